// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <c10/core/ScalarType.h>

namespace bluefog::optim::detail {

/// Scales and converts at once.
///
/// On a GPU this is one kernel, which reads and writes each element once: libtorch's elementwise
/// kernels convert what they load and what they store by themselves. On the CPU they do not, and
/// an intermediate array is made.
/// \param values  floating. \return a copy in `type`, times `factor`: computed in float32, or in
/// float64 if `type` is that, and rounded once.
[[nodiscard]] inline at::Tensor scaled_copy(const at::Tensor& values, at::ScalarType type,
                                            double factor) {
  if (factor == 1) return values.to(type, false, /*copy=*/true);
  // A number would be multiplied in the type of the values; a tensor of their shape takes part in
  // the choice of the type.
  const auto wide = c10::promoteTypes(type, at::kFloat);
  const auto factors = at::full({}, factor, values.options().dtype(wide)).expand_as(values);
  at::Tensor result = at::empty_like(values, values.options().dtype(type));
  return at::mul_out(result, values, factors);
}

}  // namespace bluefog::optim::detail
