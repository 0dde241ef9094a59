// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <bluefog/tensor/autograd_node.hpp>

namespace bluefog::amp::detail {

/// A parameter of a model that has become 16 bits wide, and the parameter of the original width,
/// its master, that is optimized in its place.
///
/// Autograd sees the narrow one as computed from the master: gradients arrive at the master,
/// widened, and are added up there, so whatever watches or counts gradients does that at the
/// master.
class master_parameter {
 public:
  /// Narrows `parameter`, which stays the same tensor object, to `type`.
  master_parameter(const at::Tensor& parameter, at::ScalarType type)
      : narrow_(parameter), master_(parameter.detach().clone()) {
    const c10::AutoGradMode no_graph(false);
    master_.set_requires_grad(narrow_.requires_grad());
    narrow_.mutable_grad().reset();
    narrow_.set_requires_grad(false);
    narrow_.set_data(narrow_.to(type));
    lead_gradients();
  }

  /// \return whether `parameter` has a master already, unless that has been frozen all along.
  [[nodiscard]] static bool has_master(const at::Tensor& parameter) {
    return dynamic_cast<const widen*>(parameter.grad_fn().get()) != nullptr;
  }

  [[nodiscard]] const at::Tensor& master() const noexcept { return master_; }
  [[nodiscard]] const at::Tensor& narrow() const noexcept { return narrow_; }

  /// Before a forward: gives the narrow one the master's values. Unnoticed by autograd, as steps of
  /// libtorch's optimizers are: go backwards before the next step.
  void refresh() {
    const c10::AutoGradMode no_graph(false);
    narrow_.variable_data().copy_(master_);
    lead_gradients();
  }

 private:
  struct widen final : torch::autograd::Node {
    widen(at::ScalarType to, torch::autograd::Edge target) : type(to) {
      add_next_edge(std::move(target));
    }
    torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
      const at::Tensor& narrow = gradients.front();
      return {narrow.defined() ? narrow.to(type) : at::Tensor()};
    }
    at::ScalarType type;
  };

  // To the master; anew if it takes gradients elsewhere now, since it has been reloaded or frozen.
  void lead_gradients() {
    const auto target = master_.requires_grad() ? torch::autograd::impl::gradient_edge(master_)
                                                : torch::autograd::Edge();
    if (target == target_) return;
    target_ = target;
    at::Tensor narrow = narrow_;
    torch::autograd::create_gradient_edge(
        narrow, bluefog::detail::make_autograd_node<widen>(master_.scalar_type(), target_));
  }

  at::Tensor narrow_;
  at::Tensor master_;
  torch::autograd::Edge target_;  // none where nothing has learnt yet
};

}  // namespace bluefog::amp::detail
