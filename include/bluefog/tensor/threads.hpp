// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <thread>

#include <ATen/Parallel.h>
#include <sched.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/logger.hpp>

namespace bluefog {

/// \return the number of cores that this process may run on.
[[nodiscard]] inline int allowed_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));  // over 1024 cores
}

namespace detail {

/// libtorch's number of threads before anything could change it.
inline const int intraop_threads_at_start = at::get_num_threads();

[[nodiscard]] inline bool environment_sets_threads() {
  const auto is_set = [](const char* name) {
    const char* text = std::getenv(name);
    return text != nullptr && *text != '\0';
  };
  return is_set("OMP_NUM_THREADS") || is_set("MKL_NUM_THREADS");
}

/// \return the number of threads that libtorch gives to a thread that is new: what
///         `at::set_num_threads` has been told last, or its default. A thread at work may have
///         another number, as `MPI_Init_thread` may leave OpenMP with one thread there.
[[nodiscard]] inline int intraop_threads_of_a_new_thread() {
  int threads = 0;
  std::thread([&] { threads = at::get_num_threads(); }).join();
  return threads;
}

/// \return the number of threads that each rank of this process may use; 0 if the program had
///         chosen one before the first call.
[[nodiscard]] inline int share_of_cores(int local_ranks) {
  static std::once_flag once;
  static int share = 0;
  std::call_once(once, [&] {
    if (intraop_threads_of_a_new_thread() != intraop_threads_at_start) return;
    const int cores = allowed_cores();
    share = std::max(1, cores / std::max(1, local_ranks));
    at::set_num_threads(share);
    logger::write(log_level::info,
                  concat("libtorch uses ", share, share == 1 ? " thread" : " threads",
                         " per rank: ", cores, " cores, ", local_ranks, " ranks on this machine"));
  });
  return share;
}

}  // namespace detail

/// Gives libtorch this rank's share of the machine's cores: allowed cores / ranks of the machine,
/// at least 1. Every operation on tensors calls it.
///
/// Left alone, each rank would take all cores, or, under some launchers, only one. The share is
/// computed once per process, by the communicator used first; ranks that are threads count as ranks
/// of the machine. Nothing happens if OMP_NUM_THREADS or MKL_NUM_THREADS is set, or if libtorch's
/// number for new threads is not what it was when the program started: then the program has called
/// `at::set_num_threads`. (Asking for just the number that libtorch started with looks like not
/// asking; do it after the first operation, or use the environment.) What `omp_set_num_threads` set
/// on one thread, as MPI libraries do, does not count.
template <backend Backend>
void share_cores(const communicator<Backend>& comm) {
  // libtorch keeps the number per thread, so every thread that uses a communicator asks once.
  thread_local const bool done = [&] {
    if (detail::environment_sets_threads()) return true;
    const int share = detail::share_of_cores(comm.local_size());
    if (share == 0 || share == at::get_num_threads()) return true;
    // This thread had a number before; new ones have the share, unless the program chose since.
    if (detail::intraop_threads_of_a_new_thread() == share) at::set_num_threads(share);
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace bluefog
