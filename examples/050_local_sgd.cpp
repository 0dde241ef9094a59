// SPDX-License-Identifier: Apache-2.0
//
// Communicates in every J-th pass only, in the two ways there are: adding up the gradients of J
// batches for one step (accumulation), or taking a step with each (local SGD). Either way it is
// `num_steps_per_communication` = J, which counts forwards: where `step()` is called makes the
// difference. Both send 1/J of the bytes; local SGD learns more from them.
//
//   mpirun -np 4 ./050_local_sgd                      four processes
//   ./050_local_sgd --backend threads --ranks 4       four threads of one process
//   ./050_local_sgd --help                            epochs, sizes, ...

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>

#include <torch/torch.h>

#include <bluefog/bluefog.hpp>

#include "support/digits.hpp"
#include "support/flat_parameters.hpp"
#include "support/nets.hpp"
#include "support/run_ranks.hpp"
#include "support/training_options.hpp"

namespace {

enum class way { accumulation, local_sgd };

struct result {
  std::int64_t steps = 0;
  std::int64_t communications = 0;
  double bytes = 0;  // per rank
  double accuracy = 0;
  double distance = 0;
};

/// Trains a net that is the same on every rank at first, each rank on its share of the images.
template <bluefog::backend Backend>
result train(bluefog::communicator<Backend>& comm, const example::training_options& options,
             const example::digits& digits, way how, int passes) {
  auto net = example::make_net(options.model, options.seed);
  torch::optim::SGD sgd(net->parameters(),
                        torch::optim::SGDOptions(options.learning_rate).momentum(0.9));
  bluefog::optim::adapt_with_combine optimizer(std::move(sgd), net, comm,
                                               {.num_steps_per_communication = passes});
  bluefog::nn::distributed_sampler sampler(*digits.train.size(), comm, {.seed = options.seed});
  auto loader = torch::data::make_data_loader(digits.train, sampler, options.batch_size);

  result done;
  const auto sent = comm.statistics().bytes_sent;
  for (int epoch = 1; epoch <= options.epochs; ++epoch) {
    sampler.set_epoch(static_cast<std::size_t>(epoch));
    for (auto& batch : *loader) {
      const at::Tensor loss = torch::nll_loss(optimizer.forward(net, batch.data), batch.target);
      if (how == way::local_sgd) {
        loss.backward();
      } else {
        (loss / passes).backward();
        if (optimizer.passes_since_communication() < passes) continue;
      }
      optimizer.step();  // communicates, if J forwards have been made since it did
      optimizer.zero_grad();
      ++done.steps;
    }
  }
  optimizer.flush();  // the passes that the end has cut off
  done.communications = optimizer.round();
  done.bytes = static_cast<double>(comm.statistics().bytes_sent - sent);

  const at::Tensor own = example::flat_parameters(*net);
  const at::Tensor mean = bluefog::allreduce(comm, own);
  const at::Tensor squared = bluefog::allreduce(comm, (own - mean).square().sum());
  example::assign_parameters(*net, mean);
  const auto tests = static_cast<std::int64_t>(*digits.test.size());
  done.distance = std::sqrt(squared.item<double>());
  done.accuracy = static_cast<double>(example::count_correct(net, digits.test,
                                                             torch::arange(tests, torch::kLong))) /
                  static_cast<double>(tests);
  return done;
}

template <bluefog::backend Backend>
void compare(bluefog::communicator<Backend>& comm, const example::training_options& options,
             const example::digits& digits) {
  const bool speaks = comm.rank() == 0;
  const auto show = [&](const char* name, int passes, const result& it) {
    if (!speaks) return;
    std::printf("%-13s %2d  %5lld  %14lld  %12.0f  %8.3f  %8.4f\n", name, passes,
                static_cast<long long>(it.steps), static_cast<long long>(it.communications),
                it.bytes, it.accuracy, it.distance);
    std::fflush(stdout);
  };
  if (speaks) {
    std::printf("%d ranks, %zu images to learn from, %zu to test on, %d epochs\n", comm.size(),
                *digits.train.size(), *digits.test.size(), options.epochs);
    std::printf("               J  steps  communications    bytes/rank  accuracy  distance\n");
  }
  const result every = train(comm, options, digits, way::local_sgd, 1);
  show("every step", 1, every);
  for (const int passes : {4, 16}) {
    const result summed = train(comm, options, digits, way::accumulation, passes);
    show("accumulation", passes, summed);
    const result local = train(comm, options, digits, way::local_sgd, passes);
    show("local SGD", passes, local);
    if (!speaks || comm.size() == 1) continue;
    std::printf("               both send 1/%.0f of the bytes, and %s learns more from them\n",
                every.bytes / std::max(summed.bytes, local.bytes),
                local.accuracy > summed.accuracy ? "local SGD" : "accumulation");
  }
}

}  // namespace

int main(int argc, char** argv) {
  example::training_options options;
  options.model = "mlp";
  options.epochs = 4;
  CLI::App app("Compares accumulation and local SGD on handwritten digits.");
  example::add_common_options(app, options);
  if (const auto code = example::parse(app, argc, argv)) return *code;
  try {
    const example::digits digits = example::load_digits(options.data);
    example::run_ranks(options.backend, options.ranks,
                       [&](auto& comm) { compare(comm, options, digits); });
  } catch (const std::exception& error) {
    std::fprintf(stderr, "050_local_sgd: %s\n", error.what());
    return 1;
  }
}

// Expected output, with the digits that quickstart.sh fetches:
// clang-format off
// <number> ranks, 4500 images to learn from, 500 to test on, 4 epochs
//                J  steps  communications    bytes/rank  accuracy  distance
// every step     1  <number>  <number>  <number>  <number>  <number>
// accumulation   4  <number>  <number>  <number>  <number>  <number>
// local SGD      4  <number>  <number>  <number>  <number>  <number>
//                both send 1/4 of the bytes, and local SGD learns more from them
// accumulation  16  <number>  <number>  <number>  <number>  <number>
// local SGD     16  <number>  <number>  <number>  <number>  <number>
//                both send 1/16 of the bytes, and local SGD learns more from them
// clang-format on
