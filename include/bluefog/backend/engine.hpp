// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <bluefog/backend/backoff.hpp>
#include <bluefog/backend/job.hpp>
#include <bluefog/backend/lane.hpp>
#include <bluefog/backend/leftovers.hpp>
#include <bluefog/backend/stall.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog {

/// Drives operations: starts those of a communicator in program order, many in flight.
///
/// Shared by the communicators derived from one another. One thread, started with the first
/// asynchronous operation and asleep when nothing is outstanding, makes progress beside the
/// caller's computation; a caller that waits makes the progress itself. A blocking operation on a
/// communicator with nothing outstanding never leaves the caller's thread. Without `background`
/// (the transport serves one thread only) progress is made in the caller's waits and tests alone.
class engine {
 public:
  explicit engine(bool background) noexcept : background_(background) {}
  engine(const engine&) = delete;
  engine& operator=(const engine&) = delete;

  ~engine() {
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
    leave_behind(std::move(retired_));
  }

  /// Runs an operation to its end. Throws what it fails with.
  void run(task work, operation_label label, lane& home) {
    {
      std::unique_lock lock(mutex_);
      if (home.outstanding_ > 0) {
        lock.unlock();
        const auto queued = submit(std::move(work), std::move(label), home);
        wait(*queued);
        queued->rethrow();
        return;
      }
      enter(home, label);
    }
    job direct(std::move(work), std::move(label), home);
    begin(direct);
    backoff pause(waiting::foreground);
    stall_reporter stalls;
    while (!direct.work_.advance()) {
      pause.pause();
      if (!pause.slow() || !supervision_due(direct.begin_)) continue;
      supervise(direct, stalls);
      stalls.speak();
      if (direct.failure_) break;
    }
    finish(direct);
    if (!direct.failure_) stalls.resolved();
    direct.rethrow();
  }

  /// Starts an operation. \return what to wait for.
  [[nodiscard]] std::shared_ptr<job> submit(task work, operation_label label, lane& home) {
    auto added = std::make_shared<job>(std::move(work), std::move(label), home);
    {
      const std::scoped_lock lock(mutex_);
      if (background_ && !thread_.joinable()) thread_ = std::thread([this] { serve(); });
      enter(home, added->label_);
      submitted_.push_back(added);
      outstanding_.fetch_add(1, std::memory_order_release);
    }
    // Started here and now if nobody else is driving: no hand-over before the first message.
    if (std::unique_lock drive(driving_, std::try_to_lock); drive) pass(false);
    if (!added->over()) wake_.notify_one();
    return added;
  }

  /// \return whether the job is over; makes progress, never blocks.
  [[nodiscard]] bool ready(const job& it) {
    if (!it.over())
      if (std::unique_lock drive(driving_, std::try_to_lock); drive) pass(true);
    return it.over();
  }

  /// Returns when the job is over. Any thread may wait.
  void wait(const job& it) {
    if (it.over()) return;
    waiters_.fetch_add(1);
    backoff pause(waiting::foreground);
    while (!it.over()) {
      if (std::unique_lock drive(driving_, std::try_to_lock); drive) pass(pause.slow());
      if (!it.over()) pause.pause();
    }
    if (waiters_.fetch_sub(1) == 1 && outstanding_.load() > 0) {
      const std::scoped_lock lock(mutex_);  // not between the thread's test and its sleep
      wake_.notify_one();
    }
  }

  /// Returns when `home` has nothing outstanding, or gives all of it up at once.
  void drain(lane& home, bool give_up) {
    backoff pause(waiting::foreground);
    while (outstanding(home) > 0) {
      {
        const std::scoped_lock drive(driving_);
        if (give_up) {
          collect_submitted();
          for (auto& it : active_)
            if (it->home_ == &home)
              fail(*it,
                   std::make_exception_ptr(peer_error(concat(
                       to_string(it->label_), ": the communicator was destroyed before the end"))));
          finish_failed();
        } else {
          pass(true);
        }
      }
      pause.pause();
    }
  }

  /// \return the smallest group number outstanding on `home`, `number` if there is none.
  [[nodiscard]] std::uint64_t oldest(const lane& home, std::uint64_t number) {
    const std::scoped_lock lock(mutex_);
    return home.numbers_.empty() ? number : std::min(number, home.numbers_.front());
  }

 private:
  using clock = job::clock;

  [[nodiscard]] int outstanding(const lane& home) {
    const std::scoped_lock lock(mutex_);
    return home.outstanding_;
  }

  // Under mutex_. Refuses a name that is in use before anything has changed.
  static void enter(lane& home, const operation_label& label) {
    if (!label.name.empty()) {
      expects(std::ranges::find(home.names_, label.name) == home.names_.end(), label.operation,
              ": the name \"", label.name, "\" is in use by an operation that is not over");
      home.names_.push_back(label.name);
    }
    ++home.outstanding_;
    if (label.tag.lane == channel::group) home.numbers_.push_back(label.tag.number);
  }

  static void begin(job& it) noexcept {
    it.begun_ = true;
    it.begin_ = clock::now();
  }

  // Ends a job whose work is over, or that has failed and whose work has been retired.
  void finish(job& it) {
    if (!it.failure_) it.failure_ = it.work_.failure();
    it.work_ = {};
    lane& home = *it.home_;
    {
      const std::scoped_lock lock(mutex_);
      --home.outstanding_;
      std::erase(home.numbers_,
                 it.label_.tag.lane == channel::group ? it.label_.tag.number : ~std::uint64_t{0});
      if (!it.label_.name.empty()) std::erase(home.names_, it.label_.name);
    }
    it.over_.store(true, std::memory_order_release);
  }

  void fail(job& it, std::exception_ptr why) {
    it.failure_ = std::move(why);
    it.work_.abandon();
    if (it.work_.settled()) return;
    const std::scoped_lock lock(mutex_);
    retired_.push_back(std::move(it.work_));
  }

  void collect_submitted() {
    const std::scoped_lock lock(mutex_);
    std::ranges::move(submitted_, std::back_inserter(active_));
    submitted_.clear();
  }

  void finish_failed() {
    std::erase_if(active_, [&](auto& it) {
      if (!it->failure_) return false;
      finish(*it);
      outstanding_.fetch_sub(1);
      return true;
    });
  }

  // One round over everything in flight. Under driving_.
  void pass(bool slow) {
    collect_submitted();
    blocked_.clear();
    std::erase_if(active_, [&](auto& it) {
      lane* const home = it->home_;
      if (!it->begun_) {
        if (std::ranges::find(blocked_, home) != blocked_.end()) return false;
        begin(*it);
      }
      if (!it->work_.advance()) {
        if (it->work_.holds_order()) blocked_.push_back(home);
        return false;
      }
      finish(*it);
      outstanding_.fetch_sub(1);
      return true;
    });
    if (active_.empty()) stalls_.resolved();
    if (!slow || !supervision_due(supervised_)) return;
    supervised_ = clock::now();
    for (auto& it : active_)
      if (it->begun_) supervise(*it, stalls_);
    stalls_.speak();
    finish_failed();
    const std::scoped_lock lock(mutex_);
    std::erase_if(retired_, [](task& it) { return it.settled(); });
  }

  [[nodiscard]] static bool supervision_due(clock::time_point last) {
    return clock::now() - last >= std::chrono::milliseconds(1);
  }

  // Listens, warns, and ends the job when its time is over.
  void supervise(job& it, stall_reporter& stalls) {
    lane& home = *it.home_;
    const auto waited = clock::now() - it.begin_;
    const auto& limits = home.limits();
    try {
      if (it.label_.tag.lane == channel::group) {
        home.listen(it.label_.tag.number);
        if (!it.announced_ && waited >= std::min(limits.timeout, limits.stall_warning) / 2) {
          it.announced_ = true;
          home.announce(it.label_.tag.number);
        }
      }
      if (waited >= limits.stall_warning) stalls.add(it, waited);
      if (waited < limits.timeout) return;
      const auto seconds = std::chrono::duration<double>(waited).count();
      fail(it, std::make_exception_ptr(timeout_error(
                   concat(to_string(it.label_), ": timed out on rank ", home.rank_of_lane(),
                          " after ", seconds, " s, waiting ", it.missing()))));
    } catch (...) {
      fail(it, std::current_exception());
    }
  }

  // The communication thread.
  void serve() {
    backoff pause(waiting::background);
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      const auto wanted = [&] {
        return stopping_ || (outstanding_.load() > 0 && waiters_.load() == 0);
      };
      if (!wanted()) {
        pause.reset();
        if (retired_.empty())
          wake_.wait(lock, wanted);
        else if (!wake_.wait_for(lock, std::chrono::milliseconds(20), wanted))
          std::erase_if(retired_, [](task& it) { return it.settled(); });
        continue;
      }
      lock.unlock();
      if (std::unique_lock drive(driving_, std::try_to_lock); drive) pass(pause.slow());
      lock.lock();
      if (stopping_ || outstanding_.load() == 0) continue;
      if (!submitted_.empty()) {
        pause.reset();
      } else if (const auto delay = pause.delay(); delay.count() > 0) {
        wake_.wait_for(lock, delay);
        pause.count();
      } else {
        lock.unlock();
        pause.pause();
        lock.lock();
      }
    }
  }

  const bool background_;
  std::mutex driving_;                        // held by whoever makes a pass; before mutex_
  std::vector<std::shared_ptr<job>> active_;  // under driving_, in program order
  std::vector<lane*> blocked_;                // scratch of a pass
  stall_reporter stalls_;
  clock::time_point supervised_{};

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<job>> submitted_;
  std::vector<task> retired_;  // given up, but the transport has not let go of their memory
  bool stopping_ = false;

  std::atomic<int> outstanding_ = 0;  // asynchronous jobs
  std::atomic<int> waiters_ = 0;
  std::thread thread_;
};

}  // namespace bluefog
