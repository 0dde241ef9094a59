// SPDX-License-Identifier: Apache-2.0
// The part of CUDA's runtime, and of NVRTC, that the library uses, on host memory.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <set>
#include <utility>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nvrtc.h>

#include "support/nccl_stand_in/kernels.hpp"
#include "support/nccl_stand_in/stand_in.hpp"

namespace bluefog_test::stand_in {
namespace {

struct event {
  std::mutex mutex;
  std::condition_variable changed;
  int recorded = 0;
  int over = 0;
};

struct allocation {
  std::size_t bytes;
  int device;
  std::shared_ptr<int> in_use = std::make_shared<int>();  // its other owners use the memory
};
using allocations = std::map<const std::byte*, allocation>;

struct planned_failure {
  std::string function;
  int device;
  int code;
};

struct everything {
  std::mutex mutex;
  std::string rules;
  std::map<void*, std::shared_ptr<stream>> streams;
  std::map<void*, std::shared_ptr<event>> events;
  allocations device_memory;
  allocations pinned_memory;
  std::vector<planned_failure> failures;
};

everything& state() {
  static everything all;
  return all;
}
std::atomic<bool> unknown_is_device = false;
std::atomic<int> until_failure = 0;
std::atomic<int> failure_code = 0;
std::atomic<int> objects = 0;
std::atomic<bool> seen_aborts = false;
std::array<std::atomic<abort_hangs>, devices> hanging_aborts = {};
std::atomic<int> abort_count = 0;
std::atomic<int> memory_call_count = 0;
std::array<std::atomic<bool>, devices> used_contexts = {};
thread_local int device = 0;

void use_context() {
  used_contexts.at(static_cast<std::size_t>(device)) = true;
}

// The piece that `data` lies in, and how much of it is left from there on.
std::pair<const allocation*, std::size_t> find(const allocations& memory, const void* data) {
  const auto* place = static_cast<const std::byte*>(data);
  auto after = memory.upper_bound(place);
  if (after == memory.begin()) return {nullptr, 0};
  --after;
  const auto* end = after->first + after->second.bytes;
  if (place >= end) return {nullptr, 0};
  return {&after->second, static_cast<std::size_t>(end - place)};
}
bool holds(const allocations& memory, const void* data) {
  return find(memory, data).first != nullptr;
}

bool is_from_cuda(const void* data) {
  const std::scoped_lock lock(state().mutex);
  return holds(state().device_memory, data) || holds(state().pinned_memory, data);
}

std::shared_ptr<event> event_of(cudaEvent_t handle, const char* call) {
  const std::scoped_lock lock(state().mutex);
  const auto found = state().events.find(handle);
  if (found != state().events.end()) return found->second;
  state().rules += std::string(call) + " of an event that is not there\n";
  return nullptr;
}

cudaError_t allocate(void** data, std::size_t bytes, allocations& memory) {
  use_context();
  ++memory_call_count;
  if (bytes == 0) return *data = nullptr, cudaSuccess;
  auto* made = static_cast<std::byte*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
  if (made == nullptr) return cudaErrorMemoryAllocation;
  std::memset(made, 0xA5, bytes);  // never zeros, which might be taken for a result
  const std::scoped_lock lock(state().mutex);
  memory[made] = {bytes, device};
  count_object(1);
  *data = made;
  return cudaSuccess;
}

cudaError_t release(void* data, allocations& memory, const char* call) {
  use_context();
  ++memory_call_count;
  if (data == nullptr) return cudaSuccess;
  int home = 0;
  {
    const std::scoped_lock lock(state().mutex);
    const auto found = memory.find(static_cast<std::byte*>(data));
    if (found == memory.end()) {
      state().rules += std::string(call) + " of memory that is not there\n";
      return cudaErrorInvalidValue;
    }
    home = found->second.device;
    if (found->second.in_use.use_count() > 1)
      state().rules += std::string(call) + " of memory that a stream still works on\n";
    memory.erase(found);
  }
  // As the real one does, it waits for what works on the memory.
  std::vector<std::shared_ptr<stream>> all;
  {
    const std::scoped_lock lock(state().mutex);
    for (const auto& [handle, each] : state().streams)
      if (each->device() == home) all.push_back(each);
  }
  for (const auto& each : all)
    while (!each->idle()) std::this_thread::yield();
  std::free(data);
  count_object(-1);
  return cudaSuccess;
}

}  // namespace

void broke(const std::string& rule) {
  const std::scoped_lock lock(state().mutex);
  state().rules += rule + "\n";
}
std::string broken_rules() {
  const std::scoped_lock lock(state().mutex);
  return std::exchange(state().rules, {});
}
void all_memory_is_device(bool yes) {
  unknown_is_device = yes;
}
void fail_communication(int nth, int code) {
  failure_code = code;
  until_failure = nth;
}
int failing_code() {
  return until_failure > 0 && --until_failure == 0 ? failure_code.load() : 0;
}
void fail_call(const std::string& function, int on_device, int code) {
  const std::scoped_lock lock(state().mutex);
  state().failures.push_back({function, on_device, code});
}
int failing_call(const char* function) {
  const std::scoped_lock lock(state().mutex);
  auto& all = state().failures;
  const auto found = std::ranges::find_if(all, [&](const planned_failure& each) {
    return each.function == function && each.device == device;
  });
  if (found == all.end()) return 0;
  const int code = found->code;
  all.erase(found);
  return code;
}
int calls_left_to_fail() {
  const std::scoped_lock lock(state().mutex);
  return static_cast<int>(std::exchange(state().failures, {}).size());
}
void aborts_are_seen(bool yes) {
  seen_aborts = yes;
}
bool aborts_are_seen() {
  return seen_aborts;
}
void aborts_hang(int on_device, abort_hangs where) {
  hanging_aborts.at(static_cast<std::size_t>(on_device)) = where;
}
void pass_abort(abort_hangs here) {
  while (hanging_aborts.at(static_cast<std::size_t>(device)) == here)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
int aborts() {
  return abort_count;
}
void count_abort() {
  ++abort_count;
}
std::shared_ptr<void> use(const void* data, std::size_t bytes, const char* call) {
  if (bytes == 0) return nullptr;
  const std::scoped_lock lock(state().mutex);
  for (const auto* memory : {&state().device_memory, &state().pinned_memory}) {
    const auto [piece, left] = find(*memory, data);
    if (piece == nullptr) continue;
    if (bytes > left) state().rules += std::string(call) + " of more memory than there is\n";
    return piece->in_use;
  }
  if (!unknown_is_device)
    state().rules += std::string(call) + " of memory that the device does not reach\n";
  return nullptr;
}
int living_objects() {
  return objects;
}
int memory_calls() {
  return memory_call_count;
}
void count_object(int change) {
  objects += change;
}
int current_device() {
  return device;
}
std::vector<int> contexts() {
  std::vector<int> used;
  for (int each = 0; each < devices; ++each)
    if (used_contexts.at(static_cast<std::size_t>(each))) used.push_back(each);
  return used;
}
void forget_contexts() {
  for (auto& each : used_contexts) each = false;
}

stream::stream(int of) : device_(of), thread_([this] { run(); }) {
  count_object(1);
}
stream::~stream() {
  {
    const std::scoped_lock lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
  count_object(-1);
}
void stream::give(std::function<void()> work) {
  {
    const std::scoped_lock lock(mutex_);
    work_.push_back(std::move(work));
  }
  changed_.notify_all();
}
bool stream::idle() {
  const std::scoped_lock lock(mutex_);
  return work_.empty() && !busy_;
}
void stream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ending_ || !work_.empty(); });
    if (work_.empty()) return;
    auto next = std::move(work_.front());
    work_.pop_front();
    busy_ = true;
    lock.unlock();
    next();
    next = nullptr;
    lock.lock();
    busy_ = false;
  }
}

std::shared_ptr<stream> stream_of(void* handle, const char* call) {
  const std::scoped_lock lock(state().mutex);
  const auto found = state().streams.find(handle);
  if (found == state().streams.end()) {
    state().rules += std::string(call) + " on a stream that is not there\n";
    return nullptr;
  }
  if (found->second->device() != device)
    state().rules += std::string(call) + " on a stream of another device than the current one\n";
  return found->second;
}

// "Not yet" counts as an error here, as with CUDA itself.
static thread_local cudaError_t last_error = cudaSuccess;

// The default stream does everything at once.
static cudaError_t give(cudaStream_t handle, const char* call, std::function<void()> work) {
  if (handle == nullptr) return work(), cudaSuccess;
  const auto on = stream_of(handle, call);
  if (!on) return cudaErrorInvalidResourceHandle;
  on->give(std::move(work));
  return cudaSuccess;
}

}  // namespace bluefog_test::stand_in

using namespace bluefog_test::stand_in;

extern "C" {

const char* cudaGetErrorName(cudaError_t) {
  return "stand-in";
}
const char* cudaGetErrorString(cudaError_t) {
  return "an error of the stand-in";
}
cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}

cudaError_t cudaGetDeviceCount(int* count) {
  return *count = devices, cudaSuccess;
}
cudaError_t cudaGetDevice(int* it) {
  return *it = device, cudaSuccess;
}
cudaError_t cudaSetDevice(int it) {
  if (it < 0 || it >= devices) return cudaErrorInvalidDevice;
  device = it;
  use_context();  // from CUDA 12 on
  return cudaSuccess;
}
static CUresult primary_context_state(CUdevice of, unsigned* flags, int* active) {
  *flags = 0;
  *active = used_contexts.at(static_cast<std::size_t>(of)) ? 1 : 0;
  return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(name, "cuDevicePrimaryCtxGetState") == 0;
  *found = known ? reinterpret_cast<void*>(&primary_context_state) : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int of) {
  *properties = {};
  properties->uuid.bytes[0] = static_cast<char>(of);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? 9
           : attribute == cudaDevAttrComputeCapabilityMinor ? 0
                                                            : 2;
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  use_context();
  *attributes = {};
  const std::scoped_lock lock(state().mutex);
  attributes->type = holds(state().device_memory, data)   ? cudaMemoryTypeDevice
                     : holds(state().pinned_memory, data) ? cudaMemoryTypeHost
                     : unknown_is_device                  ? cudaMemoryTypeDevice
                                                          : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

static cudaError_t failure(const char* function) {
  return static_cast<cudaError_t>(failing_call(function));
}

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
  if (const auto code = failure("cudaMalloc"); code != cudaSuccess) return code;
  return allocate(data, bytes, state().device_memory);
}
cudaError_t cudaFree(void* data) {
  return release(data, state().device_memory, "cudaFree");
}
cudaError_t cudaMallocHost(void** data, std::size_t bytes) {
  if (const auto code = failure("cudaMallocHost"); code != cudaSuccess) return code;
  return allocate(data, bytes, state().pinned_memory);
}
cudaError_t cudaFreeHost(void* data) {
  return release(data, state().pinned_memory, "cudaFreeHost");
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned) {
  use_context();
  if (const auto code = failure("cudaStreamCreateWithFlags"); code != cudaSuccess) return code;
  auto made = std::make_shared<stream>(device);
  *handle = reinterpret_cast<cudaStream_t>(made.get());
  const std::scoped_lock lock(state().mutex);
  state().streams[made.get()] = std::move(made);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  use_context();
  std::shared_ptr<stream> ending;
  {
    const std::scoped_lock lock(state().mutex);
    const auto found = state().streams.find(handle);
    if (found == state().streams.end()) {
      state().rules += "cudaStreamDestroy of a stream that is not there\n";
      return cudaErrorInvalidResourceHandle;
    }
    ending = std::move(found->second);
    state().streams.erase(found);
  }
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  use_context();
  const auto of = stream_of(handle, "cudaStreamQuery");
  if (!of) return cudaErrorInvalidResourceHandle;
  return of->idle() ? cudaSuccess : last_error = cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t of, unsigned) {
  use_context();
  if (const auto code = failure("cudaStreamWaitEvent"); code != cudaSuccess) return code;
  const auto on = stream_of(handle, "cudaStreamWaitEvent");
  const auto it = event_of(of, "cudaStreamWaitEvent");
  if (!on || !it) return cudaErrorInvalidResourceHandle;
  const std::scoped_lock lock(it->mutex);
  on->give([it, wanted = it->recorded] {
    std::unique_lock inside(it->mutex);
    it->changed.wait(inside, [&] { return it->over >= wanted; });
  });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
  use_context();
  if (const auto code = failure("cudaEventCreateWithFlags"); code != cudaSuccess) return code;
  auto made = std::make_shared<event>();
  *handle = reinterpret_cast<cudaEvent_t>(made.get());
  const std::scoped_lock lock(state().mutex);
  state().events[made.get()] = std::move(made);
  count_object(1);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  use_context();
  const std::scoped_lock lock(state().mutex);
  if (state().events.erase(handle) == 0)
    state().rules += "cudaEventDestroy of an event that is not there\n";
  else
    count_object(-1);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t of) {
  use_context();
  if (const auto code = failure("cudaEventRecord"); code != cudaSuccess) return code;
  const auto it = event_of(handle, "cudaEventRecord");
  if (!it) return cudaErrorInvalidResourceHandle;
  if (of == nullptr) {  // the default stream, which the tests give no work
    const std::scoped_lock lock(it->mutex);
    it->over = ++it->recorded;
    return cudaSuccess;
  }
  const auto on = stream_of(of, "cudaEventRecord");
  if (!on) return cudaErrorInvalidResourceHandle;
  if (on->launching > 0)
    broke("cudaEventRecord before a communication that was submitted is on the stream");
  const std::scoped_lock lock(it->mutex);
  on->give([it, number = ++it->recorded] {
    {
      const std::scoped_lock inside(it->mutex);
      it->over = std::max(it->over, number);
    }
    it->changed.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  use_context();
  if (const auto code = failure("cudaEventQuery"); code != cudaSuccess) return code;
  const auto it = event_of(handle, "cudaEventQuery");
  if (!it) return cudaErrorInvalidResourceHandle;
  const std::scoped_lock lock(it->mutex);
  return it->over >= it->recorded ? cudaSuccess : last_error = cudaErrorNotReady;
}

cudaError_t cudaMemcpyAsync(void* out, const void* in, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t handle) {
  use_context();
  if (const auto code = failure("cudaMemcpyAsync"); code != cudaSuccess) return code;
  const std::array used{use(out, bytes, "cudaMemcpyAsync"), use(in, bytes, "cudaMemcpyAsync")};
  return give(handle, "cudaMemcpyAsync", [=] {
    static_cast<void>(used);
    std::memmove(out, in, bytes);
  });
}

cudaError_t cudaMemcpy(void* out, const void* in, std::size_t bytes, cudaMemcpyKind) {
  use_context();
  std::memmove(out, in, bytes);
  return cudaSuccess;
}

cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void* code, cudaJitOption*, void**,
                                unsigned, cudaLibraryOption*, void**, unsigned) {
  use_context();
  *library = reinterpret_cast<cudaLibrary_t>(const_cast<void*>(code));
  return code != nullptr ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* found, cudaLibrary_t, const char* name) {
  use_context();
  const host_kernel* it = find_kernel(name);
  *found = reinterpret_cast<cudaKernel_t>(const_cast<host_kernel*>(it));
  return it != nullptr ? cudaSuccess : cudaErrorSymbolNotFound;
}
cudaError_t cudaLaunchKernel(const void* function, dim3 blocks, dim3 threads, void** arguments,
                             std::size_t, cudaStream_t handle) {
  use_context();
  if (const auto code = failure("cudaLaunchKernel"); code != cudaSuccess) return code;
  if (blocks.x == 0 || threads.x == 0 || threads.x > 1024) return cudaErrorInvalidConfiguration;
  const auto& it = *static_cast<const host_kernel*>(function);
  const auto* first = static_cast<const std::byte*>(arguments[0]);
  auto copy = std::make_shared<std::vector<std::byte>>(first, first + it.argument_bytes);
  std::vector<std::shared_ptr<void>> used;
  if (handle != nullptr)  // the default stream does it at once
    for (const auto& [data, bytes] : it.memory(copy->data()))
      if (is_from_cuda(data)) used.push_back(use(data, bytes, "cudaLaunchKernel"));
  return give(handle, "cudaLaunchKernel", [&it, copy, used] { run_kernel(it, copy->data()); });
}

// Compiling is left to the tests that are linked with the real NVRTC.
nvrtcResult nvrtcCreateProgram(nvrtcProgram* program, const char*, const char*, int,
                               const char* const*, const char* const*) {
  return *program = nullptr, NVRTC_SUCCESS;
}
nvrtcResult nvrtcCompileProgram(nvrtcProgram, int, const char* const*) {
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetCUBINSize(nvrtcProgram, std::size_t* size) {
  return *size = 1, NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetCUBIN(nvrtcProgram, char* code) {
  return *code = 'k', NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, std::size_t* size) {
  return *size = 0, NVRTC_SUCCESS;
}
nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char*) {
  return NVRTC_SUCCESS;
}
nvrtcResult nvrtcDestroyProgram(nvrtcProgram*) {
  return NVRTC_SUCCESS;
}
const char* nvrtcGetErrorString(nvrtcResult) {
  return "an error of the stand-in";
}

}  // extern "C"
