// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include <mpi.h>
#include <sys/statvfs.h>

#include <bluefog/backend/leftovers.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/log.hpp>
#include <bluefog/core/settings.hpp>
#include <bluefog/mpi/check.hpp>
#include <bluefog/mpi/handle.hpp>

namespace bluefog::mpi {

/// MPI itself, once per process.
///
/// Initialises MPI if nobody did, and then finalises it once, at process exit, never earlier: so
/// communicators may be made again and again, and a user who initialised MPI keeps it. With
/// `MPI_THREAD_MULTIPLE` calls go straight to MPI; with `MPI_THREAD_SERIALIZED` one process-wide
/// lock orders them; below that only the thread that initialised MPI calls, and there is no
/// progress beside its computation.
class library {
 public:
  /// \throws usage_error if MPI has been finalised, or the thread level does not allow this thread.
  static library& instance() {
    static library once;
    expects(is_running(), "mpi_backend: MPI has been finalized");
    once.expects_allowed_thread();
    return once;
  }

  /// \return the thread level that MPI grants.
  [[nodiscard]] int thread_level() const noexcept { return level_; }
  /// \return whether threads other than the caller's may make progress.
  [[nodiscard]] bool any_thread() const noexcept { return level_ >= MPI_THREAD_SERIALIZED; }

  /// \return a lock under which MPI may be called; holds nothing where none is needed.
  [[nodiscard]] static std::unique_lock<std::recursive_mutex> serialize() {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (level_ == MPI_THREAD_SERIALIZED) lock.lock();
    return lock;
  }

  /// A communicator went down while an exception unwound the stack: the other ranks may wait for
  /// this one for ever, so the process must not end in MPI_Finalize.
  static void mark_unwound() noexcept { unwound_ = true; }
  /// The program goes on with a new communicator: the exception was dealt with.
  static void clear_mark() noexcept { unwound_ = false; }

  /// \throws usage_error if a launcher started several ranks and MPI sees one.
  static void expects_matching_launcher(int size) {
    if (size > 1 || settings::from_environment().allow_singleton) return;
    struct trace {
      const char* variable;
      std::string_view launcher;
    };
    constexpr std::array traces{trace{"OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"},
                                trace{"PMI_SIZE", "MPICH's mpiexec (or another PMI launcher)"},
                                trace{"SLURM_STEP_NUM_TASKS", "Slurm's srun"}};
    for (const auto& [variable, launcher] : traces) {
      const char* text = std::getenv(variable);
      if (text == nullptr) continue;
      int ranks = 0;
      const std::string_view digits(text);
      std::from_chars(digits.data(), digits.data() + digits.size(), ranks);
      expects(ranks <= 1, "mpi_backend: ", launcher, " started ", ranks, " ranks (", variable, "=",
              digits,
              ") but MPI sees one: the program is linked with another MPI than the "
              "launcher's. Start it with its own mpirun, or set BLUEFOG_ALLOW_SINGLETON=1");
    }
  }

 private:
  library() {
    int initialized = 0;
    check(MPI_Initialized(&initialized), "MPI_Initialized");
    if (initialized == 0) {
      const int wanted = settings::from_environment().mpi_thread_level;
      constexpr std::array levels{MPI_THREAD_SINGLE, MPI_THREAD_FUNNELED, MPI_THREAD_SERIALIZED,
                                  MPI_THREAD_MULTIPLE};
      int granted = MPI_THREAD_SINGLE;
      check(
          MPI_Init_thread(nullptr, nullptr, levels.at(static_cast<std::size_t>(wanted)), &granted),
          "MPI_Init_thread");
      std::atexit(finalize_at_exit);
      // A rank that writes to a dead rank's socket gets an error, not a signal.
      if (std::signal(SIGPIPE, SIG_IGN) != SIG_DFL)
        log::write(log_level::debug, "mpi_backend: SIGPIPE is ignored from here on");
      warn_of_small_shared_memory();
    }
    check(MPI_Query_thread(&level_), "MPI_Query_thread");
    check(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank_), "MPI_Comm_rank");
    previous_terminate_ = std::set_terminate(abort_on_terminate);
  }

  static void expects_allowed_thread() {
    if (level_ >= MPI_THREAD_SERIALIZED) return;
    int main_thread = 0;
    check(MPI_Is_thread_main(&main_thread), "MPI_Is_thread_main");
    expects(main_thread != 0, "mpi_backend: MPI grants ", level_name(level_),
            ", which allows calls from the thread that initialised it only; another thread needs ",
            level_name(MPI_THREAD_SERIALIZED));
  }

  [[nodiscard]] static std::string_view level_name(int level) noexcept {
    if (level == MPI_THREAD_SINGLE) return "MPI_THREAD_SINGLE";
    if (level == MPI_THREAD_FUNNELED) return "MPI_THREAD_FUNNELED";
    return level == MPI_THREAD_SERIALIZED ? "MPI_THREAD_SERIALIZED" : "MPI_THREAD_MULTIPLE";
  }

  static void warn_of_small_shared_memory() {
    struct statvfs space {};
    if (statvfs("/dev/shm", &space) != 0) return;
    const auto megabytes = space.f_bavail * space.f_frsize >> 20;
    if (megabytes < 16)
      log::write(log_level::warning,
                 concat("mpi_backend: /dev/shm has ", megabytes,
                        " MiB free; MPI's shared memory may end in a bus error (a container's "
                        "--shm-size enlarges it)"));
  }

  static void abort_job(std::string_view why) noexcept {
    try {
      log::write(log_level::error, concat("rank ", world_rank_, ": ", why));
    } catch (...) {  // no memory for the message; the abort matters more
    }
    static_cast<void>(MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE));
  }

  [[noreturn]] static void abort_on_terminate() {
    if (is_running()) {
      try {
        const auto uncaught = std::current_exception();
        if (!uncaught) abort_job("std::terminate was called");
        std::rethrow_exception(uncaught);
      } catch (const std::exception& problem) {
        abort_job(problem.what());
      } catch (...) {
        abort_job("an exception of unknown type was not caught");
      }
    }
    if (previous_terminate_ != nullptr) previous_terminate_();
    std::abort();
  }

  static void finalize_at_exit() {
    if (!is_running()) return;
    if (unwound_) abort_job("an exception ended the communicator; ending the job");
    if (transfers_left_behind)
      abort_job("operations were given up and their transfers never ended; ending the job");
    static_cast<void>(MPI_Finalize());  // at exit nobody is left to be told of a failure
  }

  static inline std::recursive_mutex mutex_;
  static inline int level_ = MPI_THREAD_SINGLE;
  static inline int world_rank_ = 0;
  static inline std::atomic<bool> unwound_ = false;
  static inline std::terminate_handler previous_terminate_ = nullptr;
};

}  // namespace bluefog::mpi
