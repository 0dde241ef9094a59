// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include <bluefog/core/error.hpp>
#include <bluefog/core/kernels/mix.hpp>

#include "core/kernels_data.hpp"
#include "support/catch.hpp"

namespace {

using namespace bluefog_test;
using bluefog::bfloat16;
using bluefog::float16;
using bluefog::kernel::weighted_input;

const std::vector<int> mixed_counts = {0, 1, 2, 3, 5, 9};

template <class T>
std::vector<weighted_input> weighted(const std::vector<double>& weights,
                                     const std::vector<unaligned_array<T>>& arrays) {
  std::vector<weighted_input> inputs;
  for (std::size_t j = 0; j < arrays.size(); ++j) inputs.push_back({weights[j], arrays[j].data()});
  return inputs;
}

/// Half an ulp of the result, and of each of the sums for the types that are summed in their own.
template <class T>
constexpr double rounding = std::numeric_limits<T>::epsilon();
template <>
constexpr double rounding<float16> = 0x1p-11;
template <>
constexpr double rounding<bfloat16> = 0x1p-8;

}  // namespace

TEMPLATE_TEST_CASE("mix is the weighted sum, exactly where every step is exact", "[core][kernels]",
                   float16, bfloat16, float, double) {
  std::mt19937_64 random(1);
  for (auto instructions : instruction_sets())
    for (auto length : lengths)
      for (int count : mixed_counts) {
        const auto self = small_integers<TestType>(length, random);
        std::vector<unaligned_array<TestType>> arrays;
        std::vector<double> weights;
        for (int j = 0; j < count; ++j) {
          arrays.push_back(small_integers<TestType>(length, random));
          weights.push_back(std::ldexp(1.0, -(j % 3)));
        }
        unaligned_array<TestType> out(length);
        bluefog::kernel::detail::mix<TestType>(instructions, out.buffer(), 0.5, self.data(),
                                               weighted(weights, arrays));

        int wrong = 0;
        for (std::int64_t i = 0; i < length; ++i) {
          double expected = 0.5 * self.number(i);
          for (std::size_t j = 0; j < arrays.size(); ++j)
            expected += weights[j] * arrays[j].number(i);
          wrong += out.number(i) != expected;
        }
        CAPTURE(length, count);
        CHECK(wrong == 0);
      }
}

TEMPLATE_TEST_CASE("mix of any weights errs by no more than its roundings", "[core][kernels]",
                   float16, bfloat16, float, double) {
  std::mt19937_64 random(2);
  const std::int64_t length = 4099;
  for (int count : mixed_counts) {
    const auto self = normal<TestType>(length, random);
    std::vector<unaligned_array<TestType>> arrays;
    for (int j = 0; j < count; ++j) arrays.push_back(normal<TestType>(length, random));
    const std::vector<double> weights(arrays.size(), 1.0 / (count + 1));
    unaligned_array<TestType> out(length);
    bluefog::kernel::mix(out.buffer(), 1.0 / (count + 1), self.buffer(), weighted(weights, arrays));

    int wrong = 0;
    for (std::int64_t i = 0; i < length; ++i) {
      long double expected = static_cast<long double>(self.number(i)) / (count + 1);
      double magnitude = std::fabs(self.number(i));
      for (const auto& array : arrays) {
        expected += static_cast<long double>(array.number(i)) / (count + 1);
        magnitude += std::fabs(array.number(i));
      }
      magnitude /= count + 1;
      const bool half = sizeof(TestType) == 2;
      // Each product, each sum, and each weight's own rounding; for halves the last one rules.
      const double steps = 2 * (count + 1) * (half ? 0x1p-24 : rounding<TestType>);
      const double last = half ? rounding<TestType> * std::fabs(static_cast<double>(expected)) : 0;
      const double smallest = half ? 0x1p-25 : 0;
      wrong += std::fabs(static_cast<double>(out.number(i) - expected)) >
               steps * magnitude * 1.01 + last * 1.01 + smallest;
    }
    CAPTURE(count);
    CHECK(wrong == 0);
  }
}

TEMPLATE_TEST_CASE("mix gives every element the same bits on all instruction sets and positions",
                   "[core][kernels]", float16, bfloat16, float, double) {
  std::mt19937_64 random(3);
  for (auto length : lengths)
    for (int count : mixed_counts) {
      const auto self = normal<TestType>(length, random);
      std::vector<unaligned_array<TestType>> arrays;
      std::vector<double> weights;
      for (int j = 0; j < count; ++j) {
        arrays.push_back(normal<TestType>(length, random));
        weights.push_back(0.1 + j / 7.0);
      }
      std::vector<unaligned_array<TestType>> results;
      for (auto instructions : instruction_sets()) {
        results.emplace_back(length);
        bluefog::kernel::detail::mix<TestType>(instructions, results.back().buffer(), 0.3,
                                               self.data(), weighted(weights, arrays));
      }
      CAPTURE(length, count);
      CHECK(results.front() == results.back());
    }
}

TEMPLATE_TEST_CASE("mix may write over self and over an input", "[core][kernels]", float16,
                   bfloat16, float, double) {
  std::mt19937_64 random(4);
  for (auto length : lengths)
    for (int count : mixed_counts) {
      auto self = normal<TestType>(length, random);
      std::vector<unaligned_array<TestType>> arrays;
      for (int j = 0; j < count; ++j) arrays.push_back(normal<TestType>(length, random));
      const std::vector<double> weights(arrays.size(), 0.7);
      const auto inputs = weighted(weights, arrays);
      unaligned_array<TestType> expected(length);
      bluefog::kernel::mix(expected.buffer(), 0.2, self.buffer(), inputs);

      CAPTURE(length, count);
      if (count > 0) {
        auto copy = arrays;
        bluefog::kernel::mix(copy.back().buffer(), 0.2, self.buffer(), weighted(weights, copy));
        CHECK(copy.back() == expected);
      }
      bluefog::kernel::mix(self.buffer(), 0.2, self.buffer(), inputs);
      CHECK(self == expected);
    }
}

TEMPLATE_TEST_CASE("halves are rounded once, however many are summed", "[core][kernels]", float16,
                   bfloat16) {
  // Added one by one in halves, a one would be lost beside the large value each time.
  const double large = std::is_same_v<TestType, bfloat16> ? 256 : 2048;
  for (std::int64_t length : {1, 40}) {
    std::mt19937_64 random;
    auto self = filled<TestType>(length, random, [&](auto&) { return large; });
    const auto one = filled<TestType>(length, random, [](auto&) { return 1.0; });
    const std::vector<weighted_input> ones(6, {1.0, one.data()});
    bluefog::kernel::mix(self.buffer(), 1.0, self.buffer(), ones);
    for (std::int64_t i = 0; i < length; ++i) CHECK(self.number(i) == large + 6);
  }
}

TEMPLATE_TEST_CASE("scale and scaled_copy multiply by the factor", "[core][kernels]", float16,
                   bfloat16, float, double) {
  std::mt19937_64 random(5);
  for (auto length : lengths) {
    auto values = small_integers<TestType>(length, random);
    const auto before = values;
    unaligned_array<TestType> copy(length);
    bluefog::kernel::scaled_copy(copy.buffer(), values.buffer(), 0.25);
    CHECK(values == before);
    bluefog::kernel::scale(values.buffer(), 0.25);

    int wrong = 0;
    for (std::int64_t i = 0; i < length; ++i) wrong += values.number(i) != 0.25 * before.number(i);
    CAPTURE(length);
    CHECK(wrong == 0);
    CHECK(copy == values);
  }
}

TEST_CASE("mix, scale and scaled_copy refuse integers and unequal buffers", "[core][kernels]") {
  unaligned_array<int> integers(4);
  unaligned_array<float> four(4);
  unaligned_array<float> five(5);
  unaligned_array<double> doubles(4);
  using namespace bluefog::kernel;
  CHECK_THROWS_AS(mix(integers.buffer(), 1, integers.buffer(), {}), bluefog::usage_error);
  CHECK_THROWS_AS(mix(four.buffer(), 1, five.buffer(), {}), bluefog::usage_error);
  CHECK_THROWS_AS(mix(four.buffer(), 1, doubles.buffer(), {}), bluefog::usage_error);
  CHECK_THROWS_AS(scale(integers.buffer(), 2), bluefog::usage_error);
  CHECK_THROWS_AS(scaled_copy(four.buffer(), five.buffer(), 2), bluefog::usage_error);
  CHECK_THROWS_WITH(scale(integers.buffer(), 2),
                    ContainsSubstring("kernel::scale") && ContainsSubstring("int32"));
}
