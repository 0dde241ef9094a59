// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <bluefog/core/unique_handle.hpp>
#include <bluefog/nccl/check.hpp>

namespace bluefog::nccl {

struct stream_traits {
  using value_type = cudaStream_t;
  static cudaStream_t null() noexcept { return nullptr; }
  static void close(cudaStream_t handle) noexcept { static_cast<void>(cudaStreamDestroy(handle)); }
};
/// Owns a stream. Destroying one that still works does not wait.
using unique_stream = unique_handle<stream_traits>;

struct event_traits {
  using value_type = cudaEvent_t;
  static cudaEvent_t null() noexcept { return nullptr; }
  static void close(cudaEvent_t handle) noexcept { static_cast<void>(cudaEventDestroy(handle)); }
};
using unique_event = unique_handle<event_traits>;

/// \return a stream of the current device that does not wait for the default stream.
[[nodiscard]] inline unique_stream make_stream() {
  cudaStream_t made = nullptr;
  check(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return unique_stream(made);
}

/// \return an event that follows everything which `stream` has been given so far.
[[nodiscard]] inline unique_event record(cudaStream_t stream) {
  cudaEvent_t made = nullptr;
  check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  unique_event event(made);
  check(cudaEventRecord(made, stream), "cudaEventRecord");
  return event;
}

/// \return whether the answer to a query is "not yet", and no error. CUDA notes that as the
///         thread's last error all the same, which others, libtorch for one, would take for that
///         of their next kernel.
[[nodiscard]] inline bool is_not_ready(cudaError_t answer) noexcept {
  if (answer != cudaErrorNotReady) return false;
  static_cast<void>(cudaGetLastError());
  return true;
}

/// \return whether everything before the event is over.
[[nodiscard]] inline bool is_over(cudaEvent_t event) {
  const cudaError_t code = cudaEventQuery(event);
  if (is_not_ready(code)) return false;
  check(code, "cudaEventQuery");
  return true;
}

/// \return whether this process has a context on `device`, for which CUDA takes some 500 MB there.
///         Makes none. True where the driver does not tell.
[[nodiscard]] inline bool has_context(int device) noexcept {
  // Of the driver, which only the runtime is linked with.
  using state_query = CUresult (*)(CUdevice, unsigned*, int*);
  static const auto ask = []() -> state_query {
    constexpr unsigned since = 7000;
    void* found = nullptr;
    auto state = cudaDriverEntryPointSymbolNotFound;
    if (cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, since,
                                         cudaEnableDefault, &state) != cudaSuccess)
      static_cast<void>(cudaGetLastError());
    return state == cudaDriverEntryPointSuccess ? reinterpret_cast<state_query>(found) : nullptr;
  }();
  unsigned flags = 0;
  int active = 0;
  return ask == nullptr || ask(device, &flags, &active) != CUDA_SUCCESS || active != 0;
}

/// Makes `device` the calling thread's current one while it lives.
///
/// Afterwards it stays that where the process has no context on the one before: to go back there
/// would make one, and a thread that has never named a device is on device 0, another rank's.
class device_scope {
 public:
  explicit device_scope(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  device_scope(const device_scope&) = delete;
  device_scope& operator=(const device_scope&) = delete;
  ~device_scope() {
    if (changed_ && has_context(before_)) static_cast<void>(cudaSetDevice(before_));
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace bluefog::nccl
