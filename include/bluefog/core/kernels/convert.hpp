// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/kernels/avx2.hpp>
#include <bluefog/core/kernels/element.hpp>
#include <bluefog/core/kernels/instruction_set.hpp>

namespace bluefog::kernel {
namespace detail {

/// Rounds to odd: what it returns rounds to any shorter type as `value` itself would.
///
/// \see Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms
///      using rounding to odd", IEEE Transactions on Computers 57(4), 2008.
[[nodiscard]] constexpr float round_to_odd(double value) noexcept {
  const auto nearest = static_cast<float>(value);
  const auto back = static_cast<double>(nearest);
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  if (back == value || value != value || (bits & 1U) != 0) return nearest;
  // Even and inexact: the neighbor on the other side of `value` is odd.
  const bool too_large = (back > value) == (value > 0);
  return std::bit_cast<float>(too_large ? bits - 1 : bits + 1);
}

/// \return `value` in the type in which `Out` is computed, fit to be rounded to `Out`.
template <floating_element Out, std::floating_point In>
[[nodiscard]] constexpr computed_t<Out> narrow(In value) noexcept {
  if constexpr (sizeof(Out) == 2 && std::same_as<In, double>)
    return round_to_odd(value);
  else
    return static_cast<computed_t<Out>>(value);
}

#if defined(__x86_64__)
/// Converts as many elements as fill whole vectors. \return their number.
template <floating_element Out, floating_element In>
[[gnu::target("avx2,fma,f16c")]] std::int64_t convert_vectors(mutable_buffer out, const_buffer in) {
  constexpr std::int64_t step = 8;
  std::int64_t i = 0;
  for (; i + 2 * step <= out.count; i += 2 * step) {
    const auto a = avx2::lanes<In>::load(in.data + i * std::int64_t{sizeof(In)});
    const auto b = avx2::lanes<In>::load(in.data + (i + step) * std::int64_t{sizeof(In)});
    avx2::lanes<Out>::store(out.data + i * std::int64_t{sizeof(Out)}, a);
    avx2::lanes<Out>::store(out.data + (i + step) * std::int64_t{sizeof(Out)}, b);
  }
  return i;
}
#endif

template <floating_element Out, floating_element In>
void convert(instruction_set instructions, mutable_buffer out, const_buffer in) {
  std::int64_t i = 0;
#if defined(__x86_64__)
  if constexpr (std::same_as<computed_t<Out>, float> && std::same_as<computed_t<In>, float>)
    if (instructions == instruction_set::avx2) i = convert_vectors<Out, In>(out, in);
#endif
  static_cast<void>(instructions);
  for (; i < out.count; ++i) store<Out>(out.data, i, narrow<Out>(load<In>(in.data, i)));
}

}  // namespace detail

/// Converts between floating dtypes, rounding to nearest, ties to even; what overflows becomes
/// infinite.
///
/// \param out  n elements, floating; does not overlap `in`.
/// \param in   n elements, floating.
/// \throws usage_error if a dtype is not floating or the lengths differ.
inline void convert(mutable_buffer out, const_buffer in) {
  expects(is_floating(out.type) && is_floating(in.type),
          "kernel::convert: dtypes must be floating, got ", in.type, " to ", out.type);
  expects(out.count == in.count, "kernel::convert: out has ", out.count, " elements, in ",
          in.count);
  detail::with_floating_type(out.type, [&]<class Out>() {
    detail::with_floating_type(in.type, [&]<class In>() {
      detail::convert<Out, In>(detail::fastest_instruction_set(), out, in);
    });
  });
}

}  // namespace bluefog::kernel
