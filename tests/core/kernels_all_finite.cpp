// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <limits>
#include <random>

#include <bluefog/core/error.hpp>
#include <bluefog/core/kernels/all_finite.hpp>

#include "core/kernels_data.hpp"
#include "support/catch.hpp"

using namespace bluefog_test;

TEMPLATE_TEST_CASE("all_finite finds one infinity or NaN anywhere", "[core][kernels]",
                   bluefog::float16, bluefog::bfloat16, float, double) {
  using limits = std::numeric_limits<double>;
  std::mt19937_64 random(1);
  for (auto instructions : instruction_sets())
    for (auto length : lengths) {
      auto values = normal<TestType>(length, random);
      const auto finite = [&] {
        return bluefog::kernel::detail::all_finite(instructions, values.buffer());
      };
      CAPTURE(length);
      CHECK(finite());
      int missed = 0;
      for (std::int64_t i = 0; i<length; i += length> 100 ? 7 : 1)
        for (double bad : {limits::infinity(), -limits::infinity(), limits::quiet_NaN()}) {
          const auto good = values.get(i);
          values.set(i, to_element<TestType>(bad));
          missed += finite();
          values.set(i, good);
        }
      CHECK(missed == 0);
      CHECK(finite());
    }
}

TEST_CASE("the largest values are finite", "[core][kernels]") {
  unaligned_array<float> floats(40);
  unaligned_array<bluefog::float16> halves(40);
  for (std::int64_t i = 0; i < 40; ++i) {
    floats.set(i, -std::numeric_limits<float>::max());
    halves.set(i, bluefog::float16(65504.0F));
  }
  CHECK(bluefog::kernel::all_finite(floats.buffer()));
  CHECK(bluefog::kernel::all_finite(halves.buffer()));
}

TEST_CASE("all_finite refuses integers", "[core][kernels]") {
  const unaligned_array<std::int64_t> integers(4);
  CHECK_THROWS_AS(bluefog::kernel::all_finite(integers.buffer()), bluefog::usage_error);
}
