// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <bluefog/backend/label.hpp>
#include <bluefog/backend/lane.hpp>
#include <bluefog/backend/names.hpp>
#include <bluefog/backend/task.hpp>

namespace bluefog {

/// An operation in progress: its algorithm, its label, and in the end its outcome.
class job {
 public:
  using clock = std::chrono::steady_clock;

  /// \throws usage_error if the operation's name is in use on `home`; nothing has changed then.
  job(task work, operation_label label, lane& home)
      : name_(home.names(), label.operation, label.name),
        work_(std::move(work)),
        label_(std::move(label)),
        home_(&home),
        stall_warning_(home.limits().stall_warning),
        issued_(clock::now()) {}

  /// \return whether the outcome is known; safe from any thread.
  [[nodiscard]] bool over() const noexcept { return over_.load(std::memory_order_acquire); }
  /// Throws what the operation failed with, if it failed. The job must be over.
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }
  /// Lets another operation have this one's name.
  void release_name() noexcept { name_.end(); }
  [[nodiscard]] const operation_label& label() const noexcept { return label_; }

  /// \return after how long a wait is worth a warning; safe from any thread.
  [[nodiscard]] std::chrono::milliseconds stall_warning() const noexcept { return stall_warning_; }

  /// \return the communicator that the operation belongs to, while the job is not over.
  [[nodiscard]] lane& home() const noexcept { return *home_; }
  [[nodiscard]] bool begun() const noexcept { return begun_; }
  /// \return since when the operation could have been at work: its call, or the end of the
  ///         operation before it, if it had to wait for that one.
  [[nodiscard]] clock::time_point since() const noexcept {
    return begun_ ? begin_ : std::max(issued_, home_->progress_);
  }

  /// \return whom the job waits for, as far as anybody knows.
  [[nodiscard]] std::string missing() const {
    if (!begun_) return "for an earlier operation";
    const auto peers = work_.waiting_for();
    const auto silent =
        label_.tag.kind == channel::group ? home_->silent(label_.tag.number) : std::vector<int>{};
    if (peers.empty() && silent.empty()) return "for ranks that the transport does not know";
    std::string text;
    if (!peers.empty()) text = "for " + detail::ranks_text(peers);
    if (!silent.empty())
      text += (text.empty() ? "for those not heard from: " : "; not heard from ") +
              detail::ranks_text(silent);
    return text;
  }

 private:
  friend class engine;
  friend class supervisor;

  void begin() noexcept {
    begin_ = since();
    begun_ = true;
  }

  name_lease name_;
  task work_;
  operation_label label_;
  lane* home_;  // outlives the job's work: a communicator waits for its jobs
  std::chrono::milliseconds stall_warning_;
  clock::time_point issued_;
  clock::time_point begin_{};
  bool begun_ = false;
  bool announced_ = false;
  std::exception_ptr failure_;
  std::atomic<bool> over_ = false;
};

}  // namespace bluefog
