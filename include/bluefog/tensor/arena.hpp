// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <bluefog/core/error.hpp>
#include <bluefog/tensor/part.hpp>

namespace bluefog {

/// A tensor and what people call it.
struct named_tensor {
  std::string name;
  at::Tensor tensor;
};

/// Keeps parameters side by side in one piece of memory per dtype and device, so that many of them
/// travel as one message without a copy.
///
/// The user's tensors stay the same objects; only their memory moves, each into a storage of its
/// own over its part of the arena (a view of the whole would make `torch::save` write all of it).
/// Each part begins at a multiple of 64 bytes and keeps the tensor's order of elements in memory,
/// if it is dense. The memory lives as long as the arena or any tensor in it.
class parameter_arena {
 public:
  /// A run of elements of one block.
  struct range {
    std::size_t block = 0;
    std::int64_t begin = 0;
    std::int64_t count = 0;
  };

  parameter_arena() = default;

  /// Moves the memory of `parameters`, each of them given once, into the arena, in their order.
  /// \throws usage_error if two of them share their memory: they would no longer.
  explicit parameter_arena(const std::vector<named_tensor>& parameters) {
    expect_apart(parameters);
    for (const auto& [name, tensor] : parameters) {
      places_.emplace(tensor.unsafeGetTensorImpl(), slots_.size());
      auto& target = block_for(tensor);
      const auto aligned = round_up(target.count, alignment / tensor.element_size());
      slots_.push_back({name, tensor, static_cast<std::size_t>(&target - blocks_.data()), aligned,
                        detail::dense_strides(tensor)});
      target.count = aligned + tensor.numel();
    }
    const c10::AutoGradMode no_grad(false);
    for (auto& each : blocks_) each.flat = at::zeros({each.count}, each.options);
    for (auto& each : slots_) attach(each);
  }

  [[nodiscard]] std::size_t size() const noexcept { return slots_.size(); }
  [[nodiscard]] const std::string& name(std::size_t index) const { return slots_[index].name; }
  [[nodiscard]] const at::Tensor& tensor(std::size_t index) const { return slots_[index].tensor; }
  /// \return the index of `tensor`, `size()` if it is not in the arena.
  [[nodiscard]] std::size_t index_of(const at::Tensor& tensor) const {
    const auto found = places_.find(tensor.unsafeGetTensorImpl());
    return found != places_.end() ? found->second : size();
  }
  /// \return where the parameter's elements are.
  [[nodiscard]] range range_of(std::size_t index) const {
    const slot& it = slots_[index];
    return {it.block, it.begin, it.tensor.numel()};
  }

  /// \return the one-dimensional tensor that is block `index`.
  [[nodiscard]] const at::Tensor& block(std::size_t index) const { return blocks_[index].flat; }

  /// \return the elements of `part`.
  [[nodiscard]] at::Tensor slice(const range& part) const {
    return blocks_[part.block].flat.narrow(0, part.begin, part.count);
  }

  /// Runs of neighbouring parameters that `chosen(index)` selects, of at most `bytes` bytes unless
  /// a single parameter is longer; in the arena's order.
  template <class Choice>
  [[nodiscard]] std::vector<range> ranges(std::int64_t bytes, Choice chosen) const {
    std::vector<range> runs;
    bool open = false;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const slot& it = slots_[i];
      if (it.tensor.numel() == 0) continue;
      if (!chosen(i)) {
        open = false;
        continue;
      }
      const std::int64_t end = it.begin + it.tensor.numel();
      if (open && runs.back().block == it.block &&
          (end - runs.back().begin) * it.tensor.element_size() <= bytes)
        runs.back().count = end - runs.back().begin;
      else
        runs.push_back({it.block, it.begin, it.tensor.numel()});
      open = true;
    }
    return runs;
  }

  /// \return whether the memory of parameter `index` is in the arena, all of it.
  [[nodiscard]] bool attached(std::size_t index) const {
    const slot& it = slots_[index];
    if (it.tensor.sizes() != it.sizes) return false;
    return it.tensor.numel() == 0 || it.tensor.data_ptr() == address(it);
  }
  /// \return whether the memory of all parameters is.
  [[nodiscard]] bool attached() const {
    for (std::size_t i = 0; i < slots_.size(); ++i)
      if (!attached(i)) return false;
    return true;
  }

  /// Takes back parameters whose memory has left the arena (after `torch::load`, `set_data` and the
  /// like): their present values are copied in. A graph that saved one of them goes on with the
  /// memory it knows, which holds the same values as long as nobody writes to it. \return how many
  /// had left. \throws usage_error that names the parameter if its shape, dtype or device has
  /// changed.
  std::size_t reattach() {
    std::size_t left = 0;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (attached(i)) continue;
      expect_unchanged(slots_[i]);
      ++left;
    }
    if (left == 0) return 0;
    const c10::AutoGradMode no_grad(false);
    for (std::size_t i = 0; i < slots_.size(); ++i)
      if (!attached(i)) attach(slots_[i]);
    return left;
  }

 private:
  static constexpr std::int64_t alignment = 64;  // bytes

  struct slot {
    std::string name;
    at::Tensor tensor;
    std::size_t block;
    std::int64_t begin;  // in elements
    std::vector<std::int64_t> strides;
    std::vector<std::int64_t> sizes = tensor.sizes().vec();
  };
  struct piece {
    at::TensorOptions options;
    std::int64_t count = 0;
    at::Tensor flat = {};
  };

  // Tensors with gaps may lie in those of others, unless they begin together.
  static void expect_apart(const std::vector<named_tensor>& parameters) {
    std::vector<const named_tensor*> sorted;
    for (const named_tensor& each : parameters)
      if (each.tensor.numel() != 0) sorted.push_back(&each);
    const auto begin = [](const named_tensor* it) {
      return static_cast<const std::byte*>(it->tensor.data_ptr());
    };
    std::ranges::stable_sort(sorted, {}, begin);
    const named_tensor* before = nullptr;  // that without gaps which reaches farthest
    const std::byte* end = nullptr;
    for (std::size_t i = 0; i < sorted.size(); ++i) {
      const named_tensor* const it = sorted[i];
      const bool dense = it->tensor.is_non_overlapping_and_dense();
      const named_tensor* other = dense && begin(it) < end ? before : nullptr;
      if (i > 0 && begin(it) == begin(sorted[i - 1])) other = sorted[i - 1];
      if (other != nullptr)
        throw usage_error(concat(
            "parameter_arena: parameters \"", other->name, "\" and \"", it->name,
            "\" are two tensors over one memory; to tie weights, register one tensor twice"));
      if (!dense || begin(it) + it->tensor.nbytes() <= end) continue;
      before = it;
      end = begin(it) + it->tensor.nbytes();
    }
  }

  [[nodiscard]] static std::int64_t round_up(std::int64_t count, std::int64_t step) {
    return (count + step - 1) / step * step;
  }

  [[nodiscard]] piece& block_for(const at::Tensor& tensor) {
    const auto options = at::TensorOptions().dtype(tensor.dtype()).device(tensor.device());
    const auto found = std::ranges::find_if(blocks_, [&](const piece& it) {
      return it.options.dtype() == options.dtype() && it.options.device() == options.device();
    });
    return found != blocks_.end() ? *found : blocks_.emplace_back(piece{options});
  }

  [[nodiscard]] std::byte* address(const slot& it) const {
    const at::Tensor& flat = blocks_[it.block].flat;
    return static_cast<std::byte*>(flat.data_ptr()) + it.begin * flat.element_size();
  }

  void attach(slot& it) {
    if (it.tensor.numel() == 0) return;
    const at::Tensor part =
        detail::part_of_tensor(blocks_[it.block].flat, it.begin, it.sizes, it.strides);
    part.copy_(it.tensor);
    it.tensor.set_data(part);
  }

  void expect_unchanged(const slot& it) const {
    const at::Tensor& flat = blocks_[it.block].flat;
    expects(it.tensor.scalar_type() == flat.scalar_type(), "parameter_arena: parameter \"", it.name,
            "\" was ", flat.scalar_type(), " when it was wrapped and is ", it.tensor.scalar_type(),
            " now; wrap the optimizer after converting the model");
    expects(it.tensor.device() == flat.device(), "parameter_arena: parameter \"", it.name,
            "\" was on ", flat.device(), " when it was wrapped and is on ", it.tensor.device(),
            " now; wrap the optimizer after moving the model");
    expects(it.tensor.sizes() == at::IntArrayRef(it.sizes), "parameter_arena: parameter \"",
            it.name, "\" had shape ", at::IntArrayRef(it.sizes), " when it was wrapped and has ",
            it.tensor.sizes(), " now");
  }

  std::vector<piece> blocks_;
  std::vector<slot> slots_;
  std::unordered_map<const void*, std::size_t> places_;
};

}  // namespace bluefog
