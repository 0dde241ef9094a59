// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <vector>

#include <mpi.h>

#include <bluefog/backend/message.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/keep_for_ever.hpp>
#include <bluefog/mpi/check.hpp>
#include <bluefog/mpi/handle.hpp>
#include <bluefog/mpi/native.hpp>
#include <bluefog/mpi/request_errors.hpp>
#include <bluefog/mpi/threads.hpp>

namespace bluefog::mpi {

/// Finds messages that nobody will receive: those whose operation is over on this rank.
class strays {
 public:
  strays(MPI_Comm group, tag_space tags) noexcept : group_(group), tags_(tags) {}
  strays(const strays&) = delete;
  strays& operator=(const strays&) = delete;
  ~strays() {
    const auto lock = threads::serialize();
    // A message that is still on its way keeps its memory until the process ends.
    for (dropped& each : dropped_)
      if (is_running() && !arrived(each)) bluefog::detail::keep_for_ever(std::move(each.memory));
  }

  /// Calls `look` if that has not been done for a while.
  void look_seldom(const message_tag& now) {
    if (now.kind != channel::group) return;
    constexpr int operations = 16;
    constexpr auto time = std::chrono::milliseconds(1);
    const auto moment = std::chrono::steady_clock::now();
    {
      const std::scoped_lock lock(mutex_);
      if (++since_look_ < operations && moment - looked_ < time) return;
      since_look_ = 0;
      looked_ = moment;
    }
    look(now);
  }

  /// Throws `mismatch_error` if a message has arrived for an operation that is over.
  ///
  /// One probe where nothing is wrong, which costs more than a short message. A stray message is
  /// taken out of the way, so that its sender need not wait.
  void look(const message_tag& now) {
    if (now.kind != channel::group) return;
    const std::scoped_lock lock(mutex_);
    std::erase_if(dropped_, arrived);
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status{};
    check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, group_, &found, &status), "MPI_Iprobe");
    if (found == 0 || !tags_.is_stale(status.MPI_TAG, now.oldest)) return;
    const int tag = status.MPI_TAG;
    const int source = status.MPI_SOURCE;
    check(MPI_Improbe(source, tag, group_, &found, &message, &status), "MPI_Improbe");
    if (found == 0) return;  // a receive posted meanwhile by another thread took it
    int bytes = 0;
    check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    auto& drop = dropped_.emplace_back();
    drop.memory.resize(static_cast<std::size_t>(bytes));
    check(MPI_Imrecv(drop.memory.data(), bytes, MPI_BYTE, &message, &drop.request), "MPI_Imrecv");
    some_late_ = true;
    if (std::ranges::find(late_, tag) != late_.end()) return;
    throw mismatch_error(concat("rank ", source, " sent a message of operation ",
                                now.oldest - tags_.behind(tag, now.oldest),
                                " that this rank does not receive"));
  }

  /// Messages of this operation may come after it was given up; they are dropped without a word.
  /// \param given_up  empty for a native collective, whose messages cannot be seen.
  void expect_late(const std::optional<message_tag>& given_up) noexcept {
    const std::scoped_lock lock(mutex_);
    some_late_ = true;
    if (!given_up) return;
    constexpr std::size_t kept = 64;  // older ones cannot be told from strays, and need not be
    const int tag = tags_.tag(*given_up);
    try {
      if (std::ranges::find(late_, tag) != late_.end()) return;
      if (late_.size() >= kept) late_.erase(late_.begin());
      late_.push_back(tag);
    } catch (const std::bad_alloc&) {  // then they are reported as strays
    }
  }

  /// An operation has been given up, whose native collectives the other ranks may or may not have
  /// begun.
  void gave_up() noexcept { gave_up_ = true; }
  /// \return whether native collectives of this rank may meet others than those of the other ranks.
  [[nodiscard]] bool out_of_step() const noexcept { return gave_up_; }

  /// \return whether messages that nobody receives have been seen, or may still arrive.
  [[nodiscard]] bool left_over() noexcept {
    const auto lock = threads::serialize();
    const std::scoped_lock own(mutex_);
    if (some_late_ || !is_running()) return true;
    int found = 0;
    return MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, group_, &found, MPI_STATUS_IGNORE) !=
               MPI_SUCCESS ||
           found != 0;
  }

 private:
  struct dropped {
    std::vector<std::byte> memory;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  static bool arrived(dropped& each) noexcept { return is_over(each.request); }

  MPI_Comm group_;  // borrowed from the backend
  tag_space tags_;
  std::mutex mutex_;
  std::list<dropped> dropped_;
  std::vector<int> late_;
  bool some_late_ = false;
  std::atomic<bool> gave_up_ = false;
  int since_look_ = 0;  // operations that are over since the last look
  std::chrono::steady_clock::time_point looked_{};
};

}  // namespace bluefog::mpi
