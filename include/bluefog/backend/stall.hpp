// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <string>

#include <bluefog/backend/job.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/log.hpp>

namespace bluefog {

/// Says which operations wait too long: one line for all of them, seldom, and one when it is over.
///
/// The time between two lines doubles, so a long stall does not fill the log.
class stall_reporter {
 public:
  /// Notes that `it` has waited longer than its warning time.
  void add(const job& it, job::clock::duration waited) {
    if (stalled_++ == 0) {
      period_ = std::max(period_, it.home().limits().stall_warning);
      longest_ = waited;
      if (job::clock::now() >= next_) text_ = describe(it, waited);
    }
  }

  /// Writes the line, if one is due, and forgets what was added.
  void speak() {
    const int stalled = std::exchange(stalled_, 0);
    if (stalled == 0 || text_.empty()) return;
    if (stalled > 1) text_ += concat("; ", stalled - 1, " more operations wait");
    log::write(log_level::warning, text_);
    text_.clear();
    spoken_ = true;
    next_ = job::clock::now() + period_;
    period_ *= 2;
  }

  /// Everything that waited is over.
  void resolved() {
    if (!std::exchange(spoken_, false)) return;
    log::write(log_level::warning, concat("stall resolved after ",
                                          std::chrono::duration<double>(longest_).count(), " s"));
    *this = {};
  }

 private:
  [[nodiscard]] static std::string describe(const job& it, job::clock::duration waited) {
    return concat("stall on rank ", it.home().rank_of_lane(), ": ", to_string(it.label()),
                  " has waited ", std::chrono::duration<double>(waited).count(), " s ",
                  it.missing());
  }

  int stalled_ = 0;
  std::string text_;
  bool spoken_ = false;
  job::clock::duration longest_{};
  job::clock::time_point next_{};
  std::chrono::milliseconds period_{};
};

}  // namespace bluefog
