// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <bluefog/optim/known_gradient.hpp>
#include <bluefog/tensor/autograd_node.hpp>

namespace bluefog::optim::detail {

/// What wants to know of gradients.
class gradient_listener {
 public:
  virtual ~gradient_listener() = default;
  /// A backward has reached the first of the watched parameters.
  /// \param number  the autograd engine's, unique in this process.
  /// \param anew    whether its gradient is another tensor than after the backward before, because
  ///                gradients have been cleared in between.
  virtual void backward_began(int number, bool anew) = 0;
  /// The gradient of parameter `index` is complete for this backward.
  virtual void gradient_ready(std::size_t index) = 0;
  /// \return whether it gives the parameters other gradients, at the latest when they are used.
  [[nodiscard]] virtual bool changes_gradients() const noexcept { return false; }
};

/// Tells a listener when gradients have been accumulated, once per parameter and backward.
///
/// A parameter that is used several times is told once, after its last use. The listener is told
/// one thing at a time: parameters of several devices get their gradients on several threads. A
/// backward within a backward is one more, and so is what follows it. The hooks hold the listener
/// weakly: it may go at any time. Removed on destruction.
class gradient_watch {
 public:
  gradient_watch() = default;
  gradient_watch(gradient_watch&&) noexcept = default;
  gradient_watch& operator=(gradient_watch&& other) noexcept {
    std::swap(watched_, other.watched_);
    std::swap(sequence_, other.sequence_);
    return *this;
  }
  gradient_watch(const gradient_watch&) = delete;
  gradient_watch& operator=(const gradient_watch&) = delete;
  ~gradient_watch() {
    for (const auto& it : watched_) it.node->del_post_hook(it.key);
  }

  explicit gradient_watch(std::weak_ptr<gradient_listener> listener)
      : sequence_(std::make_shared<sequence>(std::move(listener))) {}

  /// Watches `parameter`, which must require a gradient.
  void add(const at::Tensor& parameter, std::size_t index) {
    // Keeping the node alive keeps the hook: the parameter itself holds it weakly.
    auto node = torch::autograd::impl::grad_accumulator(parameter);
    const auto key = node->add_post_hook(
        std::make_unique<hook>(sequence_, parameter.unsafeGetTensorImpl(), index));
    watched_.push_back({parameter, std::move(node), key});
  }

  /// \return whether all hooks are where gradients arrive. A parameter that `torch::load` has
  /// reloaded has another place for them.
  [[nodiscard]] bool intact() const {
    return std::ranges::all_of(watched_, [](const watched& it) {
      return torch::autograd::impl::try_get_grad_accumulator(it.parameter) == it.node;
    });
  }

  /// \return whether a listener of another watch will change gradients after this backward.
  [[nodiscard]] bool gradients_change_later() const {
    const auto changes = [](const auto& each) {
      const auto* const other = dynamic_cast<const hook*>(each.get());
      return other != nullptr && other->changes_gradients();
    };
    return std::ranges::any_of(watched_, [&](const watched& it) {
      return std::ranges::any_of(it.node->post_hooks(), changes);
    });
  }

 private:
  struct sequence {
    explicit sequence(std::weak_ptr<gradient_listener> to) : listener(std::move(to)) {}
    std::weak_ptr<gradient_listener> listener;
    std::mutex mutex;  // a listener makes no backward, which would come back here
    int last_backward = -1;
  };

  class hook final : public torch::autograd::FunctionPostHook {
   public:
    hook(std::shared_ptr<sequence> shared, at::TensorImpl* parameter, std::size_t index)
        : shared_(std::move(shared)), parameter_(parameter), index_(index) {}

    torch::autograd::variable_list operator()(
        const torch::autograd::variable_list& outputs,
        const torch::autograd::variable_list& /*inputs*/) override {
      if (const auto listener = shared_->listener.lock()) {
        const std::scoped_lock lock(shared_->mutex);
        const auto& gradient = parameter_->mutable_grad();
        const bool anew = !last_.is(gradient);
        const int backward = torch::autograd::get_current_graph_task_id();
        if (std::exchange(shared_->last_backward, backward) != backward)
          listener->backward_began(backward, anew);
        listener->gradient_ready(index_);
        last_ = known_gradient(gradient);
      }
      return outputs;
    }

    [[nodiscard]] bool changes_gradients() const {
      const auto listener = shared_->listener.lock();
      return listener && listener->changes_gradients();
    }

   private:
    std::shared_ptr<sequence> shared_;
    at::TensorImpl* parameter_;  // kept alive by the node that has the hook
    std::size_t index_;
    known_gradient last_;
  };

  struct watched {
    at::Tensor parameter;
    bluefog::detail::autograd_node node;
    std::uintptr_t key;
  };

  std::vector<watched> watched_;
  std::shared_ptr<sequence> sequence_;
};

/// Gradients that have arrived and that no step has used. Finds out that they have been cleared,
/// which it is not told of where that is done by the module or through a base class.
class pending_gradients {
 public:
  /// The gradient of parameter `index` is complete for a backward.
  void arrived(std::size_t index, const at::Tensor& parameter) {
    if (index >= gradients_.size()) gradients_.resize(index + 1);
    const at::Tensor& now = parameter.grad();
    gradients_[index] = {parameter, known_gradient(now), now.defined()};
  }
  void clear() { gradients_.clear(); }

  /// Not while gradients of a new backward arrive, but before the second of them it may be asked.
  /// \return whether some gradient has been cleared since it has arrived.
  [[nodiscard]] bool lost() const {
    if (std::ranges::any_of(gradients_, [](const gradient& it) {
          return it.defined && !it.parameter.grad().defined();
        }))
      return true;
    // Of a single one there may be another by now. Where that need not mean anything, it does not.
    if (c10::GradMode::is_enabled() || std::ranges::count_if(gradients_, &gradient::defined) != 1)
      return false;
    const gradient& only = *std::ranges::find_if(gradients_, &gradient::defined);
    const at::Tensor& now = only.parameter.grad();
    return !now.is_sparse() && !only.last.is(now);
  }

 private:
  struct gradient {
    at::Tensor parameter = {};
    known_gradient last = {};
    bool defined = false;
  };
  std::vector<gradient> gradients_;  // by the parameter's index
};

}  // namespace bluefog::optim::detail
