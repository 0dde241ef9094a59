// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include <bluefog/collective.hpp>
#include <bluefog/neighbor.hpp>
#include <bluefog/topology.hpp>

#include "collective/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

namespace {

/// Requires that every rank throws an error that holds both texts, soon, and that all then go on.
template <class Comm, class Act>
void disagree(Comm& comm, const std::string& one, const std::string& other, Act act) {
  const auto text = require_throws_soon<mismatch_error>(act);
  require_contains(text, one);
  require_contains(text, other);
  std::vector<int> ones(3, 1);
  allreduce(comm, ones, ones, reduce_op::sum);
  require_equal(ones.front(), comm.size());
}

}  // namespace

RANKS_TEST("neighbourhoods that break a rule are refused before anything is sent",
           "[neighbor][refusal]") {
  const int n = comm.size();
  const int self = comm.rank();
  const int other = (self + 1) % n;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<float> x(4, 1.0F), y(4);
  const auto refused = [&](const neighborhood& links, const std::string& why) {
    const auto text = require_throws<usage_error>([&] { neighbor_allreduce(comm, x, y, links); });
    require_contains(text, "neighbor_allreduce: ");
    require_contains(text, why);
    require_throws<usage_error>([&] { static_cast<void>(neighbor_allgather(comm, x, links)); });
  };
  const auto traffic = traffic_of(comm, [&] {
    refused({.sources = {{n}}}, concat("source 0 must be in [0, ", n, "), got rank ", n));
    refused({.destinations = {{-1}}}, concat("destination 0 must be in [0, ", n, "), got rank -1"));
    refused({.sources = {{self}}}, concat("source 0 is rank ", self, " itself; use self_weight"));
    refused({.self_weight = nan}, "self_weight must be finite, got nan");
    if (n > 1) {
      refused({.sources = {{other}, {other}}}, concat("source rank ", other, " is given twice"));
      refused({.destinations = {{other, nan}}}, concat("the weight of destination rank ", other));
    }
    auto text =
        require_throws<usage_error>([&] { neighbor_allreduce(comm, x, y, topology::ring(n + 1)); });
    require_contains(text, concat("the graph has ", n + 1, " ranks, the communicator has ", n));
    std::vector<int> integers(4);
    text = require_throws<usage_error>(
        [&] { neighbor_allreduce(comm, integers, integers, neighborhood{}); });
    require_contains(text, "neighbor_allreduce: weights need a floating type, got int32");
    std::vector<float> five(5);
    text = require_throws<usage_error>([&] { neighbor_allreduce(comm, x, five, neighborhood{}); });
    require_contains(text, "neighbor_allreduce: input has 4 elements, output has 5");
  });
  require_equal(traffic.operations, 0);
  neighbor_allreduce(comm, x, y, topology::ring(n));
  for (const float each : y) require_near(each, 1.0, 1e-6);
}

RANKS_TEST("check mode names the pair whose sends and receives do not fit, on every rank",
           "[neighbor][refusal][check]") {
  if (comm.size() == 1) return;
  auto checked = with_options(comm, {.check = true});
  std::vector<float> x(10, 1.0F);
  const auto untouched = x;
  const auto unexpected = comm.rank() == 0 ? neighborhood{.destinations = {{1}}} : neighborhood{};
  const auto absent = comm.rank() == 1 ? neighborhood{.sources = {{0}}} : neighborhood{};
  disagree(checked, "rank 0 sends to rank 1", "does not receive from it",
           [&] { neighbor_allreduce(checked, x, x, unexpected); });
  disagree(checked, "rank 1 receives from rank 0", "does not send to it",
           [&] { neighbor_allreduce(checked, x, x, absent); });
  disagree(checked, "neighbor_allgather", "rank 0 sends to rank 1",
           [&] { static_cast<void>(neighbor_allgather(checked, x, unexpected)); });
  require(x == untouched, "a refused operation has changed its input");
}

RANKS_TEST("check mode names the pair that does not fit of several arrays, and between machines",
           "[neighbor][refusal][check]") {
  if (comm.size() == 1) return;
  auto checked = with_options(comm, {.check = true, .ranks_per_machine = 1});
  std::vector<float> x(10, 1.0F);
  std::vector<std::vector<float>> arrays(2, x);
  const auto untouched = arrays;
  const auto unexpected = comm.rank() == 0 ? neighborhood{.destinations = {{1}}} : neighborhood{};
  const auto absent = comm.rank() == 1 ? neighborhood{.sources = {{0}}} : neighborhood{};
  const std::string sends = "rank 0 sends to rank 1, which does not receive from it";
  const std::string receives = "rank 1 receives from rank 0, which does not send to it";
  disagree(checked, "neighbor_allreduce", sends,
           [&] { neighbor_allreduce(checked, arrays, arrays, unexpected); });
  disagree(checked, "neighbor_allreduce", receives,
           [&] { neighbor_allreduce(checked, arrays, arrays, absent); });
  disagree(checked, "hierarchical_neighbor_allreduce", sends,
           [&] { hierarchical_neighbor_allreduce(checked, x, x, unexpected); });
  disagree(checked, "hierarchical_neighbor_allreduce", receives,
           [&] { hierarchical_neighbor_allreduce(checked, x, x, absent); });
  require(arrays == untouched && x == untouched.front(), "a refused operation changed its input");
}

RANKS_TEST("check mode tells graphs of the same edges and other weights apart, on every rank",
           "[neighbor][refusal][check]") {
  const int n = comm.size();
  if (n < 2) return;
  auto checked = with_options(comm, {.check = true, .ranks_per_machine = 1});
  std::vector<float> x(10, 1.0F);
  const auto untouched = x;
  const auto matrix = [&](double own) {  // a ring in one direction
    std::vector<std::vector<double>> weights(static_cast<std::size_t>(n),
                                             std::vector<double>(static_cast<std::size_t>(n)));
    for (std::size_t i = 0; i < weights.size(); ++i) {
      weights[i][i] = own;
      weights[i][(i + 1) % weights.size()] = 1 - own;
    }
    return topology::adjacency(weights);
  };
  const auto graph = matrix(comm.rank() == n - 1 ? 0.75 : 0.5);
  const std::string text =
      concat("the graph of rank ", n - 1, " has other weights than that of rank 0");
  disagree(checked, "neighbor_allreduce", text, [&] { neighbor_allreduce(checked, x, x, graph); });
  std::vector<std::vector<float>> arrays(2, x);
  disagree(checked, "neighbor_allreduce", text,
           [&] { neighbor_allreduce(checked, arrays, arrays, graph); });
  disagree(checked, "hierarchical_neighbor_allreduce", text,
           [&] { hierarchical_neighbor_allreduce(checked, x, x, graph); });
  require(x == untouched && arrays.back() == untouched, "a refused operation changed its input");

  // Links of a rank's own may have any weights.
  const auto own = topology::neighborhood_of(graph, comm.rank());
  if (comm.rank() == 0)
    neighbor_allreduce(checked, x, x, own);
  else
    neighbor_allreduce(checked, x, x, matrix(0.5));
  require(x == untouched, "weights that sum to one keep equal values");
}

RANKS_TEST("check mode tells every rank of other lengths and types", "[neighbor][refusal][check]") {
  if (comm.size() == 1) return;
  auto checked = with_options(comm, {.check = true, .ranks_per_machine = 1});
  const topology::ring graph(comm.size());
  const bool odd = comm.rank() == 1;
  std::vector<float> x(odd ? 5 : 10, 1.0F);
  disagree(checked, "neighbor_allreduce float32 [10]", "neighbor_allreduce float32 [5]",
           [&] { neighbor_allreduce(checked, x, x, graph); });
  std::vector<std::vector<float>> arrays{{1.0F}, x};
  disagree(checked, "of 2 arrays float32 [1] float32 [10]", "of 2 arrays float32 [1] float32 [5]",
           [&] { neighbor_allreduce(checked, arrays, arrays, graph); });
  disagree(checked, "float32 [10]", "float32 [5]",
           [&] { hierarchical_neighbor_allreduce(checked, x, x, graph); });
  if (comm.rank() < 2) {
    const auto text =
        require_throws<mismatch_error>([&] { pair_gossip(checked, x, x, 1 - comm.rank()); });
    require_contains(text, "pair_gossip float32 [10]");
    require_contains(text, "pair_gossip float32 [5]");
  }
  disagree(checked, "neighbor_allgather float32 [any]", "neighbor_allgather float64 [any]", [&] {
    if (odd)
      static_cast<void>(neighbor_allgather(checked, x, graph));
    else
      static_cast<void>(neighbor_allgather(checked, std::vector<double>(3), graph));
  });
}

RANKS_TEST("without check mode a message that nobody expects is found and is never data",
           "[neighbor][refusal][stray]") {
  if (comm.size() == 1) return;
  std::vector<float> x(4, static_cast<float>(comm.rank()));
  const auto untouched = x;
  int found = 0;
  const auto attempt = [&](const neighborhood& links) {
    try {
      neighbor_allreduce(comm, x, x, links);
    } catch (const mismatch_error& problem) {
      require_contains(problem.what(), "rank 0 sent a message of operation");
      ++found;
    }
  };
  attempt(comm.rank() == 0 ? neighborhood{.destinations = {{1}}} : neighborhood{});
  for (int i = 0; i < 100; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    attempt({});
  }
  require_equal(found, comm.rank() == 1 ? 1 : 0);
  require(x == untouched, "a stray message has become data");
  barrier(comm);
}

RANKS_TEST("a message of another length than expected is an error at its receiver",
           "[neighbor][refusal][stray]") {
  if (comm.size() == 1) return;
  struct lengths {
    std::size_t sent, expected;
  };
  for (const auto [sent, expected] :
       {lengths{4, 3}, {2, 3}, {29999, 30000}, {30001, 30000}, {300000, 3}, {3, 300000}}) {
    std::vector<float> x(comm.rank() == 0 ? sent : expected, 7.0F);
    const auto untouched = x;
    neighborhood links;
    if (comm.rank() == 0) links.destinations = {{1}};
    if (comm.rank() == 1) links.sources = {{0, 1.0}};
    if (comm.rank() == 1) {
      const auto text =
          require_throws<mismatch_error>([&] { neighbor_allreduce(comm, x, x, links); });
      require_contains(text, concat("rank 0 sent ", sent * sizeof(float), " bytes where "));
      require_contains(text, concat(" expects ", expected * sizeof(float)));
    } else {
      neighbor_allreduce(comm, x, x, links);
    }
    require(x == untouched, "the failed operation has changed its input");
    barrier(comm);
  }
}

namespace {

constexpr int absent = 2;  // of three ranks

/// Every operation in turn, on a communicator of its own, which rank `absent` does not call.
/// \param gives_up  calls what it is given, which has to fail, and counts it.
template <class Comm, class GivesUp>
void miss_every_operation(Comm& comm, std::chrono::milliseconds timeout, GivesUp gives_up) {
  const communicator_options impatient{.timeout = timeout, .ranks_per_machine = 1};
  const topology::fully_connected graph(comm.size());
  std::vector<float> x(50, 1.0F);
  const auto untouched = x;
  const auto missed = [&](auto act) {
    auto fresh = with_options(comm, impatient);
    if (comm.rank() != absent) {
      gives_up([&] { act(fresh); });
      require(x == untouched, "the failed operation has changed its input");
    }
    barrier(comm);
  };
  missed([&](auto& late) { neighbor_allreduce(late, x, x, graph); });
  missed([&](auto& late) { static_cast<void>(neighbor_allgather(late, x, graph)); });
  missed([&](auto& late) { hierarchical_neighbor_allreduce(late, x, x, graph); });
  missed([&](auto& late) { pair_gossip(late, x, x, absent); });
  missed([&](auto& late) { static_cast<void>(allgather(late, x)); });
  missed([&](auto& late) { barrier(late); });
  missed([&](auto& late) { static_cast<void>(broadcast_object(late, 1, absent)); });
  missed([&](auto& late) { broadcast(late, untouched, x, absent); });
  missed([&](auto& late) { static_cast<void>(infer_sources(late, {absent})); });
  std::vector<float> y(50);
  missed([&](auto& late) { allreduce(late, x, y); });
}

}  // namespace

TEST_CASE("every operation that waits for an absent rank ends in time and names it",
          "[neighbor][refusal]") {
  std::atomic<int> over = 0;
  run_threads(3, [&](auto& comm) {
    miss_every_operation(comm, std::chrono::milliseconds(60), [&](auto act) {
      require_contains(require_throws<timeout_error>(act), "2");
      ++over;
    });
  });
  CHECK(over == 20);
}

#ifdef BLUEFOG_TEST_NCCL
TEST_CASE("every operation over NCCL that waits for an absent rank ends in time",
          "[neighbor][refusal][nccl]") {
  std::atomic<int> over = 0;
  const auto problem =
      run_nccl_ranks(3,
                     [&](auto& comm) {
                       miss_every_operation(comm, std::chrono::milliseconds(300), [&](auto act) {
                         // The second to give up may hear that the first has.
                         const auto text = require_throws<error>(act);
                         if (text.find("timed out") != std::string::npos)
                           require_contains(text, "2");
                         ++over;
                       });
                     },
                     {});
  CHECK(problem == "");
  CHECK(over == 20);
}
#endif
