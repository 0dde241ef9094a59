// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/thread/fabric.hpp>

namespace bluefog::threads {

/// Messages in flight between threads.
class operation {
 public:
  operation() = default;
  /// Starts the messages.
  operation(std::shared_ptr<fabric> group, int rank, message_tag tag,
            std::vector<half_pointer> receives, std::vector<half_pointer> sends)
      : fabric_(std::move(group)),
        rank_(rank),
        tag_(tag),
        receives_(std::move(receives)),
        sends_(std::move(sends)) {
    try {
      for (const auto& message : receives_) fabric_->receive(message, message->peer, rank_);
      for (const auto& message : sends_) fabric_->send(message, rank_, message->peer);
    } catch (...) {  // what has started already must not outlive this
      give_up(std::current_exception());
      throw;
    }
  }
  operation(operation&&) noexcept = default;
  operation& operator=(operation&& other) noexcept {
    operation(std::move(other)).swap(*this);
    return *this;
  }
  operation(const operation&) = delete;
  operation& operator=(const operation&) = delete;
  ~operation() { abandon(); }

  [[nodiscard]] bool ready() {
    if (!fabric_) return true;
    bool all = true;
    for (const auto* side : {&receives_, &sends_})
      for (const auto& message : *side) {
        if (!message->over.load(std::memory_order_acquire)) {
          all = false;
        } else if (message->failure) {
          // The others need not wait, and must not touch memory that goes with this exception.
          const auto failure = message->failure;
          give_up(failure);
          std::rethrow_exception(failure);
        }
      }
    // A sender that nobody expects waits in vain, and so may this rank for it: look now and then.
    constexpr unsigned polls_between_looks = 16;
    if (!all && ++polls_ % polls_between_looks != 0) return false;
    const auto stray =
        tag_.kind == channel::group ? fabric_->find_stray(rank_, tag_.oldest) : std::nullopt;
    if (stray) {
      const auto failure = std::make_exception_ptr(
          mismatch_error(concat("rank ", stray->sender, " sent a message of operation ",
                                stray->number, " that rank ", rank_, " does not receive")));
      // Given up before the stray's sender is let go: it must not complete this operation.
      const auto group = fabric_;
      give_up(failure);
      group->drop_strays(rank_, tag_.oldest);
      std::rethrow_exception(failure);
    }
    if (all) fabric_ = nullptr;
    return all;
  }

  void abandon() noexcept {
    if (fabric_) give_up(nullptr);
  }

  [[nodiscard]] std::vector<int> waiting_for() const {
    std::vector<int> ranks;
    if (!fabric_) return ranks;
    for (const auto* side : {&receives_, &sends_})
      for (const auto& message : *side)
        if (!message->over) ranks.push_back(message->peer);
    std::ranges::sort(ranks);
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

 private:
  void swap(operation& other) noexcept {
    std::swap(fabric_, other.fabric_);
    std::swap(rank_, other.rank_);
    std::swap(tag_, other.tag_);
    std::swap(receives_, other.receives_);
    std::swap(sends_, other.sends_);
    std::swap(polls_, other.polls_);
  }

  // Afterwards nobody touches the memory of the messages, and the operation is complete.
  void give_up(const std::exception_ptr& why) {
    const auto group = std::exchange(fabric_, nullptr);
    const auto& messages = receives_.empty() ? sends_ : receives_;
    if (!messages.empty()) group->give_up(rank_, tag_, messages.front()->peer, why);
  }

  std::shared_ptr<fabric> fabric_;  // null once complete
  int rank_ = 0;
  message_tag tag_;
  std::vector<half_pointer> receives_;
  std::vector<half_pointer> sends_;
  unsigned polls_ = 0;
};

static_assert(pending_operation<operation>);

}  // namespace bluefog::threads
