// SPDX-License-Identifier: Apache-2.0
//
// Operations over a transport that delays, reorders, drops and dies, for many seeds. Whatever
// happens: no hang, no wrong value, inputs as they were, and errors of the library's own kinds.

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <bluefog/collective/allreduce.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/topology.hpp>

#include "support.hpp"
#include "support/faulty_backend.hpp"

using namespace std::chrono_literals;
using namespace bluefog;
using bluefog_test::faults;
using bluefog_test::faulty_backend;
using bluefog_test::require;
using bluefog_test::require_equal;

static_assert(backend<faulty_backend<thread_backend>>);
static_assert(letter_backend<faulty_backend<thread_backend>>);
static_assert(!allreducing_backend<faulty_backend<thread_backend>>);

namespace {

using faulty = faulty_backend<thread_backend>;
using communicator_type = communicator<faulty>;

/// Runs `body(comm)` on `size` ranks with the same faults, and checks that nothing stays alive.
template <class Body>
std::string on_faulty_threads(
    int size, const faults& what, const Body& body, const communicator_options& options = {},
    const std::function<void()>& leave = [] {}) {
  std::mutex mutex;
  std::vector<std::shared_ptr<bluefog_test::fault_state>> states;
  const auto failures = bluefog_test::run_wrapped(
      size,
      [&](thread_backend inner) {
        faulty transport(std::move(inner), what);
        const std::scoped_lock lock(mutex);
        states.push_back(transport.state());
        return transport;
      },
      body, options, leave);
  for (const auto& state : states)
    if (state->living != 0) return "an operation is still alive";
  return bluefog_test::first_text(failures);
}

/// Whole numbers, so that every order of summation gives the same floats.
[[nodiscard]] std::vector<double> values_of(int rank, int round, std::size_t count) {
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = 1000.0 * rank + 10.0 * round + double(i % 7);
  return values;
}

[[nodiscard]] std::vector<double> sum_over_ranks(int size, int round, std::size_t count) {
  std::vector<double> sum(count);
  for (int rank = 0; rank < size; ++rank) {
    const auto part = values_of(rank, round, count);
    for (std::size_t i = 0; i < count; ++i) sum[i] += part[i];
  }
  return sum;
}

/// Sum of what rank `rank` has and gets over a ring.
[[nodiscard]] std::vector<double> ring_sum(int rank, int size, int round, std::size_t count) {
  auto sum = values_of(rank, round, count);
  if (size == 1) return sum;
  const auto left = values_of((rank + size - 1) % size, round, count);
  for (std::size_t i = 0; i < count; ++i) sum[i] += left[i];
  return sum;
}

[[nodiscard]] neighborhood ring_links(int rank, int size) {
  if (size == 1) return {};
  return {.sources = {{(rank + size - 1) % size}}, .destinations = {{(rank + 1) % size}}};
}

/// How many operations ended in which way, over all runs of a test: without both it shows little.
struct outcomes {
  std::atomic<int> completed = 0;
  std::atomic<int> failed = 0;
};

/// One round of operations; counts those that failed as they may.
struct round_of_operations {
  outcomes* all = nullptr;
  int failures = 0;

  template <class Act>
  bool attempt(Act act) {
    try {
      act();
      if (all != nullptr) ++all->completed;
      return true;
    } catch (const timeout_error& problem) {
      require(std::string(problem.what()).find("timed out") != std::string::npos);
    } catch (const peer_error&) {
    } catch (const mismatch_error&) {
    }
    ++failures;
    if (all != nullptr) ++all->failed;
    return false;
  }

  void run(communicator_type& comm, int round) {
    // Long ones go in two steps, short ones in one.
    const std::size_t count = round % 3 == 0 ? 1200 : 5;
    const auto in = values_of(comm.rank(), round, count);
    const auto kept = in;
    std::vector<double> sum(count), mixed(count, -1);
    auto in_place = in;
    const auto links = ring_links(comm.rank(), comm.size());
    bool reduced = false;
    bool averaged = false;
    bool replaced = false;
    if (round % 2 == 0) {
      reduced = attempt([&] { allreduce(comm, in, sum, reduce_op::sum); });
      averaged = attempt([&] { neighbor_allreduce(comm, in, mixed, links); });
      replaced = attempt([&] { neighbor_allreduce(comm, in_place, in_place, links); });
    } else {
      auto first = allreduce_nonblocking(comm, in, sum, reduce_op::sum);
      auto second = neighbor_allreduce_nonblocking(comm, in, mixed, links);
      auto third = neighbor_allreduce_nonblocking(comm, in_place, in_place, links);
      replaced = attempt([&] { third.wait(); });
      averaged = attempt([&] { second.wait(); });
      reduced = attempt([&] { first.wait(); });
    }
    require(in == kept, "an input has changed");
    if (reduced) require(sum == sum_over_ranks(comm.size(), round, count), "a wrong sum");
    const auto average = ring_sum(comm.rank(), comm.size(), round, count);
    require(
        std::memcmp(in_place.data(), (replaced ? average : in).data(), count * sizeof(double)) == 0,
        replaced ? "a wrong average in place" : "an input in place of a failed operation");
    if (averaged)
      require(mixed == average, "a wrong average");
    else
      require(mixed == std::vector<double>(count, -1), "an output of a failed operation");
  }
};

/// A communicator that could not be made in time is a clean end, too.
[[nodiscard]] bool is_clean(const std::string& problem) {
  if (!problem.empty()) UNSCOPED_INFO(problem);
  return problem.empty() || problem.find("communicator (operation 0)") == 0;
}

}  // namespace

TEST_CASE("delays and reordering change no value", "[backend][faults]") {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    const int size = 1 + static_cast<int>(seed % 5);
    const bool check = seed % 2 == 1;
    const auto problem = on_faulty_threads(
        size, {.seed = seed, .delay = static_cast<int>(seed % 13), .reorder = true},
        [](communicator_type& comm) {
          round_of_operations operations;
          for (int round = 0; round < 6; ++round) operations.run(comm, round);
          require_equal(operations.failures, 0);
        },
        {.check = check});
    INFO("seed " << seed);
    REQUIRE(problem == "");
  }
}

TEST_CASE("dropped messages end in errors, never in a hang or a wrong value", "[backend][faults]") {
  const bluefog_test::log_capture quiet;
  outcomes all;
  for (std::uint64_t seed = 0; seed < 80; ++seed) {
    const int size = 2 + static_cast<int>(seed % 3);
    const auto problem = on_faulty_threads(size,
                                           {.seed = seed,
                                            .delay = static_cast<int>(seed % 5),
                                            .reorder = seed % 2 == 0,
                                            .drop = 0.08,
                                            .drop_before = 13},
                                           [&](communicator_type& comm) {
                                             round_of_operations operations{.all = &all};
                                             for (int round = 0; round < 4; ++round)
                                               operations.run(comm, round);
                                           },
                                           {.timeout = 60ms, .stall_warning = 20ms});
    INFO("seed " << seed);
    REQUIRE(is_clean(problem));
  }
  CHECK(all.completed > 0);
  CHECK(all.failed > 0);
}

TEST_CASE("operations work again after failures", "[backend][faults]") {
  const bluefog_test::log_capture quiet;
  outcomes all;
  int recoveries = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const int size = 2 + static_cast<int>(seed % 3);
    std::barrier<> together(size);
    std::atomic<int> failed = 0;
    std::atomic<bool> wounded = false;
    std::atomic<bool> recovered = false;
    const auto problem = on_faulty_threads(
        size, {.seed = seed, .delay = 3, .reorder = true, .drop = 0.15, .drop_before = 10},
        [&](communicator_type& comm) {
          round_of_operations operations{.all = &all};
          for (int round = 0; round < 3; ++round) operations.run(comm, round);
          if (operations.failures > 0) wounded = true;
          // All that went wrong is over; a slow machine may need another attempt.
          for (int attempt = 0; attempt < 20 && !recovered; ++attempt) {
            if (comm.rank() == 0) failed = 0;
            together.arrive_and_wait();
            round_of_operations again;
            again.run(comm, attempt);
            failed += again.failures;
            together.arrive_and_wait();
            if (comm.rank() == 0) recovered = failed == 0;
            together.arrive_and_wait();
          }
        },
        {.check = seed % 2 == 0, .timeout = 150ms, .stall_warning = 50ms},
        [&] { together.arrive_and_drop(); });
    INFO("seed " << seed);
    REQUIRE(is_clean(problem));
    REQUIRE((recovered || !problem.empty()));
    if (recovered && wounded) ++recoveries;
  }
  CHECK(all.completed > 0);
  CHECK(all.failed > 0);
  CHECK(recoveries > 0);
}

TEST_CASE("a rank that dies at any message takes nobody's values with it", "[backend][faults]") {
  const bluefog_test::log_capture quiet;
  outcomes all;
  for (std::uint64_t seed = 0; seed < 80; ++seed) {
    const int size = 2 + static_cast<int>(seed % 3);
    const faults what{.seed = seed,
                      .delay = static_cast<int>(seed % 4),
                      .victim = static_cast<int>(seed % 2),
                      .kill_after = static_cast<std::int64_t>(seed / 2),
                      .dead_knows = seed % 4 < 2};
    const auto problem = on_faulty_threads(
        size, what,
        [&](communicator_type& comm) {
          round_of_operations operations{.all = &all};
          for (int round = 0; round < 4; ++round) {
            operations.run(comm, round);
            // It ends, and its end is noticed; or it goes on as if nothing were wrong.
            if (comm.rank() == what.victim && operations.failures > 0 && what.dead_knows) return;
          }
        },
        {.check = seed % 3 == 0, .timeout = 40ms, .stall_warning = 30ms});
    INFO("seed " << seed);
    REQUIRE(is_clean(problem));
  }
  CHECK(all.completed > 0);
  CHECK(all.failed > 0);
}
