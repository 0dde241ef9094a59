// SPDX-License-Identifier: Apache-2.0
// What fails on one rank, or does not come: who is told what, and that there is an end of it.
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include <bluefog/collective.hpp>
#include <bluefog/neighbor.hpp>
#include <bluefog/topology.hpp>

#include "nccl/support.hpp"

using namespace bluefog;
using namespace bluefog_test;
using namespace std::chrono_literals;

namespace {

using nccl_communicator = communicator<nccl_backend>;

/// A call that fails on rank 0, in an operation on memory of the host or the device.
struct failing {
  const char* function;
  bool device;
};

}  // namespace

TEST_CASE("a call that fails on one rank ends the communicator on all, each of which says why",
          "[nccl][errors]") {
  const auto it = GENERATE(failing{"cudaMalloc", false}, failing{"cudaMallocHost", false},
                           failing{"cudaMemcpyAsync", false}, failing{"cudaEventRecord", false},
                           failing{"cudaEventQuery", false}, failing{"cudaStreamWaitEvent", false},
                           failing{"cudaEventCreateWithFlags", false}, failing{"ncclSend", false},
                           failing{"ncclGroupEnd", false}, failing{"ncclCommGetAsyncError", false},
                           failing{"ncclRecv", true}, failing{"cudaLaunchKernel", true},
                           failing{"cudaMalloc", true}, failing{"cudaEventQuery", true});
  INFO(it.function << " in " << (it.device ? "device" : "host") << " memory");
  constexpr int ranks = 3;
  stand_in::all_memory_is_device(it.device);
  const int aborts = stand_in::aborts();
  std::atomic<int> told = 0;
  std::barrier ready(ranks);  // an abort ends an operation of NCCL that only some ranks have left
  const auto problem =
      run_nccl_ranks(ranks,
                     [&](nccl_communicator& comm) {
                       const topology::ring graph(comm.size());
                       // Larger than what a block that is there could be used for.
                       std::vector<float> x(500000, 1.0F), y(x.size());
                       ready.arrive_and_wait();
                       if (comm.rank() == 0) stand_in::fail_call(it.function, 0, 2);
                       const auto text = require_throws<error>([&] {
                         for (int i = 0; i < 3; ++i) neighbor_allreduce(comm, x, y, graph);
                       });
                       require_contains(text, it.function);
                       if (comm.rank() > 0)
                         require_contains(text, "rank 0 has ended the communicator");
                       const auto later = require_throws<transport_error>([&] { barrier(comm); });
                       require_contains(later, "the communicator was aborted");
                       require_contains(later, it.function);
                       ++told;
                     },
                     {});
  stand_in::all_memory_is_device(false);
  CHECK(problem == "");
  CHECK(told == ranks);
  CHECK(stand_in::calls_left_to_fail() == 0);
  CHECK(stand_in::aborts() == aborts + ranks);
}

TEST_CASE("a failure reaches whoever waits for a request, and those that are still in flight",
          "[nccl][errors]") {
  std::barrier ready(2);
  const auto problem = run_nccl_ranks(
      2,
      [&](nccl_communicator& comm) {
        std::vector<std::vector<float>> x(6, std::vector<float>(10, 1.0F));
        ready.arrive_and_wait();
        if (comm.rank() == 1) stand_in::fail_call("ncclGroupEnd", 1, ncclSystemError);
        std::vector<request<void>> started;
        for (auto& each : x)
          started.push_back(neighbor_allreduce_nonblocking(comm, each, each, topology::ring(2)));
        for (auto& each : started)
          require_contains(require_throws<error>([&] { each.wait(); }), "ncclGroupEnd");
      },
      {});
  CHECK(problem == "");
  CHECK(stand_in::calls_left_to_fail() == 0);
}

TEST_CASE("where NCCL itself tells that a rank has aborted, the others say so", "[nccl][errors]") {
  stand_in::aborts_are_seen(true);
  std::barrier ready(3);
  const auto problem = run_nccl_ranks(
      3,
      [&](nccl_communicator& comm) {
        std::vector<float> x(10, 1.0F);
        ready.arrive_and_wait();
        if (comm.rank() == 0) stand_in::fail_call("ncclSend", 0, ncclInternalError);
        const auto text = require_throws<error>([&] {
          for (int i = 0; i < 3; ++i) neighbor_allreduce(comm, x, x, topology::ring(3));
        });
        // By way of NCCL or of the board, whichever is read first.
        if (comm.rank() > 0 && text.find("rank 0 has ended") == std::string::npos)
          require_contains(text, concat("NCCL error ", static_cast<int>(ncclRemoteError)));
      },
      {});
  stand_in::aborts_are_seen(false);
  CHECK(problem == "");
}

TEST_CASE("parent, parts and copies of a communicator are aborted once each", "[nccl][errors]") {
  const int aborts = stand_in::aborts();
  const int before = stand_in::living_objects();
  std::barrier ready(4);
  const auto problem =
      run_nccl_ranks(4,
                     [&](nccl_communicator& comm) {
                       auto part = comm.split(comm.rank() % 2);
                       auto copy = comm.duplicate();
                       std::vector<float> x(10, 1.0F), y(10, 1.0F);
                       auto pending = allreduce_nonblocking(comm, y, y);
                       pending.wait();
                       ready.arrive_and_wait();
                       if (comm.rank() == 0)
                         stand_in::fail_call("ncclGroupEnd", 0, ncclSystemError);
                       require_throws<error>([&] { barrier(comm); });
                       allreduce(copy, x, x);  // goes on: the others are communicators of their own
                       if (comm.rank() == 1)
                         stand_in::fail_call("ncclGroupEnd", 1, ncclSystemError);
                       if (comm.rank() % 2 == 1)
                         require_throws<error>([&] { barrier(part); });
                       else
                         barrier(part);
                       barrier(copy);
                       require_throws<error>([&] { barrier(comm); });
                     },
                     {});
  CHECK(problem == "");
  CHECK(stand_in::aborts() == aborts + 4 + 2);
  CHECK(stand_in::living_objects() == before);
}

TEST_CASE("an abort from which NCCL does not come back holds up nobody for ever",
          "[nccl][errors]") {
  using stand_in::abort_hangs;
  const int aborts = stand_in::aborts();
  const int before = stand_in::living_objects();
  stand_in::aborts_hang(0, abort_hangs::after);
  stand_in::aborts_hang(1, abort_hangs::before);  // there the stream works on, with the memory
  std::barrier ready(2);
  const auto problem = run_nccl_ranks(
      2,
      [&](nccl_communicator& comm) {
        ready.arrive_and_wait();
        if (comm.rank() == 0) stand_in::fail_call("ncclGroupEnd", 0, ncclSystemError);
        const auto began = std::chrono::steady_clock::now();
        std::vector<float> x(1000, 1.0F);
        const auto text =
            require_throws<error>([&] { neighbor_allreduce(comm, x, x, topology::ring(2)); });
        require_contains(text, "ncclGroupEnd");
        if (comm.rank() == 1) require_contains(text, "rank 0 has ended the communicator");
        require_contains(require_throws<error>([&] { barrier(comm); }), "was aborted");
        // Far from the time-out of an operation, which is 60 s here.
        require(std::chrono::steady_clock::now() - began < 20s, "it took long");
        ready.arrive_and_wait();
        stand_in::aborts_hang(comm.transport().device(), abort_hangs::nowhere);
      },
      {});
  for (const int device : {0, 1}) stand_in::aborts_hang(device, abort_hangs::nowhere);
  CHECK(problem == "");
  CHECK(stand_in::aborts() == aborts + 2);
  // Nothing is freed before the stream is done with it, and nothing kept longer.
  for (int i = 0; i < 2000 && stand_in::living_objects() > before; ++i)
    std::this_thread::sleep_for(1ms);
  CHECK(stand_in::living_objects() == before);
}

TEST_CASE("a communicator whose end fails is destroyed all the same", "[nccl][errors]") {
  const auto* const function = GENERATE("ncclCommFinalize", "ncclCommDestroy");
  const int before = stand_in::living_objects();
  CHECK(run_nccl_ranks(2,
                       [&](nccl_communicator& comm) {
                         barrier(comm);
                         if (comm.rank() == 0) stand_in::fail_call(function, 0, ncclSystemError);
                       },
                       {}) == "");
  CHECK(stand_in::calls_left_to_fail() == 0);
  CHECK(stand_in::living_objects() == before);
}

TEST_CASE("ranks that cannot be connected say which call failed, on every rank",
          "[nccl][bootstrap]") {
  const auto* const function =
      GENERATE("ncclGetUniqueId", "ncclCommInitRankConfig", "cudaStreamCreateWithFlags");
  const int before = stand_in::living_objects();
  stand_in::fail_call(function, 0, 3);
  const auto problem = run_nccl_ranks(3, [](nccl_communicator&) {}, {});
  INFO(problem);
  CHECK(std::ranges::count(problem, '\n') == 3);
  std::size_t found = 0;
  for (std::size_t at = problem.find(function); at != std::string::npos;
       at = problem.find(function, at + 1))
    ++found;
  CHECK(found == 3);
  CHECK(stand_in::living_objects() == before);
}

TEST_CASE("an operation of two ranks that one of them misses names operation and rank",
          "[nccl][errors]") {
  for (const bool device : {false, true}) {
    stand_in::all_memory_is_device(device);
    const auto problem = run_nccl_ranks(
        3,
        [](nccl_communicator& comm) {
          barrier(comm);
          if (comm.rank() == 2) return;
          std::vector<float> x(100, 1.0F);
          if (comm.rank() == 0) {
            const auto text = require_throws<timeout_error>([&] { pair_gossip(comm, x, x, 2); });
            require_contains(text, "pair_gossip (pair operation 0): timed out on rank 0");
            require_contains(text, "waiting for rank 2");
            require_contains(require_throws<transport_error>([&] { pair_gossip(comm, x, x, 2); }),
                             "the communicator was aborted: an operation with rank 2 was given up");
          } else {
            std::this_thread::sleep_for(300ms);  // its own time is over later than rank 0's
            const auto text = require_throws<error>([&] { barrier(comm); });
            require_contains(text, "an operation with rank 2 was given up");
          }
        },
        {.timeout = 600ms});
    CHECK(problem == "");
  }
  stand_in::all_memory_is_device(false);
}

TEST_CASE("an operation of all ranks that one of them misses names it", "[nccl][errors]") {
  std::atomic<int> over = 0;
  const auto problem = run_nccl_ranks(
      4,
      [&](nccl_communicator& comm) {
        std::vector<float> x(100, 1.0F);
        barrier(comm);
        if (comm.rank() == 2) {
          while (over < 3) std::this_thread::yield();
          return;
        }
        const auto text = require_throws<error>([&] { allreduce(comm, x, x, reduce_op::sum); });
        ++over;
        // Whoever is not the first to give up may hear of that before its own time is over.
        if (text.find("timed out") != std::string::npos)
          require_contains(text, "waiting for those not heard from: rank 2");
        else
          require_contains(text, "an operation of all ranks was given up");
      },
      {.timeout = 500ms});
  CHECK(problem == "");
  CHECK(over == 3);
}

TEST_CASE("pairs that ranks call in different orders wait for each other until their time is over",
          "[nccl][errors]") {
  const auto problem = run_nccl_ranks(3,
                                      [](nccl_communicator& comm) {
                                        std::vector<float> x(10), y(10);
                                        const int next = (comm.rank() + 1) % 3;
                                        const int last = (comm.rank() + 2) % 3;
                                        auto first = pair_gossip_nonblocking(comm, x, x, next);
                                        auto second = pair_gossip_nonblocking(comm, y, y, last);
                                        require_throws<error>([&] { first.wait(); });
                                        require_throws<error>([&] { second.wait(); });
                                      },
                                      {.timeout = 200ms});
  CHECK(problem == "");
}

TEST_CASE("operations of pairs keep their place among those of all ranks", "[nccl][order]") {
  for (const bool device : {false, true}) {
    stand_in::all_memory_is_device(device);
    const auto problem = run_nccl_ranks(
        4,
        [](nccl_communicator& comm) {
          std::vector<std::vector<float>> x(12, std::vector<float>(1000, 1.0F));
          std::vector<request<void>> started;
          for (std::size_t i = 0; i < x.size(); i += 3) {
            started.push_back(allreduce_nonblocking(comm, x[i], x[i]));  // of several steps
            started.push_back(pair_gossip_nonblocking(comm, x[i + 1], x[i + 1], comm.rank() ^ 1));
            started.push_back(
                neighbor_allreduce_nonblocking(comm, x[i + 2], x[i + 2], topology::exponential(4)));
          }
          for (auto& each : started) each.wait();
          for (const auto& each : x) require_near(each.back(), 1, 1e-6);
        },
        {});
    CHECK(problem == "");
  }
  stand_in::all_memory_is_device(false);
}

TEST_CASE("check mode finds what NCCL does not notice: other lengths and strays", "[nccl][check]") {
  const auto lengths = [](nccl_communicator& comm) {
    std::vector<float> x(comm.rank() == 0 ? 16 : 12, 1.0F);
    neighbor_allreduce(comm, x, x, topology::ring(2));
  };
  CHECK_THAT(run_nccl_ranks(2, lengths, {.timeout = 500ms}),
             ContainsSubstring("64 elements of type 1 are sent, 48 of type 1 received"));
  CHECK_THAT(run_nccl_ranks(2, lengths, {.check = true}), ContainsSubstring("ranks disagree"));

  const auto stray = [](nccl_communicator& comm) {
    std::vector<float> x(4, 1.0F);
    neighbor_allreduce(comm, x, x,
                       comm.rank() == 0 ? neighborhood{.destinations = {{1}}} : neighborhood{});
    neighbor_allreduce(comm, x, x, topology::ring(2));
  };
  CHECK_THAT(run_nccl_ranks(2, stray, {.timeout = 500ms}),
             ContainsSubstring("rank 1 to rank 0: sent in group 2 between them, received in 3"));
  CHECK_THAT(run_nccl_ranks(2, stray, {.check = true}),
             ContainsSubstring("rank 0 sends to rank 1, which does not receive from it"));
}
