// SPDX-License-Identifier: Apache-2.0
//
// Every rank has a vector of its own, and talks to its neighbors only; round by round, all vectors
// become the average of all. Prints how far they still are from it. Needs no libtorch.
//
//   mpirun -np 8 ./020_average_consensus --topology ring --rounds 100
//   ./020_average_consensus --backend threads --ranks 8 --dynamic    one neighbor per round
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <bluefog/collective.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/neighbor.hpp>
#include <bluefog/topology.hpp>

#include "support/command_line.hpp"
#include "support/json_report.hpp"
#include "support/run_ranks.hpp"
#include "support/topologies.hpp"

namespace {

using bluefog::reduce_op;

struct options {
  std::size_t data_size = 100000;
  int rounds = 10;
  std::string topology = "exponential";
  bool dynamic = false;
  std::uint64_t seed = 2020;
  std::string backend = "mpi";
  int ranks = 4;
  std::string json;
};

/// \return the square root of the sum over all ranks of |a - b|^2.
template <bluefog::backend Backend>
double distance(bluefog::communicator<Backend>& comm, const std::vector<double>& a,
                const std::vector<double>& b) {
  std::vector<double> sum(1);
  for (std::size_t i = 0; i < a.size(); ++i) sum[0] += (a[i] - b[i]) * (a[i] - b[i]);
  bluefog::allreduce(comm, sum, sum, reduce_op::sum);
  return std::sqrt(sum[0]);
}

/// \param round_of  gives whom this rank averages with in round k.
template <bluefog::backend Backend, class RoundOf>
void average(bluefog::communicator<Backend>& comm, const options& chosen, RoundOf round_of) {
  const bool speaks = comm.rank() == 0;
  example::json_report report(speaks ? chosen.json : "");
  std::mt19937_64 random(chosen.seed + static_cast<std::uint64_t>(comm.rank()));
  std::normal_distribution<double> normal;
  std::vector<double> x(chosen.data_size);
  for (double& each : x) each = normal(random);

  std::vector<double> mean(x.size());
  bluefog::allreduce(comm, x, mean);
  const double scale = distance(comm, mean, std::vector<double>(mean.size()));
  const auto print = [&](int round) {
    const double error = distance(comm, x, mean) / scale;
    if (!speaks) return;
    std::printf("round %3d  relative error %.3e\n", round, error);
    report.write({{"round", round}, {"relative_error", error}});
  };
  print(0);
  for (int round = 0; round < chosen.rounds; ++round) {
    bluefog::neighbor_allreduce(comm, x, x, round_of(round));
    print(round + 1);
  }

  std::vector<double> kept(x.size());
  bluefog::allreduce(comm, x, kept);
  const double drift = distance(comm, kept, mean) / scale;
  if (speaks)
    std::printf("the average has %s\n", drift < 1e-12 ? "not moved" : "moved: weights are uneven");
}

template <bluefog::backend Backend>
void run_rank(bluefog::communicator<Backend>& comm, const options& chosen) {
  if (comm.rank() == 0)
    std::printf("%d ranks, %s%s, %zu numbers each\n", comm.size(), chosen.topology.c_str(),
                chosen.dynamic ? ", one neighbor per round" : "", chosen.data_size);
  const auto graph = example::make_graph(chosen.topology, comm.size());
  if (chosen.dynamic) {
    const auto rounds = bluefog::topology::one_peer(graph).rounds(comm.rank());
    average(comm, chosen, [&](int round) { return rounds[round]; });
  } else {
    const auto own = bluefog::topology::neighborhood_of(graph, comm.rank());
    average(comm, chosen, [&](int) { return own; });
  }
}

}  // namespace

int main(int argc, char** argv) {
  options chosen;
  CLI::App app("Averages vectors by talking to neighbors.");
  app.option_defaults()->always_capture_default();
  app.add_option("--data-size", chosen.data_size, "numbers per rank")->check(CLI::PositiveNumber);
  app.add_option("--rounds", chosen.rounds, "how often to average with neighbors")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--topology", chosen.topology, "who averages with whom")
      ->check(CLI::IsMember({"exponential", "symmetric_exponential", "ring", "mesh_grid_2d", "star",
                             "fully_connected"}));
  app.add_flag("--dynamic", chosen.dynamic, "talk to one neighbor of the topology per round");
  app.add_option("--seed", chosen.seed, "of the random numbers");
  example::add_backend_options(app, chosen.backend, chosen.ranks);
  app.add_option("--json", chosen.json, "file that gets a line of JSON per round");
  if (const auto code = example::parse(app, argc, argv)) return *code;

  try {
    example::run_ranks(chosen.backend, chosen.ranks, [&](auto& comm) { run_rank(comm, chosen); });
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "020_average_consensus: %s\n", problem.what());
    return 1;
  }
  return 0;
}

// Expected output:
// <number> ranks, exponential, 100000 numbers each
// round 0  relative error <number>
// ...
// round 10  relative error <number>
// the average has not moved
