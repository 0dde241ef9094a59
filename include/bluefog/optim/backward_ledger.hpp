// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

namespace bluefog::optim::detail {

/// Which backwards some optimizer has already stepped on, in the whole process.
///
/// In the usual loop of a generator and a discriminator, the generator's loss reaches the
/// discriminator's parameters; the generator steps, and the discriminator's `zero_grad` may then
/// drop what reached it.
class backward_ledger {
 public:
  /// Notes that the backwards with these numbers have been stepped on.
  static void consume(const std::vector<int>& backwards) {
    if (backwards.empty()) return;
    const std::scoped_lock lock(mutex_);
    for (const int each : backwards) consumed_.push_back(each);
    constexpr std::size_t kept = 1024;
    while (consumed_.size() > kept) consumed_.pop_front();
  }

  /// \return whether backward `number` has been stepped on.
  [[nodiscard]] static bool consumed(int number) {
    const std::scoped_lock lock(mutex_);
    return std::ranges::find(consumed_, number) != consumed_.end();
  }

 private:
  static inline std::mutex mutex_;
  static inline std::deque<int> consumed_;
};

}  // namespace bluefog::optim::detail
