// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/optimizer.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/optim/agreement.hpp>
#include <bluefog/optim/communicating_optimizer.hpp>
#include <bluefog/optim/gradient_buckets.hpp>
#include <bluefog/optim/gradient_exchange.hpp>
#include <bluefog/optim/gradient_watch.hpp>
#include <bluefog/optim/module_buffers.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/optim/pass_counter.hpp>
#include <bluefog/optim/state.hpp>
#include <bluefog/tensor/arena.hpp>

namespace bluefog::optim::detail {

/// Reduces gradients over all ranks in buckets, as soon as they are ready. Hooks point to it.
template <backend Backend>
class gradient_reducer final : public gradient_listener {
 public:
  using groups = std::vector<torch::optim::OptimizerParamGroup>;
  static constexpr std::string_view name = "gradient_allreduce";

  gradient_reducer(communicator<Backend>& comm, const gradient_allreduce_options& options)
      : options_(options),
        exchange_(comm, packing(options)),
        counter_(name, "backward_passes_per_step", options.backward_passes_per_step,
                 options.on_miscount) {}

  [[nodiscard]] communicator<Backend>& comm() noexcept { return exchange_.comm(); }
  [[nodiscard]] pass_counter& counter() noexcept { return counter_; }
  [[nodiscard]] const gradient_allreduce_options& options() const noexcept { return options_; }
  /// \return the name of a parameter that has a gradient; empty if none has.
  [[nodiscard]] std::string_view first_with_gradient() const {
    for (const named_tensor& each : exchange_.parameters())
      if (each.tensor.grad().defined()) return each.name;
    return {};
  }

  /// Takes the optimizer's parameters as they are now. Collective.
  void adopt(const groups& all, const torch::nn::Module& module,
             const std::shared_ptr<gradient_reducer>& self) {
    known_ = parameters_of(module);
    if (options_.buffers == buffer_policy::average) buffers_ = module_buffers(module);
    exchange_.adopt(named_parameters(all, known_), self);
    expect_equal_parameters(name, comm(), named_list{buffers_.list()});
    expect_travelling(name, named_list{buffers_.list()}, /*frozen_too=*/true);
    signature_ = signature(all);
  }

  /// Between steps: takes in parameters that were added, frozen or unfrozen.
  void refresh(const groups& all) {
    if (!has_signature(all, signature_)) {
      for (auto& each : named_parameters(all, known_)) {
        const auto same = [&](const at::Tensor& other) { return other.is_same(each.tensor); };
        if (std::ranges::any_of(exchange_.parameters(), same, &named_tensor::tensor)) continue;
        exchange_.add(std::move(each));
      }
      signature_ = signature(all);
    }
    exchange_.refresh();
  }

  void backward_began(int number, bool anew) override {
    synchronized_ = step_announced_ = false;
    if (anew) forget_foreign();
    expect_nothing_cleared();
    any_pass_ = pass_since_step_ = true;
    counter_.count_backward(number);
    exchange_.spoil();  // what was sent, if anything was, lacks this one
  }

  void gradient_ready(std::size_t index) override {
    const c10::AutoGradMode no_grad(false);
    exchange_.ready(index, counter_.due() && !local_steps_ && !waits_for_step_);
    gradients_.arrived(index, exchange_.parameters()[index].tensor);
  }

  [[nodiscard]] bool changes_gradients() const noexcept override { return true; }

  /// \return whether gradients are the reduced ones, and no backward has come since.
  [[nodiscard]] bool synchronized() const noexcept { return synchronized_; }
  /// \return whether none of the ranks had joined in the last reduction.
  [[nodiscard]] bool all_present() const noexcept { return all_present_; }
  /// The next step knows that gradients are synchronized, whoever calls it.
  void announce_step() noexcept { step_announced_ = true; }
  [[nodiscard]] bool step_announced() const noexcept { return step_announced_; }
  /// \return whether a local step was made since the last communication.
  [[nodiscard]] bool local_steps() const noexcept { return local_steps_; }
  /// \return whether ranks have ever stepped apart, so that momenta may differ.
  [[nodiscard]] bool states_differ() const noexcept { return states_differ_; }
  void states_differ(bool known) noexcept { states_differ_ = known; }
  /// A step is about to be taken, and then was, with the gradients of this rank alone.
  void local_step_begins() {
    if (counter_.unused() > 0) clip();  // else they are still those of all ranks
  }
  void local_step_taken() {
    if (counter_.unused() > 0) local_steps_ = states_differ_ = true;
    counter_.stepped();
    gradients_.clear();
  }

  /// Makes a step count as a pass where there could be no other sign of one: gradients set by hand,
  /// or parameters reloaded just before the backward. \throws usage_error if a backward was lost.
  void step_began() {
    expect_nothing_cleared();
    if (step_is_pass()) counter_.count("step");
    pass_since_step_ = false;
  }
  /// \return whether a step made now would communicate. Without windows each does: the loss of
  ///         another rank may have reached parameters where this rank's has not.
  [[nodiscard]] bool due() const {
    return counter_.wanted() == 1 ||
           counter_.passes() + (step_is_pass() ? 1 : 0) >= counter_.wanted();
  }

  /// Reduces what is not yet reduced, in place. If it fails, the window is over.
  void synchronize() {
    if (synchronized_) return;
    expect_nothing_cleared();
    synchronized(reduce({.passes = std::max(1, counter_.passes()), .wanted = counter_.wanted()}));
  }

  /// The same where ranks may have counted differently: those without a backward bring zeros.
  /// \return what is left to do: to step with the gradients of all ranks, to average parameters
  ///         because some rank has stepped without the others, or nothing.
  [[nodiscard]] step_kind synchronize_rest() {
    if (synchronized_) return step_kind::reduced;
    expect_nothing_cleared();
    const auto result = reduce({.passes = counter_.passes(),
                                .wanted = counter_.wanted(),
                                .local_steps = local_steps_,
                                .states_differ = states_differ_});
    states_differ_ = result.states_differ;
    if (result.local_steps) return step_kind::mixing;
    synchronized(result);
    return result.passes > 0 ? step_kind::reduced : step_kind::local;
  }

  /// Takes part in the other ranks' next reduction, without a gradient of its own.
  void answer() {
    const auto result = reduce({.passes = 0, .wanted = counter_.wanted(), .joined = true});
    if (result.joined == exchange_.comm().size() || options_.uneven == uneven::stop) end(result);
  }

  /// \return whether ranks have stopped because one, or all, had no more data.
  [[nodiscard]] bool ended() const noexcept { return ended_; }
  /// \return the rank that had data for longest, once ranks have stopped.
  [[nodiscard]] int last() const noexcept { return last_; }
  /// The next epoch may begin.
  void begin_anew() {
    ended_ = false;
    exchange_.forget_joined();
  }

  /// Averages the parameters themselves, whose momenta may differ.
  void average_parameters() { exchange_.average_parameters(); }
  /// The same after steps with gradients of this rank alone, and the buffers.
  void average_replicas() {
    average_parameters();
    average_buffers(comm(), buffers_, /*takes_part=*/true, comm().size());
  }

  /// Makes parameters and the optimizer's state those of `root`. Collective.
  void broadcast_from(int root, torch::optim::Optimizer& optimizer) {
    exchange_.broadcast_from(root);
    broadcast_optimizer_state(exchange_.comm(), optimizer, root);
    states_differ_ = false;
  }

  /// A step has used the gradients, or they are given up.
  void window_ended() {
    exchange_.spoil();
    counter_.reset();
    synchronized_ = step_announced_ = local_steps_ = false;
    gradients_.clear();
  }

  /// Before gradients are cleared. \throws usage_error if that would lose a backward.
  void expect_nothing_lost() {
    if (synchronized_) return window_ended();
    forget_foreign();
    expect_none(counter_.pending(), ": zero_grad() would lose ");
  }

 private:
  [[nodiscard]] static bucket_options packing(const gradient_allreduce_options& options) {
    expects_bucket(name, options.bucket_bytes);
    expects(options.op == reduce_op::average || options.op == reduce_op::sum, name,
            ": gradients can be averaged or summed, got ", options.op);
    expects(options.local_max_norm >= 0, name, ": local_max_norm must not be negative, got ",
            options.local_max_norm);
    expects(options.predivide > 0, name, ": predivide must be positive, got ", options.predivide);
    return {.owner = name,
            .compression = options.compression,
            .op = options.op,
            .predivide = options.predivide,
            .bytes = options.bucket_bytes,
            .sparse_as_dense = options.sparse_as_dense};
  }

  void synchronized(const reduction_result& result) {
    synchronized_ = true;
    gradients_.clear();
    all_present_ = result.joined == 0;
    if (result.joined > 0 && options_.uneven == uneven::stop) end(result);
  }

  void end(const reduction_result& result) {
    ended_ = true;
    last_ = result.last;
  }

  reduction_result reduce(const contribution& own) {
    try {
      if (own.passes > 0) clip();
      const auto result = exchange_.reduce(own, options_.average_aggregated_gradients);
      if (result.joined == 0 || options_.uneven == uneven::zeros)
        average_buffers(comm(), buffers_, !own.joined, comm().size() - result.joined);
      return result;
    } catch (...) {
      window_ended();
      throw;
    }
  }

  // This rank's own gradients, which have not been sent yet then.
  void clip() {
    if (options_.local_max_norm == 0) return;
    std::vector<at::Tensor> all;
    for (const named_tensor& each : exchange_.parameters()) all.push_back(each.tensor);
    torch::nn::utils::clip_grad_norm_(all, options_.local_max_norm);
  }

  [[nodiscard]] bool step_is_pass() const {
    return !any_pass_ || (!pass_since_step_ && !synchronized_ && !exchange_.intact());
  }

  // Finds out whoever clears gradients by another zero_grad(). The window is then over.
  void expect_nothing_cleared() {
    const std::size_t lost = gradients_.lost() ? counter_.own_pending() : 0;
    if (lost > 0) window_ended();
    expect_none(lost, ": gradients were cleared, as by the module's zero_grad(), which lost ");
  }
  static void expect_none(std::size_t lost, std::string_view how) {
    expects(lost == 0, name, how, lost, lost == 1 ? " backward" : " backwards",
            " that no step() has used; call step(), or synchronize() first; reset_passes() gives "
            "them up");
  }

  // Drops backwards that only other optimizers stepped on. They may have sent other buckets on
  // other ranks, or none; with the next ones nothing travels before it is known whose they are.
  void forget_foreign() {
    const std::size_t before = counter_.pending();
    counter_.forget_foreign();
    if (before == 0 || counter_.pending() > 0) return;
    exchange_.spoil();
    gradients_.clear();
    waits_for_step_ = true;
  }

  gradient_allreduce_options options_;
  gradient_exchange<Backend> exchange_;
  module_buffers buffers_;  // those that are averaged
  pass_counter counter_;
  pending_gradients gradients_;
  std::vector<named_tensor> known_;  // the module's, for the names of parameters added later
  parameter_signature signature_;
  bool waits_for_step_ = options_.local_max_norm != 0;  // gradients travel in step()
  bool any_pass_ = false;
  bool pass_since_step_ = false;
  bool synchronized_ = false;
  bool all_present_ = true;
  bool step_announced_ = false;
  bool local_steps_ = false;
  bool states_differ_ = false;
  bool ended_ = false;
  int last_ = -1;
};

}  // namespace bluefog::optim::detail
