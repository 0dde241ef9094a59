// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdlib>
#include <utility>

#include <mpi.h>

#include <bluefog/core/logger.hpp>
#include <bluefog/mpi/check.hpp>

namespace bluefog::mpi {

/// Lets this library see the errors of its requests, which some MPIs would make fatal.
///
/// MPICH and its descendants ask the error handler of `MPI_COMM_WORLD` about a failed request,
/// whatever communicator it belongs to. Where that handler ends the job, as it does unless the
/// program changed it, `install` puts one in its place that does the same, except within a `scope`.
class request_errors {
 public:
  /// Within it a failed request of this thread ends in an error code.
  class scope {
   public:
    scope() noexcept = default;
    scope(const scope&) = delete;
    scope& operator=(const scope&) = delete;
    ~scope() { returned_ = before_; }

   private:
    bool before_ = std::exchange(returned_, true);
  };

  /// Once MPI is initialised.
  static void install() {
    if (library_version().starts_with("Open MPI")) return;
    MPI_Errhandler current = MPI_ERRHANDLER_NULL;
    check(MPI_Comm_get_errhandler(MPI_COMM_WORLD, &current), "MPI_Comm_get_errhandler");
    if (current != MPI_ERRORS_ARE_FATAL) return;
    MPI_Errhandler ours = MPI_ERRHANDLER_NULL;
    check(MPI_Comm_create_errhandler(handle, &ours), "MPI_Comm_create_errhandler");
    check(MPI_Comm_set_errhandler(MPI_COMM_WORLD, ours), "MPI_Comm_set_errhandler");
    check(MPI_Errhandler_free(&ours), "MPI_Errhandler_free");  // MPI_COMM_WORLD keeps it
  }

 private:
  // MPI wants the dots: what follows the code is its own affair.
  static void handle(MPI_Comm* where, int* code, ...) {
    if (returned_) return;
    logger::write(log_level::error, concat("MPI error ", *code, ": ", error_text(*code)));
    static_cast<void>(MPI_Abort(*where, EXIT_FAILURE));
  }

  static inline thread_local bool returned_ = false;
};

/// \return whether a request is over, as one that has failed is, too. Makes progress.
[[nodiscard]] inline bool is_over(MPI_Request& request) noexcept {
  int complete = 0;
  const request_errors::scope returned;
  return MPI_Test(&request, &complete, MPI_STATUS_IGNORE) != MPI_SUCCESS || complete != 0;
}

}  // namespace bluefog::mpi
