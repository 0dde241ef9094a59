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
#include <string>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/message.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/thread/surrender.hpp>

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
        surrendered_(static_cast<std::size_t>(size)),
        gone_(static_cast<std::size_t>(size)) {}

  [[nodiscard]] int size() const noexcept { return size_; }

  void send(const half_pointer& message, int sender, int receiver) {
    put(message, sender, receiver, &line::sends);
  }
  void receive(const half_pointer& message, int sender, int receiver) {
    put(message, sender, receiver, &line::receives);
  }

  /// Rank `rank` gives up the operation `tag`, of all ranks or of itself and `peer`: afterwards
  /// nobody touches the memory of its messages. Who waits for one, now or later, fails for the
  /// reason `why`, which may be null; messages to `rank` go nowhere.
  void give_up(int rank, const message_tag& tag, int peer, const std::exception_ptr& why) {
    const surrender given_up{tag, peer, reason(rank, why)};
    surrendered_[static_cast<std::size_t>(rank)].add(given_up);
    for (int other = 0; other < size_; ++other)
      if (given_up.concerns(tag, other)) {
        settle_given_up(at(rank, other, tag.kind), given_up, rank);
        settle_given_up(at(other, rank, tag.kind), given_up, rank);
      }
  }

  /// \return who sent a message to `receiver` that carries a number below `oldest`, which
  ///         nobody will receive, and its number.
  [[nodiscard]] std::optional<letter> find_stray(int receiver, std::uint64_t oldest) {
    for (int sender = 0; sender < size_; ++sender) {
      auto& between = at(sender, receiver, channel::group);
      if (between.waiting_sends.load(std::memory_order_relaxed) == 0) continue;
      const std::scoped_lock lock(between.mutex);
      for (const half_pointer& message : between.sends)
        if (message->tag.number < oldest) return letter{sender, message->tag.number};
    }
    return std::nullopt;
  }

  /// Takes all such messages out of the way, which lets their senders go on.
  void drop_strays(int receiver, std::uint64_t oldest) {
    for (int sender = 0; sender < size_; ++sender) {
      auto& between = at(sender, receiver, channel::group);
      if (between.waiting_sends.load(std::memory_order_relaxed) == 0) continue;
      const std::scoped_lock lock(between.mutex);
      std::erase_if(between.sends, [&](const half_pointer& message) {
        if (message->tag.number >= oldest) return false;
        finish(*message);
        return true;
      });
      between.waiting_sends = between.sends.size();
    }
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
      for (const auto kind : {channel::group, channel::pair}) {
        fail_waiting(at(rank, other, kind), rank);
        fail_waiting(at(other, rank, kind), rank);
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

  [[nodiscard]] line& at(int sender, int receiver, channel kind) {
    const auto n = static_cast<std::size_t>(size_);
    return lines_[(static_cast<std::size_t>(sender) * n + static_cast<std::size_t>(receiver)) *
                      channels +
                  static_cast<std::size_t>(kind)];
  }

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
    auto& between = at(sender, receiver, message->tag.kind);
    const bool sends = side == &line::sends;
    const std::scoped_lock lock(between.mutex);
    auto& others = sends ? between.receives : between.sends;
    const auto other = std::ranges::find_if(others, [&](const half_pointer& waiting) {
      return waiting->tag.number == message->tag.number;
    });
    if (other != others.end()) {
      if (sends)
        join(*message, **other, sender, receiver);
      else
        join(**other, *message, sender, receiver);
      others.erase(other);
    } else {
      (between.*side).push_back(message);
    }
    if (sends && message->tag.kind == channel::group)
      fail_passed(between, message->tag.oldest, sender, receiver);
    // Asked after the message is in the line: `give_up` and `leave` either see it there or are seen
    // here.
    const int rank = sends ? sender : receiver;
    const auto& peers = surrendered_[static_cast<std::size_t>(message->peer)];
    if (const auto given_up = peers.find(message->tag, rank))
      settle(between, *given_up, message->peer);
    if (gone_[static_cast<std::size_t>(message->peer)]) fail_all(between, message->peer);
    between.waiting_sends = between.sends.size();
  }

  // Moves a message from its sender to its receiver.
  static void join(half_message& out, half_message& in, int sender, int receiver) {
    if (out.bytes != in.bytes)
      fail<mismatch_error>(in, concat("rank ", sender, " sent ", out.bytes, " bytes where rank ",
                                      receiver, " expects ", in.bytes));
    else if (in.bytes > 0)
      std::memcpy(in.data, out.data, in.bytes);
    if (!in.failure) finish(in);
    finish(out);
  }

  // Everything that the sender had to send below `oldest` has been sent: nothing more will come.
  static void fail_passed(line& between, std::uint64_t oldest, int sender, int receiver) {
    std::erase_if(between.receives, [&](const half_pointer& message) {
      if (message->tag.number >= oldest) return false;
      fail<mismatch_error>(*message, concat("rank ", receiver, " expects a message of operation ",
                                            message->tag.number, ", which rank ", sender,
                                            " has passed without sending one"));
      return true;
    });
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

  // Why a peer of `rank`, which gives up because of `why`, fails too.
  [[nodiscard]] static std::exception_ptr reason(int rank, const std::exception_ptr& why) {
    const std::string text = concat("rank ", rank, " gave it up");
    if (!why) return std::make_exception_ptr(peer_error(text));
    try {
      std::rethrow_exception(why);
    } catch (const mismatch_error& problem) {
      return std::make_exception_ptr(mismatch_error(concat(text, ": ", problem.what())));
    } catch (const std::exception& problem) {
      return std::make_exception_ptr(peer_error(concat(text, ": ", problem.what())));
    }
  }

  static void settle_given_up(line& between, const surrender& given_up, int rank) {
    const std::scoped_lock lock(between.mutex);
    settle(between, given_up, rank);
    between.waiting_sends = between.sends.size();
  }

  // Ends the messages of an operation that `rank` has given up; only who receives from it is told.
  static void settle(line& between, const surrender& given_up, int rank) {
    for (auto* side : {&between.sends, &between.receives})
      std::erase_if(*side, [&](const half_pointer& message) {
        if (message->tag.number != given_up.tag.number) return false;
        if (side == &between.receives && message->peer == rank) message->failure = given_up.why;
        finish(*message);
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
  std::vector<surrender_list> surrendered_;  // per rank
  std::vector<std::atomic<bool>> gone_;
  std::mutex subsets_mutex_;
  std::map<std::pair<std::uint64_t, std::vector<int>>, forming_subset> forming_;
  std::vector<std::pair<std::vector<int>, std::weak_ptr<fabric>>> subsets_;
};

}  // namespace bluefog::threads
