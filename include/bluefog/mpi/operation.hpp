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

  MPI_Request request = MPI_REQUEST_NULL;
  const std::byte* source = nullptr;  // of a send
  std::byte* target = nullptr;        // of a receive
  int bytes = 0;
  int peer = everybody;
  bool receives = false;
  bool cancelled = false;
};

/// MPI requests that complete together.
///
/// The memory behind its parts is borrowed from the caller until `ready()` returns true or throws.
/// An operation that fails goes on until nothing is in flight, and only then throws.
class operation {
 public:
  operation() = default;
  /// \param unexpected  of the communicator that the parts belong to.
  /// \param tag  of the messages; a native collective has none.
  operation(std::vector<part> parts, std::shared_ptr<strays> unexpected,
            std::optional<message_tag> tag = std::nullopt) noexcept
      : parts_(std::move(parts)), unexpected_(std::move(unexpected)), tag_(tag) {}
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
    library::clear_mark();
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

  void abandon() noexcept {
    if (std::exchange(abandoned_, true)) return;
    const auto lock = threads::serialize();
    cancel(part::everybody);
  }

  [[nodiscard]] std::vector<int> waiting_for() const {
    std::vector<int> ranks;
    const auto lock = threads::serialize();
    for (std::size_t i = next_; i < parts_.size(); ++i) {
      if (parts_[i].peer == part::everybody || parts_[i].request == MPI_REQUEST_NULL) continue;
      int done = 0;
      // A request that failed is over as well.
      if (MPI_Request_get_status(parts_[i].request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS &&
          done == 0)
        ranks.push_back(parts_[i].peer);
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

  // Tests one part; remembers the first failure. One at a time: any test makes progress for all,
  // and this way every library says which request failed.
  [[nodiscard]] bool complete(part& it) {
    if (it.request == MPI_REQUEST_NULL) return true;  // never started
    int done = 0;
    MPI_Status status{};
    const request_errors::scope returned;
    if (const int code = MPI_Test(&it.request, &done, &status); code != MPI_SUCCESS) {
      it.request = MPI_REQUEST_NULL;
      fail(it, code, status);
      return true;
    }
    if (done == 0) return false;
    if (!it.receives || it.cancelled) return true;
    if (const int arrived = length(status); arrived != it.bytes)
      fail(it.peer,
           std::make_exception_ptr(mismatch_error(concat(
               "rank ", it.peer, " sent ", arrived, " bytes where this rank expects ", it.bytes))));
    return true;
  }

  [[nodiscard]] static int length(const MPI_Status& status) noexcept {
    int bytes = -1;
    return MPI_Get_count(&status, MPI_BYTE, &bytes) == MPI_SUCCESS ? bytes : -1;
  }

  void fail(const part& it, int code, const MPI_Status& status) {
    int error_class = MPI_ERR_OTHER;
    static_cast<void>(MPI_Error_class(code, &error_class));
    if (it.receives && error_class == MPI_ERR_TRUNCATE) {
      // Not every library tells how long the message was.
      const int sent = length(status);
      const std::string what = sent > it.bytes ? concat(sent, " bytes") : "more";
      fail(it.peer, std::make_exception_ptr(mismatch_error(
                        concat("rank ", it.peer, " sent ", what, " where this rank expects ",
                               it.bytes, sent > it.bytes ? "" : " bytes"))));
      return;
    }
    const std::string with = it.peer == part::everybody ? "" : concat(", with rank ", it.peer);
    fail(it.peer,
         std::make_exception_ptr(transport_error(
             concat("MPI_Test failed with MPI error ", code, ": ", error_text(code), with), code)));
  }

  // What else was to come from this rank may never come, and is nobody's if it does.
  void fail(int peer, std::exception_ptr why) {
    if (!failure_) failure_ = std::move(why);
    if (peer != part::everybody) cancel(peer);
  }

  // Receives only: a send cannot be cancelled once it has started.
  void cancel(int peer) noexcept {
    if (unexpected_) unexpected_->expect_late(tag_);
    for (std::size_t i = next_; i < parts_.size(); ++i) {
      part& each = parts_[i];
      if (!each.receives || each.cancelled || each.request == MPI_REQUEST_NULL) continue;
      if (peer != part::everybody && each.peer != peer) continue;
      each.cancelled = true;
      static_cast<void>(MPI_Cancel(&each.request));
    }
  }

  std::vector<part> parts_;  // empty as soon as nothing is in flight
  std::size_t next_ = 0;     // parts before it are complete
  std::shared_ptr<strays> unexpected_;
  std::optional<message_tag> tag_;
  std::exception_ptr failure_;
  bool abandoned_ = false;
  unsigned polls_ = 0;
};

static_assert(pending_operation<operation>);

}  // namespace bluefog::mpi
