// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <bluefog/optim/parameters.hpp>
#include <bluefog/tensor/arena.hpp>
#include <bluefog/tensor/part.hpp>

namespace bluefog::optim::detail {

/// One vector per dtype and device, laid out like the arena of the parameters.
using flat_tensors = std::vector<at::Tensor>;

/// The parameters of an optimizer that learn, as long vectors, and one more vector of the same
/// layout that a method keeps from step to step.
class flat_parameters {
 public:
  using groups = std::vector<torch::optim::OptimizerParamGroup>;

  flat_parameters() = default;
  flat_parameters(const groups& all, const torch::nn::Module& module)
      : known_(parameters_of(module)) {
    rebuild(all);
  }

  [[nodiscard]] const parameter_arena& arena() const noexcept { return arena_; }
  /// \return the parameters themselves.
  [[nodiscard]] const flat_tensors& values() const noexcept { return values_; }
  /// \return what the method keeps; zeros at first, and for parameters that come later.
  [[nodiscard]] const flat_tensors& kept() const noexcept { return kept_; }
  /// From now on there is something to keep.
  void keep() { kept_ = like(values_); }

  /// Between steps: takes in parameters that were added, frozen, unfrozen or reloaded.
  /// \return whether those that learn may be others than before.
  bool refresh(const groups& all) {
    if (has_signature(all, signature_)) {
      arena_.reattach();
      return false;
    }
    rebuild(all);
    return true;
  }

  /// \return what belongs to parameter `index` in `flat`: its memory, in the parameter's shape.
  [[nodiscard]] at::Tensor part(const flat_tensors& flat, std::size_t index) const {
    const at::Tensor& parameter = arena_.tensor(index);
    const auto place = arena_.range_of(index);
    return bluefog::detail::part_of_tensor(flat[place.block], place.begin, parameter.sizes(),
                                           parameter.strides());
  }

  /// Moves the parameters by `change`.
  void move(const flat_tensors& change) const {
    add(values_, change);
    changed();
  }
  /// Tells autograd that the parameters have been written to.
  void changed() const {
    for (std::size_t i = 0; i < arena_.size(); ++i)
      arena_.tensor(i).unsafeGetTensorImpl()->bump_version();
  }

  /// Adds to each vector of `target` its counterpart, times a factor.
  static void add(const flat_tensors& target, const flat_tensors& change, double factor = 1) {
    for (std::size_t block = 0; block < target.size(); ++block)
      target[block].add_(change[block], factor);
  }
  /// \return a copy of `flat`.
  [[nodiscard]] static flat_tensors copy(const flat_tensors& flat) {
    flat_tensors result;
    for (const at::Tensor& each : flat) result.push_back(each.clone());
    return result;
  }

 private:
  [[nodiscard]] static flat_tensors like(const flat_tensors& flat) {
    flat_tensors result;
    for (const at::Tensor& each : flat) result.push_back(at::zeros_like(each));
    return result;
  }

  void rebuild(const groups& all) {
    const c10::AutoGradMode no_grad(false);
    std::vector<named_tensor> learning;
    for (named_tensor& each : named_parameters(all, known_))
      if (each.tensor.requires_grad()) learning.push_back(std::move(each));
    const flat_parameters before = std::move(*this);
    known_ = before.known_;
    arena_ = parameter_arena(learning);
    values_.clear();
    for (std::size_t i = 0; i < arena_.size(); ++i)
      for (std::size_t block = values_.size(); block <= arena_.range_of(i).block; ++block)
        values_.push_back(arena_.block(block));
    signature_ = signature(all);
    kept_.clear();
    if (before.kept_.empty()) return;
    keep();
    for (std::size_t i = 0; i < arena_.size(); ++i) {
      const std::size_t index = before.arena_.index_of(arena_.tensor(i));
      if (index != before.arena_.size()) part(kept_, i).copy_(before.part(before.kept_, index));
    }
  }

  std::vector<named_tensor> known_;  // the module's, for names
  parameter_signature signature_;
  parameter_arena arena_;  // of those that learn
  flat_tensors values_;
  flat_tensors kept_;
};

/// Gives parameters other gradients, and their own back on destruction.
class lent_gradients {
 public:
  /// \param lent  one per parameter of the arena.
  lent_gradients(const parameter_arena& arena, const std::vector<at::Tensor>& lent)
      : arena_(arena) {
    for (std::size_t i = 0; i < arena.size(); ++i) {
      at::Tensor& gradient = arena.tensor(i).unsafeGetTensorImpl()->mutable_grad();
      own_.push_back(std::exchange(gradient, lent[i]));
    }
  }
  lent_gradients(const lent_gradients&) = delete;
  lent_gradients& operator=(const lent_gradients&) = delete;
  ~lent_gradients() {
    for (std::size_t i = 0; i < own_.size(); ++i)
      arena_.tensor(i).unsafeGetTensorImpl()->mutable_grad() = own_[i];
  }

 private:
  const parameter_arena& arena_;
  std::vector<at::Tensor> own_;
};

}  // namespace bluefog::optim::detail
