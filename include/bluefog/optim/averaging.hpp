// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/optim/agreement.hpp>
#include <bluefog/optim/gradient_watch.hpp>
#include <bluefog/optim/mixer.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/optim/pass_counter.hpp>
#include <bluefog/tensor/arena.hpp>

namespace bluefog::optim::detail {

/// What the averaging wrappers share: the parameters, who averages with whom, and the count of
/// passes. The hooks of the parameters point to it, so it stays at one address.
template <backend Backend, averaging_topology Topology>
class averaging final : public gradient_listener {
 public:
  using groups = std::vector<torch::optim::OptimizerParamGroup>;

  averaging(mixer<Backend, Topology> mixing, pass_counter counter, std::int64_t bucket_bytes,
            bool starts_early, std::string_view optimizer)
      : counter_(counter),
        bucket_bytes_(bucket_bytes),
        starts_early_(starts_early),
        optimizer_(optimizer),
        mixer_(std::move(mixing)) {}

  [[nodiscard]] pass_counter& counter() noexcept { return counter_; }
  [[nodiscard]] mixer<Backend, Topology>& mixing() noexcept { return mixer_; }
  [[nodiscard]] const parameter_arena& arena() const noexcept { return arena_; }

  /// Takes the optimizer's parameters as they are now into the arena and watches them.
  void adopt(const groups& all, const torch::nn::Module& module,
             const std::shared_ptr<averaging>& self) {
    names_ = named_parameters(all, module);
    rebuild(all, self);
    expect_equal_parameters(optimizer_, mixer_.comm(), arena_);
  }

  /// Between steps: takes in parameters that were added, unfrozen, reloaded or replaced.
  void refresh(const groups& all, const std::shared_ptr<averaging>& self) {
    if (signature(all) != signature_) {
      for (const auto& added : named_parameters(all, torch::nn::Module()))
        if (index_of(added.tensor) == arena_.size()) names_.push_back(added);
      rebuild(all, self);
    } else {
      arena_.reattach();
    }
  }

  /// A forward of the model was made in training.
  void forward_passed() {
    by_forwards_ = true;
    pass("forward");
  }
  void backward_began() override {
    if (!by_forwards_) pass("backward");
  }
  void gradient_ready(std::size_t /*index*/) override {}

  /// Makes a step count as a pass where there was no other sign of one: gradients set by hand.
  void step_began() {
    if (!any_pass_) counter_.count("step");
  }

  /// \return the runs of parameters that travel.
  [[nodiscard]] std::vector<parameter_arena::range> ranges() const {
    return arena_.ranges(bucket_bytes_,
                         [&](std::size_t i) { return arena_.tensor(i).requires_grad(); });
  }

  /// Sends all parameters, unless that has happened since the last communication.
  void send_all() {
    if (mixer_.started()) return;
    mixer_.begin();
    for (const auto& range : ranges()) mixer_.send(arena_, range);
  }

  /// Combines what `send_all` has sent for, and begins to count anew. Unchanged parameters if it
  /// fails.
  void apply() {
    counter_.reset();
    const c10::AutoGradMode no_grad(false);
    mixer_.apply();
    for (std::size_t i = 0; i < arena_.size(); ++i)
      if (arena_.tensor(i).requires_grad()) arena_.tensor(i).unsafeGetTensorImpl()->bump_version();
  }

  /// \return the index in the arena of the tensor, `arena().size()` if it is not there.
  [[nodiscard]] std::size_t index_of(const at::Tensor& tensor) const {
    for (std::size_t i = 0; i < arena_.size(); ++i)
      if (arena_.tensor(i).is_same(tensor)) return i;
    return arena_.size();
  }

 private:
  void pass(std::string_view kind) {
    any_pass_ = true;
    counter_.count(kind);
    if (starts_early_ && counter_.just_due()) send_all();
  }

  void rebuild(const groups& all, const std::shared_ptr<averaging>& self) {
    arena_ = parameter_arena(names_);
    watch_ = gradient_watch(self);
    for (std::size_t i = 0; i < arena_.size(); ++i)
      if (arena_.tensor(i).requires_grad()) watch_.add(arena_.tensor(i), i);
    signature_ = signature(all);
  }

  // Which parameters there are and which of them learn.
  [[nodiscard]] static std::vector<std::pair<const void*, bool>> signature(const groups& all) {
    std::vector<std::pair<const void*, bool>> result;
    for (const auto& group : all)
      for (const auto& each : group.params())
        result.emplace_back(each.unsafeGetTensorImpl(), each.requires_grad());
    return result;
  }

  pass_counter counter_;
  bool by_forwards_ = false;
  bool any_pass_ = false;
  std::int64_t bucket_bytes_;
  bool starts_early_;
  std::string_view optimizer_;
  std::vector<named_tensor> names_;
  std::vector<std::pair<const void*, bool>> signature_;
  parameter_arena arena_;
  mixer<Backend, Topology> mixer_;  // after the arena, whose memory its transfers read
  gradient_watch watch_;
};

}  // namespace bluefog::optim::detail
