// SPDX-License-Identifier: Apache-2.0

#include <chrono>
#include <numeric>
#include <string>
#include <vector>

#include <bluefog/collective/allreduce.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/topology.hpp>

#include "support.hpp"

using namespace std::chrono_literals;
using namespace bluefog;
using bluefog_test::require;
using bluefog_test::require_contains;
using bluefog_test::require_equal;
using bluefog_test::require_throws;
using bluefog_test::swap_with;

namespace {

using thread_communicator = communicator<thread_backend>;

/// Every rank must see a `mismatch_error` of `act` that contains `parts`, and go on.
template <class Act>
void disagree(int size, const std::vector<std::string>& parts, const Act& act) {
  run_threads(size,
              [&](thread_communicator& comm) {
                const auto text = require_throws<mismatch_error>([&] { act(comm); });
                for (const auto& part : parts) require_contains(text, part);
                std::vector<int> x(3, 1);
                allreduce(comm, x, x, reduce_op::sum);
                require_equal(x[0], comm.size());
              },
              {.check = true, .timeout = 20s});
}

}  // namespace

TEST_CASE("check mode shows both sides of a disagreement on every rank", "[backend][check]") {
  for (const int size : {2, 3, 8}) {
    disagree(size, {"rank 1 calls allreduce float32 [5] average", "float32 [10] average"},
             [](auto& comm) {
               std::vector<float> x(comm.rank() == 1 ? 5 : 10);
               allreduce(comm, x, x);
             });
    disagree(size, {"rank 1 calls allreduce float64", "allreduce float32"}, [](auto& comm) {
      std::vector<float> x(10);
      std::vector<double> y(10);
      if (comm.rank() == 1)
        allreduce(comm, y, y);
      else
        allreduce(comm, x, x);
    });
    disagree(size, {"] sum", "] max"}, [](auto& comm) {
      std::vector<int> x(10);
      allreduce(comm, x, x, comm.rank() == 1 ? reduce_op::max : reduce_op::sum);
    });
    disagree(size, {"allreduce \"a\"", "allreduce \"b\""}, [](auto& comm) {
      std::vector<int> x(10);
      allreduce(comm, x, x, reduce_op::sum, {.name = comm.rank() == 1 ? "b" : "a"});
    });
    disagree(size, {"allreduce float32", "rank 1 calls neighbor_allreduce float32"},
             [](auto& comm) {
               std::vector<float> x(10);
               if (comm.rank() == 1)
                 neighbor_allreduce(comm, x, x, neighborhood{});
               else
                 allreduce(comm, x, x);
             });
  }
}

TEST_CASE("check mode names the pair whose sends and receives do not fit, on every rank",
          "[backend][check]") {
  for (const int size : {2, 3, 8}) {
    disagree(size, {"rank 0 sends to rank 1, which does not receive from it"}, [](auto& comm) {
      std::vector<float> x(10);
      neighbor_allreduce(comm, x, x,
                         comm.rank() == 0 ? neighborhood{.destinations = {{1}}} : neighborhood{});
    });
    disagree(size, {"rank 0 receives from rank 1, which does not send to it"}, [](auto& comm) {
      std::vector<float> x(10);
      neighbor_allreduce(comm, x, x,
                         comm.rank() == 0 ? neighborhood{.sources = {{1}}} : neighborhood{});
    });
  }
}

TEST_CASE("check mode lets agreeing calls through, in flight together", "[backend][check]") {
  run_threads(5,
              [](thread_communicator& comm) {
                std::vector<std::vector<double>> values(30, std::vector<double>(500, comm.rank()));
                std::vector<request<void>> requests;
                for (auto& each : values)
                  requests.push_back(neighbor_allreduce_nonblocking(comm, each, each,
                                                                    topology::fully_connected(5)));
                for (auto& each : requests) each.wait();
                for (const auto& each : values) bluefog_test::require_near(each.back(), 2.0, 1e-12);
                require(comm.statistics().control_messages > 0);
              },
              {.check = true});
}

TEST_CASE("check mode does not order operations of two ranks", "[backend][check]") {
  // Each rank starts with its successor, then its predecessor: a circle, if one had to end before
  // the next may start.
  for (const int size : {3, 5})
    run_threads(size,
                [](thread_communicator& comm) {
                  const int next = (comm.rank() + 1) % comm.size();
                  const int previous = (comm.rank() + comm.size() - 1) % comm.size();
                  for (int round = 0; round < 20; ++round) {
                    std::vector<int> x(10, 1);
                    auto all = allreduce_nonblocking(comm, x, x, reduce_op::sum);
                    auto forth = swap_with(comm, next, {comm.rank(), round});
                    auto back = swap_with(comm, previous, {comm.rank(), round});
                    require(back.wait() == std::vector<int>{previous, round});
                    require(forth.wait() == std::vector<int>{next, round});
                    all.wait();
                    require_equal(x[0], comm.size());
                  }
                },
                {.check = true, .timeout = 20s});
}

TEST_CASE("without check mode a message that nobody expects is an error, not data",
          "[backend][check]") {
  const bluefog_test::log_capture quiet;
  run_threads(2,
              [](thread_communicator& comm) {
                std::vector<float> x(4, 1.0F);
                std::vector<int> y(4, 1);
                // Rank 0 sends what rank 1 does not receive; both go on to an operation of all.
                neighbor_allreduce(
                    comm, x, x,
                    comm.rank() == 0 ? neighborhood{.destinations = {{1}}} : neighborhood{});
                require_contains(
                    require_throws<mismatch_error>([&] { allreduce(comm, y, y, reduce_op::sum); }),
                    "rank 0 sent a message of operation 1 that rank 1 does not receive");
                require_equal(x[0], 1.0F);
                y.assign(4, 1);
                allreduce(comm, y, y, reduce_op::sum);
                require_equal(y[0], 2);
              },
              {.timeout = 20s});
}
