// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/neighbor/hierarchical_allreduce.hpp>
#include <bluefog/neighbor/links.hpp>
#include <bluefog/tensor/call.hpp>
#include <bluefog/tensor/carry.hpp>
#include <bluefog/tensor/neighbor_allreduce.hpp>
#include <bluefog/tensor/parcel.hpp>
#include <bluefog/topology/exponential.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog {

template <backend Backend, neighbor_links Links = neighborhood>
[[nodiscard]] std::vector<at::Tensor> hierarchical_neighbor_allreduce(
    communicator<Backend>& comm, std::span<const at::Tensor> tensors, const Links& links,
    const call_options& options = {});

namespace detail {

template <backend Backend, neighbor_links Links>
[[nodiscard]] auto hierarchical_call(communicator<Backend>& comm, std::span<const at::Tensor> in,
                                     const Links& links, const call_options& options,
                                     placement where) {
  constexpr auto operation = "hierarchical_neighbor_allreduce";
  const neighborhood machines = machine_links_of(comm, links);
  const tensor_arguments tensors(operation, in, where);
  call_description description;
  neighborhood own;
  for (const const_buffer& values : outlines(tensors.in)) {
    own = machines;
    description = check_hierarchical(comm, values, values, own, options);
  }
  description = of_graph(comm, links, std::move(description));
  describe_tensors(comm, description, tensors);
  tensors.differentiate(operation, [&comm, machines](std::vector<at::Tensor> gradients) {
    return hierarchical_neighbor_allreduce(comm, std::span<const at::Tensor>(gradients),
                                           transposed(machines));
  });
  return tensor_call{std::move(description), tensors.out,
                     [tensors, own](operation_context<Backend> context) {
                       auto parcels = parcels_by_type(context, tensors.in, tensors.out);
                       std::vector<averaged_array> arrays;
                       for (const parcel& each : parcels) arrays.push_back({each.in(), each.out()});
                       std::vector<task> works;
                       works.push_back(hierarchical_task(context, std::move(arrays), own));
                       return carry(context, std::move(works), std::move(parcels));
                     }};
}

}  // namespace detail

/// Averages a tensor within machines, and mixes the machines' averages with those of neighbour
/// machines.
///
/// With \f$ s_m \f$ the mean over the ranks of machine m, every rank of machine m computes
/// \f[ y_m = w_m s_m + \sum_{k \in \mathrm{sources}_m} a_m[k] \, d_k[m] \, s_k \f]
/// with the weights of `links`, whose ranks are machines. Collective: every rank must call it, in
/// the same order as its other operations, and all ranks of a machine with the same `links`. The
/// gradient is the transposed exchange.
///
/// \param x      dense, of any strides, floating; the same type and shape on every rank, and a
///               gradient required on all or none.
/// \param links  a `neighborhood` of machines, or a graph of `comm.machine_size()` machines
///               (`exponential` if left out).
/// \return y_m, laid out like x.
/// \throws usage_error if the tensor's type, layout or device is not supported, machines, weights
///         or the graph's size are wrong, or the machines have different numbers of ranks; nothing
///         was sent.
/// \throws timeout_error, transport_error, mismatch_error, peer_error; x is then unchanged.
template <backend Backend, neighbor_links Links = neighborhood>
[[nodiscard]] at::Tensor hierarchical_neighbor_allreduce(communicator<Backend>& comm,
                                                         const at::Tensor& x, const Links& links,
                                                         const call_options& options = {}) {
  return detail::run_single(comm, detail::hierarchical_call(comm, detail::only(x), links, options,
                                                            detail::placement::apart));
}

/// Averages a tensor over the static exponential graph of machines.
template <backend Backend>
[[nodiscard]] at::Tensor hierarchical_neighbor_allreduce(communicator<Backend>& comm,
                                                         const at::Tensor& x) {
  return hierarchical_neighbor_allreduce(comm, x, topology::exponential(comm.machine_size()));
}

/// Starts a `hierarchical_neighbor_allreduce`. The values of `x` must not change before the request
/// is over.
template <backend Backend, neighbor_links Links = neighborhood>
request<at::Tensor> hierarchical_neighbor_allreduce_nonblocking(communicator<Backend>& comm,
                                                                const at::Tensor& x,
                                                                const Links& links,
                                                                const call_options& options = {}) {
  return detail::start_single(comm, detail::hierarchical_call(comm, detail::only(x), links, options,
                                                              detail::placement::apart));
}

/// Starts averaging over the static exponential graph of machines.
template <backend Backend>
request<at::Tensor> hierarchical_neighbor_allreduce_nonblocking(communicator<Backend>& comm,
                                                                const at::Tensor& x) {
  return hierarchical_neighbor_allreduce_nonblocking(comm, x,
                                                     topology::exponential(comm.machine_size()));
}

/// Averages a tensor hierarchically in place. \return x.
/// \throws usage_error also if elements of `x` share memory, or it requires a gradient and
///         grad mode is on.
template <backend Backend, neighbor_links Links = neighborhood>
at::Tensor hierarchical_neighbor_allreduce_(communicator<Backend>& comm, const at::Tensor& x,
                                            const Links& links, const call_options& options = {}) {
  return detail::run_single(comm, detail::hierarchical_call(comm, detail::only(x), links, options,
                                                            detail::placement::in_place));
}

/// Averages a tensor over the static exponential graph of machines, in place.
template <backend Backend>
at::Tensor hierarchical_neighbor_allreduce_(communicator<Backend>& comm, const at::Tensor& x) {
  return hierarchical_neighbor_allreduce_(comm, x, topology::exponential(comm.machine_size()));
}

/// Starts a `hierarchical_neighbor_allreduce_`. `x` must be left alone until the request is over.
template <backend Backend, neighbor_links Links = neighborhood>
request<at::Tensor> hierarchical_neighbor_allreduce_nonblocking_(communicator<Backend>& comm,
                                                                 const at::Tensor& x,
                                                                 const Links& links,
                                                                 const call_options& options = {}) {
  return detail::start_single(comm, detail::hierarchical_call(comm, detail::only(x), links, options,
                                                              detail::placement::in_place));
}

/// Starts averaging over the static exponential graph of machines, in place.
template <backend Backend>
request<at::Tensor> hierarchical_neighbor_allreduce_nonblocking_(communicator<Backend>& comm,
                                                                 const at::Tensor& x) {
  return hierarchical_neighbor_allreduce_nonblocking_(comm, x,
                                                      topology::exponential(comm.machine_size()));
}

/// Averages many tensors hierarchically: one message per neighbour machine, however many tensors of
/// however many types.
/// \param tensors  of types and shapes that are the same on every rank.
/// \return the results, in the order of `tensors`.
template <backend Backend, neighbor_links Links>
[[nodiscard]] std::vector<at::Tensor> hierarchical_neighbor_allreduce(
    communicator<Backend>& comm, std::span<const at::Tensor> tensors, const Links& links,
    const call_options& options) {
  return detail::run(
      comm, detail::hierarchical_call(comm, tensors, links, options, detail::placement::apart));
}

/// Starts a `hierarchical_neighbor_allreduce` of many tensors.
template <backend Backend, neighbor_links Links = neighborhood>
request<std::vector<at::Tensor>> hierarchical_neighbor_allreduce_nonblocking(
    communicator<Backend>& comm, std::span<const at::Tensor> tensors, const Links& links,
    const call_options& options = {}) {
  return detail::start(
      comm, detail::hierarchical_call(comm, tensors, links, options, detail::placement::apart));
}

/// Averages many tensors hierarchically in place. \return the tensors.
template <backend Backend, neighbor_links Links = neighborhood>
std::vector<at::Tensor> hierarchical_neighbor_allreduce_(communicator<Backend>& comm,
                                                         std::span<const at::Tensor> tensors,
                                                         const Links& links,
                                                         const call_options& options = {}) {
  return detail::run(
      comm, detail::hierarchical_call(comm, tensors, links, options, detail::placement::in_place));
}

/// Starts a `hierarchical_neighbor_allreduce_` of many tensors.
template <backend Backend, neighbor_links Links = neighborhood>
request<std::vector<at::Tensor>> hierarchical_neighbor_allreduce_nonblocking_(
    communicator<Backend>& comm, std::span<const at::Tensor> tensors, const Links& links,
    const call_options& options = {}) {
  return detail::start(
      comm, detail::hierarchical_call(comm, tensors, links, options, detail::placement::in_place));
}

}  // namespace bluefog
