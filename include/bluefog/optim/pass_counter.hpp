// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <utility>

#include <bluefog/core/error.hpp>
#include <bluefog/core/log.hpp>
#include <bluefog/optim/options.hpp>

namespace bluefog::optim::detail {

/// Counts the passes (forwards, or backwards) since the last communication.
class pass_counter {
 public:
  /// \param optimizer  the wrapper's name, for messages.
  /// \param option     the name of the option that J comes from.
  /// \param wanted     J, the passes per communication, at least 1.
  pass_counter(std::string_view optimizer, std::string_view option, int wanted,
               miscount on_miscount) noexcept
      : optimizer_(optimizer), option_(option), wanted_(wanted), on_miscount_(on_miscount) {}

  /// Counts one pass. \param kind  "forward" or "backward".
  /// \throws usage_error if J passes have been counted already and that is to be raised.
  void count(std::string_view kind) {
    if (passes_ >= wanted_) complain(kind);
    ++passes_;
  }

  /// \return whether the next step communicates.
  [[nodiscard]] bool due() const noexcept { return passes_ >= wanted_; }
  /// \return whether the last pass was the one that makes the next step communicate.
  [[nodiscard]] bool just_due() const noexcept { return passes_ == wanted_; }
  [[nodiscard]] int passes() const noexcept { return passes_; }
  [[nodiscard]] int wanted() const noexcept { return wanted_; }
  void reset() noexcept { passes_ = 0; }

 private:
  void complain(std::string_view kind) {
    const auto text = [&] {
      return concat(optimizer_, ": ", passes_ + 1, " ", kind,
                    "s since the last communication, but ", option_, " is ", wanted_,
                    ": a step() has to follow every ", wanted_, " ", kind, "s. Adjust ", option_,
                    ", or call reset_passes() where a window is cut short");
    };
    if (on_miscount_ == miscount::raise) throw usage_error(text());
    if (!std::exchange(warned_, true)) log::write(log_level::warning, text());
  }

  std::string_view optimizer_;
  std::string_view option_;
  int wanted_;
  miscount on_miscount_;
  int passes_ = 0;
  bool warned_ = false;
};

}  // namespace bluefog::optim::detail
