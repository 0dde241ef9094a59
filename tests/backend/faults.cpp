// SPDX-License-Identifier: Apache-2.0
//
// Operations over a transport that delays, reorders, drops and dies, for many seeds. Whatever
// happens: no hang, no wrong value, inputs as they were, and errors of the library's own kinds.

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <bluefog/collective/allreduce.hpp>
#include <bluefog/neighbor/allgather.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/neighbor/hierarchical_allreduce.hpp>
#include <bluefog/topology.hpp>

#include "support.hpp"
#include "support/faulty_backend.hpp"
#include "support/recording_backend.hpp"

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

/// Four ranks are two machines; of other numbers each rank is one.
[[nodiscard]] int ranks_per_machine(int size) {
  return size == 4 ? 2 : 1;
}

/// Runs `body(comm)` on `size` ranks with the same faults, and checks that nothing stays alive.
template <class Body>
std::string on_faulty_threads(
    int size, const faults& what, const Body& body, communicator_options options = {},
    const std::function<void()>& leave = [] {}) {
  options.ranks_per_machine = ranks_per_machine(size);
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

/// Sum of the mean of the machine of rank `rank` and the mean that it gets over a ring of machines.
[[nodiscard]] std::vector<double> machine_ring_sum(int rank, int size, int round,
                                                   std::size_t count) {
  const int local = ranks_per_machine(size);
  const int machines = size / local;
  std::vector<double> sum(count);
  const auto add_mean = [&](int machine) {
    for (int member = machine * local; member < (machine + 1) * local; ++member) {
      const auto part = values_of(member, round, count);
      for (std::size_t i = 0; i < count; ++i) sum[i] += part[i] / local;
    }
  };
  add_mean(rank / local);
  if (machines > 1) add_mean((rank / local + machines - 1) % machines);
  return sum;
}

/// How many operations ended in which way, over all runs of a test: without both it shows little.
struct outcomes {
  std::atomic<int> completed = 0;
  std::atomic<int> failed = 0;
};

[[nodiscard]] bool same_bits(const std::vector<double>& one, const std::vector<double>& other) {
  return one.size() == other.size() &&
         std::memcmp(one.data(), other.data(), one.size() * sizeof(double)) == 0;
}

/// One round of operations; counts those that failed as they may.
struct round_of_operations {
  /// How many there are.
  static constexpr int length = 5;

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
    const int rank = comm.rank();
    const int size = comm.size();
    const auto before = comm.statistics().operations;
    const auto in = values_of(rank, round, count);
    const auto kept = in;
    std::vector<double> sum(count), mixed(count, -1);
    auto in_place = in;
    auto gift = in;  // is replaced by that of another rank
    const auto given = std::span(gift).first(size == 1 ? 0 : count);
    auto machine = in;
    const auto links = ring_links(rank, size);
    const auto machine_links = ring_links(comm.machine_rank(), comm.machine_size());
    bool reduced = false;
    bool averaged = false;
    bool replaced = false;
    bool received = false;
    bool between_machines = false;
    if (round % 2 == 0) {
      reduced = attempt([&] { allreduce(comm, in, sum, reduce_op::sum); });
      averaged = attempt([&] { neighbor_allreduce(comm, in, mixed, links); });
      replaced = attempt([&] { neighbor_allreduce(comm, in_place, in_place, links); });
      received = attempt([&] { neighbor_allgather(comm, gift, given, links); });
      between_machines =
          attempt([&] { hierarchical_neighbor_allreduce(comm, machine, machine, machine_links); });
    } else {
      auto first = allreduce_nonblocking(comm, in, sum, reduce_op::sum);
      auto second = neighbor_allreduce_nonblocking(comm, in, mixed, links);
      auto third = neighbor_allreduce_nonblocking(comm, in_place, in_place, links);
      auto fourth = neighbor_allgather_nonblocking(comm, gift, given, links);
      auto fifth =
          hierarchical_neighbor_allreduce_nonblocking(comm, machine, machine, machine_links);
      between_machines = attempt([&] { fifth.wait(); });
      received = attempt([&] { fourth.wait(); });
      replaced = attempt([&] { third.wait(); });
      averaged = attempt([&] { second.wait(); });
      reduced = attempt([&] { first.wait(); });
    }
    require_equal(comm.statistics().operations - before, length);
    require(same_bits(in, kept), "an input has changed");
    if (reduced) require(sum == sum_over_ranks(size, round, count), "a wrong sum");
    const auto average = ring_sum(rank, size, round, count);
    require(same_bits(in_place, replaced ? average : in),
            replaced ? "a wrong average in place" : "an input in place of a failed operation");
    if (averaged)
      require(mixed == average, "a wrong average");
    else
      require(mixed == std::vector<double>(count, -1), "an output of a failed operation");
    const auto previous = (rank + size - 1) % size;
    require(same_bits(gift, received ? values_of(previous, round, count) : in),
            received ? "a wrong gift" : "an input in place of a failed allgather");
    require(same_bits(machine, between_machines ? machine_ring_sum(rank, size, round, count) : in),
            between_machines ? "a wrong average of machines in place"
                             : "an input in place of a failed average of machines");
  }
};

/// How messages 1, 2, 3, 5, 6 and 7 leave over a faulty transport, of which k goes to rank k % 4.
struct submission {
  std::vector<int> left = {};  ///< in the order in which they were handed to the transport
  std::size_t at_once = 0;     ///< how many of them when the operation was submitted
  int tests = 0;               ///< until the operation was over
};

/// The receivers wait already, so that whatever takes time is the faults' doing.
[[nodiscard]] submission submit_with(const faults& what) {
  constexpr message_tag tag{channel::group, 1, 1};
  std::vector<int> numbers(8), received(8, -1);
  std::iota(numbers.begin(), numbers.end(), 0);
  const auto place = [](auto& values, int number) {
    return std::span(values).subspan(static_cast<std::size_t>(number), 1);
  };
  const auto group = std::make_shared<threads::fabric>(4);
  std::vector<threads::operation> receiving;
  for (const int rank : {1, 2, 3}) {
    auto exchange = thread_backend(group, rank).exchange(tag);
    for (const int number : {rank, 4 + rank})
      exchange.receive(as_mutable_buffer(place(received, number)), 0);
    receiving.push_back(std::move(exchange).submit());
  }

  bluefog_test::outbox sent;
  faulty_backend transport(
      bluefog_test::recording_backend<thread_backend>(thread_backend(group, 0), sent), what);
  auto exchange = transport.exchange(tag);
  for (const int number : {1, 2, 3, 5, 6, 7})
    exchange.send(as_buffer(place(numbers, number)), number % 4);
  require(sent.take().empty(), "left before it was submitted");
  submission seen;
  const auto look = [&] {
    for (const auto& message : sent.take())
      seen.left.push_back(*reinterpret_cast<const int*>(message.begin));
  };
  auto sending = std::move(exchange).submit();
  look();
  seen.at_once = seen.left.size();
  for (bool over = false; !over && seen.tests < 1000; ++seen.tests) {
    over = sending.ready();
    look();
  }
  for (auto& each : receiving) require(each.ready(), "sent, and not received");
  require(received == std::vector<int>{-1, 1, 2, 3, -1, 5, 6, 7},
          "messages of a pair changed places");
  return seen;
}

/// A communicator that could not be made in time is a clean end, too.
[[nodiscard]] bool is_clean(const std::string& problem) {
  if (!problem.empty()) UNSCOPED_INFO(problem);
  return problem.empty() || problem.find("communicator (operation 0)") == 0;
}

}  // namespace

TEST_CASE("the faulty transport does what its faults say", "[backend][faults]") {
  const std::vector<int> plain{1, 2, 3, 5, 6, 7};
  constexpr int delay = 3;
  std::set<std::vector<int>> orders;
  int delayed = 0;
  int late = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    INFO("seed " << seed);
    const auto harmless = submit_with({.seed = seed});
    CHECK(harmless.left == plain);
    CHECK(harmless.at_once == 6);
    CHECK(harmless.tests == 1);

    const auto reordered = submit_with({.seed = seed, .reorder = true});
    CHECK(reordered.at_once == 6);
    CHECK(reordered.tests == 1);
    CHECK(std::ranges::is_permutation(reordered.left, plain));
    orders.insert(reordered.left);
    CHECK(submit_with({.seed = seed, .reorder = true}).left == reordered.left);

    const auto slow = submit_with({.seed = seed, .delay = delay});
    CHECK(std::ranges::is_permutation(slow.left, plain));
    CHECK(slow.tests <= 2 * delay + 1);
    if (slow.at_once < 6) ++delayed;
    // Longer than until the last has left, at the latest.
    if (slow.tests > delay + 1) ++late;
    CHECK(submit_with({.seed = seed, .delay = delay}).left == slow.left);
  }
  CHECK(orders.size() == 6);  // whatever order the three ranks may have
  CHECK(delayed > 0);
  CHECK(late > 0);
}

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
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const int size = 2 + static_cast<int>(seed % 3);
    const auto problem = on_faulty_threads(size,
                                           {.seed = seed,
                                            .delay = static_cast<int>(seed % 5),
                                            .reorder = seed % 2 == 0,
                                            .drop = 0.08,
                                            .drop_before = 1 + 4 * round_of_operations::length},
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
        size,
        {.seed = seed,
         .delay = 3,
         .reorder = true,
         .drop = 0.15,
         .drop_before = 1 + 3 * round_of_operations::length},
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
