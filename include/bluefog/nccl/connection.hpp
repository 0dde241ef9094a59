// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <bluefog/core/error.hpp>
#include <bluefog/core/keep_for_ever.hpp>
#include <bluefog/core/scratch.hpp>
#include <bluefog/nccl/board.hpp>
#include <bluefog/nccl/check.hpp>
#include <bluefog/nccl/handle.hpp>
#include <bluefog/nccl/library.hpp>
#include <bluefog/nccl/mailbox.hpp>
#include <bluefog/nccl/memory.hpp>

namespace bluefog::nccl {

namespace detail {

/// Aborts `group`. Where NCCL does not come back from that within a few seconds, as it may happen
/// where a peer's host is gone, it is left to itself, in a thread of its own. What the stream then
/// works on has to stay: if it ends while the communicator is there, or in the second after, it is
/// freed. Otherwise the stream, each unfinished operation's events and memory, and the memory that
/// was kept for later ones stay until the process ends: that much for each abort that hangs.
inline void abort_in_time(ncclComm_t group, int device) noexcept {
  struct progress {
    std::mutex mutex;
    std::condition_variable changed;
    bool over = false;
  };
  constexpr auto patience = std::chrono::seconds(3);
  try {
    const auto state = std::make_shared<progress>();
    std::thread([state, group, device] {
      static_cast<void>(cudaSetDevice(device));
      static_cast<void>(ncclCommAbort(group));
      const std::scoped_lock lock(state->mutex);
      state->over = true;
      state->changed.notify_all();
    }).detach();
    std::unique_lock lock(state->mutex);
    state->changed.wait_for(lock, patience, [&] { return state->over; });
  } catch (const std::exception&) {  // no thread to be had
    static_cast<void>(ncclCommAbort(group));
  }
}

}  // namespace detail

/// One NCCL communicator and the stream that all its work is given to, in order.
///
/// NCCL's calls must not overlap, not even the one that asks for errors: everybody calls it inside
/// `enter()`. Whatever goes wrong ends the communicator: it is aborted once, and everything later
/// fails for the same reason, since the ranks no longer agree what is on its way; ranks that wait
/// for this one hear of it.
class connection {
 public:
  /// Connects; collective. \param deadline  when to give up ranks that do not come.
  /// \throws timeout_error then, which says that it is group `name`; transport_error.
  connection(const ncclUniqueId& id, int rank, int size, int device,
             const std::shared_ptr<board>& words, board::time_point deadline,
             const std::string& name)
      : device_(device), letters_(words, name, rank, size) {
    const device_scope scope(device);
    try {
      stream_ = make_stream();
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;
      check(ncclCommInitRankConfig(&group_, size, id, rank, &config), "ncclCommInitRankConfig",
            group_);
      while (!has_launched()) {
        expects_everybody();
        expects<timeout_error>(std::chrono::steady_clock::now() < deadline, "nccl_backend: rank ",
                               rank, " waits in vain for the other ranks of ", name);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
    } catch (const std::exception& problem) {
      abort(problem.what());
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
    std::unique_lock<std::mutex> lock_;
    device_scope scope_;
  };
  [[nodiscard]] access enter() { return access(*this); }

  /// \return whether `data` lies in a device's memory.
  [[nodiscard]] bool on_device(const void* data) const {
    const device_scope scope(device_);
    return library::on_device(data);
  }

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

  /// \throws peer_error if another rank has ended the communicator: what is waited for may never
  ///         come. To be asked now and then.
  void expects_everybody() {
    const auto end = letters_.end();
    if (!end) return;
    told_ = true;
    throw peer_error("nccl_backend: " + *end);
  }

  /// Aborts, unless that has been done, tells the other ranks why, and waits, for a second at most,
  /// until the stream has done what is left: from then on nothing touches the memory of any
  /// operation. Takes a few seconds at most, whatever NCCL does.
  void abort(std::string_view reason) noexcept {
    if (!std::exchange(told_, true)) letters_.tell_end(reason);
    end(reason);
  }
  [[nodiscard]] mailbox& letters() noexcept { return letters_; }

  /// \return whether the stream still has something to do.
  [[nodiscard]] bool is_working() const noexcept { return is_not_ready(cudaStreamQuery(stream())); }

  /// Makes what the stream is given from now on wait for `event`.
  void follow(cudaEvent_t event) {
    check(cudaStreamWaitEvent(stream(), event, 0), "cudaStreamWaitEvent");
  }

  /// Notes that the stream was given work, which waits for `peers`, ascending.
  void note_work(const std::vector<int>& peers = {}) {
    if (!work_) work_.emplace();
    std::vector<int> all;
    std::ranges::set_union(*work_, peers, std::back_inserter(all));
    *work_ = std::move(all);
  }
  /// \return whom the work waits for that was noted since this was last asked; nothing if none was.
  [[nodiscard]] std::optional<std::vector<int>> take_work() noexcept {
    return std::exchange(work_, std::nullopt);
  }

 private:
  void close() noexcept {
    try {
      const auto inside = enter();
      // Ranks that still talk to each other need not be told that this one has left.
      if (!is_aborted()) finished() ? let_finish() : end("it was closed");
      if (is_working()) {
        bluefog::detail::keep_for_ever(std::pair(device_memory_, pinned_memory_));
        bluefog::detail::keep_for_ever(std::move(stream_));
      }
      device_memory_ = scratch_pool();  // while the device that it belongs to is the current one
      pinned_memory_ = scratch_pool();
      stream_ = unique_stream();
    } catch (...) {  // the device is gone
    }
  }

  void end(std::string_view reason) noexcept {
    if (is_aborted()) return;
    const auto ending = std::exchange(group_, nullptr);
    try {
      reason_ = reason;
    } catch (...) {  // no memory for the reason; the abort matters more
    }
    detail::abort_in_time(ending, device_);
    let_finish();
  }

  // Waits, for a second at most, until the stream has done what is left.
  void let_finish() const noexcept {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (is_working() && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::microseconds(20));
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

  std::mutex mutex_;
  int device_;
  unique_stream stream_;
  ncclComm_t group_ = nullptr;  // null once aborted; closed by `close` or `abort`, in one way each
  std::string reason_;
  mailbox letters_;
  bool told_ = false;  // whether the other ranks know of the end
  scratch_pool device_memory_ = device_pool();
  scratch_pool pinned_memory_ = pinned_pool();
  std::optional<std::vector<int>> work_;
};

}  // namespace bluefog::nccl
