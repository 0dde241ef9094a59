// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <mpi.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/mpi/check.hpp>
#include <bluefog/mpi/library.hpp>
#include <bluefog/mpi/request_errors.hpp>
#include <bluefog/mpi/strays.hpp>

namespace bluefog::mpi {

/// One MPI request of an operation, and the message or piece of a message that it moves.
struct part {
  static constexpr int everybody = -1;

  MPI_Request request = MPI_REQUEST_NULL;  // of a receive none before its message is there
  const std::byte* source = nullptr;       // of a send
  std::byte* target = nullptr;             // of a receive
  int bytes = 0;
  int peer = everybody;
  bool awaited = false;  // a receive whose message has not been seen yet
};

/// MPI requests that complete together.
///
/// A receive is posted when its message is there and has the right length: Open MPI writes a long
/// message past the end of a receive that is too short for it.
///
/// The memory behind its parts is borrowed from the caller until `ready()` returns true or throws.
/// An operation that fails goes on until nothing is in flight, and only then throws.
class operation {
 public:
  operation() = default;
  /// Of a native collective. \param unexpected  of the communicator that the parts belong to.
  operation(std::vector<part> parts, std::shared_ptr<strays> unexpected) noexcept
      : parts_(std::move(parts)), unexpected_(std::move(unexpected)) {}
  /// Of messages. \param native_tag  what `tag` is for MPI.
  operation(std::vector<part> parts, std::shared_ptr<strays> unexpected, message_tag tag,
            MPI_Comm group, int native_tag) noexcept
      : parts_(std::move(parts)),
        awaited_(std::ranges::count_if(parts_, &part::awaited)),
        unexpected_(std::move(unexpected)),
        tag_(tag),
        group_(group),
        native_tag_(native_tag) {}
  operation(operation&&) noexcept = default;
  operation& operator=(operation&&) noexcept = default;
  operation(const operation&) = delete;
  operation& operator=(const operation&) = delete;
  ~operation() = default;  // an incomplete one is never destroyed: its driver keeps it

  /// Calls `begin`, which fills in the requests. If it throws, the operation fails with that.
  template <std::invocable<std::span<part>> Begin>
  void start(Begin begin) {
    if (parts_.empty()) return;
    library::operation_began();
    library::clear_marks();
    const auto lock = threads::serialize();
    try {
      begin(std::span<part>(parts_));
    } catch (...) {
      failure_ = std::current_exception();
      cancel(part::everybody);
    }
  }

  [[nodiscard]] bool ready() {
    if (parts_.empty() && !unexpected_) return true;
    const auto lock = threads::serialize();
    receive_arrived();
    while (next_ < parts_.size()) {
      if (!complete(parts_[next_])) {
        look_while_waiting();
        return false;
      }
      ++next_;
    }
    if (!std::exchange(parts_, {}).empty()) library::operation_ended();
    const auto unexpected = std::move(unexpected_);
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    if (tag_ && !abandoned_) unexpected->look_seldom(*tag_);
    return true;
  }

  /// \return what it fails with when nothing is in flight any more; null while all is well.
  [[nodiscard]] std::exception_ptr cause() const noexcept { return failure_; }

  void abandon() noexcept {
    if (parts_.empty() || std::exchange(abandoned_, true)) return;
    library::mark_given_up();
    if (unexpected_ && !(tag_ && tag_->kind == channel::pair)) unexpected_->gave_up();
    const auto lock = threads::serialize();
    cancel(part::everybody);
  }

  [[nodiscard]] std::vector<int> waiting_for() const {
    std::vector<int> ranks;
    const auto lock = threads::serialize();
    const request_errors::scope returned;
    for (std::size_t i = next_; i < parts_.size(); ++i) {
      if (parts_[i].peer == part::everybody) continue;
      int done = parts_[i].awaited ? 0 : 1;
      // A request that failed is over as well.
      if (parts_[i].request != MPI_REQUEST_NULL &&
          MPI_Request_get_status(parts_[i].request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS)
        continue;
      if (done == 0) ranks.push_back(parts_[i].peer);
    }
    std::ranges::sort(ranks);
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

 private:
  // A sender whom this rank does not expect may be why the one that it waits for does not come.
  void look_while_waiting() {
    constexpr unsigned polls_between_looks = 256;
    if (!tag_ || failure_ || abandoned_ || ++polls_ % polls_between_looks != 0) return;
    try {
      unexpected_->look(*tag_);
    } catch (...) {
      failure_ = std::current_exception();
      cancel(part::everybody);
    }
  }

  // Posts the receives whose messages have arrived. Messages of one sender match in the order sent.
  void receive_arrived() {
    if (awaited_ == 0) return;
    for (std::size_t i = next_; i < parts_.size(); ++i) {
      const auto before = std::span(parts_).subspan(next_, i - next_);
      const auto comes_first = [&](const part& it) {
        return it.awaited && it.peer == parts_[i].peer;
      };
      if (parts_[i].awaited && std::ranges::none_of(before, comes_first)) receive(parts_[i]);
    }
  }

  void receive(part& it) {
    int found = 0;
    int bytes = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status{};
    const request_errors::scope returned;
    try {
      check(MPI_Improbe(it.peer, native_tag_, group_, &found, &message, &status), "MPI_Improbe");
      if (found == 0) return;
      it.awaited = false;
      --awaited_;
      check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
      std::byte* target = it.target;
      if (bytes != it.bytes) {
        target = scraps_.emplace_back(static_cast<std::size_t>(bytes)).data();
      }
      check(MPI_Imrecv(target, bytes, MPI_BYTE, &message, &it.request), "MPI_Imrecv");
      if (bytes != it.bytes)
        throw mismatch_error(
            concat("rank ", it.peer, " sent ", bytes, " bytes where this rank expects ", it.bytes));
    } catch (...) {
      fail(it.peer, std::current_exception());
    }
  }

  // Tests one part; remembers the first failure. One at a time: any test makes progress for all,
  // and this way every library says which request failed.
  [[nodiscard]] bool complete(part& it) {
    if (it.awaited) return false;
    if (it.request == MPI_REQUEST_NULL) return true;  // never started
    int done = 0;
    const request_errors::scope returned;
    if (const int code = MPI_Test(&it.request, &done, MPI_STATUS_IGNORE); code != MPI_SUCCESS) {
      it.request = MPI_REQUEST_NULL;
      const std::string with = it.peer == part::everybody ? "" : concat(", with rank ", it.peer);
      fail(it.peer,
           std::make_exception_ptr(transport_error(
               concat("MPI_Test failed with MPI error ", code, ": ", error_text(code), with),
               code)));
      return true;
    }
    return done != 0;
  }

  // What else was to come from this rank may never come, and is nobody's if it does.
  void fail(int peer, std::exception_ptr why) {
    if (!failure_) failure_ = std::move(why);
    if (peer != part::everybody) cancel(peer);
  }

  // Only messages that have not come: what MPI has begun to move cannot be stopped.
  void cancel(int peer) noexcept {
    if (unexpected_) unexpected_->expect_late(tag_);
    for (std::size_t i = next_; i < parts_.size(); ++i)
      if (peer == part::everybody || parts_[i].peer == peer)
        if (std::exchange(parts_[i].awaited, false)) --awaited_;
  }

  std::vector<part> parts_;  // empty as soon as nothing is in flight
  std::size_t next_ = 0;     // parts before it are complete
  std::ptrdiff_t awaited_ = 0;
  std::vector<std::vector<std::byte>> scraps_;  // take messages of the wrong length
  std::shared_ptr<strays> unexpected_;
  std::optional<message_tag> tag_;
  MPI_Comm group_ = MPI_COMM_NULL;  // borrowed from the backend
  int native_tag_ = 0;
  std::exception_ptr failure_;
  bool abandoned_ = false;
  unsigned polls_ = 0;
};

static_assert(pending_operation<operation>);

}  // namespace bluefog::mpi
