// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "support/nccl_stand_in/stand_in.hpp"

/// CUDA tensors without a GPU: libtorch's CPU build sees the stand-in's devices as its CUDA
/// devices.
///
/// Copies are given to the current stream, whose thread does them later, and memory goes back to
/// its stream the moment a tensor lets go of it, as with libtorch's own allocator: what is not
/// ordered by events shows. Every other operation waits for the current stream and then computes on
/// the host. A test double: what it says of libtorch's CUDA library is what is known of it, not
/// what was seen.
namespace bluefog_test::device_tensors {

using stand_in::stream_of;

[[nodiscard]] inline cudaStream_t handle_of(const c10::Stream& stream) {
  return reinterpret_cast<cudaStream_t>(stream.id());
}

class device_switch {
 public:
  explicit device_switch(int to) {
    cudaGetDevice(&before_);
    cudaSetDevice(to);
  }
  device_switch(const device_switch&) = delete;
  device_switch& operator=(const device_switch&) = delete;
  ~device_switch() { cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

inline void wait_until(const std::function<bool()>& over) {
  while (!over()) std::this_thread::sleep_for(std::chrono::microseconds(5));
}

/// What libtorch asks of a device: here the stand-in's.
struct guard final : c10::impl::DeviceGuardImplInterface {
  static std::map<int, c10::StreamId>& current() {
    thread_local std::map<int, c10::StreamId> streams;
    return streams;
  }
  static c10::Device cuda(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }
  static int index_of(c10::Device device) {
    int now = 0;
    cudaGetDevice(&now);
    return device.has_index() ? device.index() : now;
  }

  static bool yes(cudaError_t answer) {
    return answer == cudaSuccess || (cudaGetLastError(), false);
  }

  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device getDevice() const override { return cuda(index_of(c10::Device(c10::kCUDA))); }
  c10::Device exchangeDevice(c10::Device to) const override {
    const auto before = getDevice();
    cudaSetDevice(to.index());
    return before;
  }
  void setDevice(c10::Device to) const override { cudaSetDevice(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { cudaSetDevice(to.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }

  c10::Stream getStream(c10::Device of) const override {
    const int index = index_of(of);
    return c10::Stream(c10::Stream::UNSAFE, cuda(index), current()[index]);
  }
  c10::Stream getDefaultStream(c10::Device of) const override {
    return c10::Stream(c10::Stream::DEFAULT, of);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    const device_switch there(index_of(of));
    cudaStream_t made = nullptr;
    cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking);  // kept for ever, as libtorch does
    return c10::Stream(c10::Stream::UNSAFE, cuda(index_of(of)),
                       reinterpret_cast<c10::StreamId>(made));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const auto before = getStream(to.device());
    current()[to.device_index()] = to.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream of) const override { return handle_of(of); }

  void record(void** event, const c10::Stream& in, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    const device_switch there(in.device_index());
    auto made = static_cast<cudaEvent_t>(*event);
    if (made == nullptr) cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    cudaEventRecord(made, handle_of(in));
    *event = made;
  }
  // The default stream does everything at once.
  void block(void* event, const c10::Stream& stream) const override {
    if (stream.id() == 0) return synchronizeEvent(event);
    const device_switch there(stream.device_index());
    cudaStreamWaitEvent(handle_of(stream), static_cast<cudaEvent_t>(event), 0);
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || yes(cudaEventQuery(static_cast<cudaEvent_t>(event)));
  }
  void synchronizeEvent(void* event) const override {
    wait_until([&] { return queryEvent(event); });
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(event));
  }
  bool queryStream(const c10::Stream& stream) const override {
    const device_switch there(stream.device_index());
    return stream.id() == 0 || yes(cudaStreamQuery(handle_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_until([&] { return queryStream(stream); });
  }
};

[[nodiscard]] inline c10::Stream current_stream(c10::Device device) {
  return guard().getStream(device);
}

/// Memory of the devices: what is let go of in a stream is the next that this stream gets.
class allocator final : public c10::Allocator {
 public:
  struct block {
    void* data;
    std::size_t bytes;
    c10::Stream home;
    std::vector<c10::Stream> users = {};
    std::vector<c10::Event> pending = {};
  };

  static allocator& get() {
    static auto* const the = new allocator;  // outlives the tensors
    return *the;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    const auto home = current_stream(c10::Device(c10::kCUDA));
    if (bytes == 0) return {nullptr, nullptr, &release, home.device()};
    const std::scoped_lock lock(mutex_);
    block* found = nullptr;
    for (auto it = free_.begin(); it != free_.end() && found == nullptr; ++it) {
      block& each = **it;
      std::erase_if(each.pending, [](const c10::Event& event) { return event.query(); });
      if (each.home != home || each.bytes != bytes || !each.pending.empty()) continue;
      found = it->release();
      free_.erase(it);
    }
    if (found == nullptr) {
      found = new block{nullptr, bytes, home};
      cudaMalloc(&found->data, bytes);
    }
    // Who gets memory writes to it, in the order of its stream.
    const auto spoil = [data = found->data, bytes] { std::memset(data, 0xA5, bytes); };
    if (home.id() == 0)
      spoil();
    else
      stream_of(handle_of(home), "a kernel")->give(spoil);
    return {found->data, found, &release, home.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  static void release(void* context) {
    if (context == nullptr) return;
    auto own = std::unique_ptr<block>(static_cast<block*>(context));
    for (const c10::Stream& user : std::exchange(own->users, {}))
      own->pending.emplace_back(c10::kCUDA).record(user);
    const std::scoped_lock lock(get().mutex_);
    get().free_.push_back(std::move(own));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<block>> free_;
};

struct hooks final : at::CUDAHooksInterface {
  hooks() = default;
  explicit hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return guard().deviceCount(); }
  int getNumGPUs() const override { return guard().deviceCount(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(c10::kCUDA, 0); }
};

/// A tensor of the host over the same memory.
[[nodiscard]] inline at::Tensor on_host(const at::Tensor& x) {
  if (!x.defined() || x.is_cpu()) return x;
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), at::TensorOptions().dtype(x.dtype()));
}

inline at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                        std::optional<at::Layout>, std::optional<at::Device> device,
                        std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const device_switch there(guard::index_of(device.value_or(c10::Device(c10::kCUDA))));
  return at::Tensor(at::detail::empty_generic(sizes, &allocator::get(),
                                              c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                              type.value_or(at::kFloat), format));
}
inline at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                                std::optional<at::ScalarType> type, std::optional<at::Layout>,
                                std::optional<at::Device> device, std::optional<bool>) {
  const device_switch there(guard::index_of(device.value_or(c10::Device(c10::kCUDA))));
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, &allocator::get(),
                                                      c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                      type.value_or(at::kFloat)));
}

/// How often a device has read or written a tensor of so many elements.
struct pass_count {
  std::atomic<std::int64_t> elements = -1;
  std::atomic<int> passes = 0;
  void note(const at::Tensor& x) {
    if (x.numel() == elements) ++passes;
  }
};
inline pass_count& counted() {
  static pass_count all;
  return all;
}

inline at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  if (to.numel() == 0) return to;
  counted().note(to);
  const auto device = to.is_cpu() ? from.device() : to.device();
  const auto stream = current_stream(device);
  const device_switch there(device.index());
  if (cudaGetLastError() != cudaSuccess)
    stand_in::broke("an earlier answer is taken for the error of libtorch's kernel");
  const auto work = [target = on_host(to), source = on_host(from.expand(to.sizes()))] {
    const at::AutoDispatchBelowADInplaceOrView below;
    target.copy_(source);
  };
  if (stream.id() == 0) {
    work();
  } else {
    stream_of(handle_of(stream), "a copy")->give([work] {
      std::this_thread::sleep_for(std::chrono::microseconds(200));  // who does not wait is early
      work();
    });
  }
  if (!non_blocking && (to.is_cpu() || from.is_cpu())) guard().synchronizeStream(stream);
  return to;
}

inline void record_stream(at::Tensor& x, at::Stream user) {
  auto* const block = static_cast<allocator::block*>(x.storage().data_ptr().get_context());
  if (block != nullptr && x.storage().data_ptr().get_deleter() == allocator::get().raw_deleter())
    block->users.push_back(user);
}

/// Puts `replace(tensor)` in the place of the tensor in `value`, or of each in its list.
template <class Replace>
void replace_tensors(c10::IValue& value, const Replace& replace) {
  if (value.isTensor()) {
    value = replace(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(replace(each));
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
      list.push_back(each ? std::optional(replace(*each)) : std::nullopt);
    value = std::move(list);
  }
}

/// Any other operation: waits for the current stream, and computes on the host.
inline void compute(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const std::size_t count = operation.schema().arguments().size();
  const std::size_t first = stack->size() - count;
  std::vector<std::pair<at::Tensor, at::Tensor>> lent;  // the host's, and whose memory it is
  std::optional<c10::Device> device;
  // What libtorch's kernels for devices refuse and those for the host do not.
  const bool no_bfloat16 =
      operation.schema().name() == "aten::_amp_foreach_non_finite_check_and_unscale_";
  const auto lend = [&](const at::Tensor& x) {
    if (!x.defined() || !x.is_cuda()) return x;
    TORCH_CHECK(!no_bfloat16 || x.scalar_type() != at::kBFloat16, operation.schema().name(),
                " not implemented for 'BFloat16'");
    device = x.device();
    guard().synchronizeStream(current_stream(x.device()));
    lent.emplace_back(on_host(x), x);
    return lent.back().first;
  };
  for (std::size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isDevice()) {
      device = value.toDevice();
      value = c10::Device(c10::kCPU);
    } else {
      replace_tensors(value, lend);
    }
  }
  if (!lent.empty()) counted().note(lent.back().second);
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    operation.callBoxed(stack);
  }
  const auto give_back = [&](const at::Tensor& x) {
    for (const auto& [host, own] : lent)
      if (host.is_same(x)) return own;
    if (!x.defined() || !device) return x;
    auto made = at::empty_strided(x.sizes(), x.strides(), x.options().device(*device));
    guard().synchronizeStream(current_stream(*device));
    on_host(made).copy_(x);
    return made;
  };
  for (std::size_t i = stack->size() - operation.schema().returns().size(); i < stack->size(); ++i)
    replace_tensors((*stack)[i], give_back);
}

}  // namespace bluefog_test::device_tensors

namespace at {
C10_REGISTER_GUARD_IMPL(CUDA, bluefog_test::device_tensors::guard)
using bluefog_hooks = bluefog_test::device_tensors::hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", bluefog_hooks)
}  // namespace at

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(
      torch::CppFunction::makeFromBoxedFunction<&bluefog_test::device_tensors::compute>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &bluefog_test::device_tensors::empty);
  library.impl("empty_strided", &bluefog_test::device_tensors::empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("copy_", &bluefog_test::device_tensors::copy);
  library.impl("record_stream", &bluefog_test::device_tensors::record_stream);
}
