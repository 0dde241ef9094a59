// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/tensor/dtype.hpp>

namespace bluefog::detail {

/// Checks that a tensor can travel. \return the type of its elements.
inline dtype expects_tensor(std::string_view operation, const at::Tensor& x) {
  expects(x.defined(), operation, ": the tensor is undefined");
  expects(x.layout() == c10::kStrided && !x.is_nested(), operation,
          ": the tensor must be dense, got layout ", x.layout(), x.is_nested() ? " (nested)" : "");
  expects(x.is_cpu() || x.is_cuda(), operation,
          ": the tensor must be on a CPU or CUDA device, got ", x.device());
  return dtype_from(x.scalar_type(), operation);
}

/// Checks that a tensor can travel and take the result.
inline void expects_target(std::string_view operation, const at::Tensor& x) {
  expects_tensor(operation, x);
  expects(at::has_internal_overlap(x) != at::MemOverlap::Yes, operation,
          ": several elements of the tensor are one place in memory, so it cannot be written; "
          "clone() it first");
  expects(!(c10::GradMode::is_enabled() && x.requires_grad()), operation,
          ": a tensor that requires a gradient cannot be changed in place; use the form without "
          "underscore, or torch::NoGradGuard");
  expects(!x.is_inference() || c10::InferenceMode::is_enabled(), operation,
          ": an inference tensor cannot be changed outside of inference mode; clone() it first");
}

/// \return the element types and lengths of tensors that can travel, without their memory; one
///         empty array in place of no tensors, so that an operation is described by its last one.
[[nodiscard]] inline std::vector<const_buffer> outlines(std::span<const at::Tensor> tensors) {
  std::vector<const_buffer> result;
  for (const at::Tensor& x : tensors)
    result.push_back({nullptr, x.numel(), dtype_from(x.scalar_type()).value()});
  if (result.empty()) result.push_back({nullptr, 0, dtype::float32});
  return result;
}

/// \return e.g. " float32 [2, 3]", for check mode.
[[nodiscard]] inline std::string shapes_text(std::span<const at::Tensor> tensors) {
  std::string text = tensors.size() == 1 ? "" : concat(" ", tensors.size(), " tensors");
  for (const at::Tensor& x : tensors)
    text += concat(" ", dtype_from(x.scalar_type()).value(), " ", x.sizes());
  return text;
}

/// One tensor as a list.
[[nodiscard]] inline std::span<const at::Tensor> only(const at::Tensor& x) noexcept {
  return {&x, 1};
}

}  // namespace bluefog::detail
