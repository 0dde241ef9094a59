// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <bluefog/backend/lane.hpp>
#include <bluefog/backend/message.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog {

/// What messages call an operation.
struct operation_label {
  std::string_view operation;  ///< the public function; static storage
  std::string name;            ///< the user's name for this call, may be empty
  message_tag tag;
};

/// \return e.g. `allreduce "loss" (operation 7)`.
[[nodiscard]] inline std::string to_string(const operation_label& label) {
  std::string text(label.operation);
  if (!label.name.empty()) text += " \"" + label.name + "\"";
  return text + concat(label.tag.lane == channel::pair ? " (pair operation " : " (operation ",
                       label.tag.number, ")");
}

/// \return e.g. "rank 3" or "ranks 0, 2, 5".
[[nodiscard]] inline std::string ranks_text(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

/// An operation in progress: its algorithm, its label, and in the end its outcome.
class job {
 public:
  using clock = std::chrono::steady_clock;

  job(task work, operation_label label, lane& home)
      : work_(std::move(work)), label_(std::move(label)), home_(&home) {}

  /// \return whether the outcome is known; safe from any thread.
  [[nodiscard]] bool over() const noexcept { return over_.load(std::memory_order_acquire); }
  /// Throws what the operation failed with, if it failed. The job must be over.
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }
  [[nodiscard]] std::exception_ptr failure() const noexcept { return failure_; }
  [[nodiscard]] const operation_label& label() const noexcept { return label_; }
  [[nodiscard]] const lane& home() const noexcept { return *home_; }

  /// \return whom the job waits for, as far as anybody knows.
  [[nodiscard]] std::string missing() const {
    const auto peers = work_.waiting_for();
    const auto silent =
        label_.tag.lane == channel::group ? home_->silent(label_.tag.number) : std::vector<int>{};
    if (peers.empty() && silent.empty()) return "for ranks that the transport does not know";
    std::string text;
    if (!peers.empty()) text = "for " + ranks_text(peers);
    if (!silent.empty())
      text +=
          (text.empty() ? "for those not heard from: " : "; not heard from ") + ranks_text(silent);
    return text;
  }

 private:
  friend class engine;

  task work_;
  operation_label label_;
  lane* home_;  // outlives the job's work: a communicator waits for its jobs
  clock::time_point begin_{};
  bool begun_ = false;
  bool announced_ = false;
  std::exception_ptr failure_;
  std::atomic<bool> over_ = false;
};

}  // namespace bluefog
