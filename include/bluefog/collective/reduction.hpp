// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/context.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/reduce_op.hpp>

namespace bluefog::detail {

/// \return where part `part` of `parts` nearly equal parts of `count` elements begins.
[[nodiscard]] constexpr std::int64_t part_begin(std::int64_t count, std::int64_t part,
                                                std::int64_t parts) noexcept {
  return count / parts * part + std::min(part, count % parts);
}

/// Part `part` of `parts` of a buffer.
template <class Buffer>
[[nodiscard]] constexpr Buffer part_of(const Buffer& whole, std::int64_t part, std::int64_t parts) {
  const auto begin = part_begin(whole.count, part, parts);
  return whole.slice(begin, part_begin(whole.count, part + 1, parts) - begin);
}

/// What a bandwidth-optimal allreduce of `bytes` bytes over `ranks` ranks sends per rank.
[[nodiscard]] constexpr std::int64_t allreduce_bytes(std::size_t bytes, std::int64_t ranks) {
  return 2 * static_cast<std::int64_t>(bytes) * (ranks - 1) / ranks;
}

/// Combines the values of `ranks`, which contain this rank, by messages: each rank combines one
/// part for all, in rank order and rounding once, then all parts are exchanged. Short values are
/// sent whole to everybody, in one round instead of two.
///
/// \param owner  of the memory, kept until the transport has let go of it; null if the caller keeps
///               that.
template <backend Backend>
task reduce_among(operation_context<Backend> context, const_buffer in, mutable_buffer out,
                  reduce_op op, std::vector<int> ranks,
                  [[maybe_unused]] std::shared_ptr<const void> owner) {
  constexpr std::size_t short_bytes = 2048;
  const auto n = static_cast<std::int64_t>(ranks.size());
  const auto self = std::ranges::find(ranks, context.rank()) - ranks.begin();
  if (n == 1) {
    context.compute().copy(in, out);
    co_return;
  }
  context.count_collective(allreduce_bytes(in.bytes(), n));

  const bool whole = in.bytes() <= short_bytes;
  const const_buffer own = whole ? in : part_of(in, self, n);
  const auto memory = context.scratch(own.bytes() * static_cast<std::size_t>(n), in.data);
  std::vector<const_buffer> inputs;
  auto gathering = context.exchange(traffic_kind::part);
  for (std::int64_t i = 0; i < n; ++i) {
    if (i == self) {
      inputs.push_back(own);
      continue;
    }
    const int peer = ranks[static_cast<std::size_t>(i)];
    const mutable_buffer slot{memory.data() + own.bytes() * static_cast<std::size_t>(i), own.count,
                              own.type};
    gathering.receive(slot, peer);
    gathering.send(whole ? in : part_of(in, i, n), peer);
    inputs.push_back(slot);
  }
  auto gathered = std::move(gathering).submit();
  co_await gathered;
  if (whole) {
    context.compute().reduce(op, out, inputs);
    co_return;
  }

  const mutable_buffer combined = part_of(out, self, n);
  context.compute().reduce(op, combined, inputs);
  auto sharing = context.exchange(traffic_kind::part);
  for (std::int64_t i = 0; i < n; ++i) {
    if (i == self) continue;
    const int peer = ranks[static_cast<std::size_t>(i)];
    sharing.receive(part_of(out, i, n), peer);
    sharing.send(combined, peer);
  }
  auto shared = std::move(sharing).submit();
  co_await shared;
}

/// The transport's own allreduce of all ranks.
template <allreducing_backend Backend>
task reduce_natively(operation_context<Backend> context, const_buffer in, mutable_buffer out,
                     reduce_op op, [[maybe_unused]] std::shared_ptr<const void> owner) {
  context.count_collective(allreduce_bytes(in.bytes(), context.size()));
  const bool average = op == reduce_op::average && !context.transport().reduces(op, in.type);
  auto reduced = context.transport().allreduce(in, out, average ? reduce_op::sum : op);
  co_await reduced;
  if (average) context.compute().divide(out, context.size());
}

/// A backend that knows when messages between the ranks beat its native allreduce.
///
/// Semantic requirements: the same answer on every rank for the same `bytes`.
template <class B>
concept selective_backend = allreducing_backend<B> && requires(const B& view, std::size_t bytes) {
  { view.reduces_by_messages(bytes) } noexcept -> std::same_as<bool>;
};

template <allreducing_backend Backend>
[[nodiscard]] bool reduces_natively(const Backend& transport, const_buffer in, reduce_op op) {
  if (transport.size() == 1 || is_half(in.type)) return false;
  if constexpr (selective_backend<Backend>)
    if (transport.reduces_by_messages(in.bytes())) return false;
  return transport.reduces(op == reduce_op::average ? reduce_op::sum : op, in.type);
}

/// Combines the values of all ranks, natively where the transport can and gains by it.
template <backend Backend>
[[nodiscard]] task reduce_over_all(operation_context<Backend> context, const_buffer in,
                                   mutable_buffer out, reduce_op op,
                                   std::shared_ptr<const void> owner) {
  if constexpr (allreducing_backend<Backend>) {
    if (reduces_natively(context.transport(), in, op))
      return reduce_natively(context, in, out, op, std::move(owner));
  }
  std::vector<int> ranks(static_cast<std::size_t>(context.size()));
  for (int rank = 0; int& each : ranks) each = rank++;
  return reduce_among(context, in, out, op, std::move(ranks), std::move(owner));
}

}  // namespace bluefog::detail
