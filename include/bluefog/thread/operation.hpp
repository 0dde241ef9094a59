// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
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
  operation(std::shared_ptr<fabric> group, int rank, message_tag tag,
            std::vector<half_pointer> receives, std::vector<half_pointer> sends) noexcept
      : fabric_(std::move(group)),
        rank_(rank),
        tag_(tag),
        receives_(std::move(receives)),
        sends_(std::move(sends)) {}
  operation(operation&&) noexcept = default;
  operation& operator=(operation&&) noexcept = default;
  operation(const operation&) = delete;
  operation& operator=(const operation&) = delete;
  ~operation() { abandon(); }

  [[nodiscard]] bool ready() {
    if (!fabric_) return true;
    const auto over = [](const half_pointer& it) {
      return it->over.load(std::memory_order_acquire);
    };
    if (!std::ranges::all_of(receives_, over) || !std::ranges::all_of(sends_, over)) return false;
    const auto group = std::exchange(fabric_, nullptr);
    for (const auto* side : {&receives_, &sends_})
      for (const auto& message : *side)
        if (message->failure) std::rethrow_exception(message->failure);
    if (tag_.lane == channel::group)
      if (const auto stray = group->drop_strays(rank_, tag_.oldest))
        throw mismatch_error(concat("rank ", stray->sender, " sent a message of operation ",
                                    stray->number, " that rank ", rank_, " does not receive"));
    return true;
  }

  void abandon() noexcept {
    if (!fabric_) return;
    for (const auto& message : receives_) fabric_->withdraw(message, message->peer, rank_);
    for (const auto& message : sends_) fabric_->withdraw(message, rank_, message->peer);
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
  std::shared_ptr<fabric> fabric_;  // null once complete
  int rank_ = 0;
  message_tag tag_;
  std::vector<half_pointer> receives_;
  std::vector<half_pointer> sends_;
};

static_assert(pending_operation<operation>);

}  // namespace bluefog::threads
