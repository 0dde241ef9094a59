// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string_view>

#include <bluefog/core/error.hpp>
#include <bluefog/topology/circulant.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/properties.hpp>
#include <bluefog/topology/symmetric_spectrum.hpp>

namespace bluefog::optim::detail {

/// \throws usage_error if averaging over `graph` moves the mean of all ranks.
template <topology::graph Graph>
void expect_doubly_stochastic(std::string_view method, const Graph& graph) {
  expects(topology::is_doubly_stochastic(graph), method,
          ": the weights that each rank receives, and those that it sends, must both sum to 1, or "
          "averaging moves the mean of all ranks; weigh the graph's edges by Metropolis and "
          "Hastings, or take another graph");
}

/// Checks the first rounds, as many as there are ranks but at most 64.
template <topology::schedule Schedule>
void expect_doubly_stochastic(std::string_view method, const Schedule& schedule) {
  for (std::ptrdiff_t k = 0; k < std::min(schedule.size(), 64); ++k)
    expects(topology::is_doubly_stochastic(schedule.round(k)), method, ": in round ", k,
            " the weights that each rank receives, or those that it sends, do not sum to 1, so "
            "averaging moves the mean of all ranks; take another schedule");
}

/// \throws usage_error that names the first edge that has not the same weight both ways.
template <topology::graph Graph>
void expect_symmetric(std::string_view method, const Graph& graph, std::string_view remedy) {
  if (topology::is_symmetric(graph)) return;
  for (int rank = 0; rank < graph.size(); ++rank)
    for (const int other : graph.out_neighbors(rank)) {
      const double there = graph.weight(rank, other);
      const double back = graph.weight(other, rank);
      expects(there - back <= 1e-9 && back - there <= 1e-9, method,
              ": the weights must be symmetric, got ", there, " from rank ", rank, " to ", other,
              " and ", back, " back; take a symmetric graph (ring, mesh_grid_2d, star, ",
              "symmetric_exponential), or ", remedy);
    }
}

/// \return the eigenvalues of a symmetric graph but the first, unless it is too large for that.
/// \throws usage_error if the graph leaves some ranks unreached.
template <topology::graph Graph>
[[nodiscard]] std::optional<topology::eigenvalue_range> expect_joined(std::string_view method,
                                                                      const Graph& graph) {
  constexpr int most = 512;
  if (!topology::circulant_graph<Graph> && graph.size() > most) return std::nullopt;
  const auto range = topology::symmetric_spectrum(graph);
  expects(range.largest < 1 - 1e-9, method,
          ": the graph must join all ranks, so that its second eigenvalue is below 1, got ",
          range.largest);
  return range;
}

/// \throws usage_error, with the number, unless all eigenvalues are above `bound`.
template <topology::graph Graph>
void expect_spectrum_above(std::string_view method, const Graph& graph, double bound,
                           std::string_view bound_text, std::string_view remedy) {
  const auto range = expect_joined(method, graph);
  expects(!range || range->smallest > bound + 1e-9, method,
          ": the smallest eigenvalue of the weights must be above ", bound_text, ", got ",
          range ? range->smallest : 0.0, "; ", remedy);
}

}  // namespace bluefog::optim::detail
