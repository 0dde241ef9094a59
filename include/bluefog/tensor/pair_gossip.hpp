// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/neighbor/pair_gossip.hpp>
#include <bluefog/tensor/call.hpp>
#include <bluefog/tensor/carry.hpp>
#include <bluefog/tensor/neighbor_allreduce.hpp>
#include <bluefog/tensor/parcel.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog {

namespace detail {

/// Runs an exchange of two ranks; the weights may lie with the sender.
template <backend Backend>
std::vector<at::Tensor> mix_in_pair(communicator<Backend>& comm,
                                    std::span<const at::Tensor> tensors, int peer,
                                    const neighborhood& links);

/// \param links  of this rank, with `peer` alone.
template <backend Backend>
[[nodiscard]] auto pair_call(communicator<Backend>& comm, std::span<const at::Tensor> in, int peer,
                             const neighborhood& links, const call_options& options,
                             placement where) {
  const tensor_arguments tensors("pair_gossip", in, where);
  call_description description;
  for (const const_buffer& values : outlines(tensors.in))
    description =
        check_pair(comm, values, values, peer, links.self_weight, links.sources[0].weight, options);
  describe_tensors(comm, description, tensors);
  tensors.differentiate("pair_gossip", [&comm, peer, links](std::vector<at::Tensor> gradients) {
    return mix_in_pair(comm, gradients, peer, transposed(links));
  });
  return tensor_call{
      std::move(description), tensors.out, [tensors, links](operation_context<Backend> context) {
        parcel values(context, tensors.in, tensors.out);
        task work = mix_task(context, values.input(), values.output(), values.layout(), links);
        return carry(context, std::move(work), std::move(values));
      }};
}

template <backend Backend>
std::vector<at::Tensor> mix_in_pair(communicator<Backend>& comm,
                                    std::span<const at::Tensor> tensors, int peer,
                                    const neighborhood& links) {
  return run(comm, pair_call(comm, tensors, peer, links, {}, placement::apart));
}

/// What a pair gossip with these weights does, of one tensor or many.
template <backend Backend>
[[nodiscard]] auto pair_call(communicator<Backend>& comm, std::span<const at::Tensor> in, int peer,
                             double self_weight, double peer_weight, const call_options& options,
                             placement where) {
  return pair_call(comm, in, peer, pair_links(peer, self_weight, peer_weight), options, where);
}

}  // namespace detail

/// Averages a tensor with that of one other rank, while the others do something else.
///
/// \f[ y = w_{\mathrm{self}} \, x_{\mathrm{self}} + w_{\mathrm{peer}} \, x_{\mathrm{peer}} \f]
/// Both ranks of the pair must call it, each with the other as `peer`, in the same order as their
/// other exchanges of this pair. The gradient is the transposed exchange.
///
/// \param x     dense, of any strides, floating; the same type and shape on both ranks, and a
///              gradient required on both or none.
/// \param peer  the other rank.
/// \param self_weight, peer_weight  finite, this rank's own choice; the two add up to 1 for an
///        average.
/// \return y, laid out like x.
/// \throws usage_error if the tensor's type, layout or device is not supported, or weights or the
///         peer are wrong; nothing was sent.
/// \throws timeout_error, transport_error, mismatch_error, peer_error; x is then unchanged.
template <backend Backend>
[[nodiscard]] at::Tensor pair_gossip(communicator<Backend>& comm, const at::Tensor& x, int peer,
                                     double self_weight = 0.5, double peer_weight = 0.5,
                                     const call_options& options = {}) {
  return detail::run_single(
      comm, detail::pair_call(comm, detail::only(x), peer, self_weight, peer_weight, options,
                              detail::placement::apart));
}

/// Starts a `pair_gossip`. The values of `x` must not change before the request is over.
template <backend Backend>
request<at::Tensor> pair_gossip_nonblocking(communicator<Backend>& comm, const at::Tensor& x,
                                            int peer, double self_weight = 0.5,
                                            double peer_weight = 0.5,
                                            const call_options& options = {}) {
  return detail::start_single(
      comm, detail::pair_call(comm, detail::only(x), peer, self_weight, peer_weight, options,
                              detail::placement::apart));
}

/// Averages a tensor with that of one other rank in place. \return x.
/// \throws usage_error also if elements of `x` share memory, or it requires a gradient and
///         grad mode is on.
template <backend Backend>
at::Tensor pair_gossip_(communicator<Backend>& comm, const at::Tensor& x, int peer,
                        double self_weight = 0.5, double peer_weight = 0.5,
                        const call_options& options = {}) {
  return detail::run_single(
      comm, detail::pair_call(comm, detail::only(x), peer, self_weight, peer_weight, options,
                              detail::placement::in_place));
}

/// Starts a `pair_gossip_`. `x` must be left alone until the request is over.
template <backend Backend>
request<at::Tensor> pair_gossip_nonblocking_(communicator<Backend>& comm, const at::Tensor& x,
                                             int peer, double self_weight = 0.5,
                                             double peer_weight = 0.5,
                                             const call_options& options = {}) {
  return detail::start_single(
      comm, detail::pair_call(comm, detail::only(x), peer, self_weight, peer_weight, options,
                              detail::placement::in_place));
}

/// Averages many tensors with those of one other rank, in one message each way.
/// \return the results, in the order of `tensors`.
template <backend Backend>
[[nodiscard]] std::vector<at::Tensor> pair_gossip(communicator<Backend>& comm,
                                                  std::span<const at::Tensor> tensors, int peer,
                                                  double self_weight = 0.5,
                                                  double peer_weight = 0.5,
                                                  const call_options& options = {}) {
  return detail::run(comm, detail::pair_call(comm, tensors, peer, self_weight, peer_weight, options,
                                             detail::placement::apart));
}

/// Starts a `pair_gossip` of many tensors.
template <backend Backend>
request<std::vector<at::Tensor>> pair_gossip_nonblocking(communicator<Backend>& comm,
                                                         std::span<const at::Tensor> tensors,
                                                         int peer, double self_weight = 0.5,
                                                         double peer_weight = 0.5,
                                                         const call_options& options = {}) {
  return detail::start(comm, detail::pair_call(comm, tensors, peer, self_weight, peer_weight,
                                               options, detail::placement::apart));
}

/// Averages many tensors with those of one other rank in place. \return the tensors.
template <backend Backend>
std::vector<at::Tensor> pair_gossip_(communicator<Backend>& comm,
                                     std::span<const at::Tensor> tensors, int peer,
                                     double self_weight = 0.5, double peer_weight = 0.5,
                                     const call_options& options = {}) {
  return detail::run(comm, detail::pair_call(comm, tensors, peer, self_weight, peer_weight, options,
                                             detail::placement::in_place));
}

/// Starts a `pair_gossip_` of many tensors.
template <backend Backend>
request<std::vector<at::Tensor>> pair_gossip_nonblocking_(communicator<Backend>& comm,
                                                          std::span<const at::Tensor> tensors,
                                                          int peer, double self_weight = 0.5,
                                                          double peer_weight = 0.5,
                                                          const call_options& options = {}) {
  return detail::start(comm, detail::pair_call(comm, tensors, peer, self_weight, peer_weight,
                                               options, detail::placement::in_place));
}

}  // namespace bluefog
