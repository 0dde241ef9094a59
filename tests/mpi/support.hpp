// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstddef>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <mpi.h>

#include <bluefog/mpi.hpp>

namespace bluefog_test {

/// \return this process's rank among all of the job.
inline int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

/// \return the number of processes of the job.
inline int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

/// Waits for all processes of the job, by the program's own call to MPI.
inline void meet_outside() {
  const auto lock = bluefog::mpi::library::serialize();
  MPI_Barrier(MPI_COMM_WORLD);
}

/// Polls until the operation is over, at most 30 seconds.
template <class Operation>
void finish(Operation& operation) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!operation.ready()) {
    if (std::chrono::steady_clock::now() > deadline) throw std::runtime_error("never over");
    std::this_thread::yield();
  }
}

/// \return bytes that differ with `seed` and place.
inline std::vector<std::byte> pattern(std::size_t bytes, int seed) {
  std::vector<std::byte> values(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    values[i] =
        static_cast<std::byte>((i * 31 + static_cast<std::size_t>(seed) * 7 + i / 251) % 256);
  return values;
}

/// Whether freed memory leaves the process. AddressSanitizer holds it back, and finds leaks itself.
#ifdef BLUEFOG_TEST_SANITIZED
inline constexpr bool freed_memory_leaves = false;
#else
inline constexpr bool freed_memory_leaves = true;
#endif

/// \return the memory of this process that is in use, in KiB.
inline long resident_kilobytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  long value = 0;
  while (status >> word)
    if (word == "VmRSS:") status >> value;
  return value;
}

}  // namespace bluefog_test
