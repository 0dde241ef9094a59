// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <bluefog/core/error.hpp>

namespace bluefog::nccl {

/// Throws `transport_error` unless `code` is `cudaSuccess`.
///
/// Every call to the CUDA runtime passes through here: `check(cudaGetDevice(&it),
/// "cudaGetDevice")`.
inline void check(cudaError_t code, std::string_view call) {
  if (code == cudaSuccess) [[likely]]
    return;
  static_cast<void>(cudaGetLastError());  // or it would be reported again, by another call
  throw transport_error(concat(call, " failed with CUDA error ", static_cast<int>(code), " (",
                               cudaGetErrorName(code), "): ", cudaGetErrorString(code)),
                        static_cast<int>(code));
}

/// \return what NCCL says about `code`, with the details that it keeps for `of`, which may be null.
[[nodiscard]] inline std::string error_text(ncclResult_t code, ncclComm_t of) {
  std::string text = ncclGetErrorString(code);
  const char* details = ncclGetLastError(of);
  if (details != nullptr && *details != '\0') text += concat(" (", details, ")");
  return text;
}

/// Throws `transport_error` unless `code` says that the call has succeeded or goes on by itself.
///
/// Every call to NCCL passes through here. \param of  the communicator, null if there is none.
inline void check(ncclResult_t code, std::string_view call, ncclComm_t of = nullptr) {
  if (code == ncclSuccess || code == ncclInProgress) [[likely]]
    return;
  throw transport_error(
      concat(call, " failed with NCCL error ", static_cast<int>(code), ": ", error_text(code, of)),
      static_cast<int>(code));
}

}  // namespace bluefog::nccl
