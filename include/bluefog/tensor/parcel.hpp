// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/TensorImpl.h>

#include <bluefog/backend/compute.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/context.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/scratch.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/tensor/arguments.hpp>
#include <bluefog/tensor/device.hpp>
#include <bluefog/tensor/dtype.hpp>

namespace bluefog::detail {

/// Whether a tensor's own memory holds its elements as they travel: in row-major order.
[[nodiscard]] inline bool travels_as_it_is(const at::Tensor& x) {
  return x.is_contiguous() && !x.is_neg() && !x._is_zerotensor();
}

/// Tensors that travel together: their elements in logical order, in one piece of memory.
///
/// One tensor whose memory already is like that lends it; everything else is copied: strided,
/// transposed, expanded and channels-last tensors, and several at once. The memory is the device's
/// where all tensors are on the transport's device. Else it is the host's, to and from which
/// tensors of a device are copied on streams of their own, after what the program had given to its
/// stream: nobody waits for a device as a whole.
class parcel {
 public:
  /// Tensors of the host are copied here and now.
  /// \param in       what to send; checked before; may be none.
  /// \param targets  what gets the result, of the same shapes: other tensors, or `in` again; none
  ///                 if the parcel is only sent.
  /// \throws usage_error if a tensor is on another CUDA device than that of the transport.
  template <backend Backend>
  parcel(const operation_context<Backend>& context, std::span<const at::Tensor> in,
         std::span<const at::Tensor> targets) {
    const c10::AutoGradMode no_graph(false);
    lay_out(in.empty() ? targets : in);
    device_ = common_device(context, in, targets);
    if (!device_) note_passages(in, targets);
    if (in.size() == 1 && lends(in.front())) {
      lent_in_ = in.front().detach();
      in_ = static_cast<const std::byte*>(lent_in_.const_data_ptr());
    } else if (!in.empty()) {
      in_ = out_ = own_ = memory(context);
      for (const at::Tensor& each : in) sources_.push_back(each.detach());
    }
    if (targets.size() == 1 && lends(targets.front())) {
      lent_out_ = targets.front().detach();
      out_ = static_cast<std::byte*>(lent_out_.mutable_data_ptr());
      mark_written(lent_out_);
    } else if (!targets.empty()) {
      if (own_ == nullptr) own_ = memory(context);
      out_ = own_;
      for (const at::Tensor& target : targets) targets_.push_back(target.detach());
    }
    if (!device_) copy_across(sources_, crossing::to_host, [this](std::size_t i) { pack(i); });
  }

  [[nodiscard]] const packed_layout& layout() const noexcept { return layout_; }
  [[nodiscard]] const std::byte* input() const noexcept { return in_; }
  [[nodiscard]] std::byte* output() const noexcept { return out_; }

  /// \return all elements, which have to be of one type.
  [[nodiscard]] const_buffer in() const { return {input(), count(), type()}; }
  [[nodiscard]] mutable_buffer out() const { return {output(), count(), type()}; }

  /// \return the device that the memory is on, if it is on one.
  [[nodiscard]] const std::optional<c10::Device>& device() const noexcept { return device_; }
  /// \return whether tensors of a device travel as host memory.
  [[nodiscard]] bool crosses() const noexcept { return !passages_.empty(); }
  /// \return whether the result has to be copied to where it belongs.
  [[nodiscard]] bool delivers() const noexcept { return !targets_.empty(); }

  /// Has the transport's stream copy what lies on its device into the parcel.
  template <backend Backend>
  void load(const operation_context<Backend>& context) {
    if constexpr (device_backend<Backend>)
      if (device_)
        give_copies(
            context.transport(), [this](std::size_t i) { pack(i); }, sources_);
  }

  /// Copies the result to the targets that have not been written directly, or has a stream do so.
  template <backend Backend>
  void deliver(const operation_context<Backend>& context) {
    if constexpr (device_backend<Backend>)
      if (device_)
        return give_copies(
            context.transport(), [this](std::size_t i) { unpack(i); }, targets_);
    const c10::AutoGradMode no_graph(false);
    copy_across(targets_, crossing::to_device, [this](std::size_t i) { unpack(i); });
  }
  /// Does so on the streams that this thread works on, where the program goes on.
  void deliver_here() const {
    const c10::AutoGradMode no_graph(false);
    for (std::size_t i = 0; i < targets_.size(); ++i) unpack(i);
  }

  /// \return what lies in `memory`, which is where this parcel's is and laid out like it, as a
  ///         tensor where `x` is. Borrows the memory unless it has to be copied there.
  [[nodiscard]] at::Tensor tensor_like(const at::Tensor& x, std::byte* memory) const {
    return view_like(x, memory).to(x.device());
  }

  /// What crosses between a device and the host.
  struct passage {
    c10::Device device;
    device_moment called;  ///< what the program had given to its stream when it called
    device_moment passed;  ///< to be awaited before the memory is used, and after `deliver`
  };
  [[nodiscard]] std::span<passage> passages() noexcept { return passages_; }

 private:
  // The device of the transport, if all tensors that have elements are there.
  template <backend Backend>
  [[nodiscard]] static std::optional<c10::Device> common_device(
      const operation_context<Backend>& context, std::span<const at::Tensor> in,
      std::span<const at::Tensor> targets) {
    if constexpr (device_backend<Backend>) {
      if (context.options().ops_on_cpu) return std::nullopt;
      const c10::Device home(c10::kCUDA,
                             static_cast<c10::DeviceIndex>(context.transport().device()));
      bool all = true;
      for (const auto& list : {in, targets})
        for (const at::Tensor& x : list) {
          expects(!x.is_cuda() || x.device() == home, Backend::name, "_backend: a tensor is on ",
                  x.device(), ", and this communicator works on ", home,
                  "; move the tensor, or have it copied by way of the host: BLUEFOG_OPS_ON_CPU=1");
          all = all && x.is_cuda();
        }
      if (all && !(in.empty() && targets.empty())) return home;
    }
    return std::nullopt;
  }

  void note_passages(std::span<const at::Tensor> in, std::span<const at::Tensor> targets) {
    for (const auto& list : {in, targets})
      for (const at::Tensor& x : list)
        if (!x.is_cpu() &&
            std::ranges::find(passages_, x.device(), &passage::device) == passages_.end())
          passages_.push_back({x.device(), device_moment(current_stream(x.device())), {}});
  }
  [[nodiscard]] passage& passage_of(const at::Tensor& x) {
    return *std::ranges::find(passages_, x.device(), &passage::device);
  }

  // Without gaps if all are of one type: a reduction runs over the whole.
  void lay_out(std::span<const at::Tensor> tensors) {
    const bool one_type = std::ranges::all_of(tensors, [&](const at::Tensor& x) {
      return x.scalar_type() == tensors.front().scalar_type();
    });
    for (const at::Tensor& x : tensors) {
      const dtype element_type = dtype_from(x.scalar_type()).value();
      if (!one_type) {
        layout_.add(x.numel(), element_type);
        continue;
      }
      layout_.segments.push_back({layout_.bytes, x.numel(), element_type});
      layout_.bytes += static_cast<std::size_t>(x.numel()) * size_of(element_type);
    }
  }

  [[nodiscard]] bool lends(const at::Tensor& x) const {
    return (x.is_cpu() || device_) && travels_as_it_is(x);
  }

  // For all elements. Pinned where a device copies.
  template <backend Backend>
  [[nodiscard]] std::byte* memory(const operation_context<Backend>& context) {
    if constexpr (device_backend<Backend>)
      if (device_) {
        device_memory_ = context.transport().scratch(layout_.bytes);
        return device_memory_.data();
      }
    host_memory_ = at::empty({static_cast<std::int64_t>(layout_.bytes)},
                             c10::TensorOptions().dtype(c10::kByte).pinned_memory(crosses()));
    return static_cast<std::byte*>(host_memory_.mutable_data_ptr());
  }

  // The part of the memory that belongs to tensor `i`, which is like `x`.
  [[nodiscard]] at::Tensor slot(std::size_t i, const at::Tensor& x) const {
    const auto& [offset, count, element_type] = layout_.segments[i];
    if (crosses())  // knows its memory, so that this is not used anew before a stream is through
      return host_memory_
          .narrow(0, static_cast<std::int64_t>(offset), static_cast<std::int64_t>(x.nbytes()))
          .view(x.scalar_type())
          .view(x.sizes());
    return view_like(x, own_ + offset);
  }
  [[nodiscard]] at::Tensor view_like(const at::Tensor& x, std::byte* memory) const {
    const auto options = x.options().device(device_.value_or(c10::kCPU)).requires_grad(false);
    return at::for_blob(memory, x.sizes())
        .options(options)
        .target_device(options.device())
        .make_tensor();
  }

  void pack(std::size_t i) const {
    const at::Tensor& x = sources_[i];
    if (x.numel() == 0) return;
    if (x.is_cpu() && travels_as_it_is(x))
      std::memcpy(own_ + layout_.segments[i].offset, x.const_data_ptr(), x.nbytes());
    else
      slot(i, x).copy_(x, /*non_blocking=*/true);
  }
  void unpack(std::size_t i) const {
    const at::Tensor& target = targets_[i];
    if (target.numel() == 0) return;
    if (!target.is_cpu() || !travels_as_it_is(target)) {
      const c10::InferenceMode as_made(target.is_inference());  // else it may not be written
      target.copy_(slot(i, target), /*non_blocking=*/true);
      return;
    }
    std::memcpy(target.mutable_data_ptr(), own_ + layout_.segments[i].offset, target.nbytes());
    mark_written(target);
  }

  // Has `copy(i)` copy each tensor between here and the host's memory. What is on a device is on
  // its way when this returns.
  template <class Copy>
  void copy_across(const std::vector<at::Tensor>& tensors, crossing direction, Copy copy) {
    if (tensors.empty()) return;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].is_cpu()) {
        copy(i);
        continue;
      }
      const auto way = side_stream(tensors[i].device(), direction);
      passage_of(tensors[i]).called.precede(way);
      const c10::StreamGuard guard(way);
      copy(i);
    }
    for (passage& each : passages_)
      each.passed = device_moment(side_stream(each.device, direction));
  }

  template <device_backend Backend, class Copy>
  void give_copies(Backend& transport, Copy copy, const std::vector<at::Tensor>& tensors) {
    if (tensors.empty()) return;
    const c10::AutoGradMode no_graph(false);
    transport.give([&] {
      const c10::StreamGuard guard(stream_of(transport, *device_));
      for (std::size_t i = 0; i < tensors.size(); ++i) copy(i);
    });
  }

  // So that autograd finds out if it has saved the tensor.
  static void mark_written(const at::Tensor& target) {
    if (!target.is_inference()) target.unsafeGetTensorImpl()->bump_version();
  }

  [[nodiscard]] dtype type() const noexcept {
    return layout_.segments.empty() ? dtype::uint8 : layout_.segments.front().type;
  }
  [[nodiscard]] std::int64_t count() const noexcept {
    return static_cast<std::int64_t>(layout_.bytes / size_of(type()));
  }

  packed_layout layout_;
  std::optional<c10::Device> device_;
  const std::byte* in_ = nullptr;
  std::byte* out_ = nullptr;
  std::byte* own_ = nullptr;  // what is not lent: the same for both
  at::Tensor lent_in_;
  at::Tensor lent_out_;
  at::Tensor host_memory_;
  scratch_pool::block device_memory_;
  std::vector<at::Tensor> sources_;  // copied from; empty if `in_` is the tensor's memory
  std::vector<at::Tensor> targets_;  // to be copied to; empty if `out_` is the target's memory
  std::vector<passage> passages_;
};

}  // namespace bluefog::detail
