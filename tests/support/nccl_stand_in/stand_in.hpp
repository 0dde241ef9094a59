// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

/// A test double of the functions of CUDA's runtime, NVRTC and NCCL that the library uses.
///
/// Devices are numbers, their memory is the host's, a stream is a thread that does what it is given
/// in order, and ranks are threads of one process. It takes the place of the real libraries when a
/// test is linked, so the backend's own code runs without a GPU and under the sanitizers. It checks
/// the rules that a GPU would not: see `broken_rules`. How long something takes here means nothing.
namespace bluefog_test::stand_in {

inline constexpr int devices = 16;

/// Notes that a rule of CUDA or NCCL was broken.
void broke(const std::string& rule);
/// \return the rules broken since this was last asked, one a line.
[[nodiscard]] std::string broken_rules();

/// Whether memory that nobody asked CUDA for counts as the device's: then the arrays of a test do.
void all_memory_is_device(bool yes);

/// From now on the `nth` communication of any rank, counted from 1, fails by itself with `code`, an
/// `ncclResult_t`; 0: none does.
void fail_communication(int nth, int code);
/// \return whether this communication is the one that fails, and with what.
[[nodiscard]] int failing_code();

/// The next call of `function`, e.g. "cudaMalloc", with `on_device` as current device fails with
/// `code`, a `cudaError_t` or `ncclResult_t`.
void fail_call(const std::string& function, int on_device, int code);
/// \return whether that is this call, and its code; 0 if not.
[[nodiscard]] int failing_call(const char* function);
/// \return the calls that had to fail and have not come, after which none has to.
[[nodiscard]] int calls_left_to_fail();

/// The next that asks for NCCL's version is told `code`, as `NCCL_VERSION_CODE` is.
void nccl_version(int code);

/// Whether a rank learns from NCCL that another one has aborted, as over sockets. Otherwise it does
/// not, as on one host.
void aborts_are_seen(bool yes);
[[nodiscard]] bool aborts_are_seen();
/// Where `ncclCommAbort` hangs, until that is taken back: before it has done anything, so that what
/// it should end works on, or after it has done all it has to do.
enum class abort_hangs : unsigned char { nowhere, before, after };
void aborts_hang(int on_device, abort_hangs where);
/// Comes back once an abort on the current device does not hang here.
void pass_abort(abort_hangs here);
/// \return how many communicators have been aborted so far.
[[nodiscard]] int aborts();
void count_abort();

/// \return how many streams, events, allocations and communicators there are now.
[[nodiscard]] int living_objects();
void count_object(int change);

/// \return how often device memory or pinned host memory has been asked for or freed so far.
[[nodiscard]] int memory_calls();

/// \return the devices on which calls have made or used a context since `forget_contexts`,
///         ascending. All but questions about devices do, on the calling thread's current one.
[[nodiscard]] std::vector<int> contexts();
void forget_contexts();

/// A stream's thread.
class stream {
 public:
  explicit stream(int device);
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;
  ~stream();

  void give(std::function<void()> work);
  [[nodiscard]] bool idle();
  [[nodiscard]] int device() const { return device_; }

  /// How many communications have been submitted for this stream that it has not been given yet.
  std::atomic<int> launching = 0;

 private:
  void run();

  int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool busy_ = false;
  bool ending_ = false;
  std::thread thread_;
};

/// Notes that a device is to use `bytes` bytes at `data`, in this call: it has to reach them.
/// \return what keeps the memory noted as in use, null if CUDA did not give it.
[[nodiscard]] std::shared_ptr<void> use(const void* data, std::size_t bytes, const char* call);

/// \return the stream behind a handle, null if there is none, which is a broken rule.
[[nodiscard]] std::shared_ptr<stream> stream_of(void* handle, const char* call);
/// \return the calling thread's device.
[[nodiscard]] int current_device();

}  // namespace bluefog_test::stand_in
