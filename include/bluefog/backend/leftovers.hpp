// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>
#include <vector>

#include <bluefog/backend/backoff.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/core/keep_for_ever.hpp>

namespace bluefog {

namespace detail {

/// Whether this process has given up transfers that its transport never let go of.
///
/// Their memory is kept until the process ends, and a transport that waits for all transfers when
/// it is closed (MPI_Finalize) would wait for ever.
inline std::atomic<bool> transfers_left_behind = false;

}  // namespace detail

/// Operations that were given up while the transport still had their memory. Any thread may call
/// any function.
///
/// Destroying it waits, at most a second, until the transport lets go; what it keeps longer is kept
/// until the process ends.
class leftovers {
 public:
  leftovers() = default;
  leftovers(const leftovers&) = delete;
  leftovers& operator=(const leftovers&) = delete;
  ~leftovers() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    detail::backoff pause(detail::waiting::background);
    while (!sweep()) {
      if (std::chrono::steady_clock::now() > deadline) {
        detail::transfers_left_behind = true;
        detail::keep_for_ever(std::move(tasks_));
        return;
      }
      pause.pause();
    }
  }

  /// Takes an abandoned task, and destroys it once it has settled.
  void keep(task given_up) {
    const std::scoped_lock lock(mutex_);
    tasks_.push_back(std::move(given_up));
  }

  /// Destroys what has settled. \return whether nothing is left.
  bool sweep() noexcept {
    const std::scoped_lock lock(mutex_);
    std::erase_if(tasks_, [](task& it) { return it.settled(); });
    return tasks_.empty();
  }

  [[nodiscard]] bool empty() const noexcept {
    const std::scoped_lock lock(mutex_);
    return tasks_.empty();
  }

 private:
  mutable std::mutex mutex_;
  std::vector<task> tasks_;
};

}  // namespace bluefog
