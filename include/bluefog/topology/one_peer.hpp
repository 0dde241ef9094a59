// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <bluefog/core/error.hpp>
#include <bluefog/topology/circulant.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/edge_view.hpp>
#include <bluefog/topology/neighborhood.hpp>
#include <bluefog/topology/rank_check.hpp>
#include <bluefog/topology/rounds.hpp>
#include <bluefog/topology/shared.hpp>
#include <bluefog/topology/shift.hpp>

namespace bluefog::topology {

/// One round of `one_peer` over a graph that is not circulant.
///
/// A rank may have several sources, or none; with d of them it weighs each, and itself,
/// 1 / (d + 1). Column stochastic. A rank's neighborhood takes O(degree log degree) time.
template <graph Graph>
class one_peer_round {
 public:
  constexpr one_peer_round() = default;
  constexpr one_peer_round(Graph graph, std::ptrdiff_t number)
      : graph_(std::move(graph)), number_(number) {}

  [[nodiscard]] constexpr int size() const { return graph_.size(); }

  /// \return the rank that `rank` sends to in this round, if any.
  [[nodiscard]] constexpr auto out_neighbors(int rank) const {
    const auto chosen = destination(rank);
    return kept(chosen ? std::vector{*chosen} : std::vector<int>{});
  }

  /// \return the ranks that send to `rank` in this round, ascending.
  [[nodiscard]] constexpr auto in_neighbors(int rank) const { return kept(sources(rank)); }

  /// \return the weight of an edge, or of a self-loop; 0 where there is none.
  [[nodiscard]] constexpr double weight(int source, int destination_rank) const {
    expect_rank(source, size(), "weight");
    expect_rank(destination_rank, size(), "weight");
    if (source != destination_rank && destination(source) != destination_rank) return 0.0;
    return 1.0 / static_cast<double>(sources(destination_rank).size() + 1);
  }

  [[nodiscard]] constexpr edge_view<one_peer_round> edges() const { return edge_view(*this); }

  /// \return the whole neighborhood at once.
  [[nodiscard]] constexpr neighborhood neighborhood_at(int rank) const {
    const auto senders = sources(rank);
    neighborhood result{.self_weight = 1.0 / static_cast<double>(senders.size() + 1)};
    for (const int sender : senders) result.sources.push_back({sender, result.self_weight});
    if (const auto receiver = destination(rank)) result.destinations.push_back({*receiver});
    return result;
  }

  bool operator==(const one_peer_round&) const = default;

 private:
  using ranks = shared<std::vector<int>>;

  [[nodiscard]] static constexpr kept_ranks<ranks> kept(std::vector<int> values) {
    const ranks owner(std::move(values));
    return {owner, owner->data(), owner->data() + owner->size()};
  }

  /// Takes turns among the out-neighbors, clockwise from `rank`.
  [[nodiscard]] constexpr std::optional<int> destination(int rank) const {
    const auto all = graph_.out_neighbors(rank);
    const auto degree = std::ranges::ssize(all);
    if (degree == 0) return std::nullopt;
    const auto first = std::ranges::lower_bound(all, rank) - std::ranges::begin(all);
    return all[(number_ % degree + first) % degree];
  }

  [[nodiscard]] constexpr std::vector<int> sources(int rank) const {
    std::vector<int> result;
    for (const int candidate : graph_.in_neighbors(rank))
      if (destination(candidate) == rank) result.push_back(candidate);
    return result;
  }

  Graph graph_{};
  std::ptrdiff_t number_ = 0;
};

/// A graph taken apart: in round k every rank sends to one of its out-neighbors, which take turns
/// clockwise: the next higher rank first.
///
/// Only the edges of the graph matter; the weights of a round are 1 / (number of sources + 1) for
/// a rank itself and each of its sources. Over a circulant graph, every rank has exactly one source
/// (none with one rank) and a round is a `shift`, made in O(1); over another graph a rank may have
/// several sources or none, and a rank's neighborhood takes O(degree log degree) time, in every
/// round. Nothing is precomputed, since the period may be huge.
template <graph Graph>
class one_peer {
 public:
  constexpr one_peer() = default;
  constexpr explicit one_peer(Graph graph) : graph_(std::move(graph)) {}

  [[nodiscard]] constexpr int size() const { return graph_.size(); }

  /// \return the graph of round `k`. Costs O(1). \throws usage_error if `k` is negative.
  [[nodiscard]] constexpr auto round(std::ptrdiff_t k) const {
    expects(k >= 0, "round: number must not be negative, got ", k);
    if constexpr (circulant_graph<Graph>) {
      const auto offsets = graph_.offsets();
      const int degree = offsets.degree();
      return shift(size(), degree == 0 ? 0 : offsets[round_in_period(k, degree)]);
    } else {
      return one_peer_round<Graph>(graph_, k);
    }
  }

  /// \return what `rank` does in rounds 0, 1, 2, ...: an endless view.
  [[nodiscard]] constexpr auto rounds(int rank) const { return rounds_of(*this, rank); }

  bool operator==(const one_peer&) const = default;

 private:
  Graph graph_{};
};

}  // namespace bluefog::topology
