// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "idx.hpp"

namespace example {

/// \return a copy of all parameters, one after the other, in one dimension.
inline at::Tensor flat_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> pieces;
  for (const at::Tensor& parameter : module.parameters())
    pieces.push_back(parameter.detach().flatten());
  return at::cat(pieces);
}

/// Sets all parameters to what `flat_parameters` of another module of this kind returned.
inline void assign_parameters(torch::nn::Module& module, const at::Tensor& flat) {
  const at::NoGradGuard no_grad;
  std::int64_t first = 0;
  for (at::Tensor& parameter : module.parameters()) {
    parameter.copy_(flat.narrow(0, first, parameter.numel()).view_as(parameter));
    first += parameter.numel();
  }
}

/// \return how many of the images in `rows` (int64) the network takes for what they are.
template <class Net>
  requires requires(Net& net, const at::Tensor& images) { net->forward(images).argmax(1); }
[[nodiscard]] std::int64_t count_correct(Net& net, const image_dataset& images,
                                         const at::Tensor& rows) {
  const at::NoGradGuard no_grad;
  std::int64_t correct = 0;
  for (const at::Tensor& chunk : rows.split(1000)) {
    const auto batch = images.select(chunk);
    correct +=
        net->forward(batch.data).argmax(1).eq(batch.target).sum().template item<std::int64_t>();
  }
  return correct;
}

}  // namespace example
