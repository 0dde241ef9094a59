// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/nccl/board.hpp>

namespace bluefog::nccl {

/// What ranks of one communicator tell each other where NCCL is stuck, by way of the board:
/// letters, and that one of them has ended the communicator.
///
/// NCCL tells nobody that a rank has aborted: the others would wait until their time is over. Ranks
/// that wait read the board at most every 20 ms, more seldom where many of them do. Each rank's
/// last few letters are on it, for all to read. A board that cannot be reached is no failure: then
/// nobody is told anything. Any thread may call any function.
class mailbox {
 public:
  /// \param group  of the ranks; unlike the name of any other communicator of the job.
  mailbox(std::shared_ptr<board> words, const std::string& group, int rank, int size)
      : words_(std::move(words)),
        letters_("letters in " + group + "\n"),
        ended_("ended " + group + "\n"),
        own_(std::to_string(rank)),
        pause_(std::max(20, size)),
        read_(static_cast<std::size_t>(size), 0) {}

  /// Tells all ranks `number`.
  void post(std::uint64_t number) noexcept {
    speak([&] {
      if (!posted_.empty() && posted_.back() == number) return;  // meant for another rank
      posted_.push_back(number);
      if (posted_.size() > kept) posted_.pop_front();
      std::string text = concat(++posts_);
      for (const std::uint64_t each : posted_) text += concat(" ", each);
      words_->put(letters_ + own_, text);
    });
  }

  /// \return the next letter that has arrived, if any.
  [[nodiscard]] std::optional<letter> collect() noexcept {
    speak([&] {
      if (arrived_.empty() && reading_.is_due(pause_)) read();
    });
    const std::scoped_lock lock(mutex_);
    if (arrived_.empty()) return std::nullopt;
    const letter next = arrived_.front();
    arrived_.pop_front();
    return next;
  }

  /// Tells all ranks that this one has ended the communicator. Letters that have been posted by now
  /// are collected next: one of them may say why.
  void tell_end(std::string_view reason) noexcept {
    speak([&] {
      words_->put(ended_ + own_, std::string(reason));
      read();
    });
  }

  /// \return which rank has ended the communicator, and why, if one has. Letters that it may have
  ///         ended it for are collected first, unless nobody does that.
  [[nodiscard]] std::optional<std::string> end() noexcept {
    std::optional<std::string> text;
    speak([&] {
      if (!ending_.is_due(pause_)) return;
      const auto all = words_->look_for_all(ended_);
      if (all.empty()) return;
      read();
      if (!arrived_.empty() && ++deferred_ < 20) return;
      text =
          concat("rank ", all.begin()->first, " has ended the communicator: ", all.begin()->second);
    });
    return text;
  }

 private:
  using clock = std::chrono::steady_clock;

  /// When to read the board again.
  class timer {
   public:
    [[nodiscard]] bool is_due(std::chrono::milliseconds pause) {
      const auto now = clock::now();
      // Who has not asked for long has only begun to wait, for what will mostly come by itself.
      if (now - asked_ > 50 * pause) next_ = now + pause;
      asked_ = now;
      if (now < next_) return false;
      next_ = now + pause;
      return true;
    }

   private:
    clock::time_point asked_{};
    clock::time_point next_{};
  };

  static constexpr std::size_t kept = 32;  // letters of a rank on the board

  // Under mutex_.
  void read() {
    for (const auto& [rank, text] : words_->look_for_all(letters_)) {
      if (rank == own_) continue;
      const int sender = std::stoi(rank);
      std::istringstream numbers(text);
      std::uint64_t posts = 0;
      numbers >> posts;
      auto& known = read_.at(static_cast<std::size_t>(sender));
      const std::uint64_t fresh = posts - std::exchange(known, posts);
      std::uint64_t left = std::min<std::uint64_t>(posts, kept);
      for (std::uint64_t number = 0; numbers >> number; --left)
        if (left <= fresh) arrived_.push_back({sender, number});
    }
  }

  // Calls `act`, unless the board has gone.
  template <class Act>
  void speak(Act act) noexcept {
    try {
      const std::scoped_lock lock(mutex_);
      if (words_) act();
    } catch (const std::exception&) {
      const std::scoped_lock lock(mutex_);
      words_ = nullptr;
    }
  }

  std::mutex mutex_;  // of all that follows
  std::shared_ptr<board> words_;
  std::string letters_;
  std::string ended_;
  std::string own_;
  std::chrono::milliseconds pause_;
  timer reading_;
  timer ending_;
  int deferred_ = 0;  // how often the end was kept back
  std::uint64_t posts_ = 0;
  std::deque<std::uint64_t> posted_;  // the last of them
  std::vector<std::uint64_t> read_;   // per rank: how many posts of it
  std::deque<letter> arrived_;
};

}  // namespace bluefog::nccl
