// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <ranges>

#include <bluefog/topology/edge_view.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog::topology {

/// A view of ranks: random access, sized, of plain `int`.
template <class R>
concept rank_range =
    std::ranges::view<R> && std::ranges::random_access_range<R> && std::ranges::sized_range<R> &&
    std::same_as<std::ranges::range_value_t<R>, int>;

/// A view of the weighted edges of a graph.
template <class R>
concept edge_range = std::ranges::view<R> && std::ranges::forward_range<R> &&
                     std::same_as<std::ranges::range_value_t<R>, directed_edge>;

/// Who sends to whom, and with what weight: one static topology.
///
/// Semantic requirements: `size()` is at least 1; neighbors are ascending and leave the rank itself
/// out; `j` is in `in_neighbors(i)` exactly if `i` is in `out_neighbors(j)`;
/// `weight(source, destination)` is 0 where there is no edge and the self weight on the diagonal;
/// `edges()` holds no self-loop. All are pure functions: equal graphs give equal answers, on every
/// rank. Views stay valid after the graph is gone. Ranks outside [0, size()) are a `usage_error`.
///
/// A graph may also have a member `neighborhood_at(rank)` where it can give the whole neighborhood
/// faster than weight by weight; `neighborhood_of` then takes that one.
template <class G>
concept graph = std::regular<G> && requires(const G& graph, int rank) {
  { graph.size() } -> std::same_as<int>;
  { graph.out_neighbors(rank) } -> rank_range;
  { graph.in_neighbors(rank) } -> rank_range;
  { graph.weight(rank, rank) } -> std::same_as<double>;
  { graph.edges() } -> edge_range;
};

/// The endless sequence of one rank's neighborhoods, round by round.
template <class R>
concept round_range = std::ranges::view<R> && std::ranges::random_access_range<R> &&
                      std::same_as<std::ranges::range_value_t<R>, neighborhood> &&
                      std::same_as<std::ranges::range_difference_t<R>, std::ptrdiff_t>;

/// A topology that changes from round to round.
///
/// Semantic requirements: `round(k)` is the graph of round k = 0, 1, 2, ... on `size()` ranks and
/// costs no more for a late round than for the first; `rounds(rank)[k]` equals
/// `neighborhood_of(round(k), rank)`, the sequence never ends, and the view stays valid after the
/// schedule is gone. All are pure functions: equal schedules give equal answers, on every rank.
template <class S>
concept schedule = std::regular<S> && requires(const S& schedule, std::ptrdiff_t k, int rank) {
  { schedule.size() } -> std::same_as<int>;
  { schedule.round(k) } -> graph;
  { schedule.rounds(rank) } -> round_range;
};

}  // namespace bluefog::topology
