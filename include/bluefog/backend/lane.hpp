// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <bluefog/backend/message.hpp>

namespace bluefog {

/// Times after which a wait is spoken of, and given up.
struct patience {
  std::chrono::milliseconds timeout;
  std::chrono::milliseconds stall_warning;
};

/// One communicator as the engine sees it: a sequence of operations that start in program order.
class lane {
 public:
  explicit lane(patience limits) noexcept : limits_(limits) {}
  lane(const lane&) = delete;
  lane& operator=(const lane&) = delete;
  virtual ~lane() = default;

  [[nodiscard]] const patience& limits() const noexcept { return limits_; }

  /// Tells the other ranks that this one waits in operation `number`.
  virtual void announce(std::uint64_t number) = 0;
  /// Reads what other ranks have told, and answers those that ask while this rank is at `number`.
  virtual void listen(std::uint64_t number) = 0;
  /// \return the ranks not known to have reached operation `number`, ascending.
  [[nodiscard]] virtual std::vector<int> silent(std::uint64_t number) const = 0;
  [[nodiscard]] virtual int rank_of_lane() const noexcept = 0;

 private:
  friend class engine;

  patience limits_;
  // Under the engine's mutex:
  int outstanding_ = 0;
  std::vector<std::uint64_t> numbers_;  // of outstanding group operations, ascending
  std::vector<std::string> names_;      // that the user gave to outstanding operations
};

}  // namespace bluefog
