// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <bluefog/amp/mixed_precision.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/communicating_optimizer.hpp>
#include <bluefog/optim/parameters.hpp>

namespace bluefog::amp {

/// Prepares a model and an optimizer for training in mixed precision: apex's `initialize`.
///
/// Comes after both are made, and before the optimizer is wrapped:
/// \code
///   torch::optim::SGD sgd(model->parameters(), 0.1);
///   auto net = amp::initialize(model, sgd, amp::opt_level::O2);
///   optim::adapt_with_combine optimizer(std::move(sgd), net, comm);
///   ...
///   loss_of(optimizer.forward(net, x), y)
/// \endcode
/// With `opt_level::O2` the optimizer gets float32 masters in place of the model's parameters,
/// which is why it must not have stepped. Levels O1 and O2 with float16 want a `grad_scaler`.
///
/// One optimizer per model: what is to be stepped with other options goes into a group of its own.
/// Of a model that has masters nothing is left for a second one.
///
/// \param optimizer  not one that communicates; parameters that are not the model's stay in it.
/// \return what takes the model's place.
/// \throws usage_error if the optimizer is wrapped already, or has state while its parameters are
///         to be changed, or the model has masters already; nothing has changed then.
template <optim::module_like Model>
[[nodiscard]] mixed_precision<Model> initialize(Model& model, torch::optim::Optimizer& optimizer,
                                                opt_level level,
                                                const initialize_options& options = {}) {
  const bool narrows = level == opt_level::O2 || level == opt_level::O3;
  expects(dynamic_cast<optim::communicating_optimizer*>(&optimizer) == nullptr || !narrows,
          "initialize: the optimizer is wrapped already; call initialize before, and make the "
          "wrapper from the optimizer and from what initialize returns");
  expects(optimizer.state().empty() || !narrows,
          "initialize: the optimizer has stepped already; its state would be lost");
  mixed_precision<Model> net(model, level, options);
  for (auto& group : optimizer.param_groups())
    for (at::Tensor& each : group.params()) each = net.master_of(each);
  return net;
}

}  // namespace bluefog::amp
