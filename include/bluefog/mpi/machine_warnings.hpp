// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <bluefog/core/error.hpp>
#include <bluefog/core/logger.hpp>
#include <bluefog/mpi/check.hpp>

namespace bluefog::mpi {

/// \return what to say if the shared memory that MPI will use has `free_bytes` left.
[[nodiscard]] inline std::optional<std::string> shared_memory_warning(std::uint64_t free_bytes) {
  constexpr std::uint64_t enough = 16;
  const auto megabytes = free_bytes >> 20;
  if (megabytes >= enough) return std::nullopt;
  return concat("mpi_backend: /dev/shm has ", megabytes,
                " MiB free; MPI's shared memory may end in a bus error (a container's --shm-size "
                "enlarges it)");
}

/// What keeps an Open MPI from copying between processes at once.
struct copy_setting {
  const char* variable;
  const char* value;
};

/// \param library  what `library_version` says.
/// \return the setting to name; none for another MPI.
[[nodiscard]] inline std::optional<copy_setting> copy_setting_of(std::string_view library) {
  constexpr std::string_view open_mpi = "Open MPI v";
  if (!library.starts_with(open_mpi)) return std::nullopt;
  library.remove_prefix(open_mpi.size());
  int version = 0;
  std::from_chars(library.data(), library.data() + library.size(), version);
  if (version < 5) return copy_setting{"OMPI_MCA_btl_vader_single_copy_mechanism", "none"};
  return copy_setting{"OMPI_MCA_smsc", "^cma"};
}

namespace detail {

/// \return whether a process may not read another's memory, as far as one system call that reads
/// nothing of this process tells: what a container's filter forbids, not limits between users.
[[nodiscard]] inline bool single_copy_is_forbidden() noexcept {
  return process_vm_readv(getpid(), nullptr, 0, nullptr, 0, 0) < 0 &&
         (errno == EPERM || errno == ENOSYS);
}

inline void warn_of_single_copy() {
  if (!single_copy_is_forbidden()) return;
  const auto setting = copy_setting_of(library_version());
  if (!setting || std::getenv(setting->variable) != nullptr) return;
  logger::write(log_level::warning,
                concat("mpi_backend: the system call by which Open MPI copies between processes is "
                       "forbidden here (a container without CAP_SYS_PTRACE?), which it reports as "
                       "\"Read -1, expected N\"; set ",
                       setting->variable, "=", setting->value));
}

}  // namespace detail

/// Says in the log what about this machine will trouble MPI, on one rank of each machine where the
/// launcher tells which that is (Open MPI's does), else on all.
inline void warn_of_machine() {
  const char* local_rank = std::getenv("OMPI_COMM_WORLD_LOCAL_RANK");
  if (local_rank != nullptr && std::string_view(local_rank) != "0") return;
  struct statvfs space {};
  if (statvfs("/dev/shm", &space) == 0)
    if (const auto warning = shared_memory_warning(space.f_bavail * space.f_frsize))
      logger::write(log_level::warning, *warning);
  const char* local_size = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  if (local_size != nullptr && std::string_view(local_size) != "1") detail::warn_of_single_copy();
}

}  // namespace bluefog::mpi
