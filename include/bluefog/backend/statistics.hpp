// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace bluefog {

/// What one rank has done on one communicator so far.
///
/// Payload: neighbour operations and pair gossip count the bytes handed to each destination; of an
/// operation of all ranks, what a bandwidth-optimal algorithm sends (allreduce 2(n-1)/n S,
/// broadcast (n-1)/n S, allgather (n-1) times the own block), as one message. Counted apart is what
/// tells about payload, or is none: check mode, set-up, barriers, lengths that travel first.
struct statistics {
  std::int64_t bytes_sent = 0;
  std::int64_t messages_sent = 0;
  std::int64_t operations = 0;
  std::int64_t control_bytes = 0;
  std::int64_t control_messages = 0;
};

/// The counters behind `statistics`; any thread may count.
class traffic {
 public:
  void count_operation() noexcept { add(operations_, 1); }
  void count(std::int64_t bytes, std::int64_t messages) noexcept {
    add(bytes_, bytes);
    add(messages_, messages);
  }
  void count_control(std::int64_t bytes, std::int64_t messages) noexcept {
    add(control_bytes_, bytes);
    add(control_messages_, messages);
  }

  [[nodiscard]] statistics snapshot() const noexcept {
    return {bytes_.load(), messages_.load(), operations_.load(), control_bytes_.load(),
            control_messages_.load()};
  }

 private:
  using counter = std::atomic<std::int64_t>;
  static void add(counter& to, std::int64_t amount) noexcept {
    to.fetch_add(amount, std::memory_order_relaxed);
  }

  counter bytes_ = 0, messages_ = 0, operations_ = 0, control_bytes_ = 0, control_messages_ = 0;
};

}  // namespace bluefog
