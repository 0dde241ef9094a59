// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <mpi.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/mpi/check.hpp>
#include <bluefog/mpi/library.hpp>
#include <bluefog/mpi/strays.hpp>

namespace bluefog::mpi {

/// One MPI request of an operation, and what is known about its message.
struct part {
  static constexpr int everybody = -1;

  MPI_Request request = MPI_REQUEST_NULL;
  int peer = everybody;
  int bytes = 0;  // of a receive
  bool receives = false;
};

/// MPI requests that complete together.
///
/// Its memory is borrowed from the caller until `ready()` is true; arrays that MPI reads meanwhile
/// (counts of a gather) are kept here.
class operation {
 public:
  operation() = default;
  operation(std::vector<part> parts, message_tag tag, std::shared_ptr<strays> unexpected,
            std::vector<int> kept = {})
      : unexpected_(std::move(unexpected)), tag_(tag), kept_(std::move(kept)) {
    for (const part& each : parts) requests_.push_back(each.request);
    parts_ = std::move(parts);
  }
  operation(operation&&) noexcept = default;
  operation& operator=(operation&&) noexcept = default;
  operation(const operation&) = delete;
  operation& operator=(const operation&) = delete;
  ~operation() = default;  // an incomplete one is never destroyed: its driver keeps it

  [[nodiscard]] bool ready() {
    if (over_) return true;
    const auto lock = library::serialize();
    if (!test()) return false;
    over_ = true;
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    if (unexpected_ && !abandoned_) unexpected_->look(tag_);
    return true;
  }

  void abandon() noexcept {
    if (over_ || std::exchange(abandoned_, true)) return;
    const auto lock = library::serialize();
    if (unexpected_) unexpected_->expect_late(tag_);
    // Sends cannot be cancelled once they have started; receives can, unless they have matched.
    for (std::size_t i = 0; i < parts_.size(); ++i)
      if (parts_[i].receives && requests_[i] != MPI_REQUEST_NULL)
        static_cast<void>(MPI_Cancel(&requests_[i]));
  }

  [[nodiscard]] std::vector<int> waiting_for() const {
    std::vector<int> ranks;
    if (over_) return ranks;
    const auto lock = library::serialize();
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      if (parts_[i].peer == part::everybody || requests_[i] == MPI_REQUEST_NULL) continue;
      int complete = 0;
      check(MPI_Request_get_status(requests_[i], &complete, MPI_STATUS_IGNORE),
            "MPI_Request_get_status");
      if (complete == 0) ranks.push_back(parts_[i].peer);
    }
    std::ranges::sort(ranks);
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
  }

 private:
  // Tests all requests; remembers the first failure and goes on until nothing is in flight.
  [[nodiscard]] bool test() {
    if (requests_.empty()) return true;
    statuses_.resize(requests_.size());
    int complete = 0;
    const int code = MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &complete,
                                 statuses_.data());
    if (code == MPI_SUCCESS) {
      if (complete == 0) return false;
      for (std::size_t i = 0; i < parts_.size(); ++i)
        if (parts_[i].receives && !abandoned_ && !failure_) expect_length(parts_[i], statuses_[i]);
      return true;
    }
    note_failure(code);
    return std::ranges::all_of(requests_, [](MPI_Request it) { return it == MPI_REQUEST_NULL; });
  }

  void expect_length(const part& message, const MPI_Status& status) {
    int bytes = 0;
    check(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    // A request that an earlier test already took out of the list has an empty status.
    if (bytes == message.bytes || status.MPI_SOURCE != message.peer) return;
    failure_ = std::make_exception_ptr(mismatch_error(concat(
        "rank ", message.peer, " sent ", bytes, " bytes where ", message.bytes, " are expected")));
  }

  void note_failure(int code) {
    int first = code;
    const part* where = nullptr;
    if (code == MPI_ERR_IN_STATUS)
      for (std::size_t i = 0; i < parts_.size(); ++i) {
        const int error = statuses_[i].MPI_ERROR;
        if (error == MPI_SUCCESS || error == MPI_ERR_PENDING) continue;
        first = error;
        where = &parts_[i];
        requests_[i] = MPI_REQUEST_NULL;
        break;
      }
    else
      std::ranges::fill(requests_, MPI_REQUEST_NULL);
    if (failure_) return;
    int error_class = 0;
    check(MPI_Error_class(first, &error_class), "MPI_Error_class");
    if (error_class == MPI_ERR_TRUNCATE && where != nullptr)
      failure_ = std::make_exception_ptr(mismatch_error(concat(
          "rank ", where->peer, " sent more than the ", where->bytes, " bytes that are expected")));
    else
      failure_ = std::make_exception_ptr(transport_error(
          concat("MPI_Testall failed with MPI error ", first, ": ", error_text(first)), first));
  }

  std::vector<MPI_Request> requests_;
  std::vector<MPI_Status> statuses_;
  std::vector<part> parts_;
  std::shared_ptr<strays> unexpected_;  // null for native collectives
  message_tag tag_;
  std::vector<int> kept_;
  std::exception_ptr failure_;
  bool abandoned_ = false;
  bool over_ = false;
};

static_assert(pending_operation<operation>);

}  // namespace bluefog::mpi
