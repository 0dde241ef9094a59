// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/message.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog::threads {

/// One half of a message: what a rank sends, or where it receives. Shared by the fabric and the
/// operation that waits for it.
struct half_message {
  std::byte* data = nullptr;  // a sender's bytes are only read
  std::size_t bytes = 0;
  message_tag tag;
  int peer = 0;
  std::atomic<bool> over = false;
  std::exception_ptr failure;  // written before `over`
};
using half_pointer = std::shared_ptr<half_message>;

/// What the ranks of a group of threads share: for each ordered pair of ranks, who waits to send
/// and who waits to receive.
///
/// The receiver's bytes are copied straight from the sender's memory, by whichever of the two comes
/// second. All functions may be called from any thread.
class fabric {
 public:
  explicit fabric(int size)
      : size_(size),
        lines_(static_cast<std::size_t>(size) * static_cast<std::size_t>(size) * channels),
        boxes_(static_cast<std::size_t>(size)),
        gone_(static_cast<std::size_t>(size)) {}

  [[nodiscard]] int size() const noexcept { return size_; }

  void send(const half_pointer& message, int sender, int receiver) {
    put(message, sender, receiver, &line::sends);
  }
  void receive(const half_pointer& message, int sender, int receiver) {
    put(message, sender, receiver, &line::receives);
  }

  /// Takes back what has not met its other half yet: afterwards nobody touches its memory.
  void withdraw(const half_pointer& message, int sender, int receiver) {
    auto& between = at(sender, receiver, message->tag.lane);
    const std::scoped_lock lock(between.mutex);
    std::erase(between.sends, message);
    std::erase(between.receives, message);
    between.waiting_sends = between.sends.size();
    message->over = true;
  }

  /// Drops messages to `receiver` that carry a number below `oldest`, which nobody will receive.
  /// \return who sent the first of them, and its number.
  [[nodiscard]] std::optional<letter> drop_strays(int receiver, std::uint64_t oldest) {
    std::optional<letter> found;
    for (int sender = 0; sender < size_; ++sender) {
      auto& between = at(sender, receiver, channel::group);
      if (between.waiting_sends.load(std::memory_order_relaxed) == 0) continue;
      const std::scoped_lock lock(between.mutex);
      while (!between.sends.empty() && between.sends.front()->tag.number < oldest) {
        if (!found) found = letter{sender, between.sends.front()->tag.number};
        finish(*between.sends.front());
        pop_front(between.sends);
      }
      between.waiting_sends = between.sends.size();
    }
    return found;
  }

  void post(int sender, int receiver, std::uint64_t number) {
    auto& box = boxes_[static_cast<std::size_t>(receiver)];
    const std::scoped_lock lock(box.mutex);
    box.letters.push_back({sender, number});
  }

  [[nodiscard]] std::optional<letter> collect(int receiver) {
    auto& box = boxes_[static_cast<std::size_t>(receiver)];
    const std::scoped_lock lock(box.mutex);
    if (box.letters.empty()) return std::nullopt;
    const letter next = box.letters.front();
    box.letters.pop_front();
    return next;
  }

  /// Rank `rank` will never send or receive again: whoever waits for it fails with a `peer_error`.
  void leave(int rank) {
    gone_[static_cast<std::size_t>(rank)] = true;
    for (int other = 0; other < size_; ++other)
      for (const auto lane : {channel::group, channel::pair}) {
        fail_waiting(at(rank, other, lane), rank);
        fail_waiting(at(other, rank, lane), rank);
      }
    const std::scoped_lock lock(subsets_mutex_);
    for (const auto& [members, known] : subsets_)
      if (const auto group = known.lock()) tell_gone(*group, members, rank);
  }

  /// \return the fabric of `members`, the same for all of them who ask with the same arguments.
  [[nodiscard]] std::shared_ptr<fabric> subset(const std::vector<int>& members,
                                               std::uint64_t serial) {
    const std::scoped_lock lock(subsets_mutex_);
    auto& entry = forming_[{serial, members}];
    if (!entry.group) {
      entry = {std::make_shared<fabric>(static_cast<int>(members.size())), members.size()};
      std::erase_if(subsets_, [](const auto& known) { return known.second.expired(); });
      subsets_.emplace_back(members, entry.group);
      for (const int member : members)
        if (gone_[static_cast<std::size_t>(member)]) tell_gone(*entry.group, members, member);
    }
    auto group = entry.group;
    if (--entry.missing == 0) forming_.erase({serial, members});
    return group;
  }

 private:
  static constexpr std::size_t channels = 2;

  struct line {
    std::mutex mutex;
    std::vector<half_pointer> sends;  // short; a vector costs nothing while unused
    std::vector<half_pointer> receives;
    std::atomic<std::size_t> waiting_sends = 0;
  };
  struct letter_box {
    std::mutex mutex;
    std::deque<letter> letters;
  };
  struct forming_subset {
    std::shared_ptr<fabric> group;
    std::size_t missing = 0;  // members that have not asked for it yet
  };

  static void tell_gone(fabric& group, const std::vector<int>& members, int rank) {
    const auto found = std::ranges::find(members, rank);
    if (found != members.end()) group.leave(static_cast<int>(found - members.begin()));
  }

  [[nodiscard]] line& at(int sender, int receiver, channel lane) {
    const auto n = static_cast<std::size_t>(size_);
    return lines_[(static_cast<std::size_t>(sender) * n + static_cast<std::size_t>(receiver)) *
                      channels +
                  static_cast<std::size_t>(lane)];
  }

  static void pop_front(std::vector<half_pointer>& waiting) { waiting.erase(waiting.begin()); }

  static void finish(half_message& message) noexcept {
    message.over.store(true, std::memory_order_release);
  }
  template <class Error>
  static void fail(half_message& message, const std::string& text) {
    message.failure = std::make_exception_ptr(Error(text));
    finish(message);
  }

  void put(const half_pointer& message, int sender, int receiver,
           std::vector<half_pointer> line::*side) {
    auto& between = at(sender, receiver, message->tag.lane);
    const std::scoped_lock lock(between.mutex);
    (between.*side).push_back(message);
    match(between, sender, receiver);
    // Asked after the message is in the line: `leave` either sees it there or is seen here.
    if (gone_[static_cast<std::size_t>(message->peer)]) fail_all(between, message->peer);
    between.waiting_sends = between.sends.size();
  }

  // Joins sends and receives in order as long as both wait. Under the line's mutex.
  static void match(line& between, int sender, int receiver) {
    while (!between.sends.empty() && !between.receives.empty()) {
      auto& out = *between.sends.front();
      auto& in = *between.receives.front();
      if (out.tag.number == in.tag.number) {
        if (out.bytes == in.bytes) {
          if (in.bytes > 0) std::memcpy(in.data, out.data, in.bytes);
          finish(in);
        } else {
          fail<mismatch_error>(in, concat("rank ", sender, " sent ", out.bytes,
                                          " bytes where rank ", receiver, " expects ", in.bytes));
        }
        finish(out);
        pop_front(between.sends);
        pop_front(between.receives);
      } else if (out.tag.number < in.tag.number) {  // nobody received it, and nobody will
        in.failure = std::make_exception_ptr(
            mismatch_error(stray(sender, receiver, out.tag.number, in.tag.number)));
        finish(out);
        pop_front(between.sends);  // the receive still waits for its own message, then fails
      } else {                     // the sender has passed that operation without sending
        fail<mismatch_error>(in, stray(sender, receiver, out.tag.number, in.tag.number));
        pop_front(between.receives);
      }
    }
  }

  [[nodiscard]] static std::string stray(int sender, int receiver, std::uint64_t sent,
                                         std::uint64_t expected) {
    return concat("rank ", sender, " sent a message of operation ", sent, " where rank ", receiver,
                  " expects operation ", expected);
  }

  static void fail_all(line& between, int rank) {
    const auto text = concat("rank ", rank, " has ended");
    for (auto* side : {&between.sends, &between.receives})
      std::erase_if(*side, [&](auto& message) {
        if (message->peer != rank) return false;
        fail<peer_error>(*message, text);
        return true;
      });
  }

  static void fail_waiting(line& between, int rank) {
    const std::scoped_lock lock(between.mutex);
    fail_all(between, rank);
    between.waiting_sends = between.sends.size();
  }

  int size_;
  std::vector<line> lines_;
  std::vector<letter_box> boxes_;
  std::vector<std::atomic<bool>> gone_;
  std::mutex subsets_mutex_;
  std::map<std::pair<std::uint64_t, std::vector<int>>, forming_subset> forming_;
  std::vector<std::pair<std::vector<int>, std::weak_ptr<fabric>>> subsets_;
};

}  // namespace bluefog::threads
