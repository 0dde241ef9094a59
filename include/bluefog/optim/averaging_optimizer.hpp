// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/collective/any_of.hpp>
#include <bluefog/optim/agreement.hpp>
#include <bluefog/optim/averaging.hpp>
#include <bluefog/optim/communicating_optimizer.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog::optim::detail {

/// The public face that the averaging wrappers share. Is the user's optimizer.
template <steppable Inner, backend Backend, averaging_topology Topology>
class averaging_optimizer : public Inner, public communicating_optimizer {
 public:
  /// Calls the model's forward and returns what it returns. Counted as a pass if the model is in
  /// training and gradients are recorded.
  template <module_like Model, class... Inputs>
  decltype(auto) forward(Model& model, Inputs&&... inputs) {
    const bool counts = module_of(model).is_training() && c10::GradMode::is_enabled();
    if (counts) refresh();
    if constexpr (std::is_void_v<decltype(call_forward(model, std::forward<Inputs>(inputs)...))>) {
      call_forward(model, std::forward<Inputs>(inputs)...);
      if (counts) shared_->forward_passed();
    } else {
      decltype(auto) output = call_forward(model, std::forward<Inputs>(inputs)...);
      if (counts) shared_->forward_passed();
      return output;
    }
  }

  /// From the next communication on. The same on every rank.
  /// \throws usage_error if the topology does not fit.
  void communication(communication_type next) { shared_->mixing().type(next); }
  [[nodiscard]] communication_type communication() const noexcept {
    return shared_->mixing().type();
  }

  /// Takes the place of the topology in the next communication, on this rank. With
  /// `start::after_forward` that one begins in the window's last forward: call it before.
  /// \throws usage_error if a rank or weight is wrong.
  void next(neighborhood links) { shared_->mixing().next(std::move(links)); }

  /// \return how many neighbour communications have begun: the schedule's next round.
  [[nodiscard]] std::int64_t round() const noexcept { return shared_->mixing().round(); }

  /// \return the passes counted since the last communication.
  [[nodiscard]] int passes_since_communication() const noexcept {
    return shared_->counter().passes();
  }
  /// Begins to count anew, e.g. where an epoch's end cut a window. The same on every rank.
  void reset_passes() {
    if (shared_->mixing().started()) shared_->apply();
    shared_->counter().reset();
  }
  /// Averages the parameters now, whatever has been counted, and begins to count anew. Collective.
  void flush() {
    refresh();
    shared_->send_all();
    shared_->apply();
  }
  /// As the user's optimizer's; backwards that only other optimizers stepped on are then forgotten.
  void zero_grad(bool set_to_none = true) {
    shared_->counter().forget_foreign();
    refresh();
    Inner::zero_grad(set_to_none);
  }

  /// Adds parameters, which are averaged from the next communication on. The same on every rank.
  void add_param_group(const torch::optim::OptimizerParamGroup& group) {
    Inner::add_param_group(group);
  }

  /// Averages as `step()` would, if it would, and does not adapt: this rank leaves its gradients
  /// out without leaving the others alone.
  void skip_step() override {
    shared_->step_began();
    refresh();
    if (shared_->counter().due()) {
      shared_->send_all();
      shared_->apply();
    }
    shared_->counter().stepped();
  }
  step_kind settle_gradients() override {
    return shared_->due() && communication() != communication_type::none ? step_kind::mixing
                                                                         : step_kind::local;
  }
  [[nodiscard]] bool reduces_gradients() const noexcept override { return false; }
  [[nodiscard]] int ranks() const noexcept override { return shared_->mixing().comm().size(); }
  [[nodiscard]] bool any_rank(bool flag) override { return any_of(shared_->mixing().comm(), flag); }
  [[nodiscard]] std::vector<double> of_every_rank(double value) override {
    return gather_value(shared_->mixing().comm(), value);
  }
  [[nodiscard]] std::weak_ptr<const void> identity() const noexcept override { return shared_; }

  /// Writes what the user's optimizer writes, and the schedule's round.
  void save(torch::serialize::OutputArchive& archive) const override {
    Inner::save(archive);
    archive.write("bluefog_round", at::full({}, round(), at::kLong), /*is_buffer=*/true);
  }
  /// An archive of the user's optimizer alone is fine too: the schedule then begins anew.
  void load(torch::serialize::InputArchive& archive) override {
    Inner::load(archive);
    at::Tensor saved;
    shared_->mixing().round(archive.try_read("bluefog_round", saved, /*is_buffer=*/true)
                                ? saved.item<std::int64_t>()
                                : 0);
  }

 protected:
  using shared_type = averaging<Backend, Topology>;

  template <module_like Model>
  averaging_optimizer(Inner inner, const Model& model, std::shared_ptr<shared_type> shared)
      : Inner(std::move(inner)), shared_(std::move(shared)) {
    refuse_line_search<Inner>();
    shared_->adopt(this->param_groups(), module_of(model), shared_);
  }

  /// Runs the closure, once, with gradients recorded.
  [[nodiscard]] static at::Tensor run(const typename Inner::LossClosure& closure) {
    if (!closure) return {};
    const c10::AutoGradMode grad(true);
    return closure();
  }

  [[nodiscard]] shared_type& shared() noexcept { return *shared_; }
  void refresh() { shared_->refresh(this->param_groups(), shared_); }

 private:
  std::shared_ptr<shared_type> shared_;
};

}  // namespace bluefog::optim::detail
