// SPDX-License-Identifier: Apache-2.0

#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <bluefog/collective/allreduce.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/thread.hpp>
#include <bluefog/topology.hpp>

#include "support/ranks.hpp"

using namespace std::chrono_literals;
using namespace bluefog;
using bluefog_test::require;
using bluefog_test::require_equal;
using bluefog_test::require_throws;
using thread_communicator = communicator<thread_backend>;

TEST_CASE("every rank runs the body once", "[thread][run]") {
  for (const int size : {1, 2, 3, 7, 64}) {
    std::vector<std::atomic<int>> calls(static_cast<std::size_t>(size));
    run_threads(size, [&](thread_communicator& comm) {
      ++calls[static_cast<std::size_t>(comm.rank())];
      require_equal(comm.size(), size);
      std::vector<int> x(100, comm.rank());
      allreduce(comm, x, x, reduce_op::sum);
      require_equal(x[99], size * (size - 1) / 2);
      std::vector<double> y(10, comm.rank());
      neighbor_allreduce(comm, y, y, topology::fully_connected(size));
      bluefog_test::require_near(y[0], (size - 1) / 2.0, 1e-12);
    });
    for (const auto& each : calls) CHECK(each == 1);
  }
}

TEST_CASE("no rank at all is refused", "[thread][run]") {
  for (const int size : {0, -3})
    CHECK_THROWS_AS(run_threads(size, [](thread_communicator&) {}), usage_error);
}

TEST_CASE("what a rank throws comes out, and not what the others throw because of it",
          "[thread][run]") {
  for (const int size : {1, 2, 3, 8}) {
    std::atomic<int> told = 0;
    const auto text = require_throws<std::domain_error>([&] {
      run_threads(
          size,
          [&](thread_communicator& comm) {
            if (comm.rank() == size - 1) throw std::domain_error("the cause");
            std::vector<int> x(10);
            try {
              allreduce(comm, x, x, reduce_op::sum);
            } catch (const peer_error& problem) {
              ++told;
              require(std::string(problem.what()).find("allreduce (operation 1): rank ") == 0);
              throw;
            }
          },
          {.timeout = 20s});
    });
    CHECK(text == "the cause");
    CHECK(told == size - 1);
  }
}

TEST_CASE("a rank that ends early fails those who need it, by name", "[thread][run]") {
  const auto text = require_throws<peer_error>([&] {
    run_threads(2,
                [&](thread_communicator& comm) {
                  if (comm.rank() == 1) return;
                  auto half = comm.duplicate();  // rank 1 never takes part
                },
                {.timeout = 20s});
  });
  CHECK(text == "communicator (operation 1): rank 1 has ended");
}

TEST_CASE("a rank that ends is noticed on communicators made before", "[thread][run]") {
  require_throws<std::runtime_error>([&] {
    run_threads(3,
                [&](thread_communicator& comm) {
                  auto pair = comm.split(comm.rank() == 0 ? 0 : 1);
                  if (comm.rank() == 2) throw std::runtime_error("the cause");
                  if (comm.rank() == 0) return;
                  std::vector<int> x(10);
                  require_throws<peer_error>([&] { allreduce(pair, x, x, reduce_op::sum); });
                },
                {.timeout = 20s});
  });
}

TEST_CASE("one rank alone needs no run", "[thread][run]") {
  thread_communicator comm;
  std::vector<double> x{1.5, 2.5};
  allreduce(comm, x, x);
  neighbor_allreduce(comm, x, x);
  auto pending = allreduce_nonblocking(comm, x, x, reduce_op::sum);
  pending.wait();
  CHECK(x == std::vector<double>{1.5, 2.5});
  CHECK(comm.statistics().bytes_sent == 0);
}

TEST_CASE("runs nest and follow one another", "[thread][run]") {
  run_threads(2, [](thread_communicator& outer) {
    for (int again = 0; again < 20; ++again)
      run_threads(3, [&](thread_communicator& inner) {
        std::vector<int> x(10, 1);
        allreduce(inner, x, x, reduce_op::sum);
        require_equal(x[0], 3);
      });
    std::vector<int> y(10, 1);
    allreduce(outer, y, y, reduce_op::sum);
    require_equal(y[0], 2);
  });
}

TEST_CASE("statistics count the payload of neighbours and the share of a collective",
          "[thread][run]") {
  run_threads(4, [](thread_communicator& comm) {
    const auto before = comm.statistics();
    std::vector<float> x(1000, 1.0F);
    neighbor_allreduce(comm, x, x, topology::ring(4));  // two destinations
    const auto between = comm.statistics();
    require_equal(between.bytes_sent - before.bytes_sent, 2 * 4000);
    require_equal(between.messages_sent - before.messages_sent, 2);
    allreduce(comm, x, x, reduce_op::sum);  // 2 (n - 1) / n S
    const auto after = comm.statistics();
    require_equal(after.bytes_sent - between.bytes_sent, 6000);
    require_equal(after.messages_sent - between.messages_sent, 1);
    require_equal(after.operations - before.operations, 2);
    // A failed operation has been counted, a refused one has not.
    std::vector<float> wrong(3);
    require_throws<usage_error>([&] { allreduce(comm, x, wrong); });
    require_equal(comm.statistics().operations, after.operations);
  });
}
