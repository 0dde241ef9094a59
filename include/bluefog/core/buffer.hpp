// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <ranges>
#include <type_traits>

#include <bluefog/core/dtype.hpp>

namespace bluefog {

/// Where memory lies: host memory, or the memory of an accelerator.
enum class memory_space { host, device };

/// Elements to be read. Borrows them.
struct const_buffer {
  const std::byte* data = nullptr;
  std::int64_t count = 0;
  dtype type = dtype::uint8;

  /// \return the length in bytes.
  [[nodiscard]] constexpr std::size_t bytes() const noexcept {
    return static_cast<std::size_t>(count) * size_of(type);
  }

  /// \return elements [first, first + length).
  [[nodiscard]] constexpr const_buffer slice(std::int64_t first, std::int64_t length) const {
    return {data + static_cast<std::size_t>(first) * size_of(type), length, type};
  }
};

/// Elements to be written. Borrows them.
struct mutable_buffer {
  std::byte* data = nullptr;
  std::int64_t count = 0;
  dtype type = dtype::uint8;

  [[nodiscard]] constexpr std::size_t bytes() const noexcept {
    return static_cast<std::size_t>(count) * size_of(type);
  }

  /// \return elements [first, first + length).
  [[nodiscard]] constexpr mutable_buffer slice(std::int64_t first, std::int64_t length) const {
    return {data + static_cast<std::size_t>(first) * size_of(type), length, type};
  }

  constexpr operator const_buffer() const noexcept { return {data, count, type}; }
};

/// A range of elements in one piece of memory: vector, array, span, of any constness.
template <class Range>
concept contiguous_elements =
    std::ranges::contiguous_range<Range> && std::ranges::sized_range<Range> &&
    element<std::ranges::range_value_t<Range>>;

/// A range of elements in one piece of memory that may be written.
template <class Range>
concept writable_elements =
    contiguous_elements<Range> &&
    !std::is_const_v<std::remove_reference_t<std::ranges::range_reference_t<Range>>>;

/// \return the elements of `range` as a buffer that borrows them.
template <contiguous_elements Range>
[[nodiscard]] const_buffer as_buffer(const Range& range) noexcept {
  return {reinterpret_cast<const std::byte*>(std::ranges::data(range)),
          static_cast<std::int64_t>(std::ranges::size(range)),
          dtype_of<std::ranges::range_value_t<Range>>::value};
}

/// \return the elements of `range` as a buffer that borrows them and may write them.
template <writable_elements Range>
[[nodiscard]] mutable_buffer as_mutable_buffer(Range&& range) noexcept {
  return {reinterpret_cast<std::byte*>(std::ranges::data(range)),
          static_cast<std::int64_t>(std::ranges::size(range)),
          dtype_of<std::ranges::range_value_t<Range>>::value};
}

}  // namespace bluefog
