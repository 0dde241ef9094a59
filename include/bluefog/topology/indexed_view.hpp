// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <concepts>
#include <cstddef>
#include <iterator>
#include <ranges>
#include <type_traits>
#include <utility>

namespace bluefog::topology {

/// A function that an `indexed_view` may call: cheap to copy, same index, same value.
template <class F>
concept index_function = std::semiregular<F> && std::regular_invocable<const F&, std::ptrdiff_t>;

/// The lazy sequence f(0), f(1), f(2), ..., either of `count` elements or endless.
///
/// Random access, yields by value, allocates nothing itself, usable in constant expressions. An
/// iterator holds its own copy of the function, so it outlives the view. `std::views::iota` does
/// not serve here: over 64-bit indices its differences have 128 bits.
///
/// \tparam Bound  `std::ptrdiff_t` for a counted view, `std::unreachable_sentinel_t` for an
///                endless one.
template <index_function Function, class Bound = std::ptrdiff_t>
  requires(std::same_as<Bound, std::ptrdiff_t> || std::same_as<Bound, std::unreachable_sentinel_t>)
class indexed_view : public std::ranges::view_interface<indexed_view<Function, Bound>> {
 public:
  class iterator {
   public:
    using iterator_concept = std::random_access_iterator_tag;
    using iterator_category = std::input_iterator_tag;  // the older rules want true references
    using reference = std::invoke_result_t<const Function&, std::ptrdiff_t>;
    using value_type = std::remove_cvref_t<reference>;
    using difference_type = std::ptrdiff_t;

    constexpr iterator() = default;
    constexpr iterator(Function function, std::ptrdiff_t index)
        : function_(std::move(function)), index_(index) {}

    [[nodiscard]] constexpr reference operator*() const { return function_(index_); }
    [[nodiscard]] constexpr reference operator[](std::ptrdiff_t n) const {
      return function_(index_ + n);
    }

    constexpr iterator& operator++() { return *this += 1; }
    constexpr iterator& operator--() { return *this -= 1; }
    constexpr iterator operator++(int) {
      auto before = *this;
      ++index_;
      return before;
    }
    constexpr iterator operator--(int) {
      auto before = *this;
      --index_;
      return before;
    }
    constexpr iterator& operator+=(std::ptrdiff_t n) {
      index_ += n;
      return *this;
    }
    constexpr iterator& operator-=(std::ptrdiff_t n) {
      index_ -= n;
      return *this;
    }

    [[nodiscard]] friend constexpr iterator operator+(iterator it, std::ptrdiff_t n) {
      return it += n;
    }
    [[nodiscard]] friend constexpr iterator operator+(std::ptrdiff_t n, iterator it) {
      return it += n;
    }
    [[nodiscard]] friend constexpr iterator operator-(iterator it, std::ptrdiff_t n) {
      return it -= n;
    }
    [[nodiscard]] friend constexpr std::ptrdiff_t operator-(const iterator& a, const iterator& b) {
      return a.index_ - b.index_;
    }
    [[nodiscard]] friend constexpr bool operator==(const iterator& a, const iterator& b) {
      return a.index_ == b.index_;
    }
    [[nodiscard]] friend constexpr auto operator<=>(const iterator& a, const iterator& b) {
      return a.index_ <=> b.index_;
    }

   private:
    Function function_{};
    std::ptrdiff_t index_ = 0;
  };

  constexpr indexed_view() = default;
  constexpr explicit indexed_view(Function function, Bound bound = {})
      : function_(std::move(function)), bound_(bound) {}

  [[nodiscard]] constexpr iterator begin() const { return {function_, 0}; }
  [[nodiscard]] constexpr auto end() const {
    if constexpr (std::same_as<Bound, std::ptrdiff_t>) {
      return iterator(function_, bound_);
    } else {
      return bound_;
    }
  }

 private:
  Function function_{};
  Bound bound_{};
};

template <index_function Function>
indexed_view(Function, int) -> indexed_view<Function, std::ptrdiff_t>;

}  // namespace bluefog::topology

template <class Function, class Bound>
inline constexpr bool
    std::ranges::enable_borrowed_range<bluefog::topology::indexed_view<Function, Bound>> = true;
