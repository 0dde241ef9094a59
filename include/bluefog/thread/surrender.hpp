// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include <bluefog/backend/message.hpp>

namespace bluefog::threads {

/// An operation that a rank has given up.
struct surrender {
  message_tag tag;
  int peer = 0;            // of an operation of two ranks: the other one
  std::exception_ptr why;  // what those who wait for it fail with

  /// \return whether it is the operation `other` of rank `rank`.
  [[nodiscard]] bool concerns(const message_tag& other, int rank) const noexcept {
    return tag.kind == other.kind && tag.number == other.number &&
           (tag.kind == channel::group || peer == rank);
  }
};

/// What one rank has given up lately.
class surrender_list {
 public:
  void add(surrender given_up) {
    const std::scoped_lock lock(mutex_);
    if (known_.size() >= kept) known_.pop_front();
    known_.push_back(std::move(given_up));
    any_ = true;
  }
  [[nodiscard]] std::optional<surrender> find(const message_tag& tag, int rank) const {
    if (!any_) return std::nullopt;
    const std::scoped_lock lock(mutex_);
    const auto found = std::ranges::find_if(
        known_, [&](const surrender& each) { return each.concerns(tag, rank); });
    return found == known_.end() ? std::nullopt : std::optional(*found);
  }

 private:
  static constexpr std::size_t kept = 64;  // ranks further behind notice by other signs

  mutable std::mutex mutex_;
  std::deque<surrender> known_;
  std::atomic<bool> any_ = false;
};

}  // namespace bluefog::threads
