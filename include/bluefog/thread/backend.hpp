// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/thread/exchange.hpp>
#include <bluefog/thread/fabric.hpp>
#include <bluefog/thread/operation.hpp>

namespace bluefog {

/// Ranks that are threads of one process: the embedded default, simulations and sanitizers.
///
/// `run_threads` makes one per rank; default-constructed it is one rank alone. Any thread may call
/// any function. Data is copied once, from the sender's memory to the receiver's. A rank that ends
/// makes whoever waits for it fail with a `peer_error`.
class thread_backend {
 public:
  using operation_type = threads::operation;
  static constexpr std::string_view name = "threads";
  static constexpr memory_space space = memory_space::host;

  thread_backend() : thread_backend(std::make_shared<threads::fabric>(1), 0) {}
  thread_backend(std::shared_ptr<threads::fabric> group, int rank) noexcept
      : fabric_(std::move(group)), rank_(rank) {}
  thread_backend(thread_backend&&) noexcept = default;
  thread_backend& operator=(thread_backend&&) noexcept = default;
  thread_backend(const thread_backend&) = delete;
  thread_backend& operator=(const thread_backend&) = delete;
  ~thread_backend() = default;

  [[nodiscard]] int rank() const noexcept { return rank_; }
  [[nodiscard]] int size() const noexcept { return fabric_->size(); }
  [[nodiscard]] int machine() const noexcept { return 0; }
  [[nodiscard]] bool any_thread() const noexcept { return true; }

  [[nodiscard]] threads::exchange exchange(message_tag tag) { return {fabric_, rank_, tag}; }

  [[nodiscard]] thread_backend subset(std::span<const int> members, std::uint64_t serial) {
    std::vector<int> ranks(members.begin(), members.end());
    const auto own = std::ranges::find(ranks, rank_) - ranks.begin();
    return {fabric_->subset(ranks, serial), static_cast<int>(own)};
  }

  void post(int peer, std::uint64_t number) { fabric_->post(rank_, peer, number); }
  [[nodiscard]] std::optional<letter> collect() { return fabric_->collect(rank_); }

 private:
  std::shared_ptr<threads::fabric> fabric_;
  int rank_;
};

static_assert(backend<thread_backend>);
static_assert(letter_backend<thread_backend>);

}  // namespace bluefog
