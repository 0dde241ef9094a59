// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/logger.hpp>
#include <bluefog/optim/agreement.hpp>
#include <bluefog/optim/gradient_buckets.hpp>
#include <bluefog/optim/gradient_watch.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/optim/pass_counter.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/tensor/arena.hpp>

namespace bluefog::optim::detail {

/// Reduces gradients over all ranks, bucket by bucket, as soon as they are ready. The hooks of the
/// parameters point to it, so it stays at one address.
template <backend Backend>
class gradient_reducer final : public gradient_listener {
 public:
  using groups = std::vector<torch::optim::OptimizerParamGroup>;
  static constexpr std::string_view name = "gradient_allreduce";

  gradient_reducer(communicator<Backend>& comm, const gradient_allreduce_options& options)
      : comm_(companion_of(comm, options)),
        options_(options),
        counter_(name, "backward_passes_per_step", options.backward_passes_per_step,
                 options.on_miscount) {}

  [[nodiscard]] communicator<Backend>& comm() noexcept { return comm_; }
  [[nodiscard]] pass_counter& counter() noexcept { return counter_; }
  [[nodiscard]] const gradient_allreduce_options& options() const noexcept { return options_; }

  /// Takes the optimizer's parameters as they are now.
  void adopt(const groups& all, const torch::nn::Module& module,
             const std::shared_ptr<gradient_reducer>& self) {
    names_ = named_parameters(all, module);
    rebuild(all, self);
    expect_equal_parameters(name, comm_, parameter_list(names_));
  }

  /// Between steps: takes in parameters that were added, frozen or unfrozen, on all ranks alike.
  void refresh(const groups& all, const std::shared_ptr<gradient_reducer>& self) {
    if (signature(all) == signature_) {
      buckets_.expect_unchanged();
      if (!watch_.intact()) watch(self);
      return;
    }
    for (const auto& added : named_parameters(all, torch::nn::Module())) {
      const auto same = [&](const at::Tensor& known) { return known.is_same(added.tensor); };
      if (!std::ranges::any_of(names_, same, &named_tensor::tensor)) names_.push_back(added);
    }
    buckets_.discard();
    rebuild(all, self);
  }

  void backward_began(int number, bool anew) override {
    synchronized_ = step_announced_ = false;
    if (anew) forget_foreign();
    if (buckets_.busy()) {  // one backward too many: what was sent lacks it, so it is sent again
      buckets_.discard();
      resend_ = true;
    }
    any_pass_ = pass_since_step_ = true;
    counter_.count_backward(number);
  }

  void gradient_ready(std::size_t index) override {
    if (!counter_.due() || resend_ || local_steps_) return;
    const c10::AutoGradMode no_grad(false);
    buckets_.put(index, comm_);
  }

  /// \return whether gradients are the reduced ones, and no backward has come since.
  [[nodiscard]] bool synchronized() const noexcept { return synchronized_; }
  /// The next step knows that gradients are synchronized, whoever calls it.
  void announce_step() noexcept { step_announced_ = true; }
  [[nodiscard]] bool step_announced() const noexcept { return step_announced_; }
  /// \return whether a local step was made since the last communication.
  [[nodiscard]] bool local_steps() const noexcept { return local_steps_; }
  /// \return whether ranks have ever stepped apart, so that momenta may differ.
  [[nodiscard]] bool states_differ() const noexcept { return states_differ_; }
  void states_differ(bool known) noexcept { states_differ_ = known; }
  /// A step was taken with the gradients of this rank alone.
  void local_step_taken() {
    // Without a new backward the gradients were still those of all ranks.
    if (counter_.unused() > 0) local_steps_ = states_differ_ = true;
    counter_.stepped();
  }

  /// Makes a step count as a pass where there could be no other sign of one: gradients set by hand,
  /// or parameters reloaded just before the backward.
  void step_began() {
    if (step_is_pass()) counter_.count("step");
    pass_since_step_ = false;
  }
  /// \return whether a step made now would communicate.
  [[nodiscard]] bool due() const {
    return counter_.passes() + (step_is_pass() ? 1 : 0) >= counter_.wanted();
  }

  /// Reduces what is not yet reduced and leaves the results in place. If it fails, the window is
  /// over.
  void synchronize() {
    if (synchronized_) return;
    const c10::AutoGradMode no_grad(false);
    const int passes = options_.average_aggregated_gradients ? std::max(1, counter_.passes()) : 1;
    try {
      buckets_.put_rest(comm_);
      buckets_.collect(passes);
    } catch (...) {
      window_ended();
      throw;
    }
    synchronized_ = true;
  }

  /// Averages the parameters themselves, after steps with gradients of this rank alone.
  void average_parameters() {
    const c10::AutoGradMode no_grad(false);
    std::vector<at::Tensor> values;
    for (const auto& each : names_)
      if (each.tensor.requires_grad()) values.push_back(each.tensor.detach());
    if (!values.empty()) allreduce_(comm_, std::span<const at::Tensor>(values));
  }

  /// A step has used the gradients, or they are given up.
  void window_ended() {
    if (buckets_.busy()) buckets_.discard();
    counter_.reset();
    synchronized_ = step_announced_ = false;
    resend_ = false;
    local_steps_ = false;
  }

  /// Before gradients are cleared. \throws usage_error if that would lose a backward.
  void expect_nothing_lost() {
    if (synchronized_) return window_ended();
    forget_foreign();
    const std::size_t lost = counter_.pending();
    expects(lost == 0, name, ": zero_grad() would lose ", lost,
            lost == 1 ? " backward" : " backwards",
            " that no step() has used; call step(), or synchronize() first; reset_passes() gives "
            "them up");
  }

 private:
  [[nodiscard]] static communicator<Backend> companion_of(
      communicator<Backend>& comm, const gradient_allreduce_options& options) {
    expects_bucket(name, options.bucket_bytes);
    expects(options.op == reduce_op::average || options.op == reduce_op::sum, name,
            ": gradients can be averaged or summed, got ", options.op);
    expects(options.predivide > 0, name, ": predivide must be positive, got ", options.predivide);
    return comm.companion();
  }

  /// Lists parameters like an arena, without moving them.
  struct parameter_list_view {
    const std::vector<named_tensor>& items;
    [[nodiscard]] std::size_t size() const { return items.size(); }
    [[nodiscard]] const std::string& name(std::size_t i) const { return items[i].name; }
    [[nodiscard]] const at::Tensor& tensor(std::size_t i) const { return items[i].tensor; }
  };
  [[nodiscard]] static parameter_list_view parameter_list(const std::vector<named_tensor>& items) {
    return {items};
  }

  [[nodiscard]] bool step_is_pass() const {
    return !any_pass_ || (!pass_since_step_ && !synchronized_ && !watch_.intact());
  }

  // Drops backwards that only other optimizers stepped on.
  void forget_foreign() {
    const std::size_t before = counter_.pending();
    counter_.forget_foreign();
    if (before == 0 || counter_.pending() > 0) return;
    if (buckets_.busy()) buckets_.discard();
    resend_ = false;
  }

  void rebuild(const groups& all, const std::shared_ptr<gradient_reducer>& self) {
    learning_.clear();
    for (const auto& each : names_)
      if (each.tensor.requires_grad()) learning_.push_back(each);
    buckets_ = gradient_buckets(learning_, options_);
    watch(self);
    signature_ = signature(all);
  }

  void watch(const std::shared_ptr<gradient_reducer>& self) {
    watch_ = gradient_watch(self);
    for (std::size_t i = 0; i < learning_.size(); ++i) watch_.add(learning_[i].tensor, i);
  }

  // Of its own: which bucket is sent when depends on the data, and so would the order among the
  // program's own operations.
  communicator<Backend> comm_;
  gradient_allreduce_options options_;
  pass_counter counter_;
  std::vector<named_tensor> names_;
  std::vector<named_tensor> learning_;
  std::vector<std::pair<const void*, bool>> signature_;
  bool any_pass_ = false;
  bool pass_since_step_ = false;
  bool synchronized_ = false;
  bool step_announced_ = false;
  bool resend_ = false;
  bool local_steps_ = false;
  bool states_differ_ = false;
  gradient_buckets buckets_;
  gradient_watch watch_;
};

}  // namespace bluefog::optim::detail
