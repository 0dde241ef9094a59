// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/context.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/collective/reduction.hpp>
#include <bluefog/core/buffer.hpp>

namespace bluefog::detail {

/// Hands a buffer down a binomial tree: log2 n rounds, for short messages.
template <backend Backend>
task broadcast_by_tree(operation_context<Backend> context, mutable_buffer values, int root,
                       traffic_kind kind) {
  const int size = context.size();
  const int place = (context.rank() - root + size) % size;  // the root has place 0
  const auto at = [=](int other) { return (other + root) % size; };
  int reach = 1;  // the tree's width in the round in which this rank gets the values
  while (reach <= place) reach *= 2;
  if (place > 0) {
    auto above = context.exchange(kind);
    above.receive(values, at(place - reach / 2));
    auto received = std::move(above).submit();
    co_await received;
  }
  auto below = context.exchange(kind);
  for (int step = reach; place + step < size; step *= 2) below.send(values, at(place + step));
  auto sent = std::move(below).submit();
  co_await sent;
}

/// Scatters a buffer from the root, then exchanges the parts: no rank sends more than 2 (n-1)/n of
/// it, for long messages.
template <backend Backend>
task broadcast_by_parts(operation_context<Backend> context, mutable_buffer values, int root,
                        traffic_kind kind) {
  const int self = context.rank();
  const int size = context.size();
  auto scatter = context.exchange(kind);
  if (self == root) {
    for (int peer = 0; peer < size; ++peer)
      if (peer != root) scatter.send(part_of(values, peer, size), peer);
  } else {
    scatter.receive(part_of(values, self, size), root);
  }
  auto scattered = std::move(scatter).submit();
  co_await scattered;

  auto sharing = context.exchange(kind);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == self) continue;
    if (self != root) sharing.receive(part_of(values, peer, size), peer);
    if (peer != root) sharing.send(part_of(values, self, size), peer);
  }
  auto shared = std::move(sharing).submit();
  co_await shared;
}

/// The transport's own broadcast.
template <broadcasting_backend Backend>
task broadcast_natively(operation_context<Backend> context, mutable_buffer values, int root) {
  auto sent = context.transport().broadcast(values, root);
  co_await sent;
}

/// Sends `values` from `root` to all, natively where the transport can. Counts nothing itself.
/// \param kind  `part` or `control`.
template <backend Backend>
[[nodiscard]] task broadcast_values(operation_context<Backend> context, mutable_buffer values,
                                    int root, traffic_kind kind) {
  constexpr std::size_t short_bytes = 32768;
  if constexpr (broadcasting_backend<Backend>)
    return broadcast_natively(context, values, root);
  else if (values.bytes() <= short_bytes)
    return broadcast_by_tree(context, values, root, kind);
  else
    return broadcast_by_parts(context, values, root, kind);
}

/// What a bandwidth-optimal broadcast of `bytes` bytes over `ranks` ranks sends per rank.
[[nodiscard]] constexpr std::int64_t broadcast_bytes(std::size_t bytes, std::int64_t ranks) {
  return static_cast<std::int64_t>(bytes) * (ranks - 1) / ranks;
}

}  // namespace bluefog::detail
