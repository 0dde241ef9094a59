// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include <bluefog/core/error.hpp>
#include <bluefog/topology/rank_check.hpp>

namespace bluefog::topology {

/// Ranks laid out machine by machine, the same number on each.
struct equal_machines {
  int size = 1;        ///< all ranks
  int local_size = 1;  ///< ranks of one machine

  [[nodiscard]] constexpr int machines() const noexcept { return size / local_size; }
  [[nodiscard]] constexpr int machine(int rank) const noexcept { return rank / local_size; }
  [[nodiscard]] constexpr int local(int rank) const noexcept { return rank % local_size; }
  [[nodiscard]] constexpr int rank(int machine, int local) const noexcept {
    return machine * local_size + local;
  }

  bool operator==(const equal_machines&) const = default;
};

/// \param function       what to blame in the message, e.g. "inner_outer_ring".
/// \param smallest_local the fewest ranks per machine.
/// \throws usage_error if the machines are smaller, or `size` is no multiple of `local_size`.
[[nodiscard]] constexpr equal_machines expect_equal_machines(int size, int local_size,
                                                             int smallest_local,
                                                             std::string_view function) {
  expect_size(size, function);
  expects(local_size >= smallest_local, function, ": local_size must be at least ", smallest_local,
          ", got ", local_size);
  expects(size % local_size == 0, function, ": size must be a multiple of local_size, got ", size,
          " and ", local_size);
  return {size, local_size};
}

}  // namespace bluefog::topology
