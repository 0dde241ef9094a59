// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <bluefog/collective/any_of.hpp>

#include "support/ranks.hpp"

using namespace bluefog;
using namespace bluefog_test;

RANKS_TEST("any_of tells every rank whether any rank's flag is true", "[collective][any_of]") {
  require_equal(any_of(comm, false), false);
  require_equal(any_of(comm, true), true);
  for (int rank = 0; rank < comm.size(); ++rank) {
    require_equal(any_of(comm, comm.rank() == rank), true);
    require_equal(any_of(comm, comm.rank() != rank), comm.size() > 1);
  }
}

RANKS_TEST("a loop that asks any_of ends in the same iteration on all ranks",
           "[collective][any_of]") {
  const int batches = 3 + comm.rank();
  int done = 0;
  while (!any_of(comm, done == batches)) ++done;
  require_equal(done, 3);
}

RANKS_TEST("any_of is one operation that sends an allreduce of one byte", "[collective][any_of]") {
  const auto before = comm.statistics();
  require_equal(any_of(comm, comm.rank() == 0, {.name = "end of the epoch"}), true);
  const auto after = comm.statistics();
  require_equal(after.operations - before.operations, 1);
  require(after.bytes_sent - before.bytes_sent <= 2);  // 2(n-1)/n of a byte
}
