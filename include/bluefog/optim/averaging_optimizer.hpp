// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/averaging.hpp>
#include <bluefog/optim/averaging_plan.hpp>
#include <bluefog/optim/backward_step.hpp>
#include <bluefog/optim/communicates_over.hpp>
#include <bluefog/optim/communicating_optimizer.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/optim/partial_step.hpp>
#include <bluefog/optim/pass_counter.hpp>
#include <bluefog/optim/saved_numbers.hpp>
#include <bluefog/optim/transfer.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog::optim::detail {

/// The public face that the averaging wrappers share. Is the user's optimizer.
template <steppable Inner, backend Backend, averaging_topology Topology>
class averaging_optimizer : public Inner, public communicates_over<Backend> {
 public:
  /// Calls the model's forward and returns what it returns. Counted as a pass if the model is in
  /// training, not all of its parameters are frozen, and gradients are recorded.
  ///
  /// Several models that share the optimizer make one pass when each of them has been called once.
  template <module_like Model, class... Inputs>
  decltype(auto) forward(Model& model, Inputs&&... inputs) {
    const void* const counts = c10::GradMode::is_enabled() && shared_->learns(module_of(model))
                                   ? static_cast<const void*>(&module_of(model))
                                   : nullptr;
    if (counts != nullptr) {
      refresh();
      shared_->forward_begins(counts);
    }
    if constexpr (std::is_void_v<decltype(call_forward(model, std::forward<Inputs>(inputs)...))>) {
      call_forward(model, std::forward<Inputs>(inputs)...);
      if (counts != nullptr) shared_->forward_passed(counts);
    } else {
      decltype(auto) output = call_forward(model, std::forward<Inputs>(inputs)...);
      if (counts != nullptr) shared_->forward_passed(counts);
      return output;
    }
  }

  /// From the next communication on. The same on every rank. One that has begun (see
  /// `optim::start`) is what it was.
  /// \throws usage_error if the topology does not fit, unless `on_round` takes its place.
  void communication(communication_type next) { shared_->mixing().type(next); }
  [[nodiscard]] communication_type communication() const noexcept {
    return shared_->mixing().type();
  }

  /// Takes the place of the topology in the next communication to begin, on this rank: with
  /// `start::after_forward` call it before the window's last forward.
  /// \throws usage_error if a rank or weight is wrong.
  void next(neighborhood links) { shared_->mixing().next(std::move(links)); }

  /// Takes the place of the topology from the next communication on, on this rank: each time that a
  /// neighbour communication begins, `choose(round())` says with whom and with which weights; ranks
  /// for `neighbor_allreduce`, machines for `hierarchical_neighbor_allreduce`. `next` goes first.
  /// \param choose  an empty function gives the topology its place back.
  void on_round(std::function<neighborhood(std::int64_t)> choose) {
    shared_->mixing().on_round(std::move(choose));
  }

  /// \return how many neighbour communications have begun: the schedule's next round.
  [[nodiscard]] std::int64_t round() const noexcept { return shared_->mixing().round(); }

  /// \return the passes counted since the last communication.
  [[nodiscard]] int passes_since_communication() const noexcept {
    return shared_->counter().passes();
  }
  /// Begins to count anew, e.g. where an epoch's end cut a window; nothing is averaged for it. The
  /// same on every rank.
  void reset_passes() { shared_->cut(); }
  /// Averages the parameters now, whatever has been counted, and begins to count anew. Collective.
  void flush() {
    shared_->end_inside();
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

  /// Averages as `step()` would, if it would, and does not adapt: this rank leaves its gradients
  /// out without leaving the others alone.
  void skip_step() override {
    expects(!shared_->steps_inside(), shared_->plan().optimizer,
            ": a step that the backward has taken cannot be skipped (start::inside_backward)");
    shared_->step_began();
    refresh();
    if (shared_->counter().due()) {
      shared_->send_all();
      shared_->apply();
    }
    shared_->step_ended();
  }
  step_kind settle_gradients() override {
    expects(!shared_->steps_inside(), shared_->plan().optimizer,
            ": start::inside_backward steps before gradients can be unscaled or checked");
    return shared_->due() && communication() != communication_type::none ? step_kind::mixing
                                                                         : step_kind::local;
  }
  [[nodiscard]] bool reduces_gradients() const noexcept override { return false; }
  [[nodiscard]] std::weak_ptr<const void> identity() const noexcept override { return shared_; }

  /// Writes what the user's optimizer writes, where in the schedule it is, and how many passes
  /// steps have used since the last communication. Neither gradients nor what is on its way are
  /// part of it: whoever loads it sends the same again.
  void save(torch::serialize::OutputArchive& archive) const override {
    Inner::save(archive);
    const auto at = shared_->mixing().position();
    write_number(archive, "bluefog_round", at.round);
    write_number(archive, "bluefog_communications", at.communications);
    write_passes(archive, shared_->counter());
  }
  /// Loads what `save` wrote; the same on every rank. An archive of the user's optimizer alone is
  /// fine too: the schedule then begins anew, and so does the window. Between `step()` and the next
  /// pass: later the window stays as it is.
  void load(torch::serialize::InputArchive& archive) override {
    Inner::load(archive);
    shared_->mixing().drop();
    shared_->mixing().position(
        {read_number(archive, "bluefog_round"), read_number(archive, "bluefog_communications")});
    pass_counter& counter = shared_->counter();
    if (counter.unused() > 0) return;
    read_passes(archive, counter);
    counter.stepped();
  }

 protected:
  using shared_type = averaging<Backend, Topology>;

  template <module_like Model>
  averaging_optimizer(Inner inner, const Model& model, communicator<Backend>& comm,
                      Topology topology, averaging_plan plan)
      : Inner(std::move(inner)) {
    refuse_line_search<Inner>();
    expects(plan.start != start::inside_backward || steps_parameters_apart<Inner>, plan.optimizer,
            ": start::inside_backward is for torch's SGD, Adam, AdamW, RMSprop and Adagrad");
    shared_ = std::make_shared<shared_type>(std::move(plan), comm, std::move(topology));
    shared_->adopt(this->param_groups(), module_of(model), shared_);
    announce();
  }
  averaging_optimizer(averaging_optimizer&& other) noexcept
      : Inner(std::move(other)), shared_(std::move(other.shared_)) {
    announce();
  }

  [[nodiscard]] shared_type& shared() noexcept { return *shared_; }
  void refresh() { shared_->refresh(this->param_groups(), shared_); }

 private:
  [[nodiscard]] communicator<Backend>& group() const noexcept override {
    return shared_->mixing().comm();
  }
  void finish(transfer& started) override { shared_->mixing().wait(started); }

  // Says where this optimizer is, to those that step it inside a backward.
  void announce() {
    shared_->stepping({[this] { Inner::step(); },
                       [this]() -> typename shared_type::groups& { return this->param_groups(); }});
  }

  std::shared_ptr<shared_type> shared_;
};

}  // namespace bluefog::optim::detail
