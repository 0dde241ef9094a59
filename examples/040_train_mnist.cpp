// SPDX-License-Identifier: Apache-2.0
//
// Trains a network on handwritten digits. Every rank learns from its own share of the images, and
// in each step averages its parameters with those of one other rank, instead of summing gradients
// over all of them. What is tested after each epoch is the average of all ranks' models.
//
//   mpirun -np 4 ./040_train_mnist                                 four processes
//   ./040_train_mnist --backend threads --ranks 4                  four threads of one process
//   mpirun -np 4 ./040_train_mnist --optimizer gradient_allreduce  what one does without a topology
//   mpirun -np 4 ./040_train_mnist --optimizer local               nobody communicates
//   ./040_train_mnist --help                                       topologies, networks, sizes, ...

#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <utility>

#include <torch/torch.h>

#include <bluefog/bluefog.hpp>

#include "support/digits.hpp"
#include "support/flat_parameters.hpp"
#include "support/json_report.hpp"
#include "support/nets.hpp"
#include "support/progress.hpp"
#include "support/run_ranks.hpp"
#include "support/topologies.hpp"
#include "support/training_options.hpp"

namespace {

using bluefog::reduce_op;
using example::training_options;

/// What one rank did in an epoch; float64, so that it can be summed over the ranks.
struct epoch_work {
  double loss_sum = 0, steps = 0, images = 0, bytes = 0, seconds = 0;
};

/// Learns from every batch of `loader` once.
template <bluefog::backend Backend, class Optimizer, class Loader>
epoch_work train_epoch(bluefog::communicator<Backend>& comm, torch::nn::Sequential& net,
                       Optimizer& optimizer, Loader& loader, example::progress_bar bar) {
  epoch_work work;
  const auto start = std::chrono::steady_clock::now();
  const auto bytes_before = comm.statistics().bytes_sent;
  for (auto& batch : loader) {
    optimizer.zero_grad();
    at::Tensor output;
    if constexpr (requires { optimizer.forward(net, batch.data); })
      output = optimizer.forward(net, batch.data);
    else  // torch's own optimizer, which does not communicate
      output = net->forward(batch.data);
    const at::Tensor loss = torch::nll_loss(output, batch.target);
    loss.backward();
    optimizer.step();

    work.loss_sum += loss.item<double>();
    work.images += static_cast<double>(batch.target.size(0));
    ++work.steps;
    bar.advance();
  }
  work.bytes = static_cast<double>(comm.statistics().bytes_sent - bytes_before);
  work.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return work;
}

/// The averaged model, and how far a rank's own is from it: the root mean square over the ranks.
template <bluefog::backend Backend>
std::pair<at::Tensor, double> consensus(bluefog::communicator<Backend>& comm,
                                        const torch::nn::Sequential& net) {
  const at::Tensor own = example::flat_parameters(*net);
  const at::Tensor mean = bluefog::allreduce(comm, own);
  const at::Tensor squared = bluefog::allreduce(comm, (own - mean).square().sum());
  return {mean, std::sqrt(squared.item<double>())};
}

/// Trains to the end, and reports each epoch.
template <bluefog::backend Backend, class Optimizer>
void train(bluefog::communicator<Backend>& comm, const training_options& options,
           const example::digits& digits, torch::nn::Sequential& net, Optimizer& optimizer) {
  const bool speaks = comm.rank() == 0;
  example::json_report report(speaks ? options.json : "");
  bluefog::nn::distributed_sampler sampler(*digits.train.size(), comm, {.seed = options.seed});
  auto loader = torch::data::make_data_loader(digits.train, sampler, options.batch_size);
  auto averaged = example::make_net(options.model, options.seed);
  const auto tests = static_cast<std::int64_t>(*digits.test.size());
  const auto own_tests = torch::arange(comm.rank(), tests, comm.size(), torch::kLong);
  const auto steps = (sampler.size() + options.batch_size - 1) / options.batch_size;

  for (int epoch = 1; epoch <= options.epochs; ++epoch) {
    sampler.set_epoch(static_cast<std::size_t>(epoch));
    const std::string label = bluefog::concat("epoch ", epoch, "/", options.epochs);
    const epoch_work work = train_epoch(comm, net, optimizer, *loader,
                                        {label, steps, speaks && example::on_terminal()});

    const auto [mean, distance] = consensus(comm, net);
    example::assign_parameters(*averaged, mean);
    const auto correct = example::count_correct(averaged, digits.test, own_tests);
    const at::Tensor sums = bluefog::allreduce(
        comm,
        torch::tensor(
            {work.loss_sum, work.steps, work.images, work.bytes, static_cast<double>(correct)},
            torch::kDouble),
        reduce_op::sum);
    const at::Tensor slowest =
        bluefog::allreduce(comm, torch::tensor({work.seconds}, torch::kDouble), reduce_op::max);
    if (!speaks) continue;

    const auto sum = [&](std::int64_t i) { return sums[i].item<double>(); };
    const double loss = sum(0) / sum(1), accuracy = sum(4) / static_cast<double>(tests);
    const double speed = sum(2) / slowest.item<double>(), bytes = sum(3) / sum(1);
    std::printf("%-12s loss %.4f  accuracy %.3f  distance %.4f  %6.0f images/s  %.0f bytes/step\n",
                label.c_str(), loss, accuracy, distance, speed, bytes);
    std::fflush(stdout);
    report.write({{"epoch", epoch},
                  {"loss", loss},
                  {"accuracy", accuracy},
                  {"distance", distance},
                  {"images_per_second", speed},
                  {"bytes_per_step", bytes}});
  }
}

/// Makes network and optimizer as the options say, and trains.
template <bluefog::backend Backend>
void run_rank(bluefog::communicator<Backend>& comm, const training_options& options,
              const example::digits& digits) {
  if (comm.rank() == 0)
    std::printf("%d ranks (%s), %s, %zu images to learn from, %zu to test on\n", comm.size(),
                options.backend.c_str(), options.optimizer.c_str(), *digits.train.size(),
                *digits.test.size());

  // Each rank draws its own initial parameters; those that are to agree start from rank 0's.
  const auto seed = options.seed + static_cast<std::uint64_t>(comm.rank());
  auto net = example::make_net(options.model, seed);
  torch::optim::SGD sgd(net->parameters(),
                        torch::optim::SGDOptions(options.learning_rate).momentum(0.9));
  if (options.optimizer == "local") return train(comm, options, digits, net, sgd);

  bluefog::broadcast_parameters(comm, *net, 0);
  if (options.optimizer == "gradient_allreduce") {
    bluefog::optim::gradient_allreduce optimizer(std::move(sgd), net, comm);
    return train(comm, options, digits, net, optimizer);
  }
  example::with_topology(options.topology, comm.size(), [&](auto topology) {
    if (options.optimizer == "adapt_then_combine") {
      bluefog::optim::adapt_then_combine optimizer(std::move(sgd), net, comm, topology);
      train(comm, options, digits, net, optimizer);
    } else {
      bluefog::optim::adapt_with_combine optimizer(std::move(sgd), net, comm, topology);
      train(comm, options, digits, net, optimizer);
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  const auto [options, code] = example::read_command_line(
      argc, argv, "Trains a network on handwritten digits with several ranks.");
  if (!options) return code;
  try {
    const example::digits digits = example::load_digits(options->data);
    example::run_ranks(options->backend, options->ranks,
                       [&](auto& comm) { run_rank(comm, *options, digits); });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "040_train_mnist: %s\n", error.what());
    return 1;
  }
}

// Expected output, with the digits that quickstart.sh fetches:
// clang-format off
// <number> ranks (mpi), adapt_with_combine, 4500 images to learn from, 500 to test on
// epoch 1/10   loss <number>  accuracy <number>  distance <number>  <number> images/s  <number> bytes/step
// ...
// epoch 10/10  loss <number>  accuracy <number>  distance <number>  <number> images/s  <number> bytes/step
// clang-format on
