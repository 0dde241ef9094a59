// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>
#include <utility>
#include <vector>

#include <bluefog/backend/backoff.hpp>
#include <bluefog/backend/task.hpp>

namespace bluefog {

/// Whether this process has given up transfers that its transport never let go of.
///
/// Their memory is kept until the process ends, and a transport that waits for all transfers when
/// it is closed (MPI_Finalize) would wait for ever.
inline std::atomic<bool> transfers_left_behind = false;

/// Waits, at most a second, until the transport lets go of the memory of `tasks`; keeps the rest.
inline void leave_behind(std::vector<task> tasks) noexcept {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  backoff pause(waiting::background);
  while (true) {
    std::erase_if(tasks, [](task& it) { return it.settled(); });
    if (tasks.empty()) return;
    if (std::chrono::steady_clock::now() > deadline) break;
    pause.pause();
  }
  transfers_left_behind = true;
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::vector<task>>;  // reachable, never destroyed
  const std::scoped_lock lock(mutex);
  kept->push_back(std::move(tasks));
}

}  // namespace bluefog
