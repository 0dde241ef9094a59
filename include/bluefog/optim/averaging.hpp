// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/agreeing_group.hpp>
#include <bluefog/optim/agreement.hpp>
#include <bluefog/optim/averaging_plan.hpp>
#include <bluefog/optim/backward_step.hpp>
#include <bluefog/optim/gradient_watch.hpp>
#include <bluefog/optim/mixer.hpp>
#include <bluefog/optim/module_buffers.hpp>
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
  using tensors = std::vector<at::Tensor>;

  averaging(averaging_plan plan, communicator<Backend>& comm, Topology topology)
      : plan_(std::move(plan)),
        group_(plan_.optimizer, comm),
        mixer_(plan_.optimizer, group_, std::move(topology), plan_.communication) {
    expects_bucket(plan_.optimizer, plan_.bucket_bytes);
    mixer_.global_every(plan_.global_average_every);
  }

  [[nodiscard]] pass_counter& counter() noexcept { return plan_.counter; }
  [[nodiscard]] mixer<Backend, Topology>& mixing() noexcept { return mixer_; }
  [[nodiscard]] const parameter_arena& arena() const noexcept { return arena_; }
  [[nodiscard]] const averaging_plan& plan() const noexcept { return plan_; }

  /// \return whether a backward has taken steps that `step()` has to end.
  [[nodiscard]] bool steps_inside() const noexcept { return inside_.has_value(); }

  /// Tells what to step inside a backward, and again whenever it has moved.
  void stepping(stepping_optimizer optimizer) { stepping_ = std::move(optimizer); }

  /// Takes the optimizer's parameters as they are now into the arena and watches them.
  void adopt(const groups& all, const torch::nn::Module& module,
             const std::shared_ptr<averaging>& self) {
    known_ = parameters_of(module);
    names_ = named_parameters(all, known_);
    if (plan_.buffers == buffer_policy::average) buffers_ = module_buffers(module);
    rebuild(all, self);
    group_.adopt(arena_and_buffers{arena_, buffers_.list()});
    expect_travelling(plan_.optimizer, arena_, /*frozen_too=*/false);
    expect_travelling(plan_.optimizer, named_list{buffers_.list()}, /*frozen_too=*/true);
  }

  /// Between steps: takes in parameters that were added, unfrozen, reloaded or replaced. Does
  /// nothing while parameters are on their way.
  void refresh(const groups& all, const std::shared_ptr<averaging>& self) {
    if (mixer_.started() || inside_) return;
    if (!has_signature(all, signature_)) {
      for (const auto& added : named_parameters(all, known_))
        if (arena_.index_of(added.tensor) == arena_.size()) names_.push_back(added);
      rebuild(all, self);
    } else {
      arena_.reattach();
      if (!watch_.intact()) watch(self);
    }
  }

  /// \return whether a forward of `model` can be a pass: it is in training, and not all frozen.
  [[nodiscard]] bool learns(const torch::nn::Module& model) {
    if (!model.is_training()) return false;
    auto found = std::ranges::find(models_, &model, &std::pair<const void*, tensors>::first);
    if (found == models_.end()) found = models_.emplace(models_.end(), &model, model.parameters());
    return found->second.empty() || std::ranges::any_of(found->second, &at::Tensor::requires_grad);
  }
  /// A forward of `model` is about to be made in training.
  void forward_begins(const void* model) {
    if (plan_.passes == counted::forwards && before_forward() && !inside_ &&
        counter().due_with_forward(model))
      send_all();
  }
  /// A forward of `model` was made in training.
  void forward_passed(const void* model) {
    if (plan_.passes == counted::backwards) return;
    by_forwards_ = true;
    any_pass_ = pass_since_step_ = true;
    if (counter().count_forward(model)) pass();
  }
  void backward_began(int number, bool anew) override {
    expects(!inside_, plan_.optimizer,
            ": a second backward after the one that has taken the step: with "
            "start::inside_backward a step() has to follow each");
    if (!by_forwards_) {
      if (anew) counter().forget_foreign();
      any_pass_ = pass_since_step_ = true;
      counter().count_backward(number);
      pass();
    }
    if (plan_.start == start::inside_backward && counter().due()) begin_inside();
  }
  void gradient_ready(std::size_t index) override {
    if (!inside_) return;
    try {
      inside_->ready(index);
    } catch (...) {  // what is left of the step is not taken
      inside_.reset();
      throw;
    }
  }

  /// Makes a step count as a pass where there could be no other sign of one: gradients set by hand,
  /// or parameters reloaded just before the backward.
  void step_began() {
    if (step_is_pass()) counter().count("step");
    pass_since_step_ = false;
  }
  /// \return whether a step made now would communicate.
  [[nodiscard]] bool due() const {
    return plan_.counter.passes() + (step_is_pass() ? 1 : 0) >= plan_.counter.wanted();
  }
  /// The step is taken. Sends for the next one, if that is sure to communicate.
  void step_ended() {
    counter().stepped();
    if (before_forward() && counter().wanted() == 1 && counter().passes() == 0) send_all();
  }

  /// Ends the step that a backward has taken. \return whether one had.
  bool end_inside() {
    if (!inside_) return false;
    const c10::AutoGradMode no_grad(false);
    counter().reset();
    auto ending = std::move(*inside_);
    inside_.reset();
    ending.finish();
    unpack_buffers();
    if (mixer_.started()) note_versions();
    return true;
  }

  /// The window is over. Takes back what was sent for it; ends a step that a backward has taken.
  void cut() {
    if (end_inside()) return;
    if (counter().passes() > 0) mixer_.recall();
    counter().reset();
  }

  /// \return the runs of parameters that travel.
  [[nodiscard]] std::vector<parameter_arena::range> ranges() const {
    return arena_.ranges(plan_.bucket_bytes,
                         [&](std::size_t i) { return arena_.tensor(i).requires_grad(); });
  }

  /// Begins a communication. \throws mismatch_error, on every rank, if what travels differs.
  void begin() {
    mixer_.drop();
    if (mixer_.type() != communication_type::none)
      group_.agree(arena_and_buffers{arena_, buffers_.list()});
    mixer_.begin();
  }

  /// Sends all parameters, unless that has happened since the last communication.
  void send_all() {
    if (mixer_.started()) return;
    arena_.reattach();
    begin();
    try {
      for (const auto& range : order()) mixer_.send(arena_, range);
    } catch (...) {
      mixer_.drop();
      throw;
    }
    note_versions();
  }

  /// Combines what `send_all` has sent for and counts anew. If it fails, no parameter has changed.
  void apply() {
    counter().reset();
    expect_untouched();
    const c10::AutoGradMode no_grad(false);
    send_buffers();
    mixer_.apply();
    unpack_buffers();
    if (!mixer_.sends()) return;
    for (std::size_t i = 0; i < arena_.size(); ++i)
      if (arena_.tensor(i).requires_grad()) arena_.tensor(i).unsafeGetTensorImpl()->bump_version();
  }

 private:
  [[nodiscard]] bool before_forward() const noexcept {
    return plan_.start == start::after_step || plan_.start == start::inside_backward;
  }

  // Without windows also where no backward came: another rank's may have reached parameters.
  [[nodiscard]] bool step_is_pass() const {
    const bool unnoticed = plan_.counter.wanted() == 1 ? plan_.counter.passes() == 0
                                                       : !pass_since_step_ && !watch_.intact();
    return !any_pass_ || (!by_forwards_ && unnoticed);
  }

  void pass() {
    if (plan_.start != start::at_step && counter().just_due()) send_all();
  }

  // Parts that step in a backward go in the order in which their gradients become ready.
  [[nodiscard]] std::vector<parameter_arena::range> order() const {
    auto all = ranges();
    if (plan_.start == start::inside_backward) std::ranges::reverse(all);
    return all;
  }

  // Unless parameters have been exchanged for others: then `step()` does it all.
  void begin_inside() {
    expects(!watch_.gradients_change_later(), plan_.optimizer,
            ": start::inside_backward steps before distributed_data_parallel or "
            "gradient_allreduce, which watch the same parameters, have reduced their gradients; "
            "take another start");
    if (!mixer_.started() || !arena_.attached() || !has_signature(stepping_.groups(), signature_))
      return;
    expect_untouched();
    const c10::AutoGradMode no_grad(false);
    send_buffers();
    inside_.emplace(stepping_, arena_, order(), mixer_, counter().wanted() == 1);
  }

  void send_buffers() {
    packed_.clear();
    if (plan_.buffers == buffer_policy::local) return;
    packed_ = buffers_.pack();
    for (const at::Tensor& flat : packed_) mixer_.send(flat);
  }
  void unpack_buffers() { buffers_.unpack(std::exchange(packed_, {})); }

  void note_versions() {
    versions_.clear();
    if (!mixer_.sends()) return;
    for (std::size_t i = 0; i < arena_.size(); ++i)
      if (arena_.tensor(i).requires_grad()) versions_.emplace_back(i, arena_.tensor(i)._version());
  }
  void expect_untouched() {
    for (const auto& [i, version] : std::exchange(versions_, {})) {
      if (arena_.tensor(i)._version() == version || !arena_.attached(i)) continue;
      mixer_.drop();
      throw usage_error(concat(plan_.optimizer, ": parameter \"", arena_.name(i),
                               "\" was changed while it was on its way to other ranks; "
                               "start::at_step lets parameters be changed at any time"));
    }
  }

  void rebuild(const groups& all, const std::shared_ptr<averaging>& self) {
    arena_ = parameter_arena(names_);
    models_.clear();
    watch(self);
    signature_ = signature(all);
  }

  void watch(const std::shared_ptr<averaging>& self) {
    watch_ = gradient_watch(self);
    for (std::size_t i = 0; i < arena_.size(); ++i)
      if (arena_.tensor(i).requires_grad()) watch_.add(arena_.tensor(i), i);
  }

  averaging_plan plan_;
  bool by_forwards_ = false;  // from the first call of forward() on
  bool any_pass_ = false;
  bool pass_since_step_ = false;
  std::vector<named_tensor> known_;  // the module's, for the names of parameters added later
  std::vector<named_tensor> names_;
  std::vector<std::pair<const void*, tensors>> models_;  // the parameters of those called
  parameter_signature signature_;
  std::vector<std::pair<std::size_t, std::int64_t>> versions_;  // of parameters when they were sent
  module_buffers buffers_;
  std::vector<at::Tensor> packed_;  // copies of the buffers, on their way
  parameter_arena arena_;
  agreeing_group<Backend> group_;
  mixer<Backend, Topology> mixer_;
  stepping_optimizer stepping_;
  std::optional<backward_step<Backend, Topology>> inside_;
  gradient_watch watch_;
};

}  // namespace bluefog::optim::detail
