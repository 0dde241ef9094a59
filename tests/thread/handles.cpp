// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <cstdint>
#include <future>
#include <utility>
#include <vector>

#include <bluefog/backend/request.hpp>
#include <bluefog/collective/allreduce.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/thread.hpp>
#include <bluefog/topology.hpp>

#include "support/ranks.hpp"

using namespace bluefog;
using bluefog_test::require_equal;
using thread_communicator = communicator<thread_backend>;

// What is equal on all ranks stays as it is under averages and maxima; here each place and window
// has a value of its own, so an operation that met another's messages, or memory of another window,
// shows.
TEST_CASE(
    "100,000 handles that are waited for here, elsewhere or dropped leave exact values and counts",
    "[thread][request]") {
  constexpr int size = 2;
  constexpr std::size_t window = 250;
  constexpr std::size_t windows = 100'000 / size / window;
  run_threads(size, [&](thread_communicator& comm) {
    const auto ring = topology::ring(size, topology::ring_style::left);
    const auto before = comm.statistics();
    std::vector<std::array<double, 3>> places(window);
    for (std::size_t round = 0; round < windows; ++round) {
      const auto value_of = [&](std::size_t place) {
        return static_cast<double>(round * window + place);
      };
      std::vector<request<void>> here, elsewhere, dropped;
      for (std::size_t place = 0; place < window; ++place) {
        places[place].fill(value_of(place));
        auto& kept = place % 3 == 0 ? here : place % 3 == 1 ? elsewhere : dropped;
        kept.push_back(
            place % 10 == 0
                ? allreduce_nonblocking(comm, places[place], places[place], reduce_op::max)
                : neighbor_allreduce_nonblocking(comm, places[place], places[place], ring));
      }
      auto waiting = std::async(std::launch::async, [handles = std::move(elsewhere)]() mutable {
        for (auto& each : handles) each.wait();
      });
      dropped.clear();
      for (auto& each : here) each.wait();
      waiting.get();
      for (std::size_t place = 0; place < window; ++place)
        for (const double each : places[place]) require_equal(each, value_of(place));
    }
    const auto after = comm.statistics();
    require_equal(after.operations - before.operations, std::int64_t{windows * window});
    require_equal(after.messages_sent - before.messages_sent, std::int64_t{windows * window});
  });
}
