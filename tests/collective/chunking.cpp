// SPDX-License-Identifier: Apache-2.0
#ifdef BLUEFOG_TEST_MPI
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <mpi.h>

#include <bluefog/collective.hpp>

#include "collective/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

TEST_CASE("messages longer than MPI counts travel in pieces", "[collective][chunking][mpi]") {
  on_mpi([](auto&) {
    // 1000 bytes stand for the 2^31 that MPI's counts end at: an odd number of elements per piece.
    communicator<mpi_backend> comm(mpi_backend(MPI_COMM_WORLD, 1000));
    const auto n = comm.size();
    std::vector<double> x(3001), y(3001);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<double>(i) * (comm.rank() + 1);
    allreduce(comm, x, y, reduce_op::sum);
    for (std::size_t i = 0; i < y.size(); ++i)
      require_near(y[i], static_cast<double>(i) * n * (n + 1) / 2, 1e-6);
    allreduce(comm, x, y, reduce_op::max);  // by messages
    for (std::size_t i = 0; i < y.size(); ++i) require_near(y[i], static_cast<double>(i) * n, 1e-6);
    y = x;
    broadcast(comm, y, n - 1);
    for (std::size_t i = 0; i < y.size(); ++i) require_near(y[i], static_cast<double>(i) * n, 1e-6);
    const auto all = allgather(comm, x);
    for (std::size_t i = 0; i < all.size(); ++i)
      require_near(all[i], static_cast<double>(i % 3001) * (static_cast<int>(i / 3001) + 1), 1e-6);
    require_equal(broadcast_object(comm, std::string(5000, 'c'), 0), std::string(5000, 'c'));
  });
}
#endif
