// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>

namespace bluefog {

/// IEEE 754 binary16: 5 exponent and 10 mantissa bits. Storage only: arithmetic happens in float.
struct float16 {
  std::uint16_t bits = 0;

  constexpr float16() noexcept = default;
  /// Rounds to nearest, ties to even; overflows to infinity.
  constexpr explicit float16(float value) noexcept : bits(round(value)) {}

  /// Exact.
  constexpr explicit operator float() const noexcept {
    const std::uint32_t sign = (bits & 0x8000U) << 16;
    const std::uint32_t magnitude = bits & 0x7FFFU;
    if (magnitude >= 0x7C00U) {  // infinity, NaN (made quiet, as the hardware does)
      const std::uint32_t quiet = magnitude > 0x7C00U ? 0x400000U : 0U;
      return std::bit_cast<float>(sign | 0x7F800000U | quiet | ((magnitude & 0x3FFU) << 13));
    }
    if (magnitude >= 0x400U)  // normal: only the exponent's bias differs
      return std::bit_cast<float>(sign | ((magnitude << 13) + (112U << 23)));
    const float value = static_cast<float>(magnitude) * 0x1p-24F;  // zero, subnormal
    return sign != 0 ? -value : value;
  }

  friend constexpr bool operator==(float16 a, float16 b) noexcept {
    return static_cast<float>(a) == static_cast<float>(b);
  }

 private:
  [[nodiscard]] static constexpr std::uint16_t round(float value) noexcept {
    const auto word = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint16_t>((word >> 16) & 0x8000U);
    const std::uint32_t magnitude = word & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U)  // NaN: keep it one
      return static_cast<std::uint16_t>(sign | 0x7E00U | ((magnitude >> 13) & 0x3FFU));
    if (magnitude >= 0x477FF000U) return static_cast<std::uint16_t>(sign | 0x7C00U);  // overflow
    if (magnitude < 0x38800000U) {  // below 2^-14: subnormal; the addition aligns and rounds
      const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
      return static_cast<std::uint16_t>(sign |
                                        (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000U));
    }
    const std::uint32_t odd = (magnitude >> 13) & 1U;
    return static_cast<std::uint16_t>(sign | ((magnitude - (112U << 23) + 0xFFFU + odd) >> 13));
  }
};

/// The upper half of a float: 8 exponent and 7 mantissa bits. Storage only, as `float16`.
struct bfloat16 {
  std::uint16_t bits = 0;

  constexpr bfloat16() noexcept = default;
  /// Rounds to nearest, ties to even.
  constexpr explicit bfloat16(float value) noexcept : bits(round(value)) {}

  /// Exact.
  constexpr explicit operator float() const noexcept {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }

  friend constexpr bool operator==(bfloat16 a, bfloat16 b) noexcept {
    return static_cast<float>(a) == static_cast<float>(b);
  }

 private:
  [[nodiscard]] static constexpr std::uint16_t round(float value) noexcept {
    const auto word = std::bit_cast<std::uint32_t>(value);
    if ((word & 0x7FFFFFFFU) > 0x7F800000U)  // NaN: keep it one
      return static_cast<std::uint16_t>((word >> 16) | 0x40U);
    return static_cast<std::uint16_t>((word + 0x7FFFU + ((word >> 16) & 1U)) >> 16);
  }
};

}  // namespace bluefog
