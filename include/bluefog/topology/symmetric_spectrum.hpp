// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

#include <bluefog/core/error.hpp>
#include <bluefog/topology/circulant.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/eigenvalues.hpp>
#include <bluefog/topology/properties.hpp>
#include <bluefog/topology/spectral_gap.hpp>

namespace bluefog::topology {

/// Between which numbers the eigenvalues of a symmetric graph lie, without the 1 of the constant
/// vector: what one averaging does to differences between ranks.
struct eigenvalue_range {
  double smallest = 0;
  double largest = 0;
};

/// \return the smallest and the largest eigenvalue but the first, to 1e-9; 0 and 0 for one rank.
///
/// Methods that correct the bias of averaging need `smallest` above some bound (-1, or -1/3); a
/// graph that joins all ranks has `largest` below 1.
///
/// \throws usage_error if the graph is not symmetric and doubly stochastic, or has more than 512
///         ranks and is not circulant.
/// \note Costs O(n * degree) for circulant graphs and about 10 n^3 operations for others.
template <graph Graph>
[[nodiscard]] eigenvalue_range symmetric_spectrum(const Graph& graph) {
  const int n = graph.size();
  expects(is_symmetric(graph) && is_column_stochastic(graph),
          "symmetric_spectrum: the weights must be symmetric, and those that each rank receives "
          "must sum to 1");
  if (n == 1) return {};
  std::vector<double> values;
  if constexpr (circulant_graph<Graph>) {
    for (const auto& value : detail::circulant_eigenvalues(graph)) values.push_back(value.real());
  } else {
    expects(n <= 512,
            "symmetric_spectrum: a graph that is not circulant must have at most 512 ranks, got ",
            n);
    for (const auto& value : detail::eigenvalues(n, weight_matrix(graph)))
      values.push_back(value.real());
    std::ranges::sort(values);
    values.pop_back();  // weights may be negative, but 1 is the largest unless averaging diverges
  }
  const auto [smallest, largest] = std::ranges::minmax(values);
  return {smallest, largest};
}

}  // namespace bluefog::topology
