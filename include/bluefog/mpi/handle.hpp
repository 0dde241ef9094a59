// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mpi.h>

#include <bluefog/core/unique_handle.hpp>
#include <bluefog/mpi/threads.hpp>

namespace bluefog::mpi {

/// \return whether MPI can be called: it has been initialised and not yet finalised.
[[nodiscard]] inline bool is_running() noexcept {
  int initialized = 0;
  int finalized = 0;
  // These two may be called at any time and report nothing but their answer.
  static_cast<void>(MPI_Initialized(&initialized));
  static_cast<void>(MPI_Finalized(&finalized));
  return initialized != 0 && finalized == 0;
}

struct communicator_traits {
  using value_type = MPI_Comm;
  static MPI_Comm null() noexcept { return MPI_COMM_NULL; }
  static void close(MPI_Comm handle) noexcept {
    const auto lock = threads::serialize();
    // After MPI_Finalize there is nothing left to free; a failure here has nobody to be told.
    if (is_running()) static_cast<void>(MPI_Comm_free(&handle));
  }
};
using unique_communicator = unique_handle<communicator_traits>;

struct group_traits {
  using value_type = MPI_Group;
  static MPI_Group null() noexcept { return MPI_GROUP_NULL; }
  static void close(MPI_Group handle) noexcept {
    const auto lock = threads::serialize();
    if (is_running()) static_cast<void>(MPI_Group_free(&handle));
  }
};
using unique_group = unique_handle<group_traits>;

}  // namespace bluefog::mpi
