// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/logger.hpp>
#include <bluefog/optim/communicates_over.hpp>
#include <bluefog/optim/communicating_optimizer.hpp>
#include <bluefog/optim/gradient_reducer.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/optim/pass_counter.hpp>
#include <bluefog/optim/saved_numbers.hpp>

namespace bluefog::optim {

/// Averages gradients over all ranks, then takes the user's step: n ranks behave as one with an
/// n-fold batch (what Horovod's optimizer does).
///
/// Gradients are reduced in buckets, each as soon as it is complete, beside the rest of the
/// backward; after the first one in the order of rank 0's backward. The last bucket leaves in
/// `step()`. Once another model's loss has run through the parameters, as a generator's does
/// through its discriminator, all of them leave in `step()`: a backward does not know whose it is.
///
/// *Is* the user's optimizer, with its state. With `backward_passes_per_step` = J the sum of J
/// backwards is reduced once. A window that contains a local step ends by averaging parameters
/// instead; from then on momenta may differ over ranks, so later windows average parameters as
/// well, until `broadcast_from` makes replicas equal. They are equal after every step that
/// communicates. Construction and steps that communicate are collective.
///
/// Parameters may be added, frozen and unfrozen on all ranks alike; where ranks differ in that, the
/// next step that communicates is a mismatch_error on all of them, which names the parameter. If a
/// reduction of gradients fails, the step throws, the parameters are unchanged and the gradients
/// unspecified; if an averaging of parameters fails, those are.
///
/// \tparam Inner  the user's optimizer, moved in; not LBFGS.
template <steppable Inner, backend Backend>
class gradient_allreduce : public Inner, public detail::communicates_over<Backend> {
 public:
  /// Makes the `step()` in its scope not synchronize again.
  class [[nodiscard]] skip_guard {
   public:
    explicit skip_guard(std::shared_ptr<bool> flag) noexcept : flag_(std::move(flag)) {
      *flag_ = true;
    }
    skip_guard(skip_guard&&) noexcept = default;
    skip_guard(const skip_guard&) = delete;
    skip_guard& operator=(const skip_guard&) = delete;
    skip_guard& operator=(skip_guard&&) = delete;
    ~skip_guard() {
      if (flag_) *flag_ = false;
    }

   private:
    std::shared_ptr<bool> flag_;
  };

  /// \param inner  the user's optimizer, moved in.
  /// \param model  gives the parameters their names.
  /// \param comm   used here only: the wrapper makes communicators of its own from it.
  /// \throws usage_error if an option is wrong; mismatch_error, on every rank, if the ranks'
  ///         parameters differ.
  template <module_like Model>
  gradient_allreduce(Inner inner, const Model& model, communicator<Backend>& comm,
                     gradient_allreduce_options options = {})
      : Inner(std::move(inner)),
        shared_(std::make_shared<detail::gradient_reducer<Backend>>(comm, options)) {
    detail::refuse_line_search<Inner>();
    shared_->adopt(this->param_groups(), module_of(model), shared_);
  }

  /// Calls the model's forward and returns what it returns.
  template <module_like Model, class... Inputs>
  decltype(auto) forward(Model& model, Inputs&&... inputs) {
    if (c10::GradMode::is_enabled()) refresh();
    return call_forward(model, std::forward<Inputs>(inputs)...);
  }

  /// Waits until the gradients are those of all ranks; applies nothing. Collective. Between this
  /// and `step()` is where gradients are clipped: one that is changed before, when it has been
  /// sent, is used as it was sent, and the log says so once, as far as that is noticed.
  void synchronize() {
    refresh();
    shared_->synchronize();
  }

  /// `{ auto guard = optimizer.skip_synchronize(); optimizer.step(); }` after `synchronize()`.
  skip_guard skip_synchronize() noexcept { return skip_guard(skip_); }

  /// Reduces the gradients, if this step is to communicate, and takes the user's step.
  /// \param closure  evaluates the loss, with gradients; called once, first.
  /// \return the closure's loss.
  at::Tensor step(typename Inner::LossClosure closure = nullptr) override {
    const at::Tensor loss = detail::evaluate(closure);
    shared_->step_began();
    refresh();
    expects(!ended() || shared_->synchronized(),
            "gradient_allreduce: step() after the ranks have stopped; call join() first");
    if (next_is_local()) {
      shared_->local_step_begins();
      Inner::step();
      shared_->local_step_taken();
      return loss;
    }
    if (shared_->local_steps()) {  // replicas have drifted apart: gradients no longer suffice
      shared_->local_step_begins();
      Inner::step();
      shared_->average_replicas();
    } else {
      if (shared_->synchronized() && !*skip_ && !shared_->step_announced()) warn_of_missing_guard();
      reduced_step();
    }
    shared_->window_ended();
    return loss;
  }

  /// Communicates as `step()` would, if it would, and does not adapt: gradients that are not finite
  /// are dropped, and with them the window.
  void skip_step() override {
    shared_->step_began();
    refresh();
    if (next_is_local()) return shared_->local_step_taken();  // others may have stepped
    if (shared_->local_steps())
      shared_->average_replicas();
    else
      shared_->synchronize();
    shared_->window_ended();
  }
  step_kind settle_gradients() override {
    expects(shared_->options().local_max_norm == 0,
            "gradient_allreduce: local_max_norm is a norm of gradients that are not scaled; with a "
            "grad_scaler clip after unscale_");
    if (!shared_->synchronized() && next_is_local()) return step_kind::local;
    if (shared_->local_steps()) return step_kind::mixing;
    synchronize();
    shared_->announce_step();
    return ended() ? step_kind::local : step_kind::reduced;
  }
  [[nodiscard]] bool reduces_gradients() const noexcept override { return true; }
  [[nodiscard]] bool all_present() const noexcept override { return shared_->all_present(); }
  [[nodiscard]] std::weak_ptr<const void> identity() const noexcept override { return identity_; }

  /// Ends a window that was cut short, e.g. by the end of an epoch: reduces and steps. Collective,
  /// also where this rank has nothing to end: it then brings zeros to the average over all ranks,
  /// and takes the same step. No rank steps if none has anything.
  void flush() {
    refresh();
    const step_kind rest = shared_->synchronize_rest();
    if (rest == step_kind::mixing) {
      shared_->local_step_begins();
      if (shared_->counter().unused() > 0) Inner::step();
      shared_->average_replicas();
    } else if (rest == step_kind::reduced) {
      reduced_step();
    }
    shared_->window_ended();
  }

  /// Says that this rank has no more batches in this epoch. Collective: ranks may call it at
  /// different times, and it returns on all when all have called it.
  ///
  /// With `uneven::zeros` this rank answers the other ranks' reductions with zeros until they have
  /// joined too, without taking their steps; then parameters and the optimizer's state become those
  /// of the rank that joined last. With `uneven::stop` the step that the others are at is given up
  /// on all ranks, and `ended()` tells them to leave their loop and join as well. A window that has
  /// begun is flushed first. Averages divide by the number of all ranks.
  ///
  /// \return the rank that joined last; of several at once the highest. Buffers and everything
  ///         else that it alone has up to date can be broadcast from it.
  /// \throws usage_error if steps could be local in the middle of a window (J > 1 with
  ///         `partial_window::local`): what to answer would be unknown.
  int join() {
    const auto& options = shared_->options();
    expects(
        options.backward_passes_per_step == 1 || options.partial_window != partial_window::local,
        "gradient_allreduce: join() cannot answer local steps; with backward_passes_per_step ",
        options.backward_passes_per_step, " set partial_window to flush or error");
    expects(!shared_->states_differ(),
            "gradient_allreduce: join() after local steps; call broadcast_from() first");
    if (!ended() && shared_->counter().passes() > 0) flush();
    while (!shared_->ended()) {
      Inner::zero_grad();
      refresh();
      shared_->answer();
    }
    shared_->window_ended();
    const int last = shared_->last();
    if (options.uneven == uneven::zeros) broadcast_from(last);
    shared_->begin_anew();
    identity_ = std::make_shared<const int>();  // ranks have taken different numbers of steps
    return last;
  }

  /// \return whether, with `uneven::stop`, a rank has run out of batches: the last `step()` has
  ///         changed nothing, and the loop must be left for `join()`. The same on every rank.
  [[nodiscard]] bool ended() const noexcept { return shared_->ended(); }

  /// Makes the parameters, and the optimizer's options and state, those of `root`: replicas are
  /// then equal, whatever each of them did before. Collective.
  void broadcast_from(int root) {
    refresh();
    shared_->broadcast_from(root, *this);
  }

  /// As the user's optimizer's. \throws usage_error if a backward would be lost that no step used.
  /// Where gradients are cleared without this, the next backward or step is what throws; not where
  /// they were set to zero in place, which a sum of backwards may come to by itself.
  void zero_grad(bool set_to_none = true) {
    shared_->expect_nothing_lost();
    refresh();
    Inner::zero_grad(set_to_none);
  }

  /// \return the backwards counted since the last communication.
  [[nodiscard]] int passes_since_communication() const noexcept {
    return shared_->counter().passes();
  }
  /// Begins to count anew. The same on every rank.
  void reset_passes() { shared_->window_ended(); }

  void save(torch::serialize::OutputArchive& archive) const override {
    Inner::save(archive);
    detail::write_number(archive, "bluefog_states_differ", shared_->states_differ());
    detail::write_number(archive, "bluefog_local_steps", shared_->local_steps());
    detail::write_passes(archive, shared_->counter());
  }
  /// An archive of the user's optimizer alone is fine too: a window then begins. Between `step()`
  /// and the next backward: later the window stays as it is.
  void load(torch::serialize::InputArchive& archive) override {
    Inner::load(archive);
    detail::pass_counter& counter = shared_->counter();
    if (counter.unused() == 0 && !shared_->synchronized()) {
      shared_->window_ended();
      detail::read_passes(archive, counter);
      if (detail::read_number(archive, "bluefog_local_steps") != 0)
        shared_->local_step_taken();
      else
        counter.stepped();
    }
    shared_->states_differ(detail::read_number(archive, "bluefog_states_differ") != 0);
  }

 private:
  [[nodiscard]] communicator<Backend>& group() const noexcept override { return shared_->comm(); }

  // Whether a step made now steps with this rank's gradients alone. Throws if that is an error.
  [[nodiscard]] bool next_is_local() const {
    if (shared_->due() || shared_->synchronized()) return false;
    const auto policy = shared_->options().partial_window;
    expects(policy != partial_window::error, "gradient_allreduce: step() after ",
            shared_->counter().passes(), " of ", shared_->counter().wanted(),
            " backwards, of which the gradient of parameter \"", shared_->first_with_gradient(),
            "\" is the sum");
    return policy == partial_window::local;
  }

  // Takes in what has become of the parameters, unless gradients are just what they should be.
  void refresh() {
    if (!shared_->synchronized()) shared_->refresh(this->param_groups());
  }

  // With the gradients of all ranks, unless they have stopped.
  void reduced_step() {
    shared_->synchronize();
    if (ended()) return;
    Inner::step();
    if (shared_->states_differ()) shared_->average_parameters();
  }

  void warn_of_missing_guard() {
    if (std::exchange(*warned_, true)) return;
    logger::write(log_level::warning,
                  "gradient_allreduce: step() after synchronize() without skip_synchronize(); the "
                  "gradients are not reduced again");
  }

  std::shared_ptr<detail::gradient_reducer<Backend>> shared_;
  std::shared_ptr<const int> identity_ = std::make_shared<const int>();
  std::shared_ptr<bool> skip_ = std::make_shared<bool>(false);  // of guards too
  std::unique_ptr<bool> warned_ = std::make_unique<bool>(false);
};

}  // namespace bluefog::optim
