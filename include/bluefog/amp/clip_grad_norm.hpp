// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/optimizer.h>

#include <bluefog/amp/grad_scaler.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/parameters.hpp>

namespace bluefog::amp {

/// Clips the norm of all gradients of an optimizer together, each of them once, in place:
/// libtorch's `clip_grad_norm_`, but it refuses gradients that are still scaled.
///
/// \return the norm before: of the gradients of all ranks with an optimizer that reduces them, else
///         of this rank's.
/// \throws usage_error if `scaler.unscale_(optimizer)` has not been called in this update.
inline double clip_grad_norm_(torch::optim::Optimizer& optimizer, grad_scaler& scaler,
                              double max_norm, double norm_type = 2) {
  expects(!scaler.enabled() || scaler.unscaled(optimizer),
          "clip_grad_norm_: the gradients are scaled; call scaler.unscale_(optimizer) before, once "
          "per update, and scaler.step(optimizer) after");
  if (!scaler.enabled()) scaler.unscale_(optimizer);  // synchronizes
  std::vector<at::Tensor> parameters;
  for (const auto& group : optim::detail::each_once(optimizer.param_groups()))
    parameters.insert(parameters.end(), group.begin(), group.end());
  return torch::nn::utils::clip_grad_norm_(parameters, max_norm, norm_type);
}

}  // namespace bluefog::amp
