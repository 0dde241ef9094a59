// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace bluefog::amp {

/// Makes libtorch's operations on a device compute in 16 bits where that is safe, on this thread
/// and as long as the guard lives: what Python's `torch.autocast` does. Guards nest.
///
/// Matrix products and convolutions take 16-bit copies of their inputs; sums, losses and the like
/// stay in float32. Put the forward and the loss under a guard, not the backward.
class [[nodiscard]] autocast_guard {
 public:
  /// \param device   operations on tensors of this device are concerned.
  /// \param type     what they compute in: `at::kBFloat16`, or `at::kHalf`, for which
  ///                 gradients have to be scaled.
  /// \param enabled  false: within this guard nothing is cast.
  explicit autocast_guard(at::DeviceType device, at::ScalarType type = at::kBFloat16,
                          bool enabled = true)
      : device_(device),
        was_enabled_(at::autocast::is_autocast_enabled(device)),
        type_before_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_enabled(device, enabled);
    at::autocast::set_autocast_dtype(device, type);
    at::autocast::increment_nesting();
  }
  autocast_guard(const autocast_guard&) = delete;
  autocast_guard& operator=(const autocast_guard&) = delete;
  ~autocast_guard() {
    // The outermost guard drops the 16-bit copies: parameters change after it.
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device_, was_enabled_);
    at::autocast::set_autocast_dtype(device_, type_before_);
  }

 private:
  at::DeviceType device_;
  bool was_enabled_;
  at::ScalarType type_before_;
};

}  // namespace bluefog::amp
