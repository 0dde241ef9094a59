// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string_view>

#include <c10/core/ScalarType.h>

#include <bluefog/core/dtype.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog {

/// \return the dtype of a torch scalar type; empty for those that do not travel: complex,
///         quantised, unsigned beyond 8 bits, float8 and the like.
[[nodiscard]] inline std::optional<dtype> dtype_from(c10::ScalarType type) noexcept {
  switch (type) {
    case c10::ScalarType::Bool: return dtype::boolean;
    case c10::ScalarType::Byte: return dtype::uint8;
    case c10::ScalarType::Char: return dtype::int8;
    case c10::ScalarType::Short: return dtype::int16;
    case c10::ScalarType::Int: return dtype::int32;
    case c10::ScalarType::Long: return dtype::int64;
    case c10::ScalarType::Half: return dtype::float16;
    case c10::ScalarType::BFloat16: return dtype::bfloat16;
    case c10::ScalarType::Float: return dtype::float32;
    case c10::ScalarType::Double: return dtype::float64;
    default: return std::nullopt;
  }
}

/// \return the dtype of a torch scalar type.
/// \throws usage_error that names `operation` and the type if it does not travel.
[[nodiscard]] inline dtype dtype_from(c10::ScalarType type, std::string_view operation) {
  const auto known = dtype_from(type);
  expects(known.has_value(), operation, ": tensors of type ", c10::toString(type),
          " are not supported");
  return *known;
}

/// \return the torch scalar type of a dtype.
[[nodiscard]] constexpr c10::ScalarType scalar_type_of(dtype type) noexcept {
  switch (type) {
    case dtype::boolean: return c10::ScalarType::Bool;
    case dtype::uint8: return c10::ScalarType::Byte;
    case dtype::int8: return c10::ScalarType::Char;
    case dtype::int16: return c10::ScalarType::Short;
    case dtype::int32: return c10::ScalarType::Int;
    case dtype::int64: return c10::ScalarType::Long;
    case dtype::float16: return c10::ScalarType::Half;
    case dtype::bfloat16: return c10::ScalarType::BFloat16;
    case dtype::float32: return c10::ScalarType::Float;
    case dtype::float64: break;
  }
  return c10::ScalarType::Double;
}

}  // namespace bluefog
