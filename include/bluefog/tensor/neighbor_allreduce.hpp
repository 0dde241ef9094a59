// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/neighbor/links.hpp>
#include <bluefog/tensor/call.hpp>
#include <bluefog/tensor/carry.hpp>
#include <bluefog/tensor/parcel.hpp>
#include <bluefog/topology/exponential.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog {

template <backend Backend, neighbor_links Links = neighborhood>
[[nodiscard]] std::vector<at::Tensor> neighbor_allreduce(communicator<Backend>& comm,
                                                         std::span<const at::Tensor> tensors,
                                                         const Links& links,
                                                         const call_options& options = {});

namespace detail {

/// \return the neighborhood of the exchange that goes back along every edge, with its weight.
[[nodiscard]] inline neighborhood transposed(const neighborhood& links) {
  return {.self_weight = links.self_weight,
          .sources = links.destinations,
          .destinations = links.sources};
}

template <backend Backend, neighbor_links Links>
[[nodiscard]] auto neighbor_allreduce_call(communicator<Backend>& comm,
                                           std::span<const at::Tensor> in, const Links& links,
                                           const call_options& options, placement where) {
  constexpr auto operation = "neighbor_allreduce";
  const neighborhood own = links_of(operation, comm, links);
  const tensor_arguments tensors(operation, in, where);
  call_description description;
  for (const const_buffer& values : outlines(tensors.in))
    description = check_mix(comm, operation, values, values, own, options);
  description = of_graph(comm, links, std::move(description));
  describe_tensors(comm, description, tensors);
  tensors.differentiate(operation, [&comm, own](std::vector<at::Tensor> gradients) {
    return neighbor_allreduce(comm, std::span<const at::Tensor>(gradients), transposed(own));
  });
  return tensor_call{
      std::move(description), tensors.out, [tensors, own](operation_context<Backend> context) {
        parcel values(context, tensors.in, tensors.out);
        task work = mix_task(context, values.input(), values.output(), values.layout(), own);
        return carry(context, std::move(work), std::move(values));
      }};
}

}  // namespace detail

/// Averages a tensor with those of neighbours.
///
/// Rank i computes
/// \f[ y_i = w_i x_i + \sum_{j \in \mathrm{sources}_i} s_i[j] \, d_j[i] \, x_j \f]
/// with the weights of `links`, see the form for arrays in `neighbor/allreduce.hpp`. Collective:
/// every rank must call it, in the same order as its other operations. The gradient is the
/// transposed exchange: it goes back along every edge, with the edge's weight.
///
/// \param x      dense, of any strides, floating; the same type and shape on every rank, and a
///               gradient required on all or none.
/// \param links  a `neighborhood`, or a graph of `comm.size()` ranks (`exponential` if left out).
/// \return y_i, laid out like x.
/// \throws usage_error if the tensor's type, layout or device is not supported, or ranks, weights
///         or the graph's size are wrong; nothing was sent.
/// \throws timeout_error, transport_error, mismatch_error, peer_error; x is then unchanged.
/// \note A contiguous tensor on the CPU travels without a copy, others are copied first. backward()
///       communicates too, see `allreduce`.
template <backend Backend, neighbor_links Links = neighborhood>
[[nodiscard]] at::Tensor neighbor_allreduce(communicator<Backend>& comm, const at::Tensor& x,
                                            const Links& links, const call_options& options = {}) {
  return detail::run_single(comm,
                            detail::neighbor_allreduce_call(comm, detail::only(x), links, options,
                                                            detail::placement::apart));
}

/// Averages a tensor over the static exponential graph.
template <backend Backend>
[[nodiscard]] at::Tensor neighbor_allreduce(communicator<Backend>& comm, const at::Tensor& x) {
  return neighbor_allreduce(comm, x, topology::exponential(comm.size()));
}

/// Starts a `neighbor_allreduce`. The values of `x` must not change before the request is over.
template <backend Backend, neighbor_links Links = neighborhood>
request<at::Tensor> neighbor_allreduce_nonblocking(communicator<Backend>& comm, const at::Tensor& x,
                                                   const Links& links,
                                                   const call_options& options = {}) {
  return detail::start_single(comm,
                              detail::neighbor_allreduce_call(comm, detail::only(x), links, options,
                                                              detail::placement::apart));
}

/// Starts averaging over the static exponential graph.
template <backend Backend>
request<at::Tensor> neighbor_allreduce_nonblocking(communicator<Backend>& comm,
                                                   const at::Tensor& x) {
  return neighbor_allreduce_nonblocking(comm, x, topology::exponential(comm.size()));
}

/// Averages a tensor with those of neighbours in place. \return x.
/// \throws usage_error also if elements of `x` share memory, or it requires a gradient and
///         grad mode is on.
template <backend Backend, neighbor_links Links = neighborhood>
at::Tensor neighbor_allreduce_(communicator<Backend>& comm, const at::Tensor& x, const Links& links,
                               const call_options& options = {}) {
  return detail::run_single(comm,
                            detail::neighbor_allreduce_call(comm, detail::only(x), links, options,
                                                            detail::placement::in_place));
}

/// Averages a tensor over the static exponential graph, in place.
template <backend Backend>
at::Tensor neighbor_allreduce_(communicator<Backend>& comm, const at::Tensor& x) {
  return neighbor_allreduce_(comm, x, topology::exponential(comm.size()));
}

/// Starts a `neighbor_allreduce_`. `x` must be left alone until the request is over.
template <backend Backend, neighbor_links Links = neighborhood>
request<at::Tensor> neighbor_allreduce_nonblocking_(communicator<Backend>& comm,
                                                    const at::Tensor& x, const Links& links,
                                                    const call_options& options = {}) {
  return detail::start_single(comm,
                              detail::neighbor_allreduce_call(comm, detail::only(x), links, options,
                                                              detail::placement::in_place));
}

/// Starts averaging over the static exponential graph, in place.
template <backend Backend>
request<at::Tensor> neighbor_allreduce_nonblocking_(communicator<Backend>& comm,
                                                    const at::Tensor& x) {
  return neighbor_allreduce_nonblocking_(comm, x, topology::exponential(comm.size()));
}

/// Averages many tensors, in one message per neighbour, however many and of whatever types.
/// \param tensors  of types and shapes that are the same on every rank.
/// \return the results, in the order of `tensors`.
template <backend Backend, neighbor_links Links>
[[nodiscard]] std::vector<at::Tensor> neighbor_allreduce(communicator<Backend>& comm,
                                                         std::span<const at::Tensor> tensors,
                                                         const Links& links,
                                                         const call_options& options) {
  return detail::run(comm, detail::neighbor_allreduce_call(comm, tensors, links, options,
                                                           detail::placement::apart));
}

/// Starts a `neighbor_allreduce` of many tensors.
template <backend Backend, neighbor_links Links = neighborhood>
request<std::vector<at::Tensor>> neighbor_allreduce_nonblocking(communicator<Backend>& comm,
                                                                std::span<const at::Tensor> tensors,
                                                                const Links& links,
                                                                const call_options& options = {}) {
  return detail::start(comm, detail::neighbor_allreduce_call(comm, tensors, links, options,
                                                             detail::placement::apart));
}

/// Averages many tensors in place. \return the tensors.
template <backend Backend, neighbor_links Links = neighborhood>
std::vector<at::Tensor> neighbor_allreduce_(communicator<Backend>& comm,
                                            std::span<const at::Tensor> tensors, const Links& links,
                                            const call_options& options = {}) {
  return detail::run(comm, detail::neighbor_allreduce_call(comm, tensors, links, options,
                                                           detail::placement::in_place));
}

/// Starts a `neighbor_allreduce_` of many tensors.
template <backend Backend, neighbor_links Links = neighborhood>
request<std::vector<at::Tensor>> neighbor_allreduce_nonblocking_(
    communicator<Backend>& comm, std::span<const at::Tensor> tensors, const Links& links,
    const call_options& options = {}) {
  return detail::start(comm, detail::neighbor_allreduce_call(comm, tensors, links, options,
                                                             detail::placement::in_place));
}

}  // namespace bluefog
