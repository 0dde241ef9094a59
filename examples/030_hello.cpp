// SPDX-License-Identifier: Apache-2.0
//
// The shortest program without libtorch: each rank says hello, in rank order, then averages its
// number with those of its neighbors on a ring.
//
//   mpirun -np 4 ./030_hello
#include <cstdio>
#include <string>
#include <vector>

#include <bluefog/collective.hpp>
#include <bluefog/mpi.hpp>
#include <bluefog/neighbor.hpp>
#include <bluefog/topology.hpp>

int main() {
  bluefog::communicator<bluefog::mpi_backend> comm;

  // The launcher mixes what ranks print, so rank 0 prints for all.
  const auto print_in_order = [&](const std::string& line) {
    const std::string text = line + "\n";
    for (const char letter : bluefog::allgather(comm, text))
      if (comm.rank() == 0) std::putchar(letter);
  };
  print_in_order(bluefog::concat("hello from rank ", comm.rank(), " of ", comm.size(),
                                 ", local rank ", comm.local_rank(), " of machine ",
                                 comm.machine_rank()));

  std::vector<double> value{static_cast<double>(comm.rank())};
  bluefog::neighbor_allreduce(comm, value, value, bluefog::topology::ring(comm.size()));
  print_in_order(
      bluefog::concat("rank ", comm.rank(), " and its neighbors have the average ", value.front()));
}

// Expected output, with two ranks:
// hello from rank 0 of 2, local rank 0 of machine 0
// hello from rank 1 of 2, local rank 1 of machine 0
// rank 0 and its neighbors have the average 0.5
// rank 1 and its neighbors have the average 0.5
