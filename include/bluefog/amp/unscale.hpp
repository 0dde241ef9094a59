// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <bluefog/core/error.hpp>

namespace bluefog::amp {

/// Multiplies tensors by a factor, in place, and looks whether they are finite, in one pass.
///
/// \param values  floating, of any dtypes and devices; sparse ones by their values.
/// \return whether every element was finite. The factor is applied in any case.
/// \note Waits for the device, once per device and dtype.
[[nodiscard]] inline bool unscale_and_check(const std::vector<at::Tensor>& values, double factor) {
  const c10::AutoGradMode no_graph(false);
  std::map<std::pair<std::size_t, at::ScalarType>, std::vector<at::Tensor>> alike;
  std::vector<at::Device> devices;
  for (const at::Tensor& each : values) {
    std::size_t device = 0;
    while (device < devices.size() && devices[device] != each.device()) ++device;
    if (device == devices.size()) devices.push_back(each.device());
    alike[{device, each.scalar_type()}].push_back(each.is_sparse() ? each._values() : each);
  }
  bool finite = true;
  for (const auto& [key, list] : alike) {
    const auto options = at::TensorOptions().dtype(at::kFloat).device(devices[key.first]);
    at::Tensor found = at::zeros({}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(list, found, at::full({}, factor, options));
    finite = finite && found.item<float>() == 0;
  }
  return finite;
}

namespace detail {

/// The gradients of an optimizer that are there.
/// \throws usage_error if one is in float16, where unscaling would lose it.
[[nodiscard]] inline std::vector<at::Tensor> gradients_of(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> gradients;
  for (std::size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const auto& parameters = optimizer.param_groups()[group].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& gradient = parameters[i].grad();
      if (!gradient.defined()) continue;
      expects(gradient.scalar_type() != at::kHalf, "grad_scaler: the gradient of group ", group,
              " parameter ", i,
              " is float16, in which an unscaled gradient would be lost; keep the optimizer's "
              "parameters in float32: autocast_guard, or amp::initialize with opt_level::O2");
      gradients.push_back(gradient);
    }
  }
  return gradients;
}

}  // namespace detail
}  // namespace bluefog::amp
