// SPDX-License-Identifier: Apache-2.0
//
// What waiting costs the rest of the machine: how long a waiting thread sleeps, and how many
// threads there are.

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include <bluefog/backend/backoff.hpp>
#include <bluefog/collective/allreduce.hpp>

#include "support.hpp"

using namespace std::chrono_literals;
using namespace bluefog;
using bluefog_test::meeting;
using bluefog_test::require_equal;

namespace {

/// \return the numbers of this process's threads.
[[nodiscard]] std::set<std::string> living_threads() {
  std::set<std::string> threads;
  for (const auto& each : std::filesystem::directory_iterator("/proc/self/task"))
    threads.insert(each.path().filename());
  return threads;
}

/// \return how many threads there are that `before` does not have. (Of those some may have ended.)
[[nodiscard]] int threads_since(const std::set<std::string>& before) {
  int added = 0;
  for (const auto& each : living_threads())
    if (!before.contains(each)) ++added;
  return added;
}

}  // namespace

TEST_CASE("who waits sleeps longer and longer, but never for more than 100 us",
          "[backend][backoff]") {
  for (const auto who : {detail::waiting::foreground, detail::waiting::background}) {
    detail::backoff pause(who);
    CHECK(pause.delay() == 0us);
    CHECK_FALSE(pause.slow());
    int rounds_at_once = 0;
    std::set<std::chrono::microseconds> delays;
    bool shrinks = false;
    bool sleeps_at_first = false;
    auto longest = 0us;
    for (int round = 0; round < 10'000; ++round) {
      pause.count();
      const auto delay = pause.delay();
      if (delay < longest) shrinks = true;
      if (delay == 0us)
        ++rounds_at_once;
      else if (!pause.slow())
        sleeps_at_first = true;
      longest = std::max(longest, delay);
      delays.insert(delay);
    }
    CHECK_FALSE(shrinks);
    CHECK_FALSE(sleeps_at_first);
    CHECK(longest > 0us);
    CHECK(longest <= 100us);
    CHECK(delays.size() > 2);  // in steps
    // A caller that has nothing else to do tries longer than a thread beside a computation.
    CHECK((rounds_at_once > 100) == (who == detail::waiting::foreground));
    for (int round = 0; round < 220'000'000; ++round) pause.count();  // six hours
    CHECK(pause.delay() == 100us);
    pause.reset();
    CHECK(pause.delay() == 0us);
    CHECK_FALSE(pause.slow());
  }
}

TEST_CASE("only an operation that does not block starts a thread, one for all communicators",
          "[backend][engine][thread]") {
  if (!std::filesystem::exists("/proc/self/task")) return;
  for (const int size : {1, 3}) {
    meeting together(size);
    run_threads(size, [&](communicator<thread_backend>& comm) {
      // Each rank has a driver of its own; all look at the same time.
      const auto look = [&](const std::set<std::string>& before, int wanted) {
        together.arrive_and_wait();
        const int found = threads_since(before);
        together.arrive_and_wait();
        require_equal(found, wanted);
      };
      std::vector<int> x(3, 1);
      together.arrive_and_wait();
      const auto before = living_threads();
      look(before, 0);

      allreduce(comm, x, x, reduce_op::sum);
      auto copy = comm.duplicate();
      allreduce(copy, x, x, reduce_op::sum);
      look(before, 0);

      allreduce_nonblocking(comm, x, x, reduce_op::max).wait();
      look(before, size);

      allreduce_nonblocking(comm, x, x, reduce_op::max).wait();
      allreduce_nonblocking(copy, x, x, reduce_op::max).wait();
      auto part = copy.split(comm.rank() % 2);
      allreduce_nonblocking(part, x, x, reduce_op::max).wait();
      allreduce(part, x, x, reduce_op::max);
      look(before, size);
    });
  }
}
