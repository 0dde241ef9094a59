// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>

#include <bluefog/backend/task.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/tensor/dtype.hpp>

namespace bluefog::detail {

/// Checks that a tensor can travel. \return the type of its elements.
inline dtype expects_tensor(std::string_view operation, const at::Tensor& x) {
  expects(x.defined(), operation, ": the tensor is undefined");
  expects(x.layout() == c10::kStrided && !x.is_nested(), operation,
          ": the tensor must be dense, got layout ", x.layout(), x.is_nested() ? " (nested)" : "");
  expects(x.is_cpu() || x.is_cuda(), operation,
          ": the tensor must be on a CPU or CUDA device, got ", x.device());
  return dtype_from(x.scalar_type(), operation);
}

/// Checks that a tensor can travel and take the result.
inline void expects_target(std::string_view operation, const at::Tensor& x) {
  expects_tensor(operation, x);
  expects(at::has_internal_overlap(x) != at::MemOverlap::Yes, operation,
          ": several elements of the tensor are one place in memory, so it cannot be written; "
          "clone() it first");
  expects(!(c10::GradMode::is_enabled() && x.requires_grad()), operation,
          ": a tensor that requires a gradient cannot be changed in place; use the form without "
          "underscore, or torch::NoGradGuard");
  expects(!x.is_inference() || c10::InferenceMode::is_enabled(), operation,
          ": an inference tensor cannot be changed outside of inference mode; clone() it first");
}

/// \return the element types and lengths of tensors that can travel, without their memory; one
///         empty array in place of no tensors, so that an operation is described by its last one.
[[nodiscard]] inline std::vector<const_buffer> outlines(std::span<const at::Tensor> tensors) {
  std::vector<const_buffer> result;
  for (const at::Tensor& x : tensors)
    result.push_back({nullptr, x.numel(), dtype_from(x.scalar_type()).value()});
  if (result.empty()) result.push_back({nullptr, 0, dtype::float32});
  return result;
}

/// \return e.g. " float32 [2, 3]", for check mode.
[[nodiscard]] inline std::string shapes_text(std::span<const at::Tensor> tensors) {
  std::string text = tensors.size() == 1 ? "" : concat(" ", tensors.size(), " tensors");
  for (const at::Tensor& x : tensors)
    text += concat(" ", dtype_from(x.scalar_type()).value(), " ", x.sizes());
  return text;
}

/// Whether a tensor's own memory holds its elements as they travel: in row-major order, on the
/// host.
[[nodiscard]] inline bool travels_as_it_is(const at::Tensor& x) {
  return x.is_cpu() && x.is_contiguous() && !x.is_neg() && !x._is_zerotensor();
}

/// A view of host memory as a tensor of the shape and type of `x`.
[[nodiscard]] inline at::Tensor view_like(const at::Tensor& x, std::byte* memory) {
  return at::from_blob(memory, x.sizes(), x.options().device(c10::kCPU).requires_grad(false));
}

/// One tensor as a list.
[[nodiscard]] inline std::span<const at::Tensor> only(const at::Tensor& x) noexcept {
  return {&x, 1};
}

/// Tensors that travel together: their elements in logical order, in one piece of host memory.
///
/// One tensor whose memory already is like that lends it; everything else is copied: strided,
/// transposed, expanded and channels-last tensors, those of other devices, and several at once.
/// Copies of a parcel share the memory.
class parcel {
 public:
  /// \param in       what to send; checked before.
  /// \param targets  what gets the result, of the same shapes: other tensors, or `in` again; none
  ///                 if the parcel is only sent.
  parcel(std::span<const at::Tensor> in, std::span<const at::Tensor> targets) {
    const c10::AutoGradMode no_graph(false);
    lay_out(in);
    if (in.size() == 1 && travels_as_it_is(in.front())) {
      in_ = in.front().detach();
    } else {
      in_ = memory();
      for (std::size_t i = 0; i < in.size(); ++i) pack(in[i], in_bytes(i));
      out_ = in_;
    }
    if (targets.size() == 1 && travels_as_it_is(targets.front())) {
      out_ = targets.front().detach();
      mark_written(out_);
    } else {
      if (!out_.defined()) out_ = memory();
      for (const at::Tensor& target : targets) targets_.push_back(target.detach());
    }
  }

  [[nodiscard]] const packed_layout& layout() const noexcept { return layout_; }
  [[nodiscard]] const std::byte* input() const {
    return static_cast<const std::byte*>(in_.const_data_ptr());
  }
  [[nodiscard]] std::byte* output() const {
    return static_cast<std::byte*>(out_.mutable_data_ptr());
  }

  /// \return all elements, which have to be of one type.
  [[nodiscard]] const_buffer in() const { return {input(), count(), type()}; }
  [[nodiscard]] mutable_buffer out() const { return {output(), count(), type()}; }

  /// Copies the result to the targets that have not been written directly.
  void deliver() const {
    const c10::AutoGradMode no_graph(false);
    for (std::size_t i = 0; i < targets_.size(); ++i)
      unpack(output() + layout_.segments[i].offset, targets_[i]);
  }

 private:
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

  [[nodiscard]] at::Tensor memory() const {
    return at::empty({static_cast<std::int64_t>(layout_.bytes)},
                     c10::TensorOptions().dtype(c10::kByte));
  }
  [[nodiscard]] std::byte* in_bytes(std::size_t index) const {
    return static_cast<std::byte*>(in_.mutable_data_ptr()) + layout_.segments[index].offset;
  }

  static void pack(const at::Tensor& x, std::byte* slot) {
    if (x.numel() == 0) return;
    if (travels_as_it_is(x))
      std::memcpy(slot, x.const_data_ptr(), x.nbytes());
    else
      view_like(x, slot).copy_(x.detach());
  }
  static void unpack(std::byte* slot, const at::Tensor& target) {
    if (target.numel() == 0) return;
    if (!travels_as_it_is(target)) {
      target.copy_(view_like(target, slot));
      return;
    }
    std::memcpy(target.mutable_data_ptr(), slot, target.nbytes());
    mark_written(target);
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
  at::Tensor in_;
  at::Tensor out_;                   // `in_` where that is our own copy
  std::vector<at::Tensor> targets_;  // to be copied to; empty if `out_` is the target's memory
};

/// \return one parcel per element type, in the order of their first tensors.
[[nodiscard]] inline std::vector<parcel> parcels_by_type(std::span<const at::Tensor> in,
                                                         std::span<const at::Tensor> targets) {
  std::vector<c10::ScalarType> types;
  for (const at::Tensor& x : in)
    if (std::ranges::find(types, x.scalar_type()) == types.end()) types.push_back(x.scalar_type());
  if (types.size() == 1) return {parcel(in, targets)};
  std::vector<parcel> parcels;
  for (const c10::ScalarType type : types) {
    std::vector<at::Tensor> from;
    std::vector<at::Tensor> to;
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (in[i].scalar_type() != type) continue;
      from.push_back(in[i]);
      to.push_back(targets[i]);
    }
    parcels.emplace_back(from, to);
  }
  return parcels;
}

/// Runs tasks one after the other, then delivers what they have computed.
inline task in_sequence(std::vector<task> works, std::vector<parcel> parcels) {
  const bool several = works.size() > 1;
  if (several) co_await order::hold;
  for (task& each : works) co_await std::move(each);
  if (several) co_await order::release;
  for (const parcel& each : parcels) each.deliver();
}

/// Runs one task, then delivers what it has computed.
inline task then_deliver(task work, parcel results) {
  co_await std::move(work);
  results.deliver();
}

}  // namespace bluefog::detail
