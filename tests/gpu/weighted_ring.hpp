// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bluefog/topology/neighborhood.hpp>

namespace bluefog_test::gpu {

/// Each rank averages with the one before it; both scale what travels.
[[nodiscard]] inline bluefog::neighborhood weighted_ring(int rank, int size) {
  if (size == 1) return {.self_weight = 0.5};
  return {.self_weight = 0.5,
          .sources = {{(rank + size - 1) % size, 0.25}},
          .destinations = {{(rank + 1) % size, 2.0}}};
}

}  // namespace bluefog_test::gpu
