// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include <bluefog/core/error.hpp>
#include <bluefog/core/kernels/reduce.hpp>

#include "core/kernels_data.hpp"
#include "support/catch.hpp"

namespace {

using namespace bluefog_test;
using bluefog::bfloat16;
using bluefog::const_buffer;
using bluefog::float16;
using bluefog::reduce_op;

const std::vector<int> reduced_counts = {1, 2, 3, 5, 9};
const std::vector<reduce_op> all_ops = {reduce_op::average, reduce_op::sum, reduce_op::min,
                                        reduce_op::max, reduce_op::product};

template <class T>
std::vector<const_buffer> buffers(const std::vector<unaligned_array<T>>& arrays) {
  std::vector<const_buffer> views;
  for (const auto& array : arrays) views.push_back(array.buffer());
  return views;
}

template <class T>
std::vector<unaligned_array<T>> many(int count, auto make) {
  std::vector<unaligned_array<T>> arrays;
  for (int j = 0; j < count; ++j) arrays.push_back(make());
  return arrays;
}

/// The reduction of exact numbers; of bool, as logic.
template <class T>
double expected(reduce_op op, const std::vector<double>& numbers) {
  double sum = 0;
  double product = 1;
  for (double number : numbers) {
    sum += number;
    product *= number;
  }
  const auto [smallest, largest] = std::ranges::minmax(numbers);
  switch (op) {
    case reduce_op::min: return smallest;
    case reduce_op::max: return largest;
    case reduce_op::sum: return std::same_as<T, bool> ? largest : sum;
    case reduce_op::product: return product;
    case reduce_op::average: return sum / static_cast<double>(numbers.size());
  }
  return std::numeric_limits<double>::quiet_NaN();
}

template <class T>
bool applies(reduce_op op) {
  return op != reduce_op::average || bluefog::is_floating(bluefog::dtype_of<T>::value);
}

}  // namespace

TEMPLATE_TEST_CASE("reduce is the operation's definition, where every step is exact",
                   "[core][kernels]", bool, std::uint8_t, std::int8_t, std::int16_t, std::int32_t,
                   std::int64_t, float16, bfloat16, float, double) {
  std::mt19937_64 random(1);
  // Sums of such integers are exact; factors of 1 and 2 keep products within every type but int8.
  const auto one_or_two = [](auto& bits) { return static_cast<double>(1 + bits() % 2); };
  for (auto instructions : instruction_sets())
    for (auto op : all_ops)
      for (auto length : lengths)
        for (int count : reduced_counts) {
          const bool product = op == reduce_op::product && !std::same_as<TestType, bool>;
          if (!applies<TestType>(op) || (product && sizeof(TestType) == 1 && count > 5)) continue;
          const auto arrays = many<TestType>(count, [&] {
            return product ? filled<TestType>(length, random, one_or_two)
                           : small_integers<TestType>(length, random);
          });
          unaligned_array<TestType> out(length);
          bluefog::kernel::detail::reduce<TestType>(instructions, op, out.buffer(),
                                                    buffers(arrays));
          int wrong = 0;
          for (std::int64_t i = 0; i < length; ++i) {
            std::vector<double> numbers;
            for (const auto& array : arrays) numbers.push_back(array.number(i));
            wrong += out.get(i) != to_element<TestType>(expected<TestType>(op, numbers));
          }
          CAPTURE(op, length, count);
          CHECK(wrong == 0);
        }
}

TEMPLATE_TEST_CASE("reduce gives the same bits on all instruction sets, whatever the values",
                   "[core][kernels]", bool, std::uint8_t, std::int8_t, std::int16_t, std::int32_t,
                   std::int64_t, float16, bfloat16, float, double) {
  std::mt19937_64 random(2);
  for (auto op : all_ops)
    for (auto length : lengths)
      for (int count : reduced_counts) {
        if (!applies<TestType>(op)) continue;
        const auto arrays =
            many<TestType>(count, [&] { return random_bits<TestType>(length, random); });
        std::vector<unaligned_array<TestType>> results;
        for (auto instructions : instruction_sets()) {
          results.emplace_back(length);
          bluefog::kernel::detail::reduce<TestType>(instructions, op, results.back().buffer(),
                                                    buffers(arrays));
        }
        int wrong = 0;  // two that are not a number need not be the same
        for (std::int64_t i = 0; i < length; ++i) {
          const double a = results.front().number(i);
          const double b = results.back().number(i);
          wrong +=
              !(a == b && std::signbit(a) == std::signbit(b)) && !(std::isnan(a) && std::isnan(b));
        }
        CAPTURE(op, length, count);
        CHECK(wrong == 0);
      }
}

TEMPLATE_TEST_CASE("reduce may write over any of its inputs", "[core][kernels]", std::int8_t,
                   std::int64_t, float16, bfloat16, float, double) {
  std::mt19937_64 random(3);
  for (auto length : lengths) {
    const auto arrays = many<TestType>(3, [&] { return small_integers<TestType>(length, random); });
    unaligned_array<TestType> out(length);
    bluefog::kernel::reduce(reduce_op::sum, out.buffer(), buffers(arrays));
    for (std::size_t target = 0; target < arrays.size(); ++target) {
      auto copy = arrays;
      bluefog::kernel::reduce(reduce_op::sum, copy[target].buffer(), buffers(copy));
      CAPTURE(length, target);
      CHECK(copy[target] == out);
    }
  }
}

TEMPLATE_TEST_CASE("integers wrap", "[core][kernels]", std::uint8_t, std::int8_t, std::int16_t,
                   std::int32_t, std::int64_t) {
  using limits = std::numeric_limits<TestType>;
  for (std::int64_t length : {1, 200}) {
    unaligned_array<TestType> largest(length);
    unaligned_array<TestType> two(length);
    for (std::int64_t i = 0; i < length; ++i) {
      largest.set(i, limits::max());
      two.set(i, 2);
    }
    const std::vector<const_buffer> inputs = {std::as_const(largest).buffer(),
                                              std::as_const(two).buffer()};
    unaligned_array<TestType> out(length);
    bluefog::kernel::reduce(reduce_op::sum, out.buffer(), inputs);
    for (std::int64_t i = 0; i < length; ++i)
      REQUIRE(out.get(i) == static_cast<TestType>(limits::min() + 1));
    bluefog::kernel::reduce(reduce_op::product, out.buffer(), inputs);
    for (std::int64_t i = 0; i < length; ++i) REQUIRE(out.get(i) == static_cast<TestType>(-2));
  }
}

TEMPLATE_TEST_CASE("what is not a number stays so in min and max, at any place", "[core][kernels]",
                   float16, bfloat16, float, double) {
  std::mt19937_64 random(4);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (auto op : {reduce_op::min, reduce_op::max})
    for (std::size_t place = 0; place < 3; ++place) {
      auto arrays = many<TestType>(3, [&] { return small_integers<TestType>(67, random); });
      for (std::int64_t i = 0; i < 67; i += 3) arrays[place].set(i, to_element<TestType>(nan));
      unaligned_array<TestType> out(67);
      bluefog::kernel::reduce(op, out.buffer(), buffers(arrays));
      for (std::int64_t i = 0; i < 67; ++i) REQUIRE(std::isnan(out.number(i)) == (i % 3 == 0));
    }
}

TEST_CASE("256 and seven ones in bfloat16 sum to what float32 gives, rounded once",
          "[core][kernels]") {
  for (std::int64_t length : {1, 100}) {
    std::mt19937_64 random;
    auto arrays = many<bfloat16>(
        8, [&] { return filled<bfloat16>(length, random, [](auto&) { return 1.0; }); });
    for (std::int64_t i = 0; i < length; ++i) arrays.front().set(i, bfloat16(256.0F));
    unaligned_array<bfloat16> out(length);
    bluefog::kernel::reduce(reduce_op::sum, out.buffer(), buffers(arrays));
    for (std::int64_t i = 0; i < length; ++i) CHECK(out.number(i) == 264);  // 263, a tie
    bluefog::kernel::reduce(reduce_op::average, out.buffer(), buffers(arrays));
    for (std::int64_t i = 0; i < length; ++i) CHECK(out.number(i) == 33);  // 32.875, a tie
  }
}

TEST_CASE("any byte but 0 counts as true", "[core][kernels]") {
  for (std::int64_t length : {1, 200}) {
    std::vector<std::uint8_t> two(static_cast<std::size_t>(length), 2);
    std::vector<std::uint8_t> four(static_cast<std::size_t>(length), 4);
    std::vector<std::uint8_t> out(static_cast<std::size_t>(length), 0);
    const auto logical = [&](auto& bytes) {
      auto buffer = bluefog::as_mutable_buffer(bytes);
      buffer.type = bluefog::dtype::boolean;
      return buffer;
    };
    const std::vector<const_buffer> inputs = {logical(two), logical(four)};
    for (auto op : {reduce_op::sum, reduce_op::max, reduce_op::min, reduce_op::product}) {
      bluefog::kernel::reduce(op, logical(out), inputs);
      CHECK(std::ranges::count(out, 0) == 0);
    }
  }
}

TEST_CASE("reduce refuses what it cannot do", "[core][kernels]") {
  unaligned_array<std::int32_t> integers(4);
  unaligned_array<float> four(4);
  const unaligned_array<float> five(5);
  const std::vector<const_buffer> own_integers = {integers.buffer()};
  const std::vector<const_buffer> longer = {five.buffer()};
  using bluefog::kernel::reduce;
  CHECK_THROWS_AS(reduce(reduce_op::sum, four.buffer(), {}), bluefog::usage_error);
  CHECK_THROWS_AS(reduce(reduce_op::average, integers.buffer(), own_integers),
                  bluefog::usage_error);
  CHECK_THROWS_AS(reduce(reduce_op::sum, four.buffer(), own_integers), bluefog::usage_error);
  CHECK_THROWS_AS(reduce(reduce_op::sum, four.buffer(), longer), bluefog::usage_error);
}
