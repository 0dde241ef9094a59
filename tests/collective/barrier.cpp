// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <bluefog/collective/barrier.hpp>

#include "collective/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

TEST_CASE("nobody leaves a barrier before everybody has come", "[collective][barrier]") {
  for (const int size : {1, 2, 3, 5, 8}) {
    std::atomic<int> arrived = 0;
    run_threads(size, [&](auto& comm) {
      for (int round = 1; round <= 20; ++round) {
        ++arrived;
        barrier(comm);
        require(arrived >= round * size, "somebody is missing");
        barrier(comm);
      }
    });
    CHECK(arrived == 20 * size);
  }
}

RANKS_TEST("barriers may be in flight, many at a time", "[collective][barrier]") {
  std::vector<request<void>> requests;
  for (int i = 0; i < 20; ++i) requests.push_back(barrier_nonblocking(comm));
  barrier(comm);
  for (auto& each : requests) each.wait();
}

RANKS_TEST("a barrier sends no payload", "[collective][barrier]") {
  const auto traffic = traffic_of(comm, [&] { barrier(comm); });
  require_equal(traffic.bytes_sent, 0);
  require_equal(traffic.messages_sent, 0);
  require_equal(traffic.operations, 1);
}

TEST_CASE("a barrier that somebody misses names him", "[collective][barrier]") {
  std::atomic<int> over = 0;
  run_threads(4,
              [&](auto& comm) {
                if (comm.rank() == 2) {
                  while (over < 3) std::this_thread::sleep_for(std::chrono::milliseconds(5));
                  return;
                }
                const auto text = require_throws<timeout_error>([&] { barrier(comm); });
                ++over;
                require_contains(text, "barrier");
                require_contains(text, "not heard from rank 2");
              },
              {.timeout = std::chrono::seconds(3)});
}
