// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include <bluefog/collective/allgather.hpp>
#include <bluefog/collective/allreduce.hpp>
#include <bluefog/collective/barrier.hpp>
#include <bluefog/collective/broadcast.hpp>

#include "backend/support.hpp"
#include "collective/support.hpp"
#include "support/native_thread_backend.hpp"

using namespace bluefog;
using namespace bluefog_test;

namespace {

/// How much rank `rank` gives: nothing on some, differing on all.
std::size_t share(int rank, std::size_t scale) {
  return static_cast<std::size_t>(rank * rank % 5) * scale;
}

/// What rank `rank` gives in round `round`: rows of seven elements, not as many on every rank.
std::vector<int> gift(int rank, int round) {
  std::vector<int> values(share(rank + 1, 7));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = sample(rank, i) + 100 * round;
  return values;
}

std::vector<int> all_gifts(int size, int round) {
  std::vector<int> values;
  for (int rank = 0; rank < size; ++rank) {
    const auto part = gift(rank, round);
    values.insert(values.end(), part.begin(), part.end());
  }
  return values;
}

/// Runs `body(comm, meeting of all ranks)` on threads whose transport has an allgather of its own.
template <class Body>
void on_native_threads(const Body& body) {
  for (const int ranks : {1, 3, 5}) {
    INFO("on " << ranks << " ranks");
    meeting together(ranks);
    const auto failures = run_wrapped(
        ranks, [](thread_backend inner) { return native_thread_backend(std::move(inner)); },
        [&](auto& comm) { body(comm, together); }, {.timeout = std::chrono::seconds(20)});
    CHECK(first_text(failures) == "");
  }
}

}  // namespace

RANKS_TEST("allgather concatenates unequal parts in rank order, for every dtype",
           "[collective][allgather]") {
  for (const dtype type : dtypes)
    with_type(type, [&]<class T>() {
      for (const std::size_t scale : {0U, 1U, 3000U}) {
        std::vector<int> wanted;
        for (int rank = 0; rank < comm.size(); ++rank)
          for (std::size_t i = 0; i < share(rank, scale); ++i) wanted.push_back(sample(rank, i));
        const auto convert = [](int value) {
          if constexpr (std::is_same_v<T, bool>)
            return value % 2 == 0;
          else if constexpr (std::is_integral_v<T>)
            return value;
          else
            return static_cast<float>(value);
        };
        const values<T> in(share(comm.rank(), scale),
                           [&](std::size_t i) { return convert(sample(comm.rank(), i)); });
        const values<T> expected(wanted.size(), [&](std::size_t i) { return convert(wanted[i]); });
        values<T> out(wanted.size());
        allgather(comm, in, out);
        require(std::equal(out.begin(), out.end(), expected.begin(), expected.end()));
        if constexpr (!std::is_same_v<T, bool>) {
          const auto made = allgather(comm, in);
          require(std::equal(made.begin(), made.end(), expected.begin(), expected.end()));
        }
      }
    });
}

RANKS_TEST("allgather in flight gives what waiting gives", "[collective][allgather]") {
  const std::vector<int> mine(share(comm.rank(), 7), comm.rank());
  auto early = allgather_nonblocking(comm, mine);
  auto late = allgather_nonblocking(comm, mine);
  const auto now = allgather(comm, mine);
  std::vector<int> out(now.size());
  auto third = allgather_nonblocking(comm, mine, out);
  third.wait();
  require_equal(early.wait(), now);
  require_equal(late.wait(), now);
  require_equal(out, now);
}

RANKS_TEST("an output of another length on one rank is refused by all before data travels",
           "[collective][allgather]") {
  const int culprit = comm.size() - 1;
  const std::vector<float> mine(2, 1.0F);
  const auto total = 2 * static_cast<std::size_t>(comm.size());
  std::vector<float> out(total + (comm.rank() == culprit ? 3 : 0));
  const auto traffic = traffic_of(comm, [&] {
    const auto text = require_throws<mismatch_error>([&] { allgather(comm, mine, out); });
    require_contains(text, concat("rank ", culprit, " has room for ", total + 3, " elements"));
    require_contains(text, comm.size() > 1 ? concat(" give ", total) : concat(" gives ", total));
  });
  require_equal(traffic.bytes_sent, 0);
  out.resize(total);
  allgather(comm, mine, out);
  require(std::ranges::count(out, 1.0F) == static_cast<std::ptrdiff_t>(total));
}

RANKS_TEST("ranks whose further dimensions or types differ are all told so",
           "[collective][allgather]") {
  if (comm.size() == 1) return;
  std::vector<float> mine(12);
  const auto run = [&](detail::gather_shape shape) {
    comm.run({.operation = "allgather"}, [&](auto context) {
      return detail::allgather_task(context, as_buffer(mine), shape,
                                    [](std::span<const std::int64_t>) -> mutable_buffer {
                                      throw rank_failure("nothing may be allocated");
                                    });
    });
  };
  auto text = require_throws<mismatch_error>([&] {
    run(comm.rank() == 1 ? detail::gather_shape{3, {4}} : detail::gather_shape{2, {6}});
  });
  require_contains(text, "float32 [3, 4]");
  require_contains(text, "float32 [2, 6]");
  text = require_throws<mismatch_error>([&] {
    if (comm.rank() == 1)
      static_cast<void>(allgather(comm, std::vector<double>(2)));
    else
      static_cast<void>(allgather(comm, std::vector<float>(2)));
  });
  require_contains(text, "float64 [2]");
  require_contains(text, "float32 [2]");
  barrier(comm);
}

TEST_CASE("of many dimensions the first are named, and all are compared",
          "[collective][allgather]") {
  const auto header = [](std::int64_t last) {
    std::vector<std::int64_t> trailing(12, 10);
    trailing.back() = last;
    return detail::gather_header({.rows = 1, .trailing = trailing}, dtype::float32);
  };
  CHECK(header(10).fits(header(10)));
  CHECK_FALSE(header(10).fits(header(11)));
  CHECK(header(10).text() == "float32 [1, 10, 10, 10, 10, 10, 10, 10, ...]");
}

RANKS_TEST("rows without elements are still counted", "[collective][allgather]") {
  std::vector<std::int64_t> rows;
  comm.run({.operation = "allgather"}, [&](auto context) {
    return detail::allgather_task(context, {nullptr, 0, dtype::float32},
                                  detail::gather_shape{comm.rank() + 1, {0, 4}},
                                  [&rows](std::span<const std::int64_t> told) {
                                    rows.assign(told.begin(), told.end());
                                    return mutable_buffer{nullptr, 0, dtype::float32};
                                  });
  });
  require_equal(rows.size(), static_cast<std::size_t>(comm.size()));
  for (std::size_t i = 0; i < rows.size(); ++i)
    require_equal(rows[i], static_cast<std::int64_t>(i) + 1);
}

RANKS_TEST("an allgather counts n-1 times the own part as one message", "[collective][allgather]") {
  const std::vector<float> mine(share(comm.rank(), 100) + 1);
  const auto traffic = traffic_of(comm, [&] { static_cast<void>(allgather(comm, mine)); });
  require_equal(traffic.bytes_sent, (comm.size() - 1) * static_cast<std::int64_t>(4 * mine.size()));
  require_equal(traffic.messages_sent, comm.size() > 1 ? 1 : 0);
  require(comm.size() == 1 || traffic.control_messages > 0, "sizes travel as control traffic");
}

RANKS_TEST("allgather refuses an output of another type", "[collective][allgather]") {
  std::vector<float> x(1);
  std::vector<double> y(static_cast<std::size_t>(comm.size()));
  const auto text = require_throws<usage_error>([&] { allgather(comm, x, y); });
  require_contains(text, "allgather: input is float32, output is float64");
}

TEST_CASE("a transport's own allgather gets unequal parts, counted in elements",
          "[collective][allgather][thread]") {
  STATIC_REQUIRE(gathering_backend<native_thread_backend>);
  on_native_threads([](auto& comm, meeting&) {
    const auto wanted = all_gifts(comm.size(), 0);
    const auto mine = gift(comm.rank(), 0);
    require_equal(allgather(comm, mine), wanted);
    std::vector<int> out(wanted.size(), -1);
    const auto traffic = traffic_of(comm, [&] { allgather(comm, mine, out); });
    require_equal(out, wanted);
    require_equal(traffic.bytes_sent,
                  (comm.size() - 1) * static_cast<std::int64_t>(sizeof(int) * mine.size()));

    // What it gives may be its own part of the result.
    std::size_t before = 0;
    for (int rank = 0; rank < comm.rank(); ++rank) before += gift(rank, 0).size();
    std::ranges::fill(out, -1);
    std::ranges::copy(mine, out.begin() + static_cast<std::ptrdiff_t>(before));
    allgather(comm, std::span(out).subspan(before, mine.size()), out);
    require_equal(out, wanted);

    // Rows of several elements.
    std::vector<std::int64_t> rows;
    std::ranges::fill(out, -1);
    comm.run({.operation = "allgather"}, [&](auto context) {
      return detail::allgather_task(
          context, as_buffer(mine),
          detail::gather_shape{static_cast<std::int64_t>(mine.size()) / 7, {7}},
          [&](std::span<const std::int64_t> told) {
            rows.assign(told.begin(), told.end());
            return as_mutable_buffer(out);
          });
    });
    require_equal(out, wanted);
    for (int rank = 0; rank < comm.size(); ++rank)
      require_equal(rows[static_cast<std::size_t>(rank)],
                    static_cast<std::int64_t>(share(rank + 1, 1)));
    require_equal(comm.transport().calls(), std::uint64_t{4});
  });
}

TEST_CASE("a transport's own collectives come in one order on all ranks, whoever is first",
          "[collective][allgather][thread]") {
  on_native_threads([](auto& comm, meeting& together) {
    constexpr int rounds = 20;
    std::vector<std::vector<int>> mine, sums, told;
    std::vector<request<std::vector<int>>> gathering;
    std::vector<request<void>> others;
    for (int round = 0; round < rounds; ++round) {
      mine.push_back(gift(comm.rank(), round));
      sums.emplace_back(2, comm.rank() + round);
      told.emplace_back(3, comm.rank() == round % comm.size() ? round : -1);
    }
    // Who is last gets all answers at once, and who is first has started all before it gets any.
    for (int turn = 0; turn < comm.size(); ++turn) {
      for (int round = 0; turn == comm.rank() && round < rounds; ++round) {
        const auto i = static_cast<std::size_t>(round);
        others.push_back(allreduce_nonblocking(comm, sums[i], sums[i], reduce_op::sum));
        gathering.push_back(allgather_nonblocking(comm, mine[i]));
        others.push_back(broadcast_nonblocking(comm, told[i], round % comm.size()));
      }
      together.arrive_and_wait();
    }
    for (int round = rounds - 1; round >= 0; --round)
      require_equal(gathering[static_cast<std::size_t>(round)].wait(),
                    all_gifts(comm.size(), round));
    for (auto& each : others) each.wait();
    for (int round = 0; round < rounds; ++round) {
      const auto i = static_cast<std::size_t>(round);
      require_equal(sums[i],
                    std::vector<int>(2, comm.size() * (comm.size() - 1) / 2 + comm.size() * round));
      require_equal(told[i], std::vector<int>(3, round));
    }
    require_equal(comm.transport().calls(),
                  static_cast<std::uint64_t>(comm.size() > 1 ? 2 * rounds : rounds));
  });
}

TEST_CASE("parts that do not fit never reach a transport's own allgather",
          "[collective][allgather][thread]") {
  on_native_threads([](auto& comm, meeting&) {
    const int culprit = comm.size() - 1;
    const auto wanted = all_gifts(comm.size(), 0);
    const auto mine = gift(comm.rank(), 0);
    std::vector<int> out(wanted.size() + (comm.rank() == culprit ? 1 : 0), -1);
    const auto text = require_throws<mismatch_error>([&] { allgather(comm, mine, out); });
    require_contains(text, concat("rank ", culprit, " has room for ", wanted.size() + 1));
    require_equal(std::ranges::count(out, -1), std::ssize(out));
    require_equal(comm.transport().calls(), std::uint64_t{0});
    out.resize(wanted.size());
    allgather(comm, mine, out);
    require_equal(out, wanted);
  });
}
