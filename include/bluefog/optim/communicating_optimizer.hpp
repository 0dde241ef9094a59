// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace bluefog::optim {

/// What the coming `step()` of an optimizer that communicates does.
enum class step_kind : std::uint8_t {
  local,   ///< communicates nothing
  mixing,  ///< averages parameters; the gradients are this rank's
  reduced  ///< uses gradients that are those of all ranks
};

/// The face that optimizers which communicate share, whatever they are made of: what has to be
/// known, and done, to leave out a step without leaving the other ranks alone.
///
/// Every optimizer of this library has it beside `torch::optim::Optimizer`, so it is found through
/// a reference to that one too.
class communicating_optimizer {
 public:
  communicating_optimizer() = default;
  communicating_optimizer(const communicating_optimizer&) = default;
  communicating_optimizer(communicating_optimizer&&) = default;
  communicating_optimizer& operator=(const communicating_optimizer&) = default;
  communicating_optimizer& operator=(communicating_optimizer&&) = default;
  virtual ~communicating_optimizer() = default;

  /// Waits until the gradients are those that the coming step uses; the step then does not
  /// synchronize again. Collective if that step uses reduced gradients.
  virtual step_kind settle_gradients() = 0;

  /// In place of a `step()`: communicates and counts as it would, but does not adapt. Collective
  /// where that step would be.
  virtual void skip_step() = 0;

  /// \return whether gradients travel, so that ranks must not scale them differently.
  [[nodiscard]] virtual bool reduces_gradients() const noexcept = 0;

  /// \return how many ranks share the training.
  [[nodiscard]] virtual int ranks() const noexcept = 0;

  /// \return whether all ranks took part in the communication before, none of them only to answer;
  ///         the same on those that did.
  [[nodiscard]] virtual bool all_present() const noexcept { return true; }

  /// Collective. \return the highest of all ranks' numbers.
  [[nodiscard]] virtual int highest(int own) = 0;

  /// Collective. \return every rank's `values`, equally many of each, in rank order.
  [[nodiscard]] virtual std::vector<double> of_every_rank(const std::vector<double>& values) = 0;

  /// What the optimizer has saved and loaded is one rank's now, on all ranks: what has to sum to
  /// zero over them begins anew. Local, on every rank.
  virtual void state_replaced() {}

  /// \return what is this optimizer's own, and moves with it; another one, on all ranks, once ranks
  ///         have taken different numbers of steps.
  [[nodiscard]] virtual std::weak_ptr<const void> identity() const noexcept = 0;
};

}  // namespace bluefog::optim
