// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

namespace bluefog::detail {

/// Who waits: a caller that has nothing else to do, or a thread beside the caller's computation.
enum class waiting : std::uint8_t { foreground, background };

/// How long to leave the processor between two tests of an operation.
///
/// First a few tests at once, then giving the processor to whoever wants it, then sleeping, at most
/// 100 us at a time: with more ranks than cores a waiting rank must not take time from one that
/// computes.
class backoff {
 public:
  explicit backoff(waiting who) noexcept : yields_(who == waiting::foreground ? 2000 : 20) {}

  /// Forgets the wait so far: progress was made.
  void reset() noexcept { round_ = 0; }

  /// \return whether the wait has left the first few microseconds.
  [[nodiscard]] bool slow() const noexcept { return round_ > spins; }

  /// \return how long to sleep now; zero for not at all.
  [[nodiscard]] std::chrono::microseconds delay() const noexcept {
    const int slept = round_ - spins - yields_;
    return std::chrono::microseconds(10 * std::clamp(slept, 0, 10));
  }

  /// Waits a little, longer with every call.
  void pause() {
    count();
    if (round_ <= spins) return;
    if (const auto time = delay(); time.count() > 0)
      std::this_thread::sleep_for(time);
    else
      std::this_thread::yield();
  }

  /// Counts a wait that the caller did by other means.
  void count() noexcept {
    if (round_ < most) ++round_;
  }

 private:
  static constexpr int spins = 20;
  static constexpr int most = 1'000'000;  // beyond it nothing changes, however long the wait

  int yields_;
  int round_ = 0;
};

}  // namespace bluefog::detail
