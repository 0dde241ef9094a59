// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bluefog/topology/neighborhood.hpp>

namespace bluefog_test {

/// \return a rank's part of a directed graph without a pattern, with weights on both ends of its
///         edges that sum up to nothing in particular; sources are in another order than ranks.
[[nodiscard]] inline bluefog::neighborhood irregular_graph(int rank, int size) {
  const auto joined = [](int source, int destination) {
    return source != destination && (7 * source + 3 * destination + source * destination) % 4 != 0;
  };
  const auto weight = [](int source, int destination) {
    return 0.1 + 0.07 * source - 0.03 * destination;
  };
  bluefog::neighborhood links{.self_weight = 0.3 + 0.1 * rank};
  for (int other = size - 1; other >= 0; --other) {
    if (joined(other, rank)) links.sources.push_back({other, weight(other, rank)});
    if (joined(rank, other)) links.destinations.push_back({other, 1.0 - weight(rank, other)});
  }
  return links;
}

}  // namespace bluefog_test
