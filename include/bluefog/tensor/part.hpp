// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

namespace bluefog::detail {

/// \return the strides of `tensor` if it is dense, else those of a contiguous tensor of its shape.
[[nodiscard]] inline std::vector<std::int64_t> dense_strides(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
  std::vector<std::int64_t> strides(static_cast<std::size_t>(tensor.dim()), 1);
  for (std::size_t i = strides.size(); i-- > 1;)
    strides[i - 1] = strides[i] * tensor.size(static_cast<std::int64_t>(i));
  return strides;
}

/// Makes a tensor over a part of a one-dimensional one. Not a view: it has a storage of its own, of
/// its own length, which keeps `flat` alive.
///
/// \param begin  the part's first element.
[[nodiscard]] inline at::Tensor part_of_tensor(const at::Tensor& flat, std::int64_t begin,
                                               at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* const first = static_cast<std::byte*>(flat.data_ptr()) + begin * flat.element_size();
  return at::from_blob(
      first, sizes, strides, [flat](void*) { /* lets go of flat */ }, flat.options(),
      flat.device());
}

}  // namespace bluefog::detail
