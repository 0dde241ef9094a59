// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include <bluefog/core/error.hpp>
#include <bluefog/core/kernels/convert.hpp>

#include "core/kernels_data.hpp"
#include "support/catch.hpp"

namespace {

using namespace bluefog_test;
using bluefog::bfloat16;
using bluefog::float16;

/// All 65536 bit patterns of a half.
template <class Half>
std::vector<Half> all_halves() {
  std::vector<Half> halves(0x10000);
  for (std::size_t bits = 0; bits < halves.size(); ++bits)
    halves[bits].bits = static_cast<std::uint16_t>(bits);
  return halves;
}

}  // namespace

TEMPLATE_TEST_CASE("every half converts to float and double exactly and comes back",
                   "[core][kernels]", float16, bfloat16) {
  const auto halves = all_halves<TestType>();
  std::vector<float> floats(halves.size());
  std::vector<double> doubles(halves.size());
  std::vector<TestType> from_floats(halves.size());
  std::vector<TestType> from_doubles(halves.size());
  using bluefog::as_buffer;
  using bluefog::as_mutable_buffer;
  bluefog::kernel::convert(as_mutable_buffer(floats), as_buffer(halves));
  bluefog::kernel::convert(as_mutable_buffer(doubles), as_buffer(halves));
  bluefog::kernel::convert(as_mutable_buffer(from_floats), as_buffer(floats));
  bluefog::kernel::convert(as_mutable_buffer(from_doubles), as_buffer(doubles));

  int wrong = 0;
  for (std::size_t k = 0; k < halves.size(); ++k) {
    const auto value = static_cast<float>(halves[k]);
    if (std::isnan(value)) {
      wrong += !std::isnan(floats[k]) || !std::isnan(doubles[k]);
      wrong += !std::isnan(static_cast<float>(from_floats[k]));
      wrong += !std::isnan(static_cast<float>(from_doubles[k]));
    } else {
      wrong += floats[k] != value || doubles[k] != static_cast<double>(value);
      wrong += from_floats[k].bits != halves[k].bits || from_doubles[k].bits != halves[k].bits;
    }
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("convert rounds floats as the half types do, on all instruction sets",
                   "[core][kernels]", float16, bfloat16) {
  std::mt19937_64 random(1);
  for (auto length : lengths) {
    const auto floats = random_bits<float>(length, random);
    for (auto instructions : instruction_sets()) {
      unaligned_array<TestType> out(length);
      bluefog::kernel::detail::convert<TestType, float>(instructions, out.buffer(),
                                                        floats.buffer());
      int wrong = 0;
      for (std::int64_t i = 0; i < length; ++i)
        wrong += out.get(i).bits != TestType(floats.get(i)).bits;
      CAPTURE(length);
      CHECK(wrong == 0);
    }
  }
}

TEMPLATE_TEST_CASE("a double becomes a half in one rounding", "[core][kernels]", float16,
                   bfloat16) {
  // Beside the middle of two halves by less than a float can tell.
  const auto halves = all_halves<TestType>();
  std::vector<double> doubles;
  std::vector<unsigned> expected;
  for (unsigned bits = 0; std::isfinite(static_cast<float>(halves[bits + 1])); ++bits) {
    const double low = static_cast<double>(static_cast<float>(halves[bits]));
    const double middle = (low + static_cast<double>(static_cast<float>(halves[bits + 1]))) / 2;
    for (double sign : {1.0, -1.0}) {
      const unsigned sign_bit = sign < 0 ? 0x8000U : 0U;
      doubles.push_back(sign * middle * (1 - 0x1p-50));
      expected.push_back(bits | sign_bit);
      doubles.push_back(sign * middle);
      expected.push_back((bits % 2 == 0 ? bits : bits + 1) | sign_bit);
      doubles.push_back(sign * middle * (1 + 0x1p-50));
      expected.push_back((bits + 1) | sign_bit);
    }
  }
  std::vector<TestType> out(doubles.size());
  bluefog::kernel::convert(bluefog::as_mutable_buffer(out), bluefog::as_buffer(doubles));
  int wrong = 0;
  for (std::size_t k = 0; k < out.size(); ++k) wrong += out[k].bits != expected[k];
  CHECK(wrong == 0);
}

TEST_CASE("doubles that no half can hold become infinite or zero", "[core][kernels]") {
  const std::vector<double> doubles = {1e300, -1e300, 1e-300, -1e-300,
                                       std::numeric_limits<double>::infinity()};
  std::vector<float16> out(doubles.size());
  bluefog::kernel::convert(bluefog::as_mutable_buffer(out), bluefog::as_buffer(doubles));
  CHECK(out[0].bits == 0x7C00);
  CHECK(out[1].bits == 0xFC00);
  CHECK(out[2].bits == 0x0000);
  CHECK(out[3].bits == 0x8000);
  CHECK(out[4].bits == 0x7C00);
}

TEST_CASE("convert between float and double rounds as the language does", "[core][kernels]") {
  std::mt19937_64 random(2);
  for (auto length : lengths) {
    const auto doubles = normal<double>(length, random);
    unaligned_array<float> floats(length);
    unaligned_array<double> back(length);
    bluefog::kernel::convert(floats.buffer(), doubles.buffer());
    bluefog::kernel::convert(back.buffer(), std::as_const(floats).buffer());
    for (std::int64_t i = 0; i < length; ++i) {
      REQUIRE(floats.get(i) == static_cast<float>(doubles.get(i)));
      REQUIRE(back.get(i) == static_cast<double>(floats.get(i)));
    }
  }
}

TEST_CASE("convert refuses integers and unequal lengths", "[core][kernels]") {
  unaligned_array<std::int16_t> integers(4);
  unaligned_array<float> four(4);
  unaligned_array<double> five(5);
  using bluefog::kernel::convert;
  CHECK_THROWS_AS(convert(integers.buffer(), four.buffer()), bluefog::usage_error);
  CHECK_THROWS_AS(convert(four.buffer(), integers.buffer()), bluefog::usage_error);
  CHECK_THROWS_AS(convert(four.buffer(), five.buffer()), bluefog::usage_error);
}
