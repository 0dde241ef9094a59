// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include <bluefog/backend/job.hpp>
#include <bluefog/backend/label.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/logger.hpp>

namespace bluefog {

/// Says which operations wait too long: one line for all of them, seldom, and one when it is over.
///
/// The time between two lines doubles, so a long stall does not fill the log.
class stall_reporter {
 public:
  /// Notes that `it` has waited longer than its warning time.
  void add(const job& it, job::clock::time_point now) {
    if (stalled_++ > 0) return;
    period_ = std::max(period_, it.home().limits().stall_warning);
    longest_ = std::max(longest_, now - it.since());
    if (now >= next_) text_ = describe(it, now);
  }

  /// Ends a round: writes the line, if one is due, or says that nothing of what was spoken of waits
  /// any more.
  void speak(job::clock::time_point now) {
    const int stalled = std::exchange(stalled_, 0);
    if (stalled == 0) {
      over();
      return;
    }
    if (text_.empty()) return;
    if (stalled > 1) text_ += concat("; ", stalled - 1, " more operations wait");
    logger::write(log_level::warning, text_);
    text_.clear();
    spoken_ = true;
    next_ = now + period_;
    period_ *= 2;
  }

  /// An operation has failed: whoever waits for it is told, so the log need not be.
  void failed() noexcept { failed_ = spoken_; }

  /// Nothing waits any more.
  void over() {
    if (spoken_ && !failed_)
      logger::write(log_level::warning,
                    concat("stall resolved after ", detail::seconds_text(longest_)));
    *this = {};
  }

 private:
  [[nodiscard]] static std::string describe(const job& it, job::clock::time_point now) {
    return concat("stall on rank ", it.home().rank_of_lane(), ": ", to_string(it.label()),
                  " has waited ", detail::seconds_text(now - it.since()), " ", it.missing());
  }

  int stalled_ = 0;
  std::string text_;
  bool spoken_ = false;
  bool failed_ = false;
  job::clock::duration longest_{};
  job::clock::time_point next_{};
  std::chrono::milliseconds period_{};
};

/// Says once of a wait on a thread that may not make progress that nobody else has made any: it has
/// no other end, since the operation may still write where the caller's memory is.
class unserved_wait {
 public:
  void go_on(const job& it) {
    if (told_) return;
    const auto now = job::clock::now();
    if (began_ == job::clock::time_point{}) began_ = now;
    if (now - began_ < it.stall_warning()) return;
    told_ = true;
    logger::write(log_level::warning,
                  concat("stall: ", to_string(it.label()), " is waited for on a thread that the ",
                         "transport does not serve, until the one that made the communicator ",
                         "waits for something, too"));
  }

 private:
  job::clock::time_point began_{};
  bool told_ = false;
};

}  // namespace bluefog
