// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <bluefog/amp/grad_scaler.hpp>

namespace bluefog::amp {

/// When gradients of a scaled loss are unscaled.
enum class unscale : std::uint8_t {
  now,   ///< right after the backward: it was the last one of this update
  later  ///< not yet: more backwards are added up
};

/// Options of `scale_loss`.
struct scale_loss_options {
  amp::unscale unscale = amp::unscale::now;
};

/// Scales a loss, runs its backward and unscales and checks the optimizer's gradients: apex's
/// `scale_loss`. By then they are synchronized, if the optimizer reduces gradients. Goes on with
/// clipping, if wanted, `scaler.step(optimizer)` and `scaler.update()`.
///
/// \param optimizer  whose gradients the loss is for.
/// \param backward   gets the scaled loss, e.g. `[](const at::Tensor& x) { x.backward(); }`.
/// \throws usage_error if the gradients of this update have been unscaled already.
template <std::invocable<const at::Tensor&> Backward>
void scale_loss(const at::Tensor& loss, torch::optim::Optimizer& optimizer, grad_scaler& scaler,
                scale_loss_options options, Backward&& backward) {
  const at::Tensor scaled = scaler.scale(loss);
  std::invoke(std::forward<Backward>(backward), scaled);
  if (options.unscale == unscale::now) scaler.unscale_(optimizer);
}

/// Unscales right after the backward.
template <std::invocable<const at::Tensor&> Backward>
void scale_loss(const at::Tensor& loss, torch::optim::Optimizer& optimizer, grad_scaler& scaler,
                Backward&& backward) {
  scale_loss(loss, optimizer, scaler, {}, std::forward<Backward>(backward));
}

}  // namespace bluefog::amp
