// SPDX-License-Identifier: Apache-2.0
//
// Averaging 25 MiB with one neighbour against averaging it with all ranks by MPI_Allreduce and a
// scaling: what a decentralized step saves where the parameters travel through memory.
//
//   mpirun -np 4 allreduce_vs_averaging [REPEATS]
//
// An allreduce moves 2 (n - 1) / n times the values per rank, one neighbour sends them once; so on
// a network the limit is 1.5 for 4 ranks and 1.75 for 8. The goal is 1.5. It is out of reach of 2
// ranks, whose allreduce is an exchange of halves and sends no more: that is said beside MISSED.
// With more ranks than cores only processor time is judged.

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <mpi.h>

#include <bluefog/communicator.hpp>
#include <bluefog/mpi.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/topology/one_peer_exponential.hpp>

#include "protocol.hpp"

int main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::max(1, std::atoi(argv[1])) : 5;
  bluefog::communicator<bluefog::mpi_backend> comm;
  protocol::calibration quiet(comm.rank());
  const auto rounds = bluefog::topology::one_peer_exponential(comm.size()).rounds(comm.rank());
  const std::size_t count = (std::size_t{25} << 20) / sizeof(float);
  auto ours = protocol::random_floats(count, static_cast<unsigned>(comm.rank()));
  auto theirs = ours;
  double mean = theirs[7];
  MPI_Allreduce(MPI_IN_PLACE, &mean, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
  mean /= comm.size();

  std::ptrdiff_t round = 0;
  const auto factor = 1.0F / static_cast<float>(comm.size());
  const auto result =
      protocol::compare([&] { bluefog::neighbor_allreduce(comm, ours, ours, rounds[round++]); },
                        [&] {
                          MPI_Allreduce(MPI_IN_PLACE, theirs.data(), static_cast<int>(count),
                                        MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                          for (float& value : theirs) value *= factor;
                        },
                        1, repeats);
  protocol::require(std::fabs(ours[7] - mean) < 1e-4 && std::fabs(theirs[7] - mean) < 1e-4,
                    "both ways lead to the mean");

  const std::string valid = quiet.valid();
  if (comm.rank() != 0) return 0;
  const double judged = 1 / (protocol::enough_cores(comm.size()) ? result.ratio : result.processor);
  constexpr double target = 1.5;
  const char* verdict = judged >= target ? "met" : "MISSED";
  const char* reason = judged >= target || comm.size() != 2
                           ? ""
                           : "an allreduce of two is an exchange of halves, which sends no more";
  std::printf("%5s %12s %15s %9s %15s %10s %7s\n", "ranks", "one peer ms", "allreduce ms",
              "speed-up", "least-largest", "processor", "target");
  std::printf("%5d %12.2f %15.2f %9.3f %7.3f-%7.3f %10.3f %7.2f %s%s%s\n", comm.size(),
              result.ours * 1e3, result.theirs * 1e3, 1 / result.ratio, 1 / result.largest,
              1 / result.least, 1 / result.processor, target, verdict, *reason == '\0' ? "" : ": ",
              reason);
  std::printf(
      "\n{\"id\": \"B05\", \"work\": \"one-peer averaging of 25 MiB, two-sided\", \"ranks\": %d, "
      "\"peer\": \"MPI_Allreduce and scale\", \"limit\": %.3f, \"speed_up\": %.3f, "
      "\"least\": %.3f, \"largest\": %.3f, \"processor_speed_up\": %.3f, \"target\": %.1f, "
      "\"verdict\": \"%s\", \"reason\": \"%s\", \"valid\": %s}\n",
      comm.size(), 2.0 * (comm.size() - 1) / comm.size(), 1 / result.ratio, 1 / result.largest,
      1 / result.least, 1 / result.processor, target, verdict, reason, valid.c_str());
}
