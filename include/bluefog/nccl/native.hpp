// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include <nccl.h>

#include <bluefog/core/dtype.hpp>
#include <bluefog/core/reduce_op.hpp>

namespace bluefog::nccl {

/// \return NCCL's name of an element type, nothing if it has none.
[[nodiscard]] constexpr std::optional<ncclDataType_t> native(dtype type) noexcept {
  switch (type) {
    case dtype::boolean:
    case dtype::int16: break;
    case dtype::uint8: return ncclUint8;
    case dtype::int8: return ncclInt8;
    case dtype::int32: return ncclInt32;
    case dtype::int64: return ncclInt64;
    case dtype::float16: return ncclFloat16;
    case dtype::bfloat16: return ncclBfloat16;
    case dtype::float32: return ncclFloat32;
    case dtype::float64: return ncclFloat64;
  }
  return std::nullopt;
}

/// \return NCCL's operation with the meaning of `op` on `type`, nothing if it has none.
///
/// NCCL leaves open what min and max make of NaN, sums halves in their own type, and multiplies by
/// 1/n for an average: those are left to the library's own kernels.
[[nodiscard]] constexpr std::optional<ncclRedOp_t> native(reduce_op op, dtype type) noexcept {
  if (!native(type) || is_half(type)) return std::nullopt;
  switch (op) {
    case reduce_op::sum: return ncclSum;
    case reduce_op::product: return ncclProd;
    case reduce_op::min:
      if (!is_floating(type)) return ncclMin;
      break;
    case reduce_op::max:
      if (!is_floating(type)) return ncclMax;
      break;
    case reduce_op::average: break;
  }
  return std::nullopt;
}

}  // namespace bluefog::nccl
