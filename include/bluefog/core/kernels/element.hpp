// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include <bluefog/core/dtype.hpp>
#include <bluefog/core/half.hpp>

/// One element at a time: what the kernels do where no vector instructions apply, and the
/// definition that the vector instructions must match bit for bit.
namespace bluefog::kernel::detail {

/// An element type that weights apply to.
template <class T>
concept floating_element = element<T> && is_floating(dtype_of<T>::value);

/// How `T` is kept in memory and what it is computed in.
template <element T>
struct arithmetic {
  using stored = T;
  using computed = T;
};
template <>
struct arithmetic<bool> {  // "any" is max and "all" is min, whatever byte stands for true
  using stored = std::uint8_t;
  using computed = std::uint8_t;
};
template <>
struct arithmetic<float16> {
  using stored = float16;
  using computed = float;
};
template <>
struct arithmetic<bfloat16> {
  using stored = bfloat16;
  using computed = float;
};

template <element T>
using stored_t = typename arithmetic<T>::stored;
template <element T>
using computed_t = typename arithmetic<T>::computed;

/// \return element `index` of the array at `data`, which need not be aligned.
template <element T>
[[nodiscard]] computed_t<T> load(const std::byte* data, std::int64_t index) noexcept {
  stored_t<T> value;
  std::memcpy(&value, data + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return static_cast<computed_t<T>>(value);
}

/// Rounds `value` to `T`, once, and writes it as element `index`.
template <element T>
void store(std::byte* data, std::int64_t index, computed_t<T> value) noexcept {
  const auto rounded = static_cast<stored_t<T>>(value);
  std::memcpy(data + index * static_cast<std::int64_t>(sizeof(T)), &rounded, sizeof(T));
}

/// Calls `function.template operator()<T>()` if `type` is floating.
template <class Function>
void with_floating_type(dtype type, Function&& function) {
  with_type(type, [&]<class T>() {
    if constexpr (floating_element<T>) std::forward<Function>(function).template operator()<T>();
  });
}

}  // namespace bluefog::kernel::detail
