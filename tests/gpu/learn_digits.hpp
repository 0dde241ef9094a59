// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <utility>

#include <torch/torch.h>

#include <bluefog/amp.hpp>
#include <bluefog/optim.hpp>
#include <bluefog/tensor.hpp>
#include <bluefog/topology.hpp>

#include "../../examples/support/digits.hpp"
#include "../../examples/support/nets.hpp"

namespace bluefog_test::gpu {

/// What is learnt enough: who sees half of the digits, and knows no others, recognizes half at
/// most.
inline constexpr double digits_goal = 0.85;

/// Learns handwritten digits with mixed precision, where no rank sees them all: rank r of n has
/// those whose number modulo n is r, and knows the others from its neighbours alone. So who does
/// not communicate, or wrongly, recognizes at most 1/n of them and some.
///
/// \return the share of the test images that this rank's net recognizes.
template <class Comm>
[[nodiscard]] double learn_digits(Comm& comm, at::Device device,
                                  const std::filesystem::path& folder, int epochs = 3) {
  using namespace bluefog;
  const auto data = example::load_digits(folder);
  const at::Tensor own = data.train.labels().remainder(comm.size()).eq(comm.rank());
  const at::Tensor rows = own.nonzero().squeeze(1);
  const at::Tensor count = at::full({}, rows.size(0), at::kLong);
  const at::Tensor least = allreduce(comm, count, reduce_op::min);
  // Two processes that share a GPU take turns on it: with each message of each step.
  const auto shortest = std::min<std::int64_t>(least.item<std::int64_t>(), 4096);

  torch::nn::Sequential net = example::convolutional_net();
  example::initialize(*net, 1);
  net->to(device);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  optim::adapt_then_combine optimizer(std::move(sgd), net, comm,
                                      topology::fully_connected(comm.size()));
  amp::grad_scaler scaler;
  const auto type = device.is_cuda() ? at::kHalf : at::kBFloat16;
  constexpr std::int64_t batch = 32;
  for (int epoch = 0; epoch < epochs; ++epoch)
    for (std::int64_t first = 0; first + batch <= shortest; first += batch) {
      const auto examples = data.train.select(rows.slice(0, first, first + batch));
      optimizer.zero_grad();
      at::Tensor loss;
      {
        const amp::autocast_guard guard(device.type(), type);
        const at::Tensor output = optimizer.forward(net, examples.data.to(device));
        loss = torch::nll_loss(output.to(at::kFloat), examples.target.to(device));
      }
      scaler.scale(loss).backward();
      scaler.step(optimizer);
      scaler.update();
    }
  const torch::NoGradGuard no_graph;
  net->eval();
  const auto test = data.test.select(at::arange(data.test.labels().size(0), at::kLong));
  const auto guess = net->forward(test.data.to(device)).argmax(1).cpu();
  return guess.eq(test.target).to(at::kDouble).mean().item<double>();
}

}  // namespace bluefog_test::gpu
