// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <bluefog/tensor/autograd_node.hpp>

namespace bluefog::detail {

/// \return whether autograd has to know of an operation on `tensors`.
[[nodiscard]] inline bool needs_gradient(std::span<const at::Tensor> tensors) {
  return c10::GradMode::is_enabled() &&
         std::ranges::any_of(tensors, [](const at::Tensor& x) { return x.requires_grad(); });
}

/// What autograd calls in place of the derivative of a linear operation over all ranks: its
/// adjoint, an operation over all ranks itself.
class adjoint final : public torch::autograd::Node {
 public:
  /// From one gradient per result, all defined, makes one per input.
  using function = std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)>;

  /// \param operation  the public function; static storage.
  adjoint(std::string_view operation, std::span<const at::Tensor> inputs, function transposed)
      : operation_(operation), transposed_(std::move(transposed)) {
    for (const at::Tensor& x : inputs)
      add_next_edge(x.requires_grad() ? torch::autograd::impl::gradient_edge(x)
                                      : torch::autograd::Edge());
  }

  /// Makes `result` the next output.
  void add_result(const at::Tensor& result) {
    const auto position = add_input_metadata(result);
    torch::autograd::impl::set_gradient_edge(result, {owner_of(*this), position});
  }

  [[nodiscard]] std::string name() const override { return "bluefog::" + std::string(operation_); }

 private:
  // A result that plays no part in the loss has gradient zero: the other ranks still take part.
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    for (std::size_t i = 0; i < gradients.size(); ++i)
      if (!gradients[i].defined())
        gradients[i] = input_metadata(static_cast<uint32_t>(i)).zeros_like();
    return transposed_(std::move(gradients));
  }

  std::string_view operation_;
  function transposed_;
};

using adjoint_pointer = autograd_pointer<adjoint>;

[[nodiscard]] inline adjoint_pointer make_adjoint(std::string_view operation,
                                                  std::span<const at::Tensor> inputs,
                                                  adjoint::function transposed) {
  return make_autograd_node<adjoint>(operation, inputs, std::move(transposed));
}

}  // namespace bluefog::detail
