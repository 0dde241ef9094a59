// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include <bluefog/backend/message.hpp>
#include <bluefog/backend/names.hpp>

namespace bluefog {

/// Times after which a wait is spoken of, and given up.
struct patience {
  std::chrono::milliseconds timeout;
  std::chrono::milliseconds stall_warning;
};

/// One communicator as the engine sees it: a sequence of operations that start in program order.
class lane {
 public:
  /// \param pairs_in_order  whether operations of two ranks, too, wait for those that hold the
  ///                        order.
  lane(patience limits, bool pairs_in_order) : limits_(limits), pairs_in_order_(pairs_in_order) {}
  lane(const lane&) = delete;
  lane& operator=(const lane&) = delete;
  virtual ~lane() = default;

  [[nodiscard]] const patience& limits() const noexcept { return limits_; }
  /// \return the names that the user gave to operations that nobody has waited for yet.
  [[nodiscard]] const std::shared_ptr<used_names>& names() const noexcept { return names_; }

  /// Tells the other ranks that this one waits in operation `number`.
  virtual void announce(std::uint64_t number) = 0;
  /// Reads what other ranks have told, and answers those that ask while this rank is at `number`.
  virtual void listen(std::uint64_t number) = 0;
  /// \return the ranks not known to have reached operation `number`, ascending.
  [[nodiscard]] virtual std::vector<int> silent(std::uint64_t number) const = 0;
  [[nodiscard]] virtual int rank_of_lane() const noexcept = 0;

 private:
  friend class engine;
  friend class job;

  // An operation begins to be outstanding, and ends that. Under the engine's mutex.
  void enter(const message_tag& tag) {
    if (tag.kind == channel::group) numbers_.push_back(tag.number);
    ++outstanding_;
  }
  void leave(const message_tag& tag) {
    if (tag.kind == channel::group) std::erase(numbers_, tag.number);
    --outstanding_;
  }

  patience limits_;
  bool pairs_in_order_;
  std::shared_ptr<used_names> names_ = std::make_shared<used_names>();
  // Under the engine's mutex:
  std::atomic<int> outstanding_ = 0;    // read without it too
  std::vector<std::uint64_t> numbers_;  // of outstanding group operations, ascending
  // Of whoever drives:
  std::chrono::steady_clock::time_point progress_{};  // when the last operation succeeded
};

}  // namespace bluefog
