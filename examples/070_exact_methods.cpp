// SPDX-License-Identifier: Apache-2.0
//
// Ranks whose data differ solve one problem together: the minimizer of the sum of all their losses.
// Averaging with a constant learning rate ends beside it; methods that correct the bias end at it,
// to rounding. (With up to 3 ranks a ring averages over all of them, and adapt_then_combine is
// exact as well.) Prints how far the furthest rank is from the minimizer, which is found otherwise,
// by Newton's method.
//
//   mpirun -np 4 ./070_exact_methods
//   ./070_exact_methods --backend threads --ranks 8 --topology exponential   some methods refuse it
//   mpirun -np 4 ./070_exact_methods --task logistic_regression --method extra --every 50

#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <torch/torch.h>

#include <bluefog/communicator.hpp>
#include <bluefog/optim.hpp>
#include <bluefog/tensor.hpp>
#include <bluefog/topology.hpp>

#include "support/command_line.hpp"
#include "support/json_report.hpp"
#include "support/regression.hpp"
#include "support/run_ranks.hpp"
#include "support/topologies.hpp"

namespace {

using example::regression;
namespace optim = bluefog::optim;

const std::vector<std::string> all_tasks{"linear_regression", "logistic_regression"};
const std::vector<std::string> all_methods{
    "adapt_with_combine", "adapt_then_combine", "decentlam", "quasi_global_momentum",
    "gradient_tracking",  "exact_diffusion",    "extra"};

struct options {
  std::vector<std::string> tasks = all_tasks;
  std::vector<std::string> methods = all_methods;
  std::string topology = "ring";
  double learning_rate = 0.3, momentum = 0.8;
  int iterations = 600, every = 100;
  std::string backend = "mpi";
  int ranks = 4;
  std::string json;
};

/// Calls `body` with the optimizer of that name.
template <bluefog::backend Backend, class Topology, class Body>
void with_optimizer(const std::string& method, const options& chosen, regression& model,
                    bluefog::communicator<Backend>& comm, const Topology& topology, Body body) {
  auto settings = torch::optim::SGDOptions(chosen.learning_rate);
  if (method == "decentlam" || method == "quasi_global_momentum")
    settings.momentum(chosen.momentum);
  torch::optim::SGD sgd(model.parameters(), settings);
  if (method == "adapt_with_combine")
    return body(optim::adapt_with_combine(std::move(sgd), model, comm, topology));
  if (method == "adapt_then_combine")
    return body(optim::adapt_then_combine(std::move(sgd), model, comm, topology));
  if (method == "quasi_global_momentum")
    return body(optim::quasi_global_momentum(std::move(sgd), model, comm, topology));
  if (method == "gradient_tracking")
    return body(optim::gradient_tracking(std::move(sgd), model, comm, topology));
  if constexpr (bluefog::topology::graph<Topology>) {
    if (method == "decentlam") return body(optim::decentlam(std::move(sgd), model, comm, topology));
    if (method == "exact_diffusion")
      return body(optim::exact_diffusion(std::move(sgd), model, comm, topology));
    return body(optim::extra(std::move(sgd), model, comm, topology));
  }
  throw bluefog::usage_error(method + " needs one graph, not a schedule of them");
}

/// \return how far the furthest rank is from `goal`, before the first iteration, after every
///         `chosen.every`-th, and at the end.
template <bluefog::backend Backend, class Optimizer>
std::vector<double> solve(bluefog::communicator<Backend>& comm, const options& chosen,
                          regression& model, const at::Tensor& goal, Optimizer& optimizer) {
  std::vector<double> distances;
  for (int k = 0; k <= chosen.iterations; ++k) {
    if (k > 0) {
      optimizer.zero_grad();
      optimizer.forward(model).backward();
      optimizer.step();
    }
    if (k % chosen.every != 0 && k != chosen.iterations) continue;
    const at::Tensor own = (model.w() - goal).norm();
    distances.push_back(
        bluefog::allreduce(comm, own, bluefog::reduce_op::max).template item<double>());
  }
  return distances;
}

template <bluefog::backend Backend, class Topology>
void compare(bluefog::communicator<Backend>& comm, const options& chosen, const std::string& task,
             const Topology& topology, example::json_report& report) {
  const bool speaks = comm.rank() == 0;
  const auto seed = 2021 + static_cast<std::uint64_t>(comm.rank());  // of its data
  const at::Tensor goal = example::minimizer(comm, regression(task, seed));
  if (speaks) {
    std::printf("%s, %d ranks, %s\n  %-21s", task.c_str(), comm.size(), chosen.topology.c_str(),
                "iteration");
    for (int k = 0; k < chosen.iterations; k += chosen.every) std::printf("  %7d", k);
    std::printf("  %7d\n", chosen.iterations);
  }
  std::string exact;
  for (const std::string& method : chosen.methods) {
    regression model(task, seed);
    std::vector<double> distances;
    std::string refusal;
    try {
      with_optimizer(method, chosen, model, comm, topology, [&](auto optimizer) {
        distances = solve(comm, chosen, model, goal, optimizer);
      });
      if (distances.back() < 1e-10) exact += " " + method;
    } catch (const bluefog::usage_error& error) {  // on every rank alike
      refusal = error.what();
    }
    if (!speaks) continue;
    std::printf("  %-21s", method.c_str());
    for (const double distance : distances) std::printf("  %.1e", distance);
    std::printf("%s%s\n", refusal.empty() ? "" : "  ", refusal.c_str());
    report.write({{"task", task}, {"method", method}, {"distances", distances}});
  }
  if (speaks) std::printf("below 1e-10:%s\n", exact.c_str());
}

template <bluefog::backend Backend>
void run_rank(bluefog::communicator<Backend>& comm, const options& chosen) {
  example::json_report report(comm.rank() == 0 ? chosen.json : "");
  for (const std::string& task : chosen.tasks)
    example::with_topology(chosen.topology, comm.size(), [&](const auto& topology) {
      compare(comm, chosen, task, topology, report);
    });
}

}  // namespace

int main(int argc, char** argv) {
  options chosen;
  CLI::App app("Minimizes the sum of all ranks' losses.");
  app.option_defaults()->always_capture_default();
  app.add_option("--task", chosen.tasks, "what to solve")->check(CLI::IsMember(all_tasks));
  app.add_option("--method", chosen.methods, "how to solve it")->check(CLI::IsMember(all_methods));
  app.add_option("--topology", chosen.topology, "who averages with whom")
      ->check(CLI::IsMember({"ring", "mesh_grid_2d", "star", "symmetric_exponential",
                             "fully_connected", "exponential", "one_peer_exponential"}));
  app.add_option("--lr", chosen.learning_rate, "learning rate")->check(CLI::PositiveNumber);
  app.add_option("--momentum", chosen.momentum, "of decentlam and quasi_global_momentum");
  app.add_option("--iterations", chosen.iterations, "steps")->check(CLI::PositiveNumber);
  app.add_option("--every", chosen.every, "steps between two numbers")->check(CLI::PositiveNumber);
  example::add_backend_options(app, chosen.backend, chosen.ranks);
  app.add_option("--json", chosen.json, "file that gets a line of JSON per method");
  if (const auto code = example::parse(app, argc, argv)) return *code;

  try {
    example::run_ranks(chosen.backend, chosen.ranks, [&](auto& comm) { run_rank(comm, chosen); });
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "070_exact_methods: %s\n", problem.what());
    return 1;
  }
}

// Expected output, with any number of ranks:
// clang-format off
// linear_regression, <number> ranks, ring
//   iteration                 0      100      200      300      400      500      600
//   adapt_with_combine     <number>  <number>  <number>  <number>  <number>  <number>  <number>
//   adapt_then_combine     <number>  <number>  <number>  <number>  <number>  <number>  <number>
//   decentlam              <number>  <number>  <number>  <number>  <number>  <number>  <number>
//   quasi_global_momentum  <number>  <number>  <number>  <number>  <number>  <number>  <number>
//   gradient_tracking      <number>  <number>  <number>  <number>  <number>  <number>  <number>
//   exact_diffusion        <number>  <number>  <number>  <number>  <number>  <number>  <number>
//   extra                  <number>  <number>  <number>  <number>  <number>  <number>  <number>
// below 1e-10:<text> gradient_tracking exact_diffusion extra
// logistic_regression, <number> ranks, ring
//   iteration                 0      100      200      300      400      500      600
//   adapt_with_combine     <number>  <number>  <number>  <number>  <number>  <number>  <number>
//   adapt_then_combine     <number>  <number>  <number>  <number>  <number>  <number>  <number>
//   decentlam              <number>  <number>  <number>  <number>  <number>  <number>  <number>
//   quasi_global_momentum  <number>  <number>  <number>  <number>  <number>  <number>  <number>
//   gradient_tracking      <number>  <number>  <number>  <number>  <number>  <number>  <number>
//   exact_diffusion        <number>  <number>  <number>  <number>  <number>  <number>  <number>
//   extra                  <number>  <number>  <number>  <number>  <number>  <number>  <number>
// below 1e-10:<text> gradient_tracking exact_diffusion extra
// clang-format on
