// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include <mpi.h>

#include <bluefog/core/error.hpp>

namespace bluefog::mpi {

/// \return the library's own text for `code`.
[[nodiscard]] inline std::string error_text(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) return "unknown error";
  return {text.data(), static_cast<std::size_t>(length)};
}

/// Throws `transport_error` unless `code` is `MPI_SUCCESS`.
///
/// Every call to MPI passes through here: `check(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank")`.
inline void check(int code, std::string_view operation) {
  if (code == MPI_SUCCESS) [[likely]]
    return;
  throw transport_error(concat(operation, " failed with MPI error ", code, ": ", error_text(code)),
                        code);
}

/// \return e.g. "Open MPI v4.1.4, package: ...". Any time, also before MPI is initialised.
[[nodiscard]] inline std::string library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  check(MPI_Get_library_version(text.data(), &length), "MPI_Get_library_version");
  return {text.data(), static_cast<std::size_t>(length)};
}

}  // namespace bluefog::mpi
