// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

#include <bluefog/core/error.hpp>
#include <bluefog/optim/parameters.hpp>

namespace bluefog::amp {

namespace detail {

/// \return float32 copies.
[[nodiscard]] inline std::vector<at::Tensor> in_float(const std::vector<at::Tensor>& values) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& each : values) copies.push_back(each.to(at::kFloat));
  return copies;
}

}  // namespace detail

/// Multiplies tensors by a factor, in place, and looks whether they are finite, in one pass.
///
/// \param values  floating, of any dtypes and devices; sparse ones by their values.
/// \return whether every element was finite. The factor is applied in any case.
/// \note Waits for each device once: whether a step is taken, the host has to know. bfloat16 on a
///       device, for which libtorch has no such kernel, takes three passes and memory twice as
///       long.
[[nodiscard]] inline bool unscale_and_check(const std::vector<at::Tensor>& values, double factor) {
  const c10::AutoGradMode no_graph(false);
  struct device_part {
    at::Device device;
    at::Tensor found;   // 0 until something is not finite
    at::Tensor factor;  // on the device
    std::map<at::ScalarType, std::vector<at::Tensor>> alike = {};
  };
  std::vector<device_part> parts;
  for (const at::Tensor& each : values) {
    auto part = std::ranges::find(parts, each.device(), &device_part::device);
    if (part == parts.end()) {
      const auto options = at::TensorOptions().dtype(at::kFloat).device(each.device());
      parts.push_back({each.device(), at::zeros({}, options), at::full({}, factor, options)});
      part = std::prev(parts.end());
    }
    part->alike[each.scalar_type()].push_back(each.is_sparse() ? each._values() : each);
  }
  for (device_part& part : parts)
    for (const auto& [type, list] : part.alike) {
      const bool wide = type == at::kBFloat16 && !part.device.is_cpu();
      const auto once = wide ? detail::in_float(list) : list;
      at::_amp_foreach_non_finite_check_and_unscale_(once, part.found, part.factor);
      for (std::size_t i = 0; wide && i < list.size(); ++i) list[i].copy_(once[i]);
    }
  return std::ranges::all_of(parts,
                             [](const device_part& part) { return part.found.item<float>() == 0; });
}

namespace detail {

/// The gradients of an optimizer that are there, each once.
/// \throws usage_error if one is in float16, where unscaling would lose it.
[[nodiscard]] inline std::vector<at::Tensor> gradients_of(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> gradients;
  optim::detail::seen_tensors seen;
  for (std::size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const auto& parameters = optimizer.param_groups()[group].params();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& gradient = parameters[i].grad();
      if (!gradient.defined() || !seen.add(parameters[i])) continue;
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
