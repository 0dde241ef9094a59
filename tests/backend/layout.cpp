// SPDX-License-Identifier: Apache-2.0

#include <string>
#include <vector>

#include "support.hpp"

using namespace bluefog;
using bluefog_test::require;
using bluefog_test::require_equal;
using bluefog_test::require_throws;

namespace {
using thread_communicator = communicator<thread_backend>;
}

TEST_CASE("machines are numbered by their lowest rank, ranks within them in rank order",
          "[backend][layout]") {
  const std::vector<int> keys{7, 3, 7, 3, 7};
  const machine_layout layout(keys, 3);
  CHECK(layout.machine_size() == 2);
  CHECK(layout.machine_rank() == 1);
  CHECK(layout.local_rank() == 1);
  CHECK(layout.local_size() == 2);
  CHECK(layout.members(0) == std::vector<int>{0, 2, 4});
  CHECK_FALSE(layout.is_homogeneous());
  CHECK(layout.to_string() == "machine 0 has ranks 0, 2, 4; machine 1 has ranks 1, 3");
  CHECK_THROWS_AS(layout.members(2), std::out_of_range);
}

TEST_CASE("consecutive ranks count as one machine where the options say so", "[backend][layout]") {
  for (const int size : {1, 2, 3, 4, 5, 8})
    for (const int per_machine : {1, 2, 3, 4, 100})
      run_threads(size,
                  [&](thread_communicator& comm) {
                    require_equal(comm.machine_rank(), comm.rank() / per_machine);
                    require_equal(comm.local_rank(), comm.rank() % per_machine);
                    require_equal(comm.machine_size(), (size + per_machine - 1) / per_machine);
                    const int first = comm.machine_rank() * per_machine;
                    require_equal(comm.local_size(), std::min(per_machine, size - first));
                    require_equal(comm.is_homogeneous(),
                                  size % per_machine == 0 || per_machine >= size);

                    auto local = comm.local();
                    require_equal(local.size(), comm.local_size());
                    require_equal(local.rank(), comm.local_rank());
                    require_equal(local.machine_size(), 1);
                    const auto leaders = comm.leaders();
                    require_equal(leaders.has_value(), comm.local_rank() == 0);
                    if (!leaders) return;
                    require_equal(leaders->size(), comm.machine_size());
                    require_equal(leaders->rank(), comm.machine_rank());
                    require_equal(leaders->machine_size(), comm.machine_size());
                    require_equal(leaders->local_size(), 1);
                  },
                  {.nodes_per_machine = per_machine});
}

RANKS_TEST("ranks of one process or host share a machine", "[backend][layout]") {
  require_equal(comm.machine_size(), 1);
  require_equal(comm.local_rank(), comm.rank());
  require_equal(comm.local_size(), comm.size());
  require(comm.is_homogeneous());
}

RANKS_TEST("split numbers ranks by key, then by rank", "[backend][layout]") {
  auto backwards = comm.split(0, -comm.rank());
  require_equal(backwards.rank(), comm.size() - 1 - comm.rank());
  auto tied = comm.split(comm.rank() / 2, 7);
  require_equal(tied.rank(), comm.rank() % 2);
  auto alone = comm.split(comm.rank());
  require_equal(alone.size(), 1);
  auto nested = backwards.split(backwards.rank() % 2).duplicate();
  require_equal(nested.rank(), backwards.rank() / 2);
}

TEST_CASE("options that make no sense are refused by name", "[backend][options]") {
  using namespace std::chrono_literals;
  const auto refused = [](const communicator_options& options) {
    return require_throws<usage_error>([&] { thread_communicator comm(options); });
  };
  CHECK(refused({.timeout = 0ms}) == "communicator: the timeout must be positive, got 0 ms");
  CHECK(refused({.stall_warning = -5ms}) ==
        "communicator: the stall warning must be positive, got -5 ms");
  CHECK(refused({.nodes_per_machine = 0}) ==
        "communicator: nodes_per_machine must be at least 1, got 0");
}
