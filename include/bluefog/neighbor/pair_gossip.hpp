// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/collective/arguments.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog {

namespace detail {

[[nodiscard]] inline neighborhood pair_links(int peer, double self_weight, double peer_weight) {
  return {.self_weight = self_weight, .sources = {{peer, peer_weight}}, .destinations = {{peer}}};
}

template <backend Backend>
[[nodiscard]] call_description check_pair(const communicator<Backend>& comm, const_buffer in,
                                          const_buffer out, int peer, double self_weight,
                                          double peer_weight, const call_options& options) {
  expects_fitting("pair_gossip", comm, in, out);
  expects(is_floating(in.type), "pair_gossip: weights need a floating type, got ", in.type);
  expects_rank("pair_gossip", comm, peer, "peer");
  expects(peer != comm.rank(), "pair_gossip: the peer must be another rank, got ", peer);
  expects(std::isfinite(self_weight) && std::isfinite(peer_weight),
          "pair_gossip: weights must be finite, got ", self_weight, " and ", peer_weight);
  auto call = describe(comm, "pair_gossip", options, " ", in.type, " [", in.count, "]");
  call.peer = peer;
  return call;
}

}  // namespace detail

/// Averages values with one other rank, while the others do something else.
///
/// \f[ y = w_{\mathrm{self}} \, x_{\mathrm{self}} + w_{\mathrm{peer}} \, x_{\mathrm{peer}} \f]
/// Both ranks of the pair must call it, each with the other as `peer`, in the same order as their
/// other exchanges of this pair; no other rank takes part.
///
/// \param in    equally many elements of one floating type on both ranks.
/// \param out   as many elements; may be `in`.
/// \param peer  the other rank.
/// \param self_weight, peer_weight  finite, this rank's own choice; the two add up to 1 for an
///        average.
/// \throws usage_error if types, lengths, weights or the peer are wrong; nothing was sent.
/// \throws timeout_error, transport_error, mismatch_error, peer_error; `in` and `out` are then
///         unchanged.
/// \note Sends the input once.
/// \see Boyd, Ghosh, Prabhakar and Shah, "Randomized Gossip Algorithms", IEEE Transactions on
///      Information Theory 52(6), 2006.
template <backend Backend, contiguous_elements In, writable_elements Out>
void pair_gossip(communicator<Backend>& comm, const In& in, Out&& out, int peer,
                 double self_weight = 0.5, double peer_weight = 0.5,
                 const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  comm.run(detail::check_pair(comm, source, target, peer, self_weight, peer_weight, options),
           [&](auto context) {
             return detail::mix_task(context, source.data, target.data,
                                     detail::packed_layout(source),
                                     detail::pair_links(peer, self_weight, peer_weight));
           });
}

/// Starts a `pair_gossip`. `in` and `out` must outlive the request.
template <backend Backend, lasting_elements In, lasting_writable_elements Out>
request<void> pair_gossip_nonblocking(communicator<Backend>& comm, In&& in, Out&& out, int peer,
                                      double self_weight = 0.5, double peer_weight = 0.5,
                                      const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  return {
      comm.driver(),
      comm.start(detail::check_pair(comm, source, target, peer, self_weight, peer_weight, options),
                 [&](auto context) {
                   return detail::mix_task(context, source.data, target.data,
                                           detail::packed_layout(source),
                                           detail::pair_links(peer, self_weight, peer_weight));
                 })};
}

}  // namespace bluefog
