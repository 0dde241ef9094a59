// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <bluefog/optim/known_gradient.hpp>
#include <bluefog/tensor/arena.hpp>
#include <bluefog/tensor/device.hpp>

namespace bluefog::optim::detail {

/// Gradients of one type on one device, side by side: they travel as one message.
///
/// Behind them lies one number per gradient, which says whether this rank used the parameter; in
/// the last bucket another one.
struct gradient_bucket {
  struct member {
    std::size_t index;
    std::string name;
    at::Tensor parameter;
    at::ScalarType type;
    at::Tensor slot = {};  // over its part of the bucket, shaped and laid out like the parameter
    bool used = false;     // by this rank's backward
    noted_gradient sent = {};  // what was put in

    [[nodiscard]] bool holds(const at::Tensor& gradient) const {
      return gradient.defined() && !gradient.is_sparse() && slot.numel() != 0 &&
             slot.data_ptr() == gradient.data_ptr();
    }
  };

  at::ScalarType type = at::ScalarType::Float;
  at::Device device = at::kCPU;
  std::int64_t count = 0;
  std::int64_t bytes = 0;
  std::vector<member> members = {};
  at::Tensor flat = {};
  std::size_t missing = 0;
  std::size_t used = 0;
  at::Tensor flags = {};              // what `flat` ends with, reduced, on the host
  bluefog::detail::relay order = {};  // gradients may become ready on several streams

  [[nodiscard]] at::Tensor flag(std::size_t index) const {
    return flat.select(0, count + static_cast<std::int64_t>(index));
  }
  [[nodiscard]] float reduced_flag(std::size_t index) const {
    return flags.const_data_ptr<float>()[index];
  }

  /// Takes over `flags`; what a device has to send is there once its stream is done.
  void fetch_flags() {
    flags = flat.slice(0, count).to(at::kFloat);
    if (device.is_cpu()) return;
    const auto pinned = at::TensorOptions(at::kFloat).pinned_memory(true);
    flags = at::empty(flags.sizes(), pinned).copy_(flags, /*non_blocking=*/true);
  }

  /// Writes who of the members was used, which is summed or averaged along: mostly all of them.
  void note_use() const {
    const auto all = static_cast<std::int64_t>(members.size());
    flat.narrow(0, count, all).fill_(1);
    if (used == members.size()) return;
    for (std::size_t i = 0; i < members.size(); ++i)
      if (!members[i].used) flag(i).zero_();
  }
};

/// Which gradients share a bucket: those that follow one another among the ones of their type and
/// device, of about `bytes` bytes; the first bucket is small, so that something travels early.
/// \param order      indices of `parameters`, as their gradients are expected.
/// \param wire_type  what a type travels as.
/// \return buckets without memory, in the order in which they are expected to be complete.
template <std::invocable<at::ScalarType> WireType>
[[nodiscard]] std::vector<gradient_bucket> packed(const std::vector<named_tensor>& parameters,
                                                  const std::vector<std::size_t>& order,
                                                  std::int64_t bytes, WireType wire_type) {
  constexpr std::int64_t first_bucket = 1 << 20;
  std::vector<gradient_bucket> buckets;
  std::vector<std::size_t> open;  // the last one of each type and device
  std::vector<std::size_t> place(parameters.size());
  for (std::size_t k = 0; k < order.size(); ++k) {
    const auto& [name, parameter] = parameters[order[k]];
    place[order[k]] = k;
    const at::ScalarType type = wire_type(parameter.scalar_type());
    const auto size = parameter.numel() * static_cast<std::int64_t>(c10::elementSize(type));
    auto found = std::ranges::find_if(open, [&, &tensor = parameter](std::size_t index) {
      return buckets[index].type == type && buckets[index].device == tensor.device();
    });
    if (found == open.end()) found = open.insert(found, buckets.size());
    const std::int64_t limit = *found == 0 ? std::min(first_bucket, bytes) : bytes;
    if (*found < buckets.size() && buckets[*found].bytes + size > limit) *found = buckets.size();
    if (*found == buckets.size()) buckets.push_back({.type = type, .device = parameter.device()});
    gradient_bucket& target = buckets[*found];
    target.members.push_back({order[k], name, parameter, parameter.scalar_type()});
    target.count += parameter.numel();
    target.bytes += size;
  }
  const auto completed = [&](const gradient_bucket& it) { return place[it.members.back().index]; };
  std::ranges::sort(buckets, {}, completed);
  return buckets;
}

}  // namespace bluefog::optim::detail
