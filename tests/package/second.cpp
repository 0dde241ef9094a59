// SPDX-License-Identifier: Apache-2.0
// The second translation unit: what the headers define must not collide with the first's.
#include <bluefog/bluefog.hpp>

int sources_of_rank_zero(int size) {
  return static_cast<int>(bluefog::topology::exponential(size).in_neighbors(0).size());
}
