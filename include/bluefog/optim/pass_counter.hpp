// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/core/error.hpp>
#include <bluefog/core/logger.hpp>
#include <bluefog/optim/backward_ledger.hpp>
#include <bluefog/optim/options.hpp>

namespace bluefog::optim::detail {

/// Counts the passes (forwards, or backwards) since the last communication.
class pass_counter {
 public:
  /// \param optimizer  the wrapper's name, for messages; static storage.
  /// \param option     the name of the option that J comes from; static storage.
  /// \param wanted     J, the passes per communication.
  /// \throws usage_error if J is less than 1.
  pass_counter(std::string_view optimizer, std::string_view option, int wanted,
               miscount on_miscount)
      : optimizer_(optimizer), option_(option), wanted_(wanted), on_miscount_(on_miscount) {
    expects(wanted >= 1, optimizer, ": ", option, " must be at least 1, got ", wanted);
  }

  /// Counts one pass. \param kind  "forward", "backward" or "step".
  /// \throws usage_error if J passes have been counted already and that is to be raised. Backwards
  ///         that another optimizer has stepped on do not make it too many: as many as the
  ///         generator's may reach a discriminator before it clears its gradients.
  void count(std::string_view kind) {
    if (passes_ >= wanted_)
      if (const int own = passes_ - foreign(); own >= wanted_) complain(kind, own + 1);
    ++passes_;
    ++unused_;
  }
  /// Counts a forward of `model`. Forwards of several models, each once, are one pass of all.
  /// \return whether it is the first of a new pass.
  bool count_forward(const void* model) {
    int& own = forwards_of(model);
    const bool first = own == most_forwards_;
    if (first) {
      count("forward");
      ++most_forwards_;
    }
    ++own;
    return first;
  }
  /// \return whether the next forward of `model` makes the next step communicate.
  [[nodiscard]] bool due_with_forward(const void* model) {
    return forwards_of(model) == most_forwards_ && passes_ + 1 == wanted_;
  }
  /// Counts a backward. \param number  the autograd engine's, unique in this process.
  void count_backward(int number) {
    count("backward");
    pending_.push_back(number);
  }

  /// \return whether the next step communicates.
  [[nodiscard]] bool due() const noexcept { return passes_ >= wanted_; }
  /// \return whether the last pass was the one that makes the next step communicate.
  [[nodiscard]] bool just_due() const noexcept { return passes_ == wanted_; }
  [[nodiscard]] int passes() const noexcept { return passes_; }
  [[nodiscard]] int wanted() const noexcept { return wanted_; }
  /// \return how many passes no step has used yet.
  [[nodiscard]] int unused() const noexcept { return unused_; }
  /// \return how many backwards no step has used yet.
  [[nodiscard]] std::size_t pending() const noexcept { return pending_.size(); }
  /// \return how many of them no other optimizer has stepped on either.
  [[nodiscard]] std::size_t own_pending() const {
    return pending_.size() - static_cast<std::size_t>(foreign());
  }

  /// A step has used the gradients that are there; the window goes on.
  void stepped() {
    backward_ledger::consume(std::exchange(pending_, {}));
    unused_ = 0;
  }
  /// The window is over.
  void reset() {
    stepped();
    passes_ = most_forwards_ = 0;
    forwards_.clear();
  }
  /// Gradients have been cleared: backwards that only other optimizers stepped on were not meant
  /// for this one, and are not counted.
  void forget_foreign() {
    const auto foreign = static_cast<int>(
        std::erase_if(pending_, [](int number) { return backward_ledger::consumed(number); }));
    passes_ -= foreign;
    unused_ -= foreign;
  }

 private:
  [[nodiscard]] int& forwards_of(const void* model) {
    const auto found = std::ranges::find(forwards_, model, &std::pair<const void*, int>::first);
    return found != forwards_.end() ? found->second : forwards_.emplace_back(model, 0).second;
  }

  // How many of the passes may still turn out to be meant for other optimizers only.
  [[nodiscard]] int foreign() const {
    return static_cast<int>(std::ranges::count_if(pending_, &backward_ledger::consumed));
  }

  void complain(std::string_view kind, int passes) {
    const auto text = [&] {
      return concat(optimizer_, ": ", passes, " ", kind, "s since the last communication, but ",
                    option_, " is ", wanted_, ": a step() has to follow every ", wanted_, " ", kind,
                    "s. Adjust ", option_, ", or call reset_passes() where a window is cut short");
    };
    if (on_miscount_ == miscount::raise) throw usage_error(text());
    if (!std::exchange(warned_, true)) logger::write(log_level::warning, text());
  }

  std::string_view optimizer_;
  std::string_view option_;
  int wanted_;
  miscount on_miscount_;
  int passes_ = 0;
  int unused_ = 0;
  int most_forwards_ = 0;
  std::vector<std::pair<const void*, int>> forwards_;  // per model, since the last communication
  bool warned_ = false;
  std::vector<int> pending_;  // backwards that no step of this optimizer has used
};

}  // namespace bluefog::optim::detail
