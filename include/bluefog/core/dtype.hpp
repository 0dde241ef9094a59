// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <ostream>
#include <string_view>
#include <type_traits>

#include <bluefog/core/half.hpp>

namespace bluefog {

/// The element types that travel.
enum class dtype : std::uint8_t {
  boolean,
  uint8,
  int8,
  int16,
  int32,
  int64,
  float16,
  bfloat16,
  float32,
  float64
};

/// \return bytes of one element.
[[nodiscard]] constexpr std::size_t size_of(dtype type) noexcept {
  switch (type) {
    case dtype::boolean:
    case dtype::uint8:
    case dtype::int8: return 1;
    case dtype::int16:
    case dtype::float16:
    case dtype::bfloat16: return 2;
    case dtype::int32:
    case dtype::float32: return 4;
    case dtype::int64:
    case dtype::float64: return 8;
  }
  return 0;
}

/// \return the name in messages, e.g. "float32".
[[nodiscard]] constexpr std::string_view name_of(dtype type) noexcept {
  switch (type) {
    case dtype::boolean: return "bool";
    case dtype::uint8: return "uint8";
    case dtype::int8: return "int8";
    case dtype::int16: return "int16";
    case dtype::int32: return "int32";
    case dtype::int64: return "int64";
    case dtype::float16: return "float16";
    case dtype::bfloat16: return "bfloat16";
    case dtype::float32: return "float32";
    case dtype::float64: return "float64";
  }
  return "unknown";
}

inline std::ostream& operator<<(std::ostream& out, dtype type) {
  return out << name_of(type);
}

/// \return whether weights and averages make sense for `type`.
[[nodiscard]] constexpr bool is_floating(dtype type) noexcept {
  return type >= dtype::float16;
}

/// \return whether `type` is a 16-bit float, which is summed in float32.
[[nodiscard]] constexpr bool is_half(dtype type) noexcept {
  return type == dtype::float16 || type == dtype::bfloat16;
}

/// The `dtype` of a C++ type; defined for the types that travel.
template <class T>
struct dtype_of;

template <>
struct dtype_of<bool> : std::integral_constant<dtype, dtype::boolean> {};
template <>
struct dtype_of<float16> : std::integral_constant<dtype, dtype::float16> {};
template <>
struct dtype_of<bfloat16> : std::integral_constant<dtype, dtype::bfloat16> {};
template <>
struct dtype_of<float> : std::integral_constant<dtype, dtype::float32> {};
template <>
struct dtype_of<double> : std::integral_constant<dtype, dtype::float64> {};

// `long` and `long long` are both 64 bits here, so integers go by size and sign.
template <std::signed_integral T>
  requires(sizeof(T) <= sizeof(std::int64_t))  // some compilers have a longer one
struct dtype_of<T> : std::integral_constant<dtype, sizeof(T) == 1   ? dtype::int8
                                                   : sizeof(T) == 2 ? dtype::int16
                                                   : sizeof(T) == 4 ? dtype::int32
                                                                    : dtype::int64> {};
template <>
struct dtype_of<std::uint8_t> : std::integral_constant<dtype, dtype::uint8> {};

/// A C++ type whose values travel: bool, uint8, int8 to int64, float16, bfloat16, float, double.
template <class T>
concept element = requires {
  { dtype_of<std::remove_cv_t<T>>::value } -> std::convertible_to<dtype>;
};

/// Calls `function.template operator()<T>()` with the C++ type of `type`.
///
/// The one place where a run-time type becomes a compile-time one.
template <class Function>
decltype(auto) with_type(dtype type, Function&& function) {
  switch (type) {
    case dtype::boolean: return function.template operator()<bool>();
    case dtype::uint8: return function.template operator()<std::uint8_t>();
    case dtype::int8: return function.template operator()<std::int8_t>();
    case dtype::int16: return function.template operator()<std::int16_t>();
    case dtype::int32: return function.template operator()<std::int32_t>();
    case dtype::int64: return function.template operator()<std::int64_t>();
    case dtype::float16: return function.template operator()<float16>();
    case dtype::bfloat16: return function.template operator()<bfloat16>();
    case dtype::float32: return function.template operator()<float>();
    case dtype::float64: break;
  }
  return function.template operator()<double>();
}

}  // namespace bluefog
