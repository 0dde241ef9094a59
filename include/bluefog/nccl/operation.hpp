// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/label.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/nccl/connection.hpp>
#include <bluefog/nccl/handle.hpp>
#include <bluefog/nccl/staging.hpp>

namespace bluefog::nccl {

/// Work that was given to a connection's stream.
///
/// Complete once it is over, as an event tells; where all memory is the device's and later work on
/// the stream will be waited for anyway, once it is certain to be on the stream. Nobody waits for
/// the device as a whole.
class operation {
 public:
  /// What has to have happened.
  enum class end : bool { launched, over };

  operation() = default;
  /// \param peers  the ranks whose part it needs, ascending; empty if all have one.
  operation(std::shared_ptr<connection> on, end wanted, std::vector<int> peers = {}) noexcept
      : connection_(std::move(on)), wanted_(wanted), peers_(std::move(peers)) {}
  operation(operation&&) noexcept = default;
  operation& operator=(operation&&) noexcept = default;
  operation(const operation&) = delete;
  operation& operator=(const operation&) = delete;
  ~operation() = default;  // an incomplete one is never destroyed: its driver keeps it

  /// \return what is complete once all work on the stream of `on` is, as far as it is there now.
  /// \param peers  whom that work waits for.
  [[nodiscard]] static operation all_so_far(std::shared_ptr<connection> on,
                                            std::vector<int> peers) {
    operation made(std::move(on), end::over, std::move(peers));
    made.active_ = true;
    made.launched_ = true;
    if (!made.connection_->is_aborted()) made.over_ = record(made.connection_->stream());
    return made;
  }

  /// Calls `begin(staging&)`, which gives work to the stream. If it throws, the operation fails,
  /// and the connection with it. \param host  memory of the host that travels, see `staging`.
  template <std::invocable<staging&> Begin>
  void start(staging host, Begin begin) {
    const auto inside = connection_->enter();
    connection_->expects_usable();
    host_ = std::move(host);
    active_ = true;
    try {
      host_.acquire(*connection_);
      host_.to_device(*connection_);
      begin(host_);
    } catch (...) {
      fail();
    }
  }

  [[nodiscard]] bool ready() {
    if (!active_) return true;
    const auto inside = connection_->enter();
    try {
      if (!failure_ && !connection_->is_aborted() && !progressed()) return false;
      if (!failure_ && !abandoned_ && connection_->is_aborted()) connection_->expects_usable();
    } catch (...) {
      fail();
    }
    // What an abort leaves on the stream, it leaves to end by itself. Whoever waits need not wait
    // for that, see `failure()`.
    if (connection_->is_aborted() && connection_->is_working()) return false;
    active_ = false;
    host_.release();
    if (failure_ && !abandoned_) std::rethrow_exception(std::exchange(failure_, nullptr));
    return true;
  }

  void abandon() noexcept {
    if (!active_ || std::exchange(abandoned_, true)) return;
    try {
      const auto inside = connection_->enter();
      connection_->abort(peers_.empty()
                             ? "an operation of all ranks was given up"
                             : "an operation with " + bluefog::detail::ranks_text(peers_) +
                                   " was given up");
    } catch (...) {  // the device is gone, and what worked on it
      active_ = false;
    }
  }

  /// \return why it has failed, where the stream works on in spite of the abort, and with the
  ///         operation's memory: `ready()` may stay false for ever then. Null otherwise.
  [[nodiscard]] std::exception_ptr failure() const noexcept { return active_ ? failure_ : nullptr; }

  /// All whose part it needs: NCCL does not tell whose is missing.
  [[nodiscard]] std::vector<int> waiting_for() const { return peers_; }

 private:
  // Goes on as far as it can without waiting. \return whether everything is as wanted.
  [[nodiscard]] bool progressed() {
    if (!launched_) {
      if (!connection_->has_launched()) {
        look_around();
        return false;
      }
      launched_ = true;
      if (wanted_ == end::launched && host_.empty()) {
        connection_->note_work(peers_);
        return true;
      }
      host_.from_device(*connection_);
      over_ = record(connection_->stream());
    }
    if (!over_) return true;
    if (!is_over(over_.get())) {
      look_around();
      return false;
    }
    // An abort by another thread ends the work without having done it.
    static_cast<void>(connection_->has_launched());
    host_.hand_over();
    return true;
  }

  // Now and then finds out whether what it waits for can still come.
  void look_around() {
    constexpr unsigned polls_between_looks = 16;
    if (++polls_ % polls_between_looks != 0) return;
    static_cast<void>(connection_->has_launched());
    connection_->expects_everybody();
  }

  void fail() {
    failure_ = std::current_exception();
    try {
      throw;
    } catch (const std::exception& problem) {
      connection_->abort(problem.what());
    } catch (...) {
      connection_->abort("an unknown failure");
    }
  }

  std::shared_ptr<connection> connection_;
  end wanted_ = end::over;
  std::vector<int> peers_;
  staging host_;
  unique_event over_;
  std::exception_ptr failure_;
  bool active_ = false;
  bool launched_ = false;
  bool abandoned_ = false;
  unsigned polls_ = 0;
};

static_assert(pending_operation<operation>);

}  // namespace bluefog::nccl
