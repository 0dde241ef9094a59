// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <ranges>
#include <type_traits>
#include <utility>
#include <vector>

namespace bluefog {

/// One side of a directed edge: the other rank, and the factor applied to what travels.
struct edge {
  int rank = 0;
  double weight = 1.0;

  bool operator==(const edge&) const = default;
};

/// A short sequence of edges, stored without heap memory up to four of them.
///
/// A contiguous range and a regular value, usable in constant expressions. A moved-from sequence
/// may be used again: it holds what it held, or nothing.
class edges {
 public:
  using value_type = edge;
  using iterator = edge*;
  using const_iterator = const edge*;

  /// How many edges fit without heap memory.
  static constexpr std::size_t inline_capacity = 4;

  constexpr edges() = default;
  constexpr edges(std::initializer_list<edge> list) {
    for (const edge& each : list) push_back(each);
  }

  /// Copies the edges of `range`, in its order.
  template <class Range>
    requires(!std::same_as<std::remove_cvref_t<Range>, edges> && std::ranges::input_range<Range> &&
             std::convertible_to<std::ranges::range_reference_t<Range>, edge>)
  constexpr edges(Range&& range) {
    for (auto&& each : range) push_back(each);
  }

  [[nodiscard]] constexpr std::size_t size() const noexcept {
    return spilled_.empty() ? count_ : spilled_.size();
  }
  [[nodiscard]] constexpr bool empty() const noexcept { return size() == 0; }

  [[nodiscard]] constexpr edge* data() noexcept {
    return spilled_.empty() ? inline_.data() : spilled_.data();
  }
  [[nodiscard]] constexpr const edge* data() const noexcept {
    return spilled_.empty() ? inline_.data() : spilled_.data();
  }
  [[nodiscard]] constexpr edge* begin() noexcept { return data(); }
  [[nodiscard]] constexpr const edge* begin() const noexcept { return data(); }
  [[nodiscard]] constexpr edge* end() noexcept { return data() + size(); }
  [[nodiscard]] constexpr const edge* end() const noexcept { return data() + size(); }

  /// \param index  below `size()`.
  [[nodiscard]] constexpr edge& operator[](std::size_t index) noexcept { return data()[index]; }
  [[nodiscard]] constexpr const edge& operator[](std::size_t index) const noexcept {
    return data()[index];
  }

  constexpr void push_back(const edge& added) {
    if (spilled_.empty() && count_ < inline_capacity) {
      inline_[count_++] = added;
      return;
    }
    const edge kept = added;  // `added` may be one of the elements that move
    if (spilled_.empty()) {
      spilled_.reserve(2 * inline_capacity);
      spilled_.assign(inline_.begin(), inline_.end());
      count_ = 0;
    }
    spilled_.push_back(kept);
  }

  [[nodiscard]] friend constexpr bool operator==(const edges& a, const edges& b) {
    return std::ranges::equal(a, b);
  }

 private:
  std::array<edge, inline_capacity> inline_{};
  std::size_t count_ = 0;      // edges in inline_; 0 once they have spilled
  std::vector<edge> spilled_;  // all edges, as soon as there are more than fit inline
};

/// Whom one rank averages with, in one round.
///
/// Rank i computes
/// \f[ y_i = w_i x_i + \sum_{j \in \mathrm{sources}_i} s_i[j] \, d_j[i] \, x_j \f]
/// where w is `self_weight`, s a source's weight (applied by the receiver) and d a destination's
/// weight (applied by the sender). Ranks match by number, never by position in the sequence.
struct neighborhood {
  double self_weight = 1.0;
  edges sources = {};
  edges destinations = {};

  friend constexpr bool operator==(const neighborhood&, const neighborhood&) = default;
};

static_assert(std::ranges::contiguous_range<edges> && std::ranges::sized_range<edges>);
static_assert(std::regular<edges> && std::regular<neighborhood>);

}  // namespace bluefog
