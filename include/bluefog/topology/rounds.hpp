// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <iterator>
#include <utility>

#include <bluefog/core/error.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/indexed_view.hpp>
#include <bluefog/topology/neighborhood_of.hpp>
#include <bluefog/topology/rank_check.hpp>

namespace bluefog::topology {

/// A schedule but for its member `rounds`, which `rounds_of` makes from the rest.
template <class S>
concept graph_sequence = std::regular<S> && requires(const S& sequence, std::ptrdiff_t k) {
  { sequence.size() } -> std::same_as<int>;
  { sequence.round(k) } -> graph;
};

/// The function k -> neighborhood of one rank in round k.
template <graph_sequence Sequence>
struct neighborhood_in_round {
  Sequence sequence{};
  int rank = 0;

  constexpr neighborhood operator()(std::ptrdiff_t k) const {
    return neighborhood_of(sequence.round(k), rank);
  }
};

/// The endless view of one rank's neighborhoods, which holds the schedule by value.
///
/// Whoever writes a schedule defines `size()` and `round(k)`, and `rounds` by this:
/// `constexpr auto rounds(int rank) const { return rounds_of(*this, rank); }`
///
/// \throws usage_error if there is no such rank.
template <graph_sequence Sequence>
[[nodiscard]] constexpr auto rounds_of(const Sequence& sequence, int rank) {
  expect_rank(rank, sequence.size(), "rounds");
  return indexed_view(neighborhood_in_round<Sequence>{sequence, rank},
                      std::unreachable_sentinel_t{});
}

/// Refuses a negative round number, and returns it modulo `period`.
/// \throws usage_error unless k >= 0.
[[nodiscard]] constexpr int round_in_period(std::ptrdiff_t k, int period) {
  expects(k >= 0, "round: number must not be negative, got ", k);
  return static_cast<int>(k % period);
}

}  // namespace bluefog::topology
