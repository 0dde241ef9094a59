// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <ranges>
#include <vector>

#include <bluefog/topology/concepts.hpp>

namespace bluefog::topology {

namespace detail {

constexpr bool is_one(double sum, double tolerance) {
  return sum - 1.0 <= tolerance && 1.0 - sum <= tolerance;
}

}  // namespace detail

/// \return whether the weights that each destination receives, its own included, sum to 1: what
///         averaging needs, so that a constant stays as it is. Costs O(edges).
template <graph Graph>
[[nodiscard]] constexpr bool is_column_stochastic(const Graph& graph, double tolerance = 1e-9) {
  for (int rank = 0; rank < graph.size(); ++rank) {
    double sum = graph.weight(rank, rank);
    for (const int source : graph.in_neighbors(rank)) sum += graph.weight(source, rank);
    if (!detail::is_one(sum, tolerance)) return false;
  }
  return true;
}

/// \return whether the weights that each source sends, to itself included, sum to 1: what push-sum
///         needs, so that the total stays as it is. Costs O(edges).
template <graph Graph>
[[nodiscard]] constexpr bool is_row_stochastic(const Graph& graph, double tolerance = 1e-9) {
  for (int rank = 0; rank < graph.size(); ++rank) {
    double sum = graph.weight(rank, rank);
    for (const int destination : graph.out_neighbors(rank)) sum += graph.weight(rank, destination);
    if (!detail::is_one(sum, tolerance)) return false;
  }
  return true;
}

/// \return whether averaging keeps both a constant and the mean: both of the above. Whether it
/// tends to the mean, `spectral_gap` says.
template <graph Graph>
[[nodiscard]] constexpr bool is_doubly_stochastic(const Graph& graph, double tolerance = 1e-9) {
  return is_column_stochastic(graph, tolerance) && is_row_stochastic(graph, tolerance);
}

/// \return whether every edge goes both ways with one weight. Costs O(edges).
template <graph Graph>
[[nodiscard]] constexpr bool is_symmetric(const Graph& graph, double tolerance = 1e-9) {
  for (int rank = 0; rank < graph.size(); ++rank)
    for (const int other : graph.out_neighbors(rank)) {
      const double difference = graph.weight(rank, other) - graph.weight(other, rank);
      if (difference > tolerance || difference < -tolerance) return false;
    }
  return true;
}

/// \return whether all ranks have the same number of edges, out- and ingoing ones together.
template <graph Graph>
[[nodiscard]] constexpr bool is_regular(const Graph& graph) {
  const auto degree = [&](int rank) {
    return std::ranges::size(graph.out_neighbors(rank)) +
           std::ranges::size(graph.in_neighbors(rank));
  };
  for (int rank = 1; rank < graph.size(); ++rank)
    if (degree(rank) != degree(0)) return false;
  return true;
}

/// \return whether two graphs, of whatever types, have the same edges with exactly the same
///         weights, rank for rank. Costs O(edges).
template <graph A, graph B>
[[nodiscard]] constexpr bool is_equivalent(const A& a, const B& b) {
  if (a.size() != b.size()) return false;
  for (int rank = 0; rank < a.size(); ++rank) {
    const auto receivers = a.out_neighbors(rank);
    if (a.weight(rank, rank) != b.weight(rank, rank) ||
        !std::ranges::equal(receivers, b.out_neighbors(rank)))
      return false;
    for (const int receiver : receivers)
      if (a.weight(rank, receiver) != b.weight(rank, receiver)) return false;
  }
  return true;
}

/// \return all n * n weights, row after row; row = source, column = destination.
template <graph Graph>
[[nodiscard]] constexpr std::vector<double> weight_matrix(const Graph& graph) {
  const auto n = static_cast<std::size_t>(graph.size());
  std::vector<double> matrix(n * n, 0.0);
  for (int source = 0; source < graph.size(); ++source) {
    const auto row = static_cast<std::size_t>(source) * n;
    matrix[row + static_cast<std::size_t>(source)] = graph.weight(source, source);
    for (const int destination : graph.out_neighbors(source))
      matrix[row + static_cast<std::size_t>(destination)] = graph.weight(source, destination);
  }
  return matrix;
}

}  // namespace bluefog::topology
