// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/collective/arguments.hpp>
#include <bluefog/collective/broadcast_values.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>

namespace bluefog {

namespace detail {

template <backend Backend>
[[nodiscard]] call_description check_broadcast(const communicator<Backend>& comm, const_buffer in,
                                               const_buffer out, int root,
                                               const call_options& options) {
  expects_fitting("broadcast", comm, in, out);
  expects_rank("broadcast", comm, root, "root");
  return describe(comm, "broadcast", options, " ", in.type, " [", in.count, "] from rank ", root);
}

template <backend Backend>
task broadcast_task(operation_context<Backend> context, const_buffer in, mutable_buffer out,
                    int root) {
  context.count_collective(broadcast_bytes(in.bytes(), context.size()));
  if (context.rank() == root) context.compute().copy(in, out);
  if (context.size() == 1) co_return;
  auto values = broadcast_values(context, out, root, traffic_kind::part);
  co_await std::move(values);
}

}  // namespace detail

/// Gives every rank the values of one.
///
/// Collective: every rank must call it, in the same order as its other operations.
///
/// \param in    read on the root only: equally many elements of one type on every rank.
/// \param out   the root's values: as many elements; may be `in`.
/// \param root  whose values; the same on every rank.
/// \throws usage_error if types or lengths differ or there is no such rank; nothing was sent.
/// \throws timeout_error, transport_error, mismatch_error, peer_error; `out` is then unspecified.
/// \note Sends (n-1)/n times the input per rank where the algorithm is bandwidth-optimal.
template <backend Backend, contiguous_elements In, writable_elements Out>
void broadcast(communicator<Backend>& comm, const In& in, Out&& out, int root,
               const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  comm.run(detail::check_broadcast(comm, source, target, root, options),
           [&](auto context) { return detail::broadcast_task(context, source, target, root); });
}

/// Overwrites `values` with those of the root, in place.
template <backend Backend, writable_elements Values>
void broadcast(communicator<Backend>& comm, Values&& values, int root,
               const call_options& options = {}) {
  broadcast(comm, values, values, root, options);
}

/// Starts a `broadcast`. `in` and `out` must outlive the request.
template <backend Backend, lasting_elements In, lasting_writable_elements Out>
request<void> broadcast_nonblocking(communicator<Backend>& comm, In&& in, Out&& out, int root,
                                    const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  return {comm.driver(), comm.start(detail::check_broadcast(comm, source, target, root, options),
                                    [&](auto context) {
                                      return detail::broadcast_task(context, source, target, root);
                                    })};
}

/// Starts to overwrite `values`, which must outlive the request, with those of the root.
template <backend Backend, lasting_writable_elements Values>
request<void> broadcast_nonblocking(communicator<Backend>& comm, Values&& values, int root,
                                    const call_options& options = {}) {
  return broadcast_nonblocking(comm, values, values, root, options);
}

}  // namespace bluefog
