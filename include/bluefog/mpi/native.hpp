// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <mpi.h>

#include <bluefog/backend/message.hpp>
#include <bluefog/core/dtype.hpp>
#include <bluefog/core/reduce_op.hpp>

namespace bluefog::mpi {

/// \return MPI's name of an element type; halves, which MPI does not know, travel as bytes.
[[nodiscard]] inline MPI_Datatype native(dtype type) noexcept {
  switch (type) {
    case dtype::boolean: return MPI_C_BOOL;
    case dtype::uint8: return MPI_UINT8_T;
    case dtype::int8: return MPI_INT8_T;
    case dtype::int16: return MPI_INT16_T;
    case dtype::int32: return MPI_INT32_T;
    case dtype::int64: return MPI_INT64_T;
    case dtype::float16:
    case dtype::bfloat16: break;
    case dtype::float32: return MPI_FLOAT;
    case dtype::float64: return MPI_DOUBLE;
  }
  return MPI_DATATYPE_NULL;
}

/// \return MPI's operation with the meaning of `op` on `type`, `MPI_OP_NULL` if it has none.
///
/// MPI leaves open what min and max make of NaN, so those are left to the library's own kernels.
[[nodiscard]] inline MPI_Op native(reduce_op op, dtype type) noexcept {
  if (is_half(type) || op == reduce_op::average) return MPI_OP_NULL;
  const bool any = op == reduce_op::sum || op == reduce_op::max;
  if (type == dtype::boolean) return any ? MPI_LOR : MPI_LAND;
  if (op == reduce_op::sum) return MPI_SUM;
  if (op == reduce_op::product) return MPI_PROD;
  if (is_floating(type)) return MPI_OP_NULL;
  return op == reduce_op::min ? MPI_MIN : MPI_MAX;
}

/// Message tags: which channel, and the operation's number as far as it fits.
struct tag_space {
  int span = 1 << 14;  ///< numbers are told apart modulo this

  /// \param highest  the largest tag that MPI accepts, at least 32767.
  explicit tag_space(int highest) noexcept : span((std::min(highest, (1 << 30) - 1) + 1) / 2) {}

  [[nodiscard]] int tag(const message_tag& of) const noexcept {
    return static_cast<int>(of.number % static_cast<std::uint64_t>(span)) * 2 +
           static_cast<int>(of.kind);
  }

  /// \return whether `tag` is of a group operation whose number lies below `oldest`.
  [[nodiscard]] bool is_stale(int tag, std::uint64_t oldest) const noexcept {
    if (tag % 2 != static_cast<int>(channel::group)) return false;
    const std::uint64_t operations = behind(tag, oldest);
    return operations != 0 && operations < static_cast<std::uint64_t>(span) / 2;
  }

  /// \return by how many operations the one of `tag` comes before operation `number`.
  [[nodiscard]] std::uint64_t behind(int tag, std::uint64_t number) const noexcept {
    const auto modulus = static_cast<std::uint64_t>(span);
    return (number % modulus + modulus - static_cast<std::uint64_t>(tag / 2)) % modulus;
  }
};

}  // namespace bluefog::mpi
