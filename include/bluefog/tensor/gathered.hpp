// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <bluefog/backend/compute.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/context.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/collective/gathering.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/tensor/arguments.hpp>
#include <bluefog/tensor/carry.hpp>
#include <bluefog/tensor/device.hpp>
#include <bluefog/tensor/gradient.hpp>
#include <bluefog/tensor/parcel.hpp>

namespace bluefog::detail {

/// \return what `x` adds to a concatenation; a tensor without dimensions is one row.
[[nodiscard]] inline gather_shape gather_shape_of(const at::Tensor& x) {
  if (x.dim() == 0) return {.rows = 1};
  return {.rows = x.size(0), .trailing = {x.sizes().begin() + 1, x.sizes().end()}};
}

/// A concatenation in the making: its size is known only once every contribution has been told.
///
/// Made by `std::make_shared`, on the thread that calls the operation; shared by whoever waits for
/// it and its task.
class gathered {
 public:
  gathered(std::string_view operation, const at::Tensor& x)
      : type_(expects_tensor(operation, x)), like_(x), shape_(gather_shape_of(x)) {
    if (!x.is_cpu()) caller_ = current_stream(x.device());
  }

  [[nodiscard]] const gather_shape& shape() const noexcept { return shape_; }
  /// \return the type and length of the contribution, without its memory.
  [[nodiscard]] const_buffer outline() const { return {nullptr, like_.numel(), type_}; }
  /// \return whether autograd has to know.
  [[nodiscard]] bool gradient() const { return needs_gradient(only(like_)); }

  /// Has `transposed` called when the result is differentiated.
  void differentiate(std::string_view operation, adjoint::function transposed) {
    if (gradient()) node_ = make_adjoint(operation, only(like_), std::move(transposed));
  }

  /// \return the rows of every contribution; filled once they are known.
  [[nodiscard]] std::shared_ptr<const std::vector<std::int64_t>> rows() const noexcept {
    return rows_;
  }

  /// Makes the result, on the device of the contribution, and channels-last if that is.
  /// \return where to receive it.
  template <backend Backend>
  [[nodiscard]] mutable_buffer allocate(const operation_context<Backend>& context,
                                        std::span<const std::int64_t> rows) {
    const c10::AutoGradMode no_graph(false);
    rows_->assign(rows.begin(), rows.end());
    std::vector<std::int64_t> sizes(shape_.trailing);
    sizes.insert(sizes.begin(), std::reduce(rows.begin(), rows.end(), std::int64_t{0}));
    const auto make = [&] {
      return at::empty(sizes, like_.options().requires_grad(false), like_.suggest_memory_format());
    };
    if (!caller_) {
      result_ = make();
      return (room_ = std::make_unique<parcel>(context, nothing, only(result_)))->out();
    }
    // Memory that no stream uses any more: this thread does not know what the caller's does. When
    // the result goes, it waits for the caller's.
    const c10::Stream way = side_stream(caller_->device(), crossing::to_device);
    const c10::StreamGuard guard(way);
    result_ = make();
    result_.record_stream(*caller_);
    room_ = std::make_unique<parcel>(context, nothing, only(result_));
    if constexpr (device_backend<Backend>)
      if (room_->device())
        context.transport().give(
            [&] { device_moment(way).precede(stream_of(context.transport(), caller_->device())); });
    return room_->out();
  }

  /// \return what the result was received into.
  [[nodiscard]] std::span<parcel> room() const noexcept { return {room_.get(), 1}; }

  /// \return the result, once everything has arrived.
  [[nodiscard]] at::Tensor take() {
    room_.reset();
    if (node_) {
      c10::OptionalStreamGuard guard;
      if (caller_) guard.reset_stream(*caller_);
      node_->add_result(result_);  // which notes the stream to differentiate on
    }
    node_.reset();
    like_.reset();
    return std::move(result_);
  }

 private:
  static constexpr std::span<const at::Tensor> nothing = {};

  dtype type_;
  at::Tensor like_;
  gather_shape shape_;
  std::optional<c10::Stream> caller_;  // of a device: what the caller uses the result on
  adjoint_pointer node_;
  std::shared_ptr<std::vector<std::int64_t>> rows_ = std::make_shared<std::vector<std::int64_t>>();
  at::Tensor result_;
  std::unique_ptr<parcel> room_;
};

/// What a gathering task calls to make room.
template <backend Backend>
[[nodiscard]] auto room_in(operation_context<Backend> context, std::shared_ptr<gathered> result) {
  return [context, result = std::move(result)](std::span<const std::int64_t> rows) {
    return result->allocate(context, rows);
  };
}

/// Runs a gathering task, then puts the result where the caller takes it.
template <backend Backend>
task then_take(operation_context<Backend> context, task work, parcel values,
               std::shared_ptr<gathered> result, std::shared_ptr<at::Tensor> place) {
  const lasting held{place};  // the result too, if it is given up
  co_await held;
  auto gathering = carry(context, std::move(work), std::move(values));
  co_await std::move(gathering);
  if (result->room().front().delivers()) {
    auto unloading = unload(context, result->room());
    co_await std::move(unloading);
  }
  *place = result->take();
}

}  // namespace bluefog::detail
