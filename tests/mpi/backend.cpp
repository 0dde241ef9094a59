// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <mpi.h>

#include <bluefog/collective/allreduce.hpp>
#include <bluefog/collective/broadcast.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/mpi.hpp>
#include <bluefog/mpi/backend.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/topology/ring.hpp>

#include "backend/support.hpp"
#include "mpi/support.hpp"
#include "support/catch.hpp"

using bluefog::communicator;
using bluefog::mpi_backend;
using bluefog::reduce_op;
using bluefog_test::ContainsSubstring;
using bluefog_test::finish;
using bluefog_test::meet_outside;
using bluefog_test::world_rank;
using bluefog_test::world_size;

using namespace std::chrono_literals;

namespace {

/// The sum of 0, 1, ..., n - 1 in every element, by a communicator.
void check_sum_of_ranks(communicator<mpi_backend>& comm) {
  std::vector<double> values(100, comm.rank());
  bluefog::allreduce(comm, values, values, reduce_op::sum);
  const double sum = comm.size() * (comm.size() - 1) / 2.0;
  CHECK(std::ranges::all_of(values, [&](double value) { return value == sum; }));
}

std::string refusal(MPI_Comm group) {
  try {
    mpi_backend refused(group);
  } catch (const bluefog::usage_error& problem) {
    return problem.what();
  }
  return "nothing was thrown";
}

}  // namespace

TEST_CASE("the program's messages on the same ranks are never taken", "[mpi][backend]") {
  communicator<mpi_backend> comm;
  const int rank = comm.rank();
  const int size = comm.size();
  // A receive of anything from anybody waits while the library works, on the communicator that it
  // was made from; and unreceived messages of many tags lie there.
  std::vector<int> own(64, rank);
  std::vector<MPI_Request> requests;
  for (int tag = 0; tag < 64; ++tag)
    MPI_Isend(&own[static_cast<std::size_t>(tag)], 1, MPI_INT, (rank + 1) % size, tag,
              MPI_COMM_WORLD, &requests.emplace_back());
  for (int round = 0; round < 100; ++round) {
    check_sum_of_ranks(comm);
    std::vector<float> values(10, static_cast<float>(rank));
    bluefog::neighbor_allreduce(comm, values, values, bluefog::topology::ring(size));
  }
  std::vector<int> tags;
  for (int message = 0; message < 64; ++message) {
    int value = -1;
    MPI_Status status;
    MPI_Recv(&value, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
    CHECK(value == (rank + size - 1) % size);
    tags.push_back(status.MPI_TAG);
  }
  CHECK(std::ranges::is_sorted(tags));
  MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);

  int anything = -1;
  MPI_Request waiting = MPI_REQUEST_NULL;
  MPI_Irecv(&anything, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &waiting);
  check_sum_of_ranks(comm);
  check_sum_of_ranks(comm);
  int arrived = -1;
  MPI_Test(&waiting, &arrived, MPI_STATUS_IGNORE);
  CHECK(arrived == 0);
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Send(&rank, 1, MPI_INT, (rank + 1) % size, 5, MPI_COMM_WORLD);
  MPI_Wait(&waiting, MPI_STATUS_IGNORE);
  CHECK(anything == (rank + size - 1) % size);
}

TEST_CASE("a communicator of the program is duplicated and keeps its order of ranks",
          "[mpi][backend]") {
  const int rank = world_rank();
  const int size = world_size();
  MPI_Comm reversed = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, 0, size - rank, &reversed);
  communicator<mpi_backend> comm(reversed);
  MPI_Comm_free(&reversed);  // ours no more than it was before
  CHECK(comm.size() == size);
  CHECK(comm.rank() == size - 1 - rank);
  check_sum_of_ranks(comm);

  MPI_Comm odd_or_even = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &odd_or_even);
  {
    communicator<mpi_backend> part(odd_or_even);
    CHECK(part.size() == (size + 1 - rank % 2) / 2);
    CHECK(part.rank() == rank / 2);
    check_sum_of_ranks(part);
  }
  MPI_Barrier(odd_or_even);  // still the program's
  MPI_Comm_free(&odd_or_even);

  communicator<mpi_backend> alone(MPI_COMM_SELF);
  CHECK(alone.size() == 1);
  check_sum_of_ranks(alone);
}

TEST_CASE("members of a subset are numbered as they are listed", "[mpi][backend]") {
  communicator<mpi_backend> comm;
  auto reversed = comm.split(0, -comm.rank());
  CHECK(reversed.rank() == comm.size() - 1 - comm.rank());
  check_sum_of_ranks(reversed);
  auto part = reversed.split(comm.rank() % 2);
  CHECK(part.size() == (comm.size() + 1 - comm.rank() % 2) / 2);
  check_sum_of_ranks(part);
}

TEST_CASE("groups that cannot carry operations are refused", "[mpi][backend]") {
  bluefog::mpi::library::instance();
  CHECK_THAT(refusal(MPI_COMM_NULL), ContainsSubstring("MPI_COMM_NULL"));
  if (world_size() == 1) return;
  const int side = world_rank() % 2;
  MPI_Comm own_side = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, side, world_rank(), &own_side);
  MPI_Comm between = MPI_COMM_NULL;
  MPI_Intercomm_create(own_side, 0, MPI_COMM_WORLD, 1 - side, 1, &between);
  CHECK_THAT(refusal(between), ContainsSubstring("inter-communicator"));
  MPI_Comm_free(&between);
  MPI_Comm_free(&own_side);
  CHECK_THROWS_AS(mpi_backend(MPI_COMM_WORLD, 0), bluefog::usage_error);
}

TEST_CASE("native collectives of any length are right, in pieces where they are long",
          "[mpi][backend]") {
  mpi_backend ranks(MPI_COMM_WORLD, 1000);
  const int last = ranks.size() - 1;
  for (const std::size_t count :
       {0UL, 1UL, 124UL, 125UL, 126UL, 250UL, 1000UL}) {  // 125 doubles are 1000 bytes
    std::vector<double> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<double>(i) * (ranks.rank() + 1);
    std::vector<double> sums(count, -1);
    auto reduction = ranks.allreduce(bluefog::as_buffer(values), bluefog::as_mutable_buffer(sums),
                                     reduce_op::sum);
    finish(reduction);
    auto in_place = ranks.allreduce(bluefog::as_buffer(values), bluefog::as_mutable_buffer(values),
                                    reduce_op::sum);
    finish(in_place);
    CHECK(values == sums);
    const double factor = ranks.size() * (ranks.size() + 1) / 2.0;
    for (std::size_t i = 0; i < count; ++i) CHECK(sums[i] == static_cast<double>(i) * factor);

    std::vector<double> told(count, ranks.rank() == last ? 42.0 : 0.0);
    auto telling = ranks.broadcast(bluefog::as_mutable_buffer(told), last);
    finish(telling);
    CHECK(told == std::vector<double>(count, 42.0));
  }
  CHECK(bluefog::mpi::library::operations_in_flight() == 0);
}

TEST_CASE("letters arrive in order beside the operations", "[mpi][backend]") {
  mpi_backend ranks;
  const int next = (ranks.rank() + 1) % ranks.size();
  const int previous = (ranks.rank() + ranks.size() - 1) % ranks.size();
  for (std::uint64_t number = 0; number < 100; ++number) ranks.post(next, number << 40);
  for (std::uint64_t number = 0; number < 100; ++number) {
    std::optional<bluefog::letter> arrived;
    while (!arrived) arrived = ranks.collect();
    CHECK(arrived->sender == previous);
    CHECK(arrived->number == number << 40);
  }
  CHECK_FALSE(ranks.collect());
}

TEST_CASE("up to a thousand communicators, one after the other, leave nothing behind",
          "[mpi][backend]") {
  communicator<mpi_backend> comm;
  const auto make = [&](int count) {
    for (int i = 0; i < count; ++i) {
      auto part = comm.split(comm.rank() % 2);
      auto copy = comm.duplicate();
      if (i % 100 == 0) check_sum_of_ranks(part);
      if (i % 100 == 0) check_sum_of_ranks(copy);
    }
  };
  make(20);
  const long before = bluefog_test::resident_kilobytes();
  make(world_size() <= 2 ? 500 : 50);  // MPICH takes 0.2 s for each with more ranks than cores
  const long grown = bluefog_test::resident_kilobytes() - before;
  CHECK((grown < 8000 || !bluefog_test::freed_memory_leaves));  // MPI's own tables grow a little
}

TEST_CASE("requests complete at every thread level, and other threads may wait where it allows",
          "[mpi][threads]") {
  communicator<mpi_backend> comm;
  std::vector<double> values(1000, comm.rank());
  const double sum = comm.size() * (comm.size() - 1) / 2.0;
  auto request = bluefog::allreduce_nonblocking(comm, values, values, reduce_op::sum);
  if (comm.transport().any_thread()) {
    std::thread([&] { request.wait(); }).join();
    CHECK(values == std::vector<double>(1000, sum));
    std::thread([&] { check_sum_of_ranks(comm); }).join();
    return;
  }
  request.wait();
  CHECK(values == std::vector<double>(1000, sum));

  std::string using_it;
  std::string making_it;
  std::thread([&] {
    try {
      bluefog::allreduce(comm, values, values);
    } catch (const bluefog::usage_error& problem) {
      using_it = problem.what();
    }
    try {
      mpi_backend another(MPI_COMM_SELF);
    } catch (const bluefog::usage_error& problem) {
      making_it = problem.what();
    }
  }).join();
  const std::string granted = bluefog::mpi::library::thread_level() == MPI_THREAD_SINGLE
                                  ? "MPI_THREAD_SINGLE"
                                  : "MPI_THREAD_FUNNELED";
  for (const auto& text : {using_it, making_it}) {
    CHECK_THAT(text, ContainsSubstring(granted));
    CHECK_THAT(text, ContainsSubstring("MPI_THREAD_SERIALIZED"));
  }
  check_sum_of_ranks(comm);  // nothing was sent
}

TEST_CASE("a communicator is made while another one's operation is under way, or that is refused",
          "[mpi][threads]") {
  communicator<mpi_backend> comm;
  if (comm.size() == 1) return;
  std::vector<double> values(4000, 1.0);  // long enough for two exchanges
  auto request = bluefog::allreduce_nonblocking(comm, values, values, reduce_op::sum);
  if (comm.transport().any_thread()) {
    if (comm.rank() != 0) request.wait();
    communicator<mpi_backend> another;  // rank 0 makes it meanwhile
    if (comm.rank() == 0) request.wait();
    check_sum_of_ranks(another);
  } else {
    std::string text;
    try {
      communicator<mpi_backend> another;
    } catch (const bluefog::usage_error& problem) {
      text = problem.what();
    }
    CHECK_THAT(text, ContainsSubstring("while operations are in flight"));
    request.wait();
  }
  CHECK(values == std::vector<double>(4000, comm.size()));
}

TEST_CASE("an operation of one communicator goes on while another one is waited for",
          "[mpi][threads]") {
  communicator<mpi_backend> one({.timeout = 30s});
  communicator<mpi_backend> other({.timeout = 30s});
  std::vector<double> values(4000, 1.0);  // long enough for two exchanges
  auto request = bluefog::allreduce_nonblocking(one, values, values, reduce_op::sum);
  if (one.rank() != 0) request.wait();
  check_sum_of_ranks(other);
  if (one.rank() == 0) request.wait();
  CHECK(values == std::vector<double>(4000, one.size()));
}

TEST_CASE("after an operation was given up MPI's collectives are refused, and a duplicate goes on",
          "[mpi]") {
  const bluefog_test::log_capture quiet;
  std::vector<double> late(10, world_rank());
  std::vector<double> next(10, world_rank());
  communicator<mpi_backend> comm({.timeout = 1500ms, .stall_warning = 60s});
  if (comm.size() == 1) return;
  // Every rank makes the same calls; that of rank 0, which sends, succeeds when nobody waits any
  // more, and what it sends then has to be lost.
  if (comm.rank() == 0) {
    meet_outside();
    bluefog::broadcast(comm, late, 0);
    bluefog::broadcast(comm, next, 0);
  } else {
    CHECK_THROWS_AS(bluefog::broadcast(comm, late, 0), bluefog::timeout_error);
    meet_outside();
    try {
      bluefog::broadcast(comm, next, 0);
      FAIL("not refused");
    } catch (const bluefog::peer_error& problem) {
      CHECK_THAT(problem.what(), ContainsSubstring("go on with a duplicate"));
    }
  }
  auto again = comm.duplicate();
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<double> values(10, comm.rank());
    bluefog::broadcast(again, values, root);
    CHECK(values == std::vector<double>(10, root));
  }
}

TEST_CASE("what is wrong with one rank's message is said although another one never comes",
          "[mpi]") {
  const bluefog_test::log_capture quiet;
  communicator<mpi_backend> comm({.timeout = 1500ms, .stall_warning = 60s});
  if (comm.size() < 3) return;
  std::vector<double> in(comm.rank() == 1 ? 5 : 10, 1.0);
  auto out = in;
  if (comm.rank() == 0) {
    const bluefog::neighborhood both{.self_weight = 0, .sources = {{1, 0.5}, {2, 0.5}}};
    try {
      bluefog::neighbor_allreduce(comm, in, out, both);
      FAIL("the lengths differ");
    } catch (const bluefog::mismatch_error& problem) {
      CHECK_THAT(problem.what(), ContainsSubstring("rank 1 sent 40 bytes"));
    }
  } else if (comm.rank() == 1) {
    bluefog::neighbor_allreduce(comm, in, out, bluefog::neighborhood{.destinations = {{0}}});
  }
  meet_outside();
}

TEST_CASE("operations go on while the program calls nothing", "[mpi][engine]") {
  communicator<mpi_backend> comm;
  if (!comm.transport().any_thread()) return;
  for (const std::size_t count : {std::size_t{1}, std::size_t{1} << 18}) {  // eager and not
    INFO(count << " values to each rank in each step");
    std::vector<std::thread::id> threads;
    std::atomic<bool> over = false;
    bluefog::request<void> pending(
        comm.driver(), comm.start({.operation = "noting"}, [&](auto context) {
          return bluefog_test::noting_task(context, &threads, &over, count);
        }));
    // Neither a wait nor a question, which would make the progress themselves.
    CHECK(bluefog_test::comes_true(over));
    pending.wait();
  }
}
