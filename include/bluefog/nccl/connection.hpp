// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <bluefog/core/error.hpp>
#include <bluefog/core/scratch.hpp>
#include <bluefog/nccl/board.hpp>
#include <bluefog/nccl/check.hpp>
#include <bluefog/nccl/handle.hpp>
#include <bluefog/nccl/memory.hpp>

namespace bluefog::nccl {

/// One NCCL communicator and the stream that all its work is given to, in order.
///
/// NCCL's calls must not overlap, not even the one that asks for errors: everybody calls it inside
/// `enter()`. Whatever goes wrong ends the communicator: it is aborted once, and everything later
/// fails for the same reason, since the ranks no longer agree what is on its way.
class connection {
 public:
  /// Connects; collective. \param deadline  when to give up ranks that do not come.
  /// \throws timeout_error then, which says that it is group `name`; transport_error.
  connection(const ncclUniqueId& id, int rank, int size, int device, board::time_point deadline,
             const std::string& name)
      : device_(device) {
    const device_scope scope(device);
    stream_ = make_stream();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    try {
      check(ncclCommInitRankConfig(&group_, size, id, rank, &config), "ncclCommInitRankConfig",
            group_);
      while (!has_launched()) {
        expects<timeout_error>(std::chrono::steady_clock::now() < deadline, "nccl_backend: rank ",
                               rank, " waits in vain for the other ranks of ", name);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    } catch (...) {
      abort("it was never complete");
      throw;
    }
  }
  connection(const connection&) = delete;
  connection& operator=(const connection&) = delete;
  /// Lets what is on its way arrive, for at most a few seconds.
  ~connection() { close(); }

  /// While it lives, no other thread uses NCCL here, and the device is the thread's current one.
  class access {
   public:
    explicit access(connection& to) : lock_(to.mutex_), scope_(to.device_) {}

   private:
    std::unique_lock<std::recursive_mutex> lock_;
    device_scope scope_;
  };
  [[nodiscard]] access enter() { return access(*this); }

  // The rest is called inside `enter()`.

  [[nodiscard]] ncclComm_t group() const noexcept { return group_; }
  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_.get(); }
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] scratch_pool& device_memory() noexcept { return device_memory_; }
  [[nodiscard]] scratch_pool& pinned_memory() noexcept { return pinned_memory_; }

  /// \throws transport_error if the communicator has been aborted.
  void expects_usable() const {
    if (is_aborted())
      throw transport_error("nccl_backend: the communicator was aborted: " + reason_,
                            ncclInvalidUsage);
  }
  [[nodiscard]] bool is_aborted() const noexcept { return group_ == nullptr; }

  /// \return whether everything that NCCL was told is on the stream: only then does an event on the
  ///         stream come after it. \throws transport_error if something has failed since.
  [[nodiscard]] bool has_launched() {
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(group_, &state), "ncclCommGetAsyncError", group_);
    check(state, "a communication", group_);
    return state != ncclInProgress;
  }

  /// Aborts, unless that has been done, and waits, for a second at most, until the stream has done
  /// what is left: from then on nothing touches the memory of any operation.
  void abort(std::string_view reason) noexcept {
    if (is_aborted()) return;
    const auto ending = std::exchange(group_, nullptr);
    try {
      reason_ = reason;
    } catch (...) {  // no memory for the reason; the abort matters more
    }
    static_cast<void>(ncclCommAbort(ending));
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (is_working() && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  /// \return whether the stream still has something to do.
  [[nodiscard]] bool is_working() const noexcept {
    return cudaStreamQuery(stream()) == cudaErrorNotReady;
  }

  /// Makes what the stream is given from now on wait for `event`.
  void follow(cudaEvent_t event) {
    check(cudaStreamWaitEvent(stream(), event, 0), "cudaStreamWaitEvent");
  }

  /// Notes that the stream was given work; \return whether it had any since this was last asked.
  void note_work() noexcept { worked_ = true; }
  [[nodiscard]] bool take_work() noexcept { return std::exchange(worked_, false); }

 private:
  void close() noexcept {
    try {
      const auto inside = enter();
      if (!is_aborted() && !finished()) abort("it was closed");
      device_memory_ = scratch_pool();  // while the device that it belongs to is the current one
      pinned_memory_ = scratch_pool();
      stream_ = unique_stream();
    } catch (...) {  // the device is gone
    }
  }

  // Ends the communicator in peace. \return whether that was possible.
  [[nodiscard]] bool finished() noexcept {
    try {
      constexpr auto patience = std::chrono::seconds(5);
      const auto deadline = std::chrono::steady_clock::now() + patience;
      check(ncclCommFinalize(group_), "ncclCommFinalize", group_);
      while (!has_launched()) {
        if (std::chrono::steady_clock::now() >= deadline) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      check(ncclCommDestroy(std::exchange(group_, nullptr)), "ncclCommDestroy");
      return true;
    } catch (...) {
      return false;
    }
  }

  std::recursive_mutex mutex_;
  int device_;
  unique_stream stream_;
  ncclComm_t group_ = nullptr;  // null once aborted; closed by `close` or `abort`, in one way each
  std::string reason_;
  scratch_pool device_memory_ = device_pool();
  scratch_pool pinned_memory_ = pinned_pool();
  bool worked_ = false;
};

}  // namespace bluefog::nccl
