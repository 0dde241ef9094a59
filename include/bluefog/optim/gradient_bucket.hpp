// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <bluefog/optim/known_gradient.hpp>
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

}  // namespace bluefog::optim::detail
