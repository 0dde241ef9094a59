// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <list>
#include <span>
#include <string>
#include <vector>

#include <bluefog/collective/allgather.hpp>
#include <bluefog/collective/allreduce.hpp>

#include "collective/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

namespace {

template <class Out, class In>
concept reducible = requires(communicator<thread_backend>& comm, const In& in, Out& out) {
  allreduce(comm, in, out);
};

/// The definition, in whole numbers, which all dtypes can represent.
template <class T>
double combined(reduce_op op, int ranks, std::size_t place) {
  std::int64_t result = sample(0, place);
  bool any = false;
  bool all = true;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::int64_t value = sample(rank, place) % (op == reduce_op::product ? 2 : 100) + 1;
    any = any || value % 2 != 0;
    all = all && value % 2 != 0;
    if (rank == 0) {
      result = value;
      continue;
    }
    switch (op) {
      case reduce_op::min: result = std::min(result, value); break;
      case reduce_op::max: result = std::max(result, value); break;
      case reduce_op::product: result *= value; break;
      default: result += value;
    }
  }
  if constexpr (std::is_same_v<T, bool>)
    return op == reduce_op::sum || op == reduce_op::max ? any : all;
  if (op == reduce_op::average)
    return number(static_cast<T>(static_cast<float>(result) / static_cast<float>(ranks)));
  if constexpr (std::is_integral_v<T>)
    return number(static_cast<T>(result));
  else
    return static_cast<double>(result);
}

/// Rank `rank`'s input for `combined`.
template <class T>
values<T> operand(reduce_op op, int rank, std::size_t count) {
  return values<T>(count, [&](std::size_t i) {
    const int value = sample(rank, i) % (op == reduce_op::product ? 2 : 100) + 1;
    if constexpr (std::is_same_v<T, bool>)
      return value % 2 != 0;
    else if constexpr (std::is_integral_v<T>)
      return value;
    else
      return static_cast<float>(value);
  });
}

}  // namespace

TEST_CASE("allreduce accepts arrays of elements and nothing else", "[collective][allreduce]") {
  STATIC_REQUIRE(reducible<std::vector<float>, std::vector<float>>);
  STATIC_REQUIRE(reducible<std::span<double>, std::array<double, 3>>);
  STATIC_REQUIRE_FALSE(reducible<std::span<const float>, std::vector<float>>);
  STATIC_REQUIRE_FALSE(reducible<std::vector<float>, std::list<float>>);
  STATIC_REQUIRE_FALSE(reducible<std::vector<std::string>, std::vector<std::string>>);
  STATIC_REQUIRE_FALSE(reducible<std::vector<bool>, std::vector<bool>>);
}

RANKS_TEST("allreduce combines the values of all ranks, for every dtype, operation and length",
           "[collective][allreduce]") {
  for (const auto op :
       {reduce_op::average, reduce_op::sum, reduce_op::min, reduce_op::max, reduce_op::product})
    for (const dtype type : dtypes)
      with_type(type, [&]<class T>() {
        if (op == reduce_op::average && !is_floating(type)) return;
        for (const std::size_t count : sizes) {
          const auto in = operand<T>(op, comm.rank(), count);
          values<T> out(count);
          allreduce(comm, in, out, op);
          const auto untouched = operand<T>(op, comm.rank(), count);
          require(std::equal(in.begin(), in.end(), untouched.begin()), "the input has changed");
          for (std::size_t i = 0; i < count; i += 1 + count / 500) {
            const double wanted = combined<T>(op, comm.size(), i);
            const double tolerance = type == dtype::float64 ? 1e-6 : 0;  // the oracle's average
            require_near(number(out[i]), wanted, op == reduce_op::average ? tolerance : 0);
          }
        }
      });
}

RANKS_TEST("allreduce in place gives what it gives out of place", "[collective][allreduce]") {
  for (const std::size_t count : sizes) {
    values<float> x(
        count, [&](std::size_t i) { return 0.1F * static_cast<float>(sample(comm.rank(), i)); });
    values<float> out(count);
    allreduce(comm, x, out);
    allreduce(comm, x, x);
    require(std::equal(x.begin(), x.end(), out.begin()));
  }
}

RANKS_TEST("allreduce gives all ranks the same bits", "[collective][allreduce]") {
  for (const std::size_t count : {7U, 5000U}) {
    std::vector<float> x(count);
    for (std::size_t i = 0; i < count; ++i)
      x[i] = std::sin(static_cast<float>(sample(comm.rank(), i) * (comm.rank() + 3)));
    allreduce(comm, x, x);
    const auto all = allgather(comm, x);
    for (std::size_t i = 0; i < all.size(); ++i) require_equal(all[i], x[i % count]);
  }
}

RANKS_TEST("allreduce sums 16-bit floats in float32 and rounds once", "[collective][allreduce]") {
  if (comm.size() != 8) return;
  for (const std::size_t count : {1U, 3000U}) {
    std::vector<bfloat16> x(count, bfloat16(comm.rank() == 0 ? 256.0F : 1.0F)), y(count);
    allreduce(comm, x, y, reduce_op::sum);
    for (const auto each : y) require_equal(static_cast<float>(each), 264.0F);  // 263 rounded
    allreduce(comm, x, y);
    for (const auto each : y) require_equal(static_cast<float>(each), 33.0F);  // 32.875 rounded
    std::vector<float16> h(count, float16(comm.rank() == 0 ? 256.0F : 1.0F)), g(count);
    allreduce(comm, h, g, reduce_op::sum);
    for (const auto each : g) require_equal(static_cast<float>(each), 263.0F);
    allreduce(comm, h, g);
    for (const auto each : g) require_equal(static_cast<float>(each), 32.875F);
    std::vector<float16> large(count, float16(30000.0F));  // the sum alone would be infinite
    allreduce(comm, large, large);
    for (const auto each : large) require_equal(static_cast<float>(each), 30000.0F);
  }
}

RANKS_TEST("one rank's NaN reaches every rank, whatever the operation", "[collective][allreduce]") {
  const int culprit = comm.size() - 1;
  for (const dtype type : {dtype::float16, dtype::bfloat16, dtype::float32, dtype::float64})
    with_type(type, [&]<class T>() {
      if constexpr (!std::is_integral_v<T>)
        for (const auto op : {reduce_op::average, reduce_op::sum, reduce_op::min, reduce_op::max,
                              reduce_op::product})
          for (const std::size_t count : {3U, 5000U}) {
            values<T> x(count, [&](std::size_t i) {
              return i == 1 && comm.rank() == culprit ? std::numeric_limits<float>::quiet_NaN()
                                                      : 1.0F;
            });
            allreduce(comm, x, x, op);
            require(std::isnan(number(x[1])), name_of(op));
            require(!std::isnan(number(x[0])) && !std::isnan(number(x[2])), "NaN spread");
          }
    });
}

RANKS_TEST("sums of integers wrap around", "[collective][allreduce]") {
  std::vector<std::int8_t> x(9, 100);
  allreduce(comm, x, x, reduce_op::sum);
  for (const auto each : x) require_equal(each, static_cast<std::int8_t>(100 * comm.size()));
}

RANKS_TEST("allreduce refuses what it cannot do before anything is sent",
           "[collective][allreduce]") {
  std::vector<std::int64_t> integers{1, 2};
  const auto traffic = traffic_of(comm, [&] {
    auto text = require_throws<usage_error>([&] { allreduce(comm, integers, integers); });
    require_contains(text, "allreduce: average needs a floating type, got int64");
    std::vector<float> three(3), four(4);
    text = require_throws<usage_error>([&] { allreduce(comm, three, four); });
    require_contains(text, "allreduce: input has 3 elements, output has 4");
    text = require_throws<usage_error>([&] { allreduce(comm, three, integers, reduce_op::sum); });
    require_contains(text, "allreduce: input is float32, output is int64");
  });
  require_equal(traffic.operations, 0);
  require_equal(integers, std::vector<std::int64_t>{1, 2});
  allreduce(comm, integers, integers, reduce_op::max);  // goes on as if nothing had been
  require_equal(integers, std::vector<std::int64_t>{1, 2});
}

RANKS_TEST("an allreduce within machines combines each machine's own ranks",
           "[collective][allreduce]") {
  auto machines = with_options(comm, {.ranks_per_machine = 2});
  for (const std::size_t count : {1U, 5000U}) {
    const int first = comm.rank() / 2 * 2;
    const int members = std::min(2, comm.size() - first);
    std::vector<double> x(count, comm.rank()), y(count);
    allreduce(machines, x, y, reduce_op::average, {.scope = scope::machine});
    for (const double each : y) require_near(each, first + (members - 1) / 2.0, 1e-12);
    const auto traffic = traffic_of(
        machines, [&] { allreduce(machines, x, x, reduce_op::sum, {.scope = scope::machine}); });
    for (const double each : x) require_near(each, members * first + (members - 1), 1e-12);
    const auto bytes = static_cast<std::int64_t>(count * sizeof(double));
    require_equal(traffic.bytes_sent, 2 * (members - 1) * bytes / members);
    require_equal(traffic.messages_sent, std::int64_t{members > 1});
  }
}

RANKS_TEST("an allreduce counts 2(n-1)/n of its bytes as one message", "[collective][allreduce]") {
  for (const std::size_t count : {1000U, 100000U}) {
    std::vector<float> x(count);
    const auto traffic = traffic_of(comm, [&] { allreduce(comm, x, x); });
    const auto n = std::int64_t{comm.size()};
    require_equal(traffic.bytes_sent, 2 * (n - 1) * static_cast<std::int64_t>(4 * count) / n);
    require_equal(traffic.messages_sent, n > 1 ? 1 : 0);
    require_equal(traffic.operations, 1);
    require_equal(traffic.control_bytes, 0);
  }
}
