// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/collective/arguments.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/neighbor/links.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/exponential.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog {

namespace detail {

template <backend Backend>
[[nodiscard]] call_description check_mix(const communicator<Backend>& comm,
                                         std::string_view operation, const_buffer in,
                                         const_buffer out, const neighborhood& links,
                                         const call_options& options) {
  expects_fitting(operation, comm, in, out);
  expects(is_floating(in.type), operation, ": weights need a floating type, got ", in.type);
  validate(operation, links, comm.rank(), comm.size());
  auto call = describe(comm, operation, options, " ", in.type, " [", in.count, "]");
  call.links = links;
  return call;
}

}  // namespace detail

/// Averages values with those of neighbours.
///
/// Rank i computes
/// \f[ y_i = w_i x_i + \sum_{j \in \mathrm{sources}_i} s_i[j] \, d_j[i] \, x_j \f]
/// with the weights of `links`, or those of a graph: \f$ w_i = W_{ii}, s_i[j] = W_{ji}, d = 1 \f$.
/// Collective: every rank must call it, in the same order as its other operations; a rank with
/// nothing to send or receive passes empty sides. Sends and receives must agree: check mode
/// compares them first; otherwise a message that nobody expects is a `mismatch_error` where it is
/// found, and one that never comes a `timeout_error`.
///
/// \param in     x_i: equally many elements of one floating type on every rank.
/// \param out    y_i: as many elements; may be `in`.
/// \param links  a `neighborhood`, or a graph of `comm.size()` ranks (`exponential` if left out).
/// \throws usage_error if types, lengths, ranks, weights or the graph's size are wrong; nothing was
///         sent.
/// \throws timeout_error, transport_error, mismatch_error, peer_error; `in` and `out` are then
///         unchanged.
/// \note Holds one copy of the values per source, and per destination whose weight is not 1.
/// \see Nedic and Ozdaglar, "Distributed Subgradient Methods for Multi-Agent Optimization", IEEE
///      Transactions on Automatic Control 54(1), 2009.
template <backend Backend, contiguous_elements In, writable_elements Out,
          neighbor_links Links = neighborhood>
void neighbor_allreduce(communicator<Backend>& comm, const In& in, Out&& out, const Links& links,
                        const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  const neighborhood own = detail::links_of("neighbor_allreduce", comm, links);
  comm.run(
      detail::of_graph(comm, links,
                       detail::check_mix(comm, "neighbor_allreduce", source, target, own, options)),
      [&](auto context) {
        return detail::mix_task(context, source.data, target.data, detail::packed_layout(source),
                                own);
      });
}

/// Averages over the static exponential graph.
template <backend Backend, contiguous_elements In, writable_elements Out>
void neighbor_allreduce(communicator<Backend>& comm, const In& in, Out&& out) {
  neighbor_allreduce(comm, in, out, topology::exponential(comm.size()));
}

/// Starts a `neighbor_allreduce`. `in` and `out` must outlive the request.
template <backend Backend, lasting_elements In, lasting_writable_elements Out,
          neighbor_links Links = neighborhood>
request<void> neighbor_allreduce_nonblocking(communicator<Backend>& comm, In&& in, Out&& out,
                                             const Links& links, const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  const neighborhood own = detail::links_of("neighbor_allreduce", comm, links);
  return {comm.driver(),
          comm.start(detail::of_graph(comm, links,
                                      detail::check_mix(comm, "neighbor_allreduce", source, target,
                                                        own, options)),
                     [&](auto context) {
                       return detail::mix_task(context, source.data, target.data,
                                               detail::packed_layout(source), own);
                     })};
}

/// Starts averaging over the static exponential graph.
template <backend Backend, lasting_elements In, lasting_writable_elements Out>
request<void> neighbor_allreduce_nonblocking(communicator<Backend>& comm, In&& in, Out&& out) {
  return neighbor_allreduce_nonblocking(comm, in, out, topology::exponential(comm.size()));
}

}  // namespace bluefog
