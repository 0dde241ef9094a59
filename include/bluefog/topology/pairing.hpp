// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <utility>

#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/edge_view.hpp>
#include <bluefog/topology/indexed_view.hpp>
#include <bluefog/topology/rank_check.hpp>

namespace bluefog::topology {

/// A rule by which every rank has at most one destination and at most one source.
///
/// Semantic requirements: `source(destination(r))` is r and `destination(source(r))` is r; a rank
/// is its own destination, and its own source, where it has none.
template <class R>
concept pairing_rule = std::regular<R> && requires(const R& rule, int rank) {
  { rule.size() } -> std::same_as<int>;
  { rule.destination(rank) } -> std::same_as<int>;
  { rule.source(rank) } -> std::same_as<int>;
};

/// The graph of a rule: weights are 1/2 for a rank that receives, and 1 for one that is silent.
///
/// Doubly stochastic. O(1) memory and time.
template <pairing_rule Rule>
class pairing {
 public:
  constexpr pairing() = default;
  constexpr explicit pairing(Rule rule) : rule_(std::move(rule)) {}

  [[nodiscard]] constexpr int size() const { return rule_.size(); }

  /// \return the rank that `rank` sends to, if any.
  [[nodiscard]] constexpr auto out_neighbors(int rank) const {
    expect_rank(rank, size(), "out_neighbors");
    const int other = rule_.destination(rank);
    return indexed_view(the_rank{other}, other == rank ? 0 : 1);
  }

  /// \return the rank that sends to `rank`, if any.
  [[nodiscard]] constexpr auto in_neighbors(int rank) const {
    expect_rank(rank, size(), "in_neighbors");
    const int other = rule_.source(rank);
    return indexed_view(the_rank{other}, other == rank ? 0 : 1);
  }

  /// \return the weight of an edge, or of a self-loop; 0 where there is none.
  [[nodiscard]] constexpr double weight(int source, int destination) const {
    expect_rank(source, size(), "weight");
    expect_rank(destination, size(), "weight");
    const int sender = rule_.source(destination);
    if (sender == destination) return source == destination ? 1.0 : 0.0;
    return source == destination || source == sender ? 0.5 : 0.0;
  }

  [[nodiscard]] constexpr edge_view<pairing> edges() const { return edge_view(*this); }

  bool operator==(const pairing&) const = default;

 private:
  struct the_rank {
    int rank = 0;
    constexpr int operator()(std::ptrdiff_t) const noexcept { return rank; }
  };

  Rule rule_{};
};

}  // namespace bluefog::topology
