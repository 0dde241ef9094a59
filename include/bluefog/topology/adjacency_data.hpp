// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include <bluefog/core/error.hpp>
#include <bluefog/topology/edge_view.hpp>
#include <bluefog/topology/rank_check.hpp>

namespace bluefog::topology {

/// Which weights must sum to 1: those that each destination receives (what averaging needs), those
/// that each source sends (what push-sum needs), both, or none. A rank's self weight counts.
enum class stochasticity { column, row, doubly, none };

/// Where the weights of an `adjacency` come from: the caller, or the edges alone.
enum class weighting {
  given,               ///< as the caller says
  uniform,             ///< 1 / (in-degree + 1), or 1 / (out-degree + 1) for `stochasticity::row`
  metropolis_hastings  ///< 1 / (1 + larger degree of both ends), the rest to oneself; symmetric
};

/// How an `adjacency` treats what it is given.
struct adjacency_options {
  weighting weights = weighting::given;
  stochasticity check = stochasticity::column;
};

/// A sparse weight matrix: for each rank its ascending out- and in-neighbors, in one block each.
struct adjacency_data {
  int size = 1;
  std::vector<double> self_weights = {};
  std::vector<std::size_t> out_first = {};  // size + 1 positions in `destinations`
  std::vector<int> destinations = {};
  std::vector<double> weights = {};        // of each entry of `destinations`
  std::vector<std::size_t> in_first = {};  // size + 1 positions in `sources`
  std::vector<int> sources = {};

  bool operator==(const adjacency_data&) const = default;
};

namespace detail {

/// Orders `entries`, and refuses one that cannot be an entry or is there twice.
constexpr void check_entries(int size, std::vector<directed_edge>& entries) {
  for (const auto& [source, destination, weight] : entries) {
    expects(source >= 0 && source < size && destination >= 0 && destination < size,
            "adjacency: ranks must be in [0, ", size, "), got edge (", source, ", ", destination,
            ")");
    expects(weight >= 0 && weight <= std::numeric_limits<double>::max(), "adjacency: weight(",
            source, ", ", destination, ") must be finite and not negative, got ", weight);
  }
  std::ranges::sort(entries, {},
                    [](const directed_edge& e) { return std::pair(e.source, e.destination); });
  const auto twice = std::ranges::adjacent_find(entries, [](const auto& a, const auto& b) {
    return a.source == b.source && a.destination == b.destination;
  });
  if (twice != entries.end())
    expects(false, "adjacency: edge (", twice->source, ", ", twice->destination,
            ") must be given once, got it twice");
}

/// Divides the weight of each destination (or source) equally among its edges and itself.
constexpr void weigh_uniformly(std::vector<directed_edge>& edges, std::vector<double>& self_weights,
                               int directed_edge::*side) {
  for (const auto& edge : edges) self_weights[static_cast<std::size_t>(edge.*side)] += 1;
  for (double& weight : self_weights) weight = 1.0 / (weight + 1);
  for (auto& edge : edges) edge.weight = self_weights[static_cast<std::size_t>(edge.*side)];
}

constexpr void weigh_by_metropolis_hastings(std::vector<directed_edge>& edges,
                                            std::vector<double>& self_weights) {
  std::vector<double> degrees(self_weights.size(), 1.0);  // each rank counts itself
  for (const auto& edge : edges) degrees[static_cast<std::size_t>(edge.source)] += 1;
  for (const auto& [source, destination, weight] : edges) {
    const std::pair reverse(destination, source);
    const auto by_ends = [](const directed_edge& e) { return std::pair(e.source, e.destination); };
    expects(std::ranges::binary_search(edges, reverse, {}, by_ends),
            "adjacency: Metropolis-Hastings weights need both directions of an edge, got (", source,
            ", ", destination, ") without (", destination, ", ", source, ")");
  }
  std::ranges::fill(self_weights, 1.0);
  for (auto& edge : edges) {
    const auto source = static_cast<std::size_t>(edge.source);
    edge.weight =
        1.0 / std::max(degrees[source], degrees[static_cast<std::size_t>(edge.destination)]);
    self_weights[source] -= edge.weight;
  }
}

/// Refuses sums that are off 1 by more than 1e-9.
constexpr void check_sums(const std::vector<directed_edge>& edges, std::vector<double> sums,
                          int directed_edge::*side, const char* verb, const char* line) {
  for (const auto& edge : edges) sums[static_cast<std::size_t>(edge.*side)] += edge.weight;
  for (std::size_t rank = 0; rank < sums.size(); ++rank) {
    const double off = sums[rank] - 1.0;
    expects(off <= 1e-9 && off >= -1e-9, "adjacency: the weights that rank ", rank, " ", verb, " (",
            line, " ", rank, ") must sum to 1, got ", sums[rank], ", off by ", off);
  }
}

/// The offsets at which each rank's neighbors begin, and behind the last one's end.
constexpr std::vector<std::size_t> first_positions(const std::vector<directed_edge>& edges,
                                                   std::size_t size, int directed_edge::*side) {
  std::vector<std::size_t> first(size + 1, 0);
  for (const auto& edge : edges) ++first[static_cast<std::size_t>(edge.*side) + 1];
  for (std::size_t rank = 0; rank < size; ++rank) first[rank + 1] += first[rank];
  return first;
}

/// Checks, weighs and stores. `entries` may hold self-loops; entries of weight 0 are no edges.
constexpr adjacency_data make_adjacency(int size, std::vector<directed_edge> entries,
                                        adjacency_options options) {
  expect_size(size, "adjacency");
  check_entries(size, entries);

  const auto count = static_cast<std::size_t>(size);
  adjacency_data data{.size = size, .self_weights = std::vector<double>(count, 0.0)};
  std::vector<directed_edge> edges;
  for (const auto& entry : entries) {
    if (entry.source != entry.destination) {
      if (entry.weight > 0) edges.push_back(entry);
    } else if (options.weights == weighting::given) {
      data.self_weights[static_cast<std::size_t>(entry.source)] = entry.weight;
    }
  }

  const bool by_source = options.check == stochasticity::row;
  if (options.weights == weighting::uniform)
    weigh_uniformly(edges, data.self_weights,
                    by_source ? &directed_edge::source : &directed_edge::destination);
  if (options.weights == weighting::metropolis_hastings)
    weigh_by_metropolis_hastings(edges, data.self_weights);

  if (options.check == stochasticity::column || options.check == stochasticity::doubly)
    check_sums(edges, data.self_weights, &directed_edge::destination, "receives", "column");
  if (options.check == stochasticity::row || options.check == stochasticity::doubly)
    check_sums(edges, data.self_weights, &directed_edge::source, "sends", "row");

  data.out_first = first_positions(edges, count, &directed_edge::source);
  data.in_first = first_positions(edges, count, &directed_edge::destination);
  data.sources.assign(edges.size(), 0);
  auto next = data.in_first;
  for (const auto& edge : edges) {  // by ascending source, so each rank's sources ascend too
    data.destinations.push_back(edge.destination);
    data.weights.push_back(edge.weight);
    data.sources[next[static_cast<std::size_t>(edge.destination)]++] = edge.source;
  }
  return data;
}

}  // namespace detail
}  // namespace bluefog::topology
