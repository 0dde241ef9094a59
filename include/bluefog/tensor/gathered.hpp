// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <bluefog/backend/task.hpp>
#include <bluefog/collective/gathering.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/tensor/dtype.hpp>
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
/// Made by `std::make_shared`; shared by whoever waits for it and its task.
class gathered {
 public:
  gathered(std::string_view operation, const at::Tensor& x)
      : type_(expects_tensor(operation, x)), like_(x), shape_(gather_shape_of(x)) {}

  [[nodiscard]] const gather_shape& shape() const noexcept { return shape_; }
  /// \return the type and length of the contribution, without its memory.
  [[nodiscard]] const_buffer outline() const { return {nullptr, like_.numel(), type_}; }
  /// \return whether autograd has to know.
  [[nodiscard]] bool gradient() const { return needs_gradient({&like_, 1}); }

  /// Has `transposed` called when the result is differentiated.
  void differentiate(std::string_view operation, adjoint::function transposed) {
    if (gradient())
      node_ =
          make_adjoint(operation, std::span<const at::Tensor>(&like_, 1), std::move(transposed));
  }

  /// \return the rows of every contribution; filled once they are known.
  [[nodiscard]] std::shared_ptr<const std::vector<std::int64_t>> rows() const noexcept {
    return rows_;
  }

  /// Makes room. \return it.
  [[nodiscard]] mutable_buffer allocate(std::span<const std::int64_t> rows) {
    const c10::AutoGradMode no_graph(false);
    rows_->assign(rows.begin(), rows.end());
    std::vector<std::int64_t> sizes(shape_.trailing);
    sizes.insert(sizes.begin(), std::reduce(rows.begin(), rows.end(), std::int64_t{0}));
    memory_ = at::empty(sizes, like_.options().device(c10::kCPU).requires_grad(false));
    return {static_cast<std::byte*>(memory_.mutable_data_ptr()), memory_.numel(), type_};
  }

  /// \return the result, once everything has arrived: on the device of the contribution, and
  ///         channels-last if that was.
  [[nodiscard]] at::Tensor take() {
    at::Tensor result;
    {
      const c10::AutoGradMode no_graph(false);
      result = memory_.to(like_.device()).contiguous(like_.suggest_memory_format());
    }
    memory_.reset();
    if (node_) node_->add_result(result);
    node_.reset();
    like_.reset();
    return result;
  }

 private:
  dtype type_;
  at::Tensor like_;
  gather_shape shape_;
  adjoint_pointer node_;
  std::shared_ptr<std::vector<std::int64_t>> rows_ = std::make_shared<std::vector<std::int64_t>>();
  at::Tensor memory_;
};

/// What a gathering task calls to make room.
[[nodiscard]] inline auto room_in(std::shared_ptr<gathered> result) {
  return [result = std::move(result)](std::span<const std::int64_t> rows) {
    return result->allocate(rows);
  };
}

/// Runs a gathering task, then puts the result where the caller takes it.
inline task then_take(task work, std::shared_ptr<gathered> result,
                      std::shared_ptr<at::Tensor> place) {
  co_await std::move(work);
  *place = result->take();
}

}  // namespace bluefog::detail
