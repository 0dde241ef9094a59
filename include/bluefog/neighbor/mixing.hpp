// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/backend/compute.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/context.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/kernels.hpp>
#include <bluefog/core/scratch.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog::detail {

/// Checks one side of a neighborhood: ranks exist, are not this one, appear once, weigh something
/// finite.
inline void validate_side(std::string_view operation, const edges& side, std::string_view what,
                          int rank, int size) {
  for (std::size_t i = 0; i < side.size(); ++i) {
    const edge& each = side[i];
    expects(each.rank >= 0 && each.rank < size, operation, ": ", what, " ", i, " must be in [0, ",
            size, "), got rank ", each.rank);
    expects(each.rank != rank, operation, ": ", what, " ", i, " is rank ", rank,
            " itself; use self_weight");
    expects(std::isfinite(each.weight), operation, ": the weight of ", what, " rank ", each.rank,
            " must be finite, got ", each.weight);
    for (std::size_t k = 0; k < i; ++k)
      expects(side[k].rank != each.rank, operation, ": ", what, " rank ", each.rank,
              " is given twice");
  }
}

/// Checks a neighborhood of rank `rank` among `size` ranks; nothing has been sent.
inline void validate(std::string_view operation, const neighborhood& links, int rank, int size) {
  expects(std::isfinite(links.self_weight), operation, ": self_weight must be finite, got ",
          links.self_weight);
  validate_side(operation, links.sources, "source", rank, size);
  validate_side(operation, links.destinations, "destination", rank, size);
}

/// Several arrays that travel as one message: a piece of memory, and what lies in it.
struct packed_layout {
  struct segment {
    std::size_t offset;  // in bytes, a multiple of the element's size
    std::int64_t count;
    dtype type;
  };
  std::vector<segment> segments;
  std::size_t bytes = 0;

  packed_layout() = default;
  /// One array.
  explicit packed_layout(const_buffer whole)
      : segments{{0, whole.count, whole.type}}, bytes(whole.bytes()) {}

  /// Adds an array behind those so far, aligned to a cache line.
  void add(std::int64_t count, dtype type) {
    const std::size_t offset =
        (bytes + scratch_pool::alignment - 1) / scratch_pool::alignment * scratch_pool::alignment;
    segments.push_back({offset, count, type});
    bytes = offset + static_cast<std::size_t>(count) * size_of(type);
  }
};

[[nodiscard]] inline const_buffer as_bytes(const std::byte* data, std::size_t bytes) noexcept {
  return {data, static_cast<std::int64_t>(bytes), dtype::uint8};
}
[[nodiscard]] inline mutable_buffer as_bytes(std::byte* data, std::size_t bytes) noexcept {
  return {data, static_cast<std::int64_t>(bytes), dtype::uint8};
}

/// What the sources of a neighborhood sent, in their order.
using arrivals = std::vector<scratch_pool::block>;

/// Adds a message with `in`, weighted, to each destination.
/// \return the weighted copies, to be kept until the messages are sent.
template <backend Backend>
[[nodiscard]] std::vector<scratch_pool::block> add_sends(counted_exchange<Backend>& exchange,
                                                         const operation_context<Backend>& context,
                                                         const std::byte* in,
                                                         const packed_layout& layout,
                                                         const edges& destinations) {
  std::vector<scratch_pool::block> weighted;
  for (const edge& destination : destinations) {
    const std::byte* message = in;
    if (destination.weight != 1.0) {
      const auto& copy = weighted.emplace_back(context.scratch(layout.bytes, in));
      for (const auto& [offset, count, type] : layout.segments)
        context.compute().scaled_copy({copy.data() + offset, count, type},
                                      {in + offset, count, type}, destination.weight);
      message = copy.data();
    }
    exchange.send(as_bytes(message, layout.bytes), destination.rank);
  }
  return weighted;
}

/// Sends `in` to the destinations, weighted, and receives what the sources send, one message per
/// peer. `arrived` and `in` are laid out as `layout`; `in` is only read.
template <backend Backend>
task fetch_task(operation_context<Backend> context, const std::byte* in, packed_layout layout,
                neighborhood links, std::shared_ptr<arrivals> arrived) {
  // Weighted copies first: what may fail, fails before anything is sent.
  auto exchange = context.exchange();
  const auto weighted = add_sends(exchange, context, in, layout, links.destinations);
  for (const edge& source : links.sources) {
    const auto& slot = arrived->emplace_back(context.scratch(layout.bytes, in));
    exchange.receive(as_bytes(slot.data(), layout.bytes), source.rank);
  }
  auto transfer = std::move(exchange).submit();
  co_await transfer;
}

/// Computes out = self_weight in + sum of source weights times what the sources sent. `out` may be
/// `in`. \param mix  as `kernel::mix`, where the memory lies.
template <class Mix>
void combine(const std::byte* in, std::byte* out, const packed_layout& layout,
             const neighborhood& links, const arrivals& arrived, Mix mix) {
  std::vector<kernel::weighted_input> inputs(links.sources.size());
  for (const auto& [offset, count, type] : layout.segments) {
    for (std::size_t i = 0; i < inputs.size(); ++i)
      inputs[i] = {links.sources[i].weight, arrived[i].data() + offset};
    mix(mutable_buffer{out + offset, count, type}, links.self_weight,
        const_buffer{in + offset, count, type}, std::span<const kernel::weighted_input>(inputs));
  }
}

/// The same in host memory.
inline void combine(const std::byte* in, std::byte* out, const packed_layout& layout,
                    const neighborhood& links, const arrivals& arrived) {
  combine(in, out, layout, links, arrived, kernel::mix);
}

/// Averages with the neighbours. `out`, which may be `in`, is written only once everything has
/// arrived.
template <backend Backend>
task mix_task(operation_context<Backend> context, const std::byte* in, std::byte* out,
              packed_layout layout, neighborhood links) {
  const auto arrived = std::make_shared<arrivals>();
  co_await fetch_task(context, in, layout, links, arrived);
  combine(in, out, layout, links, *arrived,
          [&](auto... operands) { context.compute().mix(operands...); });
}

}  // namespace bluefog::detail
