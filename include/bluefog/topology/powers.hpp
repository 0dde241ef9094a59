// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include <bluefog/core/error.hpp>

namespace bluefog::topology {

/// \return base to the power `exponent`, which must fit an `int`.
///
/// A shift for base 2; else by squaring, which is at most five steps.
[[nodiscard]] constexpr int power(int base, int exponent) {
  if (base == 2) return 1 << exponent;
  int result = 1;
  for (int factor = base;;) {
    if ((exponent & 1) != 0) result *= factor;
    exponent >>= 1;
    if (exponent == 0) return result;
    factor *= factor;
  }
}

/// \return how many of base^0, base^1, base^2, ... are below `limit`.
/// \param function  what to blame in the message, e.g. "exponential".
/// \throws usage_error if `base` is below 2.
[[nodiscard]] constexpr int powers_below(int base, int limit, std::string_view function) {
  expects(base >= 2, function, ": base must be at least 2, got ", base);
  if (limit <= 1) return 0;
  int count = 1;
  for (int last = limit - 1; last >= base; last /= base) ++count;
  return count;
}

}  // namespace bluefog::topology
