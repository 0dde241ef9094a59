// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <concepts>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <bluefog/backend/backoff.hpp>
#include <bluefog/backend/failure.hpp>
#include <bluefog/backend/job.hpp>
#include <bluefog/backend/lane.hpp>
#include <bluefog/backend/leftovers.hpp>
#include <bluefog/backend/stall.hpp>
#include <bluefog/backend/supervisor.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog {

/// Drives operations: starts those of a communicator in program order, many in flight.
///
/// Shared by the communicators derived from one another. One thread, started with the first
/// asynchronous operation and asleep when nothing is outstanding, makes progress beside the
/// caller's computation; a caller that waits makes the progress itself. A blocking operation on a
/// communicator with nothing outstanding never leaves the caller's thread. Without `background`
/// (the transport serves one thread only) progress is made in the waits and tests of the thread
/// that made the engine alone.
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
  }

  /// Runs an operation to its end, and throws what it fails with.
  void run(const std::shared_ptr<job>& it) {
    if (!enter_alone(*it)) {
      submit(it);
      wait(*it);
    } else {
      it->begin();
      detail::backoff pause(detail::waiting::foreground);
      supervisor watch;
      while (!it->work_.advance()) {
        pause.pause();
        if (!pause.slow() || !watch.due()) continue;
        if (auto why = watch.look(*it)) {
          fail(*it, std::move(why));
          break;
        }
        watch.speak();
      }
      finish(*it);
      watch.ended(it->failure_ != nullptr, true);
    }
    it->release_name();
    it->rethrow();
  }

  /// Starts an operation. If it throws, the operation never was.
  void submit(const std::shared_ptr<job>& it) {
    {
      const std::scoped_lock lock(mutex_);
      if (background_ && !thread_.joinable()) thread_ = std::thread([this] { serve(); });
      submitted_.reserve(submitted_.size() + 1);
      it->home_->enter(it->label_.tag);
      submitted_.push_back(it);
      outstanding_.fetch_add(1);
    }
    try_pass(false);  // started here and now: no hand-over before the first message
    if (!it->over()) wake_.notify_one();
  }

  /// \return whether this thread may make progress.
  [[nodiscard]] bool drives() const noexcept {
    return background_ || std::this_thread::get_id() == home_;
  }

  /// \return whether the job is over; makes progress, never blocks.
  [[nodiscard]] bool ready(const job& it) {
    if (!it.over() && drives()) try_pass(true);
    return it.over();
  }

  /// Returns when the job is over. Any thread may wait; one that does not drive for one that does.
  /// Also when `in_vain()`, asked while nothing happens. \return whether the job is over.
  template <std::predicate InVain = std::false_type>
  bool wait(const job& it, InVain in_vain = {}) {
    if (it.over()) return true;
    waiters_.fetch_add(1);
    detail::backoff pause(detail::waiting::foreground);
    unserved_wait unserved;
    while (!it.over() && !(pause.slow() && in_vain())) {
      if (drives())
        try_pass(pause.slow());
      else
        unserved.go_on(it);
      if (!it.over()) pause.pause();
    }
    if (waiters_.fetch_sub(1) == 1 && outstanding_.load() > 0) {
      const std::scoped_lock lock(mutex_);  // not between the thread's test and its sleep
      wake_.notify_one();
    }
    return it.over();
  }

  /// Returns when `home` has nothing outstanding, or gives all of it up at once.
  void drain(const lane& home, bool give_up) {
    detail::backoff pause(detail::waiting::foreground);
    while (home.outstanding_.load() > 0) {
      if (const std::scoped_lock drive(driving_); give_up)
        abandon(home);
      else
        pass(true);
      pause.pause();
    }
  }

  /// \return the smallest group number outstanding on `home`, `number` if there is none.
  [[nodiscard]] std::uint64_t oldest(const lane& home, std::uint64_t number) {
    const std::scoped_lock lock(mutex_);
    return home.numbers_.empty() ? number : std::min(number, home.numbers_.front());
  }

 private:
  // Enters an operation that may run on the caller's thread because nothing comes before it. Where
  // nobody else drives, operations of other communicators count too: peers may wait for them.
  [[nodiscard]] bool enter_alone(job& it) {
    const std::scoped_lock lock(mutex_);
    if (it.home_->outstanding_ > 0 || (!background_ && outstanding_.load() > 0)) return false;
    it.home_->enter(it.label_.tag);
    return true;
  }

  // Ends a job whose work is over, or that has failed and whose work has been retired. Its
  // communicator may be gone when this returns.
  void finish(job& it) {
    it.failure_ = explained(it.failure_ ? it.failure_ : it.work_.failure(), it.label_);
    it.work_ = {};
    {
      const std::scoped_lock lock(mutex_);
      if (!it.failure_) it.home_->progress_ = job::clock::now();
      it.home_->leave(it.label_.tag);
    }
    it.over_.store(true, std::memory_order_release);
  }

  // Gives a job up. What the transport still holds is kept until it lets go.
  void fail(job& it, std::exception_ptr why) {
    it.failure_ = std::move(why);
    it.work_.abandon();
    if (!it.work_.settled()) retired_.keep(std::move(it.work_));
  }

  // Under driving_, as all that follows but `serve`.
  void abandon(const lane& home) {
    collect_submitted();
    for (auto& it : active_)
      if (it->home_ == &home)
        fail(*it, std::make_exception_ptr(peer_error(concat(
                      to_string(it->label_), ": the communicator was destroyed before the end"))));
    finish_failed();
  }

  void collect_submitted() {
    const std::scoped_lock lock(mutex_);
    std::ranges::move(submitted_, std::back_inserter(active_));
    submitted_.clear();
  }

  void end(job& it) {
    finish(it);
    ended_ = true;
    if (it.failure_) failed_ = true;
    outstanding_.fetch_sub(1);
  }

  void finish_failed() {
    std::erase_if(active_, [&](auto& it) {
      if (!it->failure_) return false;
      end(*it);
      return true;
    });
  }

  // Unless somebody else is driving.
  void try_pass(bool slow) {
    if (std::unique_lock drive(driving_, std::try_to_lock); drive) pass(slow);
  }

  // One round over everything in flight; `slow` when nothing has happened for a while.
  void pass(bool slow) {
    collect_submitted();
    blocked_.clear();
    blocked_.reserve(active_.size());
    std::erase_if(active_, [&](auto& it) {
      const lane* const home = it->home_;
      if (!it->begun_) {
        // Where messages have numbers, operations of two ranks need no order, and ranks may issue
        // them in different ones.
        if ((it->label_.tag.kind == channel::group || home->pairs_in_order_) &&
            std::ranges::find(blocked_, home) != blocked_.end())
          return false;
        it->begin();
      }
      if (!it->work_.advance()) {
        if (it->work_.holds_order()) blocked_.push_back(home);
        return false;
      }
      end(*it);
      return true;
    });
    if (slow && supervisor_.due()) supervise();
    if (std::exchange(ended_, false))
      supervisor_.ended(std::exchange(failed_, false), active_.empty());
  }

  void supervise() {
    for (auto& it : active_)
      if (auto why = supervisor_.look(*it)) fail(*it, std::move(why));
    finish_failed();
    if (!active_.empty()) supervisor_.speak();
    retired_.sweep();
  }

  // The communication thread.
  void serve() {
    detail::backoff pause(detail::waiting::background);
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      const auto wanted = [&] {
        return stopping_ || (outstanding_.load() > 0 && waiters_.load() == 0);
      };
      if (!wanted()) {
        pause.reset();
        if (retired_.empty())
          wake_.wait(lock, wanted);
        else if (!wake_.wait_for(lock, std::chrono::milliseconds(20), wanted)) {
          lock.unlock();  // the transport may wait for a lock that a caller of ours holds
          retired_.sweep();
          lock.lock();
        }
        continue;
      }
      lock.unlock();
      try_pass(pause.slow());
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
  const std::thread::id home_ = std::this_thread::get_id();
  std::mutex driving_;                        // held by whoever makes a pass; before mutex_
  std::vector<std::shared_ptr<job>> active_;  // under driving_, in program order
  std::vector<const lane*> blocked_;          // of a pass: who must not start anything now
  bool ended_ = false;                        // of a pass: whether a job has ended,
  bool failed_ = false;                       // and failed
  supervisor supervisor_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::shared_ptr<job>> submitted_;
  bool stopping_ = false;
  leftovers retired_;
  std::atomic<int> outstanding_ = 0;  // asynchronous jobs
  std::atomic<int> waiters_ = 0;
  std::thread thread_;
};

}  // namespace bluefog
