// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>

#include <bluefog/backend/job.hpp>
#include <bluefog/backend/label.hpp>
#include <bluefog/backend/stall.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog {

/// Watches over operations that take long, seldom enough to cost nothing.
///
/// It answers ranks that ask whether this one is there, asks in turn, warns, and tells when an
/// operation's time is over, or its transport has failed without letting go of it.
class supervisor {
 public:
  using clock = job::clock;

  /// \return whether it is time for a round: `look` at each operation, then `speak`.
  [[nodiscard]] bool due() noexcept {
    constexpr auto between = std::chrono::milliseconds(1);
    const auto now = clock::now();
    if (now - round_ < between) return false;
    round_ = now;
    return true;
  }

  /// \return why the job has to be given up; null if it may go on.
  [[nodiscard]] std::exception_ptr look(job& it) noexcept {
    auto why = judge(it);
    if (why) stalls_.failed();
    return why;
  }

  void speak() noexcept {
    try {
      stalls_.speak(round_);
    } catch (...) {  // no memory for a warning
    }
  }

  /// An operation has ended, and how; `idle` if nothing else is in flight.
  void ended(bool failed, bool idle) noexcept {
    if (failed) stalls_.failed();
    if (!idle) return;
    try {
      stalls_.over();
    } catch (...) {  // no memory for a line that says that all is well
    }
  }

 private:
  [[nodiscard]] std::exception_ptr judge(job& it) noexcept {
    try {
      if (auto why = it.work_.stuck()) return why;
      const lane& home = it.home();
      const auto waited = round_ - it.since();
      const auto& limits = home.limits();
      if (it.begun() && it.label().tag.kind == channel::group) correspond(it, waited);
      if (waited < limits.timeout) {
        if (waited >= limits.stall_warning) stalls_.add(it, round_);
        return nullptr;
      }
      if (auto why = it.work_.cause()) return why;
      return std::make_exception_ptr(timeout_error(
          concat(to_string(it.label()), ": timed out on rank ", home.rank_of_lane(), " after ",
                 detail::seconds_text(waited), ", waiting ", it.missing())));
    } catch (...) {
      return std::current_exception();
    }
  }

  static void correspond(job& it, clock::duration waited) {
    const auto& limits = it.home().limits();
    const auto number = it.label().tag.number;
    it.home().listen(number);
    if (it.announced_ || waited < std::min(limits.timeout, limits.stall_warning) / 2) return;
    it.announced_ = true;
    it.home().announce(number);
  }

  stall_reporter stalls_;
  clock::time_point round_ = clock::now();
};

}  // namespace bluefog
