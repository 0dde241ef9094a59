// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include <bluefog/core/half.hpp>

#include "support/catch.hpp"

namespace {

using bluefog::bfloat16;
using bluefog::float16;

template <class Half>
constexpr int exponent_bits = 0;
template <>
constexpr int exponent_bits<float16> = 5;
template <>
constexpr int exponent_bits<bfloat16> = 8;

template <class Half>
Half from_bits(unsigned bits) {
  Half half;
  half.bits = static_cast<std::uint16_t>(bits);
  return half;
}

/// What IEEE 754 says that the bits of a half mean.
template <class Half>
double meaning(unsigned bits) {
  constexpr int mantissa_bits = 15 - exponent_bits<Half>;
  constexpr int bias = (1 << (exponent_bits<Half> - 1)) - 1;
  constexpr int largest = (1 << exponent_bits<Half>)-1;
  const int mantissa = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
  const int exponent = (static_cast<int>(bits) >> mantissa_bits) & largest;
  const double sign = (bits & 0x8000U) != 0 ? -1 : 1;
  if (exponent == largest)
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

/// The non-negative finite halves in ascending order, which is the order of their bits, and then
/// the power of two at which a half of more range would go on.
template <class Half>
std::vector<double> magnitudes() {
  std::vector<double> values;
  for (unsigned bits = 0; std::isfinite(meaning<Half>(bits)); ++bits)
    values.push_back(meaning<Half>(bits));
  values.push_back(2 * values.back() - values[values.size() - 2]);
  return values;
}

/// The bits of the half nearest to `value`, which is a number, found by search.
unsigned nearest_bits(const std::vector<double>& table, double value) {
  const unsigned sign = std::signbit(value) ? 0x8000U : 0U;
  const double magnitude = std::min(std::fabs(value), table.back());
  const auto above = std::lower_bound(table.begin(), table.end(), magnitude);
  const auto upper = static_cast<unsigned>(above - table.begin());
  if (*above == magnitude) return sign | upper;
  const double to_upper = *above - magnitude;
  const double to_lower = magnitude - table[upper - 1];
  const bool up = to_upper < to_lower || (to_upper == to_lower && upper % 2 == 0);
  return sign | (up ? upper : upper - 1);
}

}  // namespace

TEMPLATE_TEST_CASE("all 65536 halves mean what IEEE 754 says and come back from float",
                   "[core][half]", float16, bfloat16) {
  int wrong_values = 0;
  int wrong_bits = 0;
  for (unsigned bits = 0; bits < 0x10000U; ++bits) {
    const auto half = from_bits<TestType>(bits);
    const auto value = static_cast<float>(half);
    const double expected = meaning<TestType>(bits);
    if (std::isnan(expected)) {
      wrong_values += !std::isnan(value);
      wrong_bits += !std::isnan(static_cast<float>(TestType(value)));
    } else {
      wrong_values += static_cast<double>(value) != expected;
      wrong_values += std::signbit(value) != std::signbit(expected);
      wrong_bits += TestType(value).bits != bits;
    }
  }
  CHECK(wrong_values == 0);
  CHECK(wrong_bits == 0);
}

TEMPLATE_TEST_CASE(
    "a float between two halves goes to the nearest, from the middle to the even one",
    "[core][half]", float16, bfloat16) {
  const auto table = magnitudes<TestType>();
  int wrong = 0;
  for (std::size_t k = 0; k + 1 < table.size(); ++k) {
    const auto middle = static_cast<float>((table[k] + table[k + 1]) / 2);
    const float infinity = std::numeric_limits<float>::infinity();
    for (float value : {std::nextafter(middle, 0.0F), middle, std::nextafter(middle, infinity)}) {
      wrong += TestType(value).bits != nearest_bits(table, value);
      wrong += TestType(-value).bits != nearest_bits(table, -value);
    }
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("floats of random bits go to the nearest half", "[core][half]", float16,
                   bfloat16) {
  const auto table = magnitudes<TestType>();
  std::mt19937 random(20);
  int wrong = 0;
  for (int k = 0; k < 300000; ++k) {
    const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    const TestType half(value);
    if (std::isnan(value))
      wrong += !std::isnan(static_cast<float>(half));
    else
      wrong += half.bits != nearest_bits(table, value);
  }
  CHECK(wrong == 0);
}

TEST_CASE("halves are usable in constant expressions", "[core][half]") {
  STATIC_REQUIRE(static_cast<float>(float16(1.5F)) == 1.5F);
  STATIC_REQUIRE(static_cast<float>(bfloat16(1.5F)) == 1.5F);
  STATIC_REQUIRE(float16(65504.0F).bits == 0x7BFF);  // the largest
  STATIC_REQUIRE(float16(65520.0F).bits == 0x7C00);  // the middle to what would be the next
  STATIC_REQUIRE(float16(0x1p-24F).bits == 1);       // the smallest
  STATIC_REQUIRE(float16(0.0F) == float16(-0.0F));
}
