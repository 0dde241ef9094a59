// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <ranges>
#include <utility>
#include <vector>

#include <bluefog/topology.hpp>

namespace bluefog_test {

using matrix = std::vector<std::vector<double>>;

[[nodiscard]] constexpr std::size_t index(int rank) {
  return static_cast<std::size_t>(rank);
}

/// Whether a range of ranks holds exactly these.
[[nodiscard]] constexpr bool holds(std::ranges::input_range auto&& ranks,
                                   std::initializer_list<int> expected) {
  return std::ranges::equal(ranks, expected);
}

/// The matrix of a graph, asked weight by weight for every pair.
template <bluefog::topology::graph Graph>
[[nodiscard]] matrix weights_of(const Graph& graph) {
  matrix result(index(graph.size()), std::vector<double>(index(graph.size())));
  for (int source = 0; source < graph.size(); ++source)
    for (int destination = 0; destination < graph.size(); ++destination)
      result[index(source)][index(destination)] = graph.weight(source, destination);
  return result;
}

/// One round of averaging on all ranks: what the documentation of `neighborhood` says, taken
/// literally.
template <class Value>
[[nodiscard]] std::vector<Value> mix(const std::vector<bluefog::neighborhood>& all,
                                     const std::vector<Value>& x) {
  std::vector<Value> y;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    Value sum = static_cast<Value>(all[rank].self_weight) * x[rank];
    for (const auto& [source, weight] : all[rank].sources) {
      const auto sent = std::ranges::find(all[index(source)].destinations, static_cast<int>(rank),
                                          &bluefog::edge::rank);
      sum += static_cast<Value>(weight * sent->weight) * x[index(source)];
    }
    y.push_back(sum);
  }
  return y;
}

/// All ranks' neighborhoods in round k.
template <bluefog::topology::schedule Schedule>
[[nodiscard]] std::vector<bluefog::neighborhood> all_of_round(const Schedule& schedule,
                                                              std::ptrdiff_t k) {
  std::vector<bluefog::neighborhood> all;
  for (int rank = 0; rank < schedule.size(); ++rank) all.push_back(schedule.rounds(rank)[k]);
  return all;
}

/// Calls `use` with every graph of `n` ranks.
void for_each_graph(int n, auto&& use) {
  using namespace bluefog::topology;
  use(exponential(n));
  use(exponential(n, 3));
  use(exponential(n, 4));
  use(symmetric_exponential(n));
  use(symmetric_exponential(n, 2));
  use(ring(n));
  use(ring(n, ring_style::left));
  use(ring(n, ring_style::right));
  use(mesh_grid_2d(n));
  use(star(n));
  use(star(n, n / 2));
  use(star(n, n - 1));
  use(fully_connected(n));
  use(shift(n, n / 3));
  use(adjacency(mesh_grid_2d(n)));
  use(adjacency(exponential(n)));
}

/// Calls `use` with every schedule that has `n` ranks, and with what `n` ranks of it repeat.
void for_each_schedule(int n, auto&& use) {
  using namespace bluefog::topology;
  use(one_peer_exponential(n));
  use(one_peer(exponential(n)));
  use(one_peer(ring(n)));
  use(one_peer(fully_connected(n)));
  use(one_peer(symmetric_exponential(n)));
  use(one_peer(mesh_grid_2d(n)));
  use(one_peer(star(n, n / 2)));
  use(one_peer(adjacency(mesh_grid_2d(n))));
  use(repeat(mesh_grid_2d(n)));
  use(repeat(exponential(n)));
  use(one_peer_exponential_machines(3 * n, 3));
  for (int local_size = 3; local_size <= n; ++local_size) {
    if (n % local_size != 0) continue;
    use(inner_outer_ring(n, local_size));
    use(inner_outer_exponential(n, local_size));
  }
}

}  // namespace bluefog_test
