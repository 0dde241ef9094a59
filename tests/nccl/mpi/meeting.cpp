// SPDX-License-Identifier: Apache-2.0
// Ranks of MPI that become ranks of NCCL, over the stand-in, whose communicators do not leave a
// process: what they agree on before that, and communicators of one rank each.
#include <string>
#include <vector>

#include <bluefog/collective/allreduce.hpp>
#include <bluefog/collective/barrier.hpp>
#include <bluefog/mpi.hpp>

#include "nccl/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

TEST_CASE("ranks of MPI meet over its communicator, and each gets a device", "[nccl][mpi]") {
  communicator<mpi_backend> over_mpi;
  for (int time = 0; time < 2; ++time) {
    const nccl::meeting here = nccl::meet_over(over_mpi);
    CHECK(here.rank == over_mpi.rank());
    CHECK(here.size == over_mpi.size());
    const nccl::group all = nccl::make_group(here);
    CHECK(all.machines == std::vector<int>(static_cast<std::size_t>(over_mpi.size()), 0));
    CHECK(all.device == over_mpi.rank());
    barrier(over_mpi);  // rank 0 keeps the board
  }
}

TEST_CASE("ranks of MPI that all want one device are refused on every rank, and MPI goes on",
          "[nccl][mpi]") {
  const environment local("LOCAL_RANK", "3");
  communicator<mpi_backend> over_mpi;
  const nccl::meeting here = nccl::meet_over(over_mpi);
  std::string text = "fine";
  try {
    static_cast<void>(nccl::make_group(here));
  } catch (const usage_error& problem) {
    text = problem.what();
  }
  if (over_mpi.size() == 1)
    CHECK(text == "fine");
  else
    CHECK_THAT(text, ContainsSubstring("ranks 0 and 1 use the same device"));
  std::vector<int> ranks{1};
  allreduce(over_mpi, ranks, ranks, reduce_op::sum);
  CHECK(ranks[0] == over_mpi.size());
}

TEST_CASE("a part of MPI's ranks becomes a communicator of NCCL", "[nccl][mpi]") {
  communicator<mpi_backend> over_mpi;
  auto alone = over_mpi.split(over_mpi.rank());
  communicator<nccl_backend> comm(nccl::meet_over(alone));
  CHECK(comm.size() == 1);
  std::vector<float> x{1, 2, 3};
  allreduce(comm, x, x);
  CHECK(x == std::vector<float>{1, 2, 3});
  CHECK(stand_in::broken_rules() == "");
}
