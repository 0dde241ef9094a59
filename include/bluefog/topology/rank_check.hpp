// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include <bluefog/core/error.hpp>

namespace bluefog::topology {

/// Refuses a rank that a topology of `size` ranks does not have.
///
/// \param function  what to blame in the message, e.g. "ring".
/// \throws usage_error unless 0 <= rank < size.
constexpr void expect_rank(int rank, int size, std::string_view function) {
  expects(rank >= 0 && rank < size, function, ": rank must be in [0, ", size, "), got ", rank);
}

/// Refuses a topology without ranks. \throws usage_error unless size >= 1.
constexpr int expect_size(int size, std::string_view function) {
  expects(size >= 1, function, ": size must be at least 1, got ", size);
  return size;
}

}  // namespace bluefog::topology
