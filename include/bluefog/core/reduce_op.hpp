// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <ostream>
#include <string_view>

namespace bluefog {

/// How values of several ranks become one. `average` is the sum divided by the number of ranks.
///
/// On bool, `sum` and `max` are "any", `min` and `product` are "all".
enum class reduce_op : std::uint8_t { average, sum, min, max, product };

/// \return the name in messages, e.g. "average".
[[nodiscard]] constexpr std::string_view name_of(reduce_op op) noexcept {
  switch (op) {
    case reduce_op::average: return "average";
    case reduce_op::sum: return "sum";
    case reduce_op::min: return "min";
    case reduce_op::max: return "max";
    case reduce_op::product: return "product";
  }
  return "unknown";
}

inline std::ostream& operator<<(std::ostream& out, reduce_op op) {
  return out << name_of(op);
}

}  // namespace bluefog
