// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>

#include <mpi.h>

#include <bluefog/backend/leftovers.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/logger.hpp>
#include <bluefog/core/settings.hpp>
#include <bluefog/mpi/check.hpp>
#include <bluefog/mpi/handle.hpp>
#include <bluefog/mpi/machine_warnings.hpp>
#include <bluefog/mpi/request_errors.hpp>
#include <bluefog/mpi/threads.hpp>

namespace bluefog::mpi {

/// MPI itself, once per process.
///
/// Initialises MPI if nobody did, and then finalises it once, at process exit, never earlier: so
/// communicators may be made again and again, and a user who initialised MPI keeps it. Unless the
/// program has seen to it, a broken connection is then an error and no signal (SIGPIPE), and under
/// MPICH failed requests of the library do not end the job. `std::terminate` aborts the job. Where
/// an exception, or a transfer that never ended, would make `MPI_Finalize` wait for ever, whoever
/// calls it, the job is aborted instead, with a line that names the rank. See `threads` for who may
/// call MPI.
class library {
 public:
  /// \throws usage_error if MPI has been finalised, or the thread level does not allow this thread.
  static library& instance() {
    static library once;
    expects(is_running(), "mpi_backend: MPI has been finalized");
    threads::expects_allowed();
    return once;
  }

  /// \return the thread level that MPI grants.
  [[nodiscard]] static int thread_level() noexcept { return threads::level(); }

  /// \return a lock under which MPI may be called; holds nothing where none is needed. With
  /// `MPI_THREAD_SERIALIZED` a program has to hold it during its own calls to MPI.
  [[nodiscard]] static std::unique_lock<std::recursive_mutex> serialize() {
    return threads::serialize();
  }

  /// A communicator went down while an exception unwound the stack: the other ranks may wait for
  /// this one for ever, so the process must not end in MPI_Finalize.
  static void mark_unwound() noexcept { unwound_ = true; }
  /// An operation was given up: whom it waited for may never come, nor to MPI_Finalize.
  static void mark_given_up() noexcept { given_up_ = true; }
  /// The program goes on communicating: what was marked has been dealt with.
  static void clear_marks() noexcept {
    for (auto* mark : {&unwound_, &given_up_})
      if (mark->load(std::memory_order_relaxed)) *mark = false;
  }

  /// Counts the operations in flight, which the process must not end with.
  static void operation_began() noexcept { in_flight_.fetch_add(1, std::memory_order_relaxed); }
  static void operation_ended() noexcept { in_flight_.fetch_sub(1, std::memory_order_relaxed); }
  [[nodiscard]] static int operations_in_flight() noexcept { return in_flight_.load(); }

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
    apply_log_settings(settings::from_environment());
    warn_of_machine();  // before MPI maps what there is too little of
    int initialized = 0;
    check(MPI_Initialized(&initialized), "MPI_Initialized");
    if (initialized == 0) initialize();
    threads::learn_level();
    request_errors::install();
    watch_finalize();
    check(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank_), "MPI_Comm_rank");
    previous_terminate_ = std::set_terminate(abort_on_terminate);
  }

  static void initialize() {
    const int wanted = settings::from_environment().mpi_thread_level;
    constexpr std::array levels{MPI_THREAD_SINGLE, MPI_THREAD_FUNNELED, MPI_THREAD_SERIALIZED,
                                MPI_THREAD_MULTIPLE};
    int granted = MPI_THREAD_SINGLE;
    check(MPI_Init_thread(nullptr, nullptr, levels.at(static_cast<std::size_t>(wanted)), &granted),
          "MPI_Init_thread");
    std::atexit(finalize_at_exit);
    // A rank that writes to a dead rank's socket gets an error, not a signal.
    struct sigaction pipe {};
    if (sigaction(SIGPIPE, nullptr, &pipe) == 0 && pipe.sa_handler == SIG_DFL)
      std::signal(SIGPIPE, SIG_IGN);
  }

  static void abort_job(std::string_view why) noexcept {
    if (aborting_.exchange(true)) return;  // MPI_Abort of some libraries runs the exit handlers
    try {
      logger::write(log_level::error, concat("rank ", world_rank_, ": ", why));
    } catch (...) {  // no memory for the message; the abort matters more
    }
    std::fflush(nullptr);  // what the program has printed so far
    static_cast<void>(MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE));
  }

  [[noreturn]] static void abort_on_terminate() {
    if (is_running()) {
      if (const auto uncaught = std::current_exception()) {
        try {
          std::rethrow_exception(uncaught);
        } catch (const std::exception& problem) {
          abort_job(problem.what());
        } catch (...) {
          abort_job("an exception of unknown type was not caught");
        }
      } else {
        abort_job("std::terminate was called");
      }
    }
    if (previous_terminate_ != nullptr) previous_terminate_();
    std::abort();
  }

  // The first thing that MPI_Finalize does, whoever calls it, is to drop what MPI_COMM_SELF has.
  static void watch_finalize() {
    int key = MPI_KEYVAL_INVALID;
    check(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, abort_in_finalize, &key, nullptr),
          "MPI_Comm_create_keyval");
    check(MPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr), "MPI_Comm_set_attr");
    check(MPI_Comm_free_keyval(&key), "MPI_Comm_free_keyval");
  }
  static int abort_in_finalize(MPI_Comm, int, void*, void*) {
    abort_if_in_vain();
    return MPI_SUCCESS;
  }

  // Where MPI_Finalize would wait for ever.
  static void abort_if_in_vain() {
    if (unwound_) abort_job("an exception ended the communicator; ending the job");
    if (given_up_) abort_job("the program ends after an operation was given up; ending the job");
    if (in_flight_ > 0 || bluefog::detail::transfers_left_behind)
      abort_job("the program ends with transfers that never ended; ending the job");
  }

  static void finalize_at_exit() {
    if (aborting_ || !is_running()) return;
    static_cast<void>(MPI_Finalize());  // at exit nobody is left to be told of a failure
  }

  static inline int world_rank_ = 0;
  static inline std::atomic<int> in_flight_ = 0;
  static inline std::atomic<bool> unwound_ = false;
  static inline std::atomic<bool> given_up_ = false;
  static inline std::atomic<bool> aborting_ = false;
  static inline std::terminate_handler previous_terminate_ = nullptr;
};

}  // namespace bluefog::mpi
