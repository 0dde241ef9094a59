// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <utility>

#include <mpi.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/keep_for_ever.hpp>
#include <bluefog/mpi/check.hpp>
#include <bluefog/mpi/handle.hpp>
#include <bluefog/mpi/request_errors.hpp>
#include <bluefog/mpi/threads.hpp>

namespace bluefog::mpi {

/// Letters between ranks, on an MPI communicator of their own.
///
/// Letters are sent where something is amiss, and some of them are never read. MPI uses the
/// identity of a freed communicator again, and they would arrive on the next one; so a communicator
/// that has carried a letter is kept until the process ends.
class mailbox {
 public:
  /// Takes `group` over.
  explicit mailbox(unique_communicator group) : group_(std::move(group)) {
    check(MPI_Comm_set_errhandler(group_.get(), MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  mailbox(const mailbox&) = delete;
  mailbox& operator=(const mailbox&) = delete;
  ~mailbox() {
    const auto lock = threads::serialize();
    if (!is_running()) return;
    std::erase_if(sent_, left);
    if (!sent_.empty())
      bluefog::detail::keep_for_ever(std::move(sent_));  // MPI may not have read it yet
    if (used_ || has_letter(group_.get())) static_cast<void>(group_.release());
  }

  /// Makes a communicator of some of the ranks; collective over those only.
  ///
  /// Here, since Open MPI sends what this takes as ordinary messages of the given tag, which must
  /// not mix with those of operations. Letters have tag 0.
  [[nodiscard]] unique_communicator create(std::span<const int> members,
                                           std::uint64_t serial) const {
    const auto lock = threads::serialize();
    MPI_Group everybody = MPI_GROUP_NULL;
    check(MPI_Comm_group(group_.get(), &everybody), "MPI_Comm_group");
    const unique_group all(everybody);
    MPI_Group some = MPI_GROUP_NULL;
    check(MPI_Group_incl(everybody, static_cast<int>(members.size()), members.data(), &some),
          "MPI_Group_incl");
    const unique_group chosen(some);
    MPI_Comm made = MPI_COMM_NULL;
    const int tag = 1 + static_cast<int>(serial % 32767);
    check(MPI_Comm_create_group(group_.get(), some, tag, &made), "MPI_Comm_create_group");
    return unique_communicator(made);
  }

  void post(int peer, std::uint64_t number) {
    const auto lock = threads::serialize();
    used_ = true;
    std::erase_if(sent_, left);
    auto& each = sent_.emplace_back(outgoing{number, MPI_REQUEST_NULL});
    check(MPI_Isend(&each.number, 1, MPI_UINT64_T, peer, 0, group_.get(), &each.request),
          "MPI_Isend");
  }

  [[nodiscard]] std::optional<letter> collect() {
    const auto lock = threads::serialize();
    int found = 0;
    MPI_Status status{};
    MPI_Message message = MPI_MESSAGE_NULL;
    check(MPI_Improbe(MPI_ANY_SOURCE, 0, group_.get(), &found, &message, &status), "MPI_Improbe");
    if (found == 0) return std::nullopt;
    used_ = true;
    letter arrived{status.MPI_SOURCE, 0};
    // Short enough to have arrived whole with its envelope, so this does not wait.
    check(MPI_Mrecv(&arrived.number, 1, MPI_UINT64_T, &message, MPI_STATUS_IGNORE), "MPI_Mrecv");
    return arrived;
  }

 private:
  struct outgoing {
    std::uint64_t number;
    MPI_Request request;
  };

  static bool left(outgoing& each) noexcept { return is_over(each.request); }

  [[nodiscard]] static bool has_letter(MPI_Comm group) noexcept {
    int found = 0;
    return MPI_Iprobe(MPI_ANY_SOURCE, 0, group, &found, MPI_STATUS_IGNORE) != MPI_SUCCESS ||
           found != 0;
  }

  unique_communicator group_;
  bool used_ = false;
  std::list<outgoing> sent_;  // addresses stay: MPI reads the numbers
};

}  // namespace bluefog::mpi
