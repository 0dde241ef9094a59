// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include <bluefog/collective/allreduce.hpp>

#include "support.hpp"
#include "support/environment.hpp"

using namespace bluefog;
using bluefog_test::environment;
using bluefog_test::require;
using bluefog_test::require_equal;
using bluefog_test::require_throws;

namespace {
using thread_communicator = communicator<thread_backend>;
}

TEST_CASE("machines are numbered by their lowest rank, ranks within them in rank order",
          "[backend][layout][thread]") {
  const std::vector<int> keys{7, 3, 7, 3, 7};
  const machine_layout layout(keys, 3);
  CHECK(layout.machine_size() == 2);
  CHECK(layout.machine_rank() == 1);
  CHECK(layout.local_rank() == 1);
  CHECK(layout.local_size() == 2);
  CHECK(layout.members(0) == std::vector<int>{0, 2, 4});
  CHECK_FALSE(layout.is_homogeneous());
  CHECK(concat(layout) == "machine 0 has ranks 0, 2, 4; machine 1 has ranks 1, 3");
  CHECK_THROWS_AS(layout.members(2), std::out_of_range);

  const machine_layout interleaved(std::vector{0, 1, 0, 1}, 2);  // equal parts do not suffice
  CHECK(interleaved.machine_rank() == 0);
  CHECK(interleaved.local_rank() == 1);
  CHECK(interleaved.members(1) == std::vector<int>{1, 3});
  CHECK_FALSE(interleaved.is_homogeneous());
  CHECK(machine_layout(std::vector{1, 1, 0, 0}, 2).is_homogeneous());
}

RANKS_TEST("consecutive ranks count as one machine where the options say so", "[backend][layout]") {
  for (const int per_machine : {1, 2, 3, 4, 100}) {
    auto laid_out = bluefog_test::with_options(comm, {.ranks_per_machine = per_machine});
    require_equal(laid_out.machine_rank(), comm.rank() / per_machine);
    require_equal(laid_out.local_rank(), comm.rank() % per_machine);
    require_equal(laid_out.machine_size(), (comm.size() + per_machine - 1) / per_machine);
    const int first = laid_out.machine_rank() * per_machine;
    const int last = std::min(first + per_machine, comm.size()) - 1;
    require_equal(laid_out.local_size(), last - first + 1);
    require_equal(laid_out.is_homogeneous(),
                  comm.size() % per_machine == 0 || per_machine >= comm.size());

    auto local = laid_out.local();
    require_equal(local.size(), laid_out.local_size());
    require_equal(local.rank(), laid_out.local_rank());
    require_equal(local.machine_size(), 1);
    std::vector<int> sum{comm.rank()};
    allreduce(local, sum, sum, reduce_op::sum);
    require_equal(sum.front(), (first + last) * (last - first + 1) / 2);

    auto leaders = laid_out.leaders();
    require_equal(leaders.has_value(), laid_out.local_rank() == 0);
    if (!leaders) continue;
    require_equal(leaders->size(), laid_out.machine_size());
    require_equal(leaders->rank(), laid_out.machine_rank());
    require_equal(leaders->machine_size(), laid_out.machine_size());
    require_equal(leaders->local_size(), 1);
    sum = {comm.rank()};
    allreduce(*leaders, sum, sum, reduce_op::sum);
    const int machines = laid_out.machine_size();
    require_equal(sum.front(), per_machine * machines * (machines - 1) / 2);
  }
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

TEST_CASE("what options do not say is as the environment has it", "[backend][options][thread]") {
  using namespace std::chrono_literals;
  const environment check("BLUEFOG_CHECK", "1"), timeout("BLUEFOG_TIMEOUT", "7"),
      stall("BLUEFOG_STALL_WARNING", "3"), machine("BLUEFOG_NODES_PER_MACHINE", "2"),
      host("BLUEFOG_OPS_ON_CPU", "1");
  run_threads(3, [](thread_communicator& comm) {
    require(comm.checks());
    require_equal(comm.machine_size(), 2);
    require(comm.options().timeout == 7s);
    require(comm.options().stall_warning == 3s);
    require(comm.options().ops_on_cpu);
  });
  run_threads(3,
              [](thread_communicator& comm) {
                require(!comm.checks());
                require_equal(comm.machine_size(), 3);
                require(comm.options().timeout == 9s);
              },
              {.check = false, .timeout = 9s, .ranks_per_machine = 1});
}

TEST_CASE("options that make no sense are refused by name", "[backend][options][thread]") {
  using namespace std::chrono_literals;
  const auto refused = [](const communicator_options& options) {
    return require_throws<usage_error>([&] { thread_communicator comm(options); });
  };
  CHECK(refused({.timeout = 0ms}) == "communicator: the timeout must be positive, got 0 ms");
  CHECK(refused({.stall_warning = -5ms}) ==
        "communicator: the stall warning must be positive, got -5 ms");
  // As much as can be written down, but more than can be added to the time of day.
  for (const communicator_options& endless :
       {communicator_options{.timeout = std::chrono::milliseconds::max()},
        communicator_options{.stall_warning = std::chrono::milliseconds::max()}})
    CHECK(refused(endless).starts_with("communicator: times must be at most 1000000000000 ms"));
  run_threads(2, [](thread_communicator& comm) { require_equal(comm.size(), 2); },
              {.timeout = settings::longest_time, .stall_warning = settings::longest_time});
  CHECK(refused({.ranks_per_machine = 0}) ==
        "communicator: ranks_per_machine must be at least 1, got 0");
}
