// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>
#include <string_view>

#include <mpi.h>

#include <bluefog/core/error.hpp>
#include <bluefog/mpi/check.hpp>

namespace bluefog::mpi {

/// Which threads may call MPI, by the thread level that it granted.
///
/// With `MPI_THREAD_MULTIPLE` calls go straight to MPI; with `MPI_THREAD_SERIALIZED` one
/// process-wide lock orders them; below that only the thread that initialised MPI calls.
class threads {
 public:
  /// Asks MPI, once it is initialised.
  static void learn_level() { check(MPI_Query_thread(&level_), "MPI_Query_thread"); }

  /// \return the thread level that MPI grants.
  [[nodiscard]] static int level() noexcept { return level_; }
  /// \return whether threads other than the one that initialised MPI may call it.
  [[nodiscard]] static bool any() noexcept { return level_ >= MPI_THREAD_SERIALIZED; }

  /// \return a lock under which MPI may be called; holds nothing where none is needed.
  [[nodiscard]] static std::unique_lock<std::recursive_mutex> serialize() {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (level_ == MPI_THREAD_SERIALIZED) lock.lock();
    return lock;
  }

  /// \throws usage_error naming the granted and the needed level if this thread must not call MPI.
  static void expects_allowed() {
    if (any()) return;
    int main_thread = 0;
    check(MPI_Is_thread_main(&main_thread), "MPI_Is_thread_main");
    expects(main_thread != 0, "mpi_backend: MPI grants ", name_of(level_),
            ", which allows calls from the thread that initialised it only; another thread needs ",
            name_of(MPI_THREAD_SERIALIZED));
  }

 private:
  [[nodiscard]] static std::string_view name_of(int level) noexcept {
    if (level == MPI_THREAD_SINGLE) return "MPI_THREAD_SINGLE";
    if (level == MPI_THREAD_FUNNELED) return "MPI_THREAD_FUNNELED";
    return level == MPI_THREAD_SERIALIZED ? "MPI_THREAD_SERIALIZED" : "MPI_THREAD_MULTIPLE";
  }

  static inline std::recursive_mutex mutex_;
  static inline int level_ = MPI_THREAD_SINGLE;
};

}  // namespace bluefog::mpi
