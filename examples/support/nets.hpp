// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

namespace example {

/// Draws every parameter anew, in torch's usual ranges, from a generator of its own.
///
/// torch's global generator is shared by the threads of a process: ranks that are threads would get
/// other numbers in every run. This depends on `seed` alone.
inline void initialize(torch::nn::Module& module, std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  const auto generator = at::detail::createCPUGenerator(seed);
  double bound = 0;
  for (at::Tensor& parameter : module.parameters()) {
    // A weight comes before its bias, and one output of it has numel / size(0) inputs.
    if (parameter.dim() > 1)
      bound = 1 / std::sqrt(static_cast<double>(parameter.numel() / parameter.size(0)));
    parameter.uniform_(-bound, bound, generator);
  }
}

/// A convolutional network for 28x28 digits, 2 x (convolution, maximum of 2x2) and 2 layers.
inline torch::nn::Sequential convolutional_net() {
  using namespace torch::nn;
  return Sequential(Conv2d(Conv2dOptions(1, 12, 5)), MaxPool2d(2), ReLU(),   //
                    Conv2d(Conv2dOptions(12, 32, 5)), MaxPool2d(2), ReLU(),  //
                    Flatten(), Linear(512, 64), ReLU(), Linear(64, 10), LogSoftmax(1));
}

/// A network of three layers without convolutions.
inline torch::nn::Sequential multilayer_perceptron() {
  using namespace torch::nn;
  return Sequential(Flatten(), Linear(784, 128), ReLU(), Linear(128, 64), ReLU(), Linear(64, 10),
                    LogSoftmax(1));
}

/// Makes a network that takes (batch, 1, 28, 28) and returns ten logarithms of probabilities each.
///
/// \param kind  "cnn" or "mlp".
/// \param seed  decides the initial parameters, whatever other threads do.
/// \throws std::invalid_argument for another kind.
inline torch::nn::Sequential make_net(const std::string& kind, std::uint64_t seed) {
  if (kind != "cnn" && kind != "mlp")
    throw std::invalid_argument("make_net: kind must be cnn or mlp, got " + kind);
  torch::nn::Sequential net = kind == "cnn" ? convolutional_net() : multilayer_perceptron();
  initialize(*net, seed);
  return net;
}

}  // namespace example
