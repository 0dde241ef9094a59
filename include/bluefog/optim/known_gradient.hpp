// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <ATen/core/Tensor.h>
#include <c10/core/Layout.h>
#include <c10/util/intrusive_ptr.h>

namespace bluefog::optim::detail {

/// Which gradient there was. A weak reference keeps its address from being taken by another tensor.
class known_gradient {
 public:
  known_gradient() = default;
  explicit known_gradient(const at::Tensor& gradient) : last_(gradient.getIntrusivePtr()) {}
  /// \return whether `gradient` is that one; false as well if there was none.
  [[nodiscard]] bool is(const at::Tensor& gradient) const {
    return last_.use_count() != 0 && last_._unsafe_get_target() == gradient.unsafeGetTensorImpl();
  }

 private:
  c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> last_{
      at::Tensor().getIntrusivePtr()};
};

/// A gradient as it was, to find out what has become of it, at the cost of a few reads.
///
/// Torch counts changes in place, but not those through `data()`, as libtorch's `clip_grad_norm_`
/// makes them. In host memory some of its values are therefore compared as well.
class noted_gradient {
 public:
  noted_gradient() = default;
  explicit noted_gradient(const at::Tensor& gradient)
      : tensor_(gradient), version_(version_of(gradient)), sample_(sample_of(gradient)) {}

  /// \return whether `gradient` is another tensor, or known to have other values.
  [[nodiscard]] bool differs(const at::Tensor& gradient) const {
    return gradient.defined() && (!tensor_.is(gradient) || version_of(gradient) != version_ ||
                                  sample_of(gradient) != sample_);
  }

 private:
  [[nodiscard]] static std::int64_t version_of(const at::Tensor& gradient) {
    return gradient.defined() && !gradient.is_inference() ? gradient._version() : 0;
  }
  // A number made of up to 64 bytes of it, if they can be read here.
  [[nodiscard]] static std::uint64_t sample_of(const at::Tensor& gradient) {
    const bool readable = gradient.defined() && gradient.device().is_cpu() &&
                          gradient.layout() == at::kStrided &&
                          gradient.is_non_overlapping_and_dense() && gradient.numel() != 0;
    if (!readable) return 0;
    constexpr std::size_t words = 8;
    const auto* const bytes = static_cast<const std::byte*>(gradient.const_data_ptr());
    const std::size_t length = std::min(gradient.nbytes(), sizeof(std::uint64_t));
    std::uint64_t sample = 0;
    for (std::size_t i = 0; i < words; ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, bytes + (gradient.nbytes() - length) / (words - 1) * i, length);
      sample = sample * 0x9E3779B97F4A7C15U + word;
    }
    return sample;
  }

  known_gradient tensor_;
  std::int64_t version_ = 0;
  std::uint64_t sample_ = 0;
};

}  // namespace bluefog::optim::detail
