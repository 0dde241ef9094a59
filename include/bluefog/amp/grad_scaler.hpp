// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <bluefog/amp/grad_scaler_state.hpp>
#include <bluefog/amp/unscale.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/communicating_optimizer.hpp>

namespace bluefog::amp {

/// Scales losses so that gradients in 16 bits neither vanish nor overflow for long: one per
/// training loop, for all its optimizers. Scale for scale what Python's `torch.amp.GradScaler`
/// does.
///
/// Per update: `scale(loss).backward()`; perhaps `unscale_(optimizer)`, to clip; `step(optimizer)`
/// for each optimizer, which leaves the step out if a gradient is not finite; one `update()`. The
/// scale stays the same over all backwards that are added up.
///
/// With an optimizer that communicates, also if it is given as a `torch::optim::Optimizer&`:
/// - `gradient_allreduce` is synchronized first. An infinity on one rank has then reached them all,
///   so all leave out the step, without a message for it, and their window ends.
/// - `adapt_with_combine`, `adapt_then_combine`: in a step that communicates ranks tell
///   one another, and all leave it out or none; the averaging takes place in any case. In a local
///   step each rank decides for itself, and `update()` leaves the scale alone: what was found joins
///   in the next step that communicates, so a window counts as one update and the scale is always
///   the same on all ranks. On one rank every step decides.
/// - The first step that communicates, with no rank in `gradient_allreduce::join()`, compares the
///   ranks' options and scales. So does the first one after a join, in which ranks may have updated
///   at different times: `scaler.load_state_dict(broadcast_object(comm, scaler.state_dict(),
///   optimizer.join()))`.
/// - With `communication_type::none` on several ranks no step decides, so a scale that is too large
///   does not shrink: take `agreement::local`.
///
/// A plain optimizer of gradients that `nn::distributed_data_parallel` averages compares nothing:
/// `scaler.load_state_dict(broadcast_object(comm, scaler.state_dict(), 0))` makes ranks alike.
class grad_scaler {
 public:
  /// \throws usage_error if a factor is on the wrong side of 1, or the scale not positive
  ///         and finite in float32.
  explicit grad_scaler(const grad_scaler_options& options = {})
      : options_(options), scale_(usable("init_scale", options.init_scale)) {
    expect_factors(options.growth_factor, options.backoff_factor, options.growth_interval);
  }

  /// \return the outputs times the scale, in float32 at least.
  [[nodiscard]] at::Tensor scale(const at::Tensor& outputs) {
    if (!enabled()) return outputs;
    used_ = true;
    const bool narrow =
        outputs.scalar_type() == at::kHalf || outputs.scalar_type() == at::kBFloat16;
    return (narrow ? outputs.to(at::kFloat) : outputs) *
           at::full({}, scale_, outputs.options().dtype(at::kFloat).requires_grad(false));
  }
  [[nodiscard]] std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs) {
    std::vector<at::Tensor> scaled;
    for (const at::Tensor& each : outputs) scaled.push_back(scale(each));
    return scaled;
  }

  /// Divides the optimizer's gradients by the scale and looks whether they are finite. Called by
  /// `step()` unless it has been called. Collective where the optimizer's coming step communicates.
  /// \throws usage_error if it has been called since the last `update()`, or nothing was scaled;
  ///         mismatch_error, on every rank and with both values, if the ranks' options or scales
  ///         differ.
  void unscale_(torch::optim::Optimizer& optimizer);

  /// Steps, unless a gradient is not finite. Collective where `optimizer.step()` would be.
  /// \return whether the optimizer has stepped.
  /// \throws usage_error if it has been called since the last `update()`, or nothing was scaled.
  bool step(torch::optim::Optimizer& optimizer);

  /// After the steps of all optimizers: shrinks the scale if one was left out, and grows it after
  /// `growth_interval` updates without that. \throws usage_error if nothing has been unscaled.
  void update();
  /// Goes on with another scale, the same on every rank. Not between the backwards of a window: the
  /// gradients that are there keep the scale they have, which is not noticed.
  void update(double new_scale);

  [[nodiscard]] bool enabled() const noexcept { return options_.enabled; }
  /// \return the scale; 1 if not enabled.
  [[nodiscard]] double get_scale() const noexcept { return enabled() ? scale_ : 1; }
  /// \return the updates in a row that were finite, since the scale has last changed.
  [[nodiscard]] std::int64_t get_growth_tracker() const noexcept { return tracker_; }
  /// \return whether the optimizer's gradients have been unscaled and not been stepped on.
  [[nodiscard]] bool unscaled(const torch::optim::Optimizer& optimizer) const {
    const auto found = records_.find(key_of(optimizer));
    return found != records_.end() && found->second.at == stage::unscaled;
  }

  /// To be called after `update()`, not before.
  [[nodiscard]] grad_scaler_state state_dict() const {
    grad_scaler_state state{scale_, options_.growth_factor, options_.backoff_factor,
                            options_.growth_interval, tracker_};
    state.overflowed = carried_;
    return state;
  }
  /// The same on every rank, but for `overflowed`. \throws usage_error if no scaler can have it.
  void load_state_dict(const grad_scaler_state& state);

  /// For `torch::save` and `torch::load`.
  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const grad_scaler& scaler) {
    return archive << scaler.state_dict();
  }
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    grad_scaler& scaler) {
    grad_scaler_state state;
    archive >> state;
    scaler.load_state_dict(state);
    return archive;
  }

 private:
  enum class stage : std::uint8_t { ready, unscaled, stepped };

  // What has become of one optimizer since the last update().
  struct record {
    stage at = stage::ready;
    bool skip = false;      // its step is left out
    bool decides = false;   // its step has a say in the scale, the same on all ranks
    bool overflow = false;  // the scale is too large
  };

  // What an optimizer is known by: one that communicates may move between two calls.
  [[nodiscard]] static const void* key_of(const torch::optim::Optimizer& optimizer) {
    const auto* const shared = dynamic_cast<const optim::communicating_optimizer*>(&optimizer);
    return shared != nullptr ? shared->identity().lock().get() : &optimizer;
  }
  // Whether overflows are this rank's own business.
  [[nodiscard]] bool decides_alone(const optim::communicating_optimizer& optimizer) const {
    return options_.agreement == agreement::local && !optimizer.reduces_gradients();
  }
  [[nodiscard]] static float usable(std::string_view name, double scale) {
    const auto narrow = static_cast<float>(scale);
    expects(narrow > 0 && std::isfinite(narrow), "grad_scaler: ", name,
            " must be positive and finite in float32, got ", scale);
    return narrow;
  }
  static void expect_factors(double growth, double backoff, std::int64_t interval) {
    expects(growth > 1, "grad_scaler: growth_factor must be above 1, got ", growth);
    expects(backoff > 0 && backoff < 1, "grad_scaler: backoff_factor must be between 0 and 1, got ",
            backoff);
    expects(interval >= 1, "grad_scaler: growth_interval must be at least 1, got ", interval);
  }
  void expect_scaled(std::string_view call) const {
    expects(used_, "grad_scaler: ", call,
            " without scale(): call backward() on what scale(loss) returns");
  }
  void expect_alike(optim::communicating_optimizer& optimizer);

  grad_scaler_options options_;
  float scale_;
  std::int64_t tracker_ = 0;
  bool used_ = false;
  bool carried_ = false;  // a local step of this rank has overflowed, and no other rank knows
  std::map<const void*, record> records_;            // by what `key_of` tells
  std::vector<std::weak_ptr<const void>> compared_;  // optimizers whose ranks have this state
};

inline void grad_scaler::unscale_(torch::optim::Optimizer& optimizer) {
  auto* const shared = dynamic_cast<optim::communicating_optimizer*>(&optimizer);
  if (!enabled()) {
    if (shared != nullptr && shared->settle_gradients() != optim::step_kind::local)
      expect_alike(*shared);
    return;
  }
  expect_scaled("unscale_()");
  record& it = records_[key_of(optimizer)];
  expects(it.at == stage::ready, "grad_scaler: unscale_() ",
          it.at == stage::unscaled ? "twice" : "after step()", " since the last update()");
  const auto kind = shared != nullptr ? shared->settle_gradients() : optim::step_kind::local;
  const bool alone = shared == nullptr || shared->ranks() == 1 || decides_alone(*shared);
  if (kind != optim::step_kind::local) expect_alike(*shared);

  const bool finite =
      unscale_and_check(detail::gradients_of(optimizer), 1 / static_cast<double>(scale_));
  it = {.at = stage::unscaled, .skip = !finite, .decides = true, .overflow = !finite};
  if (alone || kind == optim::step_kind::reduced) return;
  if (kind == optim::step_kind::local) {
    it.decides = false;
    carried_ = carried_ || !finite;
    return;
  }
  // One number says both: 2 = a gradient of this step is not finite, 1 = one of a local step was.
  const int highest = shared->highest(!finite ? 2 : carried_ ? 1 : 0);
  it.skip = highest == 2;
  it.overflow = highest >= 1;
  carried_ = false;
}

inline bool grad_scaler::step(torch::optim::Optimizer& optimizer) {
  if (!enabled()) {
    unscale_(optimizer);
    optimizer.step();
    return true;
  }
  expect_scaled("step()");
  record& it = records_[key_of(optimizer)];
  expects(it.at != stage::stepped, "grad_scaler: step() twice since the last update()");
  if (it.at == stage::ready) unscale_(optimizer);
  it.at = stage::stepped;
  if (!it.skip) {
    optimizer.step();
    return true;
  }
  auto* const shared = dynamic_cast<optim::communicating_optimizer*>(&optimizer);
  if (shared != nullptr) shared->skip_step();
  return false;
}

inline void grad_scaler::update() {
  if (!enabled()) return;
  expect_scaled("update()");
  bool any = false, decided = false, overflow = false;
  for (const auto& [optimizer, it] : records_) {
    any = any || it.at != stage::ready;
    decided = decided || it.decides;
    overflow = overflow || (it.decides && it.overflow);
  }
  expects(any, "grad_scaler: update() before any unscale_() or step()");
  records_.clear();
  if (!decided) return;  // local steps only
  if (overflow) {
    scale_ = static_cast<float>(static_cast<double>(scale_) * options_.backoff_factor);
    tracker_ = 0;
  } else if (++tracker_ == options_.growth_interval) {
    const auto grown = static_cast<float>(static_cast<double>(scale_) * options_.growth_factor);
    if (std::isfinite(grown)) scale_ = grown;
    tracker_ = 0;
  }
}

inline void grad_scaler::update(double new_scale) {
  if (!enabled()) return;
  expect_scaled("update()");
  scale_ = usable("a new scale", new_scale);
  carried_ = false;
  records_.clear();
  compared_.clear();
}

inline void grad_scaler::load_state_dict(const grad_scaler_state& state) {
  if (!enabled()) return;
  expect_factors(state.growth_factor, state.backoff_factor, state.growth_interval);
  const float scale = usable("a loaded scale", state.scale);
  expects(state.growth_tracker >= 0,
          "grad_scaler: a loaded growth_tracker must not be negative, got ", state.growth_tracker);
  options_.growth_factor = state.growth_factor;
  options_.backoff_factor = state.backoff_factor;
  options_.growth_interval = state.growth_interval;
  scale_ = scale;
  tracker_ = state.growth_tracker;
  carried_ = state.overflowed;
  compared_.clear();
}

inline void grad_scaler::expect_alike(optim::communicating_optimizer& optimizer) {
  if (optimizer.ranks() == 1) return;
  const auto own = optimizer.identity();
  std::erase_if(compared_, [](const auto& other) { return other.expired(); });
  for (const auto& other : compared_)
    if (!other.owner_before(own) && !own.owner_before(other)) return;
  if (!optimizer.all_present()) return;  // those that only answer would not hear of it
  constexpr std::array<std::string_view, 7> names{
      "enabled",        "agreement",       "the scale",         "growth_factor",
      "backoff_factor", "growth_interval", "the growth tracker"};
  std::vector<double> values{enabled() ? 1.0 : 0.0,
                             enabled() && decides_alone(optimizer) ? 1.0 : 0.0};
  if (values == std::vector{1.0, 0.0})
    values.insert(values.end(),
                  {scale_, options_.growth_factor, options_.backoff_factor,
                   static_cast<double>(options_.growth_interval), static_cast<double>(tracker_)});
  values.resize(names.size());  // where ranks decide alone, or nothing is scaled, the rest is free
  const auto all = optimizer.of_every_rank(values);
  for (std::size_t i = names.size(); i < all.size(); ++i) {
    const std::size_t field = i % names.size();
    expects<mismatch_error>(all[i] == all[field], "grad_scaler: ranks differ: ", names[field],
                            " is ", all[field], " on rank 0 and ", all[i], " on rank ",
                            i / names.size(), "; give every rank the same options and state");
  }
  compared_.push_back(own);
}

}  // namespace bluefog::amp
