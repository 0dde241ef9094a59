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

/// What passes are to an averaging wrapper.
enum class counted : std::uint8_t { forwards, backwards };

/// How an averaging wrapper counts and sends.
struct averaging_plan {
  std::string_view optimizer;  ///< the wrapper's name; static storage
  pass_counter counter;
  counted passes;
  std::int64_t bucket_bytes;
  bool starts_early;  ///< sends when the last pass of a window is counted, not in the step
};

/// What the averaging wrappers share: the parameters, who averages with whom, and the count of
/// passes. The hooks of the parameters point to it, so it stays at one address.
template <backend Backend, averaging_topology Topology>
class averaging final : public gradient_listener {
 public:
  using groups = std::vector<torch::optim::OptimizerParamGroup>;

  averaging(averaging_plan plan, communicator<Backend>& comm, Topology topology,
            communication_type type)
      : plan_(std::move(plan)), mixer_(plan_.optimizer, comm, std::move(topology), type) {
    expects_bucket(plan_.optimizer, plan_.bucket_bytes);
  }

  [[nodiscard]] pass_counter& counter() noexcept { return plan_.counter; }
  [[nodiscard]] mixer<Backend, Topology>& mixing() noexcept { return mixer_; }
  [[nodiscard]] const parameter_arena& arena() const noexcept { return arena_; }

  /// Takes the optimizer's parameters as they are now into the arena and watches them.
  void adopt(const groups& all, const torch::nn::Module& module,
             const std::shared_ptr<averaging>& self) {
    names_ = named_parameters(all, module);
    rebuild(all, self);
    expect_equal_parameters(plan_.optimizer, mixer_.comm(), arena_);
  }

  /// Between steps: takes in parameters that were added, unfrozen, reloaded or replaced. Does
  /// nothing while parameters are on their way.
  void refresh(const groups& all, const std::shared_ptr<averaging>& self) {
    if (mixer_.started()) return;
    if (signature(all) != signature_) {
      for (const auto& added : named_parameters(all, torch::nn::Module()))
        if (arena_.index_of(added.tensor) == arena_.size()) names_.push_back(added);
      rebuild(all, self);
    } else {
      arena_.reattach();
      if (!watch_.intact()) watch(self);
    }
  }

  /// A forward of the model was made in training.
  void forward_passed() {
    if (plan_.passes == counted::backwards) return;
    by_forwards_ = true;
    any_pass_ = pass_since_step_ = true;
    counter().count("forward");
    pass();
  }
  void backward_began(int number, bool anew) override {
    if (by_forwards_) return;
    if (anew) counter().forget_foreign();
    any_pass_ = pass_since_step_ = true;
    counter().count_backward(number);
    pass();
  }
  void gradient_ready(std::size_t /*index*/) override {}

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

  /// \return the runs of parameters that travel.
  [[nodiscard]] std::vector<parameter_arena::range> ranges() const {
    return arena_.ranges(plan_.bucket_bytes,
                         [&](std::size_t i) { return arena_.tensor(i).requires_grad(); });
  }

  /// Sends all parameters, unless that has happened since the last communication.
  void send_all() {
    if (mixer_.started()) return;
    arena_.reattach();
    mixer_.begin();
    try {
      for (const auto& range : ranges()) mixer_.send(arena_, range);
    } catch (...) {
      mixer_.drop();
      throw;
    }
  }

  /// Combines what `send_all` has sent for, and begins to count anew. Unchanged parameters if it
  /// fails.
  void apply() {
    counter().reset();
    const c10::AutoGradMode no_grad(false);
    mixer_.apply();
    for (std::size_t i = 0; i < arena_.size(); ++i)
      if (arena_.tensor(i).requires_grad()) arena_.tensor(i).unsafeGetTensorImpl()->bump_version();
  }

 private:
  [[nodiscard]] bool step_is_pass() const {
    return !any_pass_ || (!by_forwards_ && !pass_since_step_ && !watch_.intact());
  }

  void pass() {
    if (plan_.starts_early && counter().just_due()) send_all();
  }

  void rebuild(const groups& all, const std::shared_ptr<averaging>& self) {
    arena_ = parameter_arena(names_);
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
  std::vector<named_tensor> names_;
  std::vector<std::pair<const void*, bool>> signature_;
  parameter_arena arena_;
  mixer<Backend, Topology> mixer_;
  gradient_watch watch_;
};

}  // namespace bluefog::optim::detail
