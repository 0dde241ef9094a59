// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>

#include <bluefog/core/error.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog::topology {

/// The part of a graph that one rank needs to take part in an average.
///
/// The receiver applies the weights: a source j of rank i weighs `graph.weight(j, i)`, every
/// destination 1. Sources and destinations are ascending.
///
/// \param rank  in [0, graph.size()).
/// \throws usage_error if there is no such rank.
/// \note Costs O(degree of `rank`) calls of `weight`.
template <graph Graph>
[[nodiscard]] constexpr neighborhood neighborhood_of(const Graph& graph, int rank) {
  expects(rank >= 0 && rank < graph.size(), "neighborhood_of: rank must be in [0, ", graph.size(),
          "), got ", rank);
  if constexpr (requires {
                  { graph.neighborhood_at(rank) } -> std::same_as<neighborhood>;
                }) {
    return graph.neighborhood_at(rank);
  } else {
    neighborhood result{.self_weight = graph.weight(rank, rank)};
    for (const int source : graph.in_neighbors(rank))
      result.sources.push_back({source, graph.weight(source, rank)});
    for (const int destination : graph.out_neighbors(rank))
      result.destinations.push_back({destination});
    return result;
  }
}

}  // namespace bluefog::topology
