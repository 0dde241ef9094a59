// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <utility>

#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/edge_view.hpp>
#include <bluefog/topology/indexed_view.hpp>
#include <bluefog/topology/neighborhood.hpp>
#include <bluefog/topology/rank_check.hpp>

namespace bluefog::topology {

/// The distances that every rank of a circulant graph sends over.
///
/// Semantic requirements: `offsets[0] < offsets[1] < ... < offsets[degree() - 1]`, all in
/// [1, size()); each is computed in constant time.
template <class O>
concept offset_set = std::regular<O> && requires(const O& offsets, int k) {
  { offsets.size() } -> std::same_as<int>;
  { offsets.degree() } -> std::same_as<int>;
  { offsets[k] } -> std::same_as<int>;
};

/// \return how many offsets are below `limit`. Costs O(log degree).
template <offset_set Offsets>
[[nodiscard]] constexpr int offsets_below(const Offsets& offsets, int limit) {
  int low = 0;
  for (int high = offsets.degree(); low < high;) {
    const int middle = low + (high - low) / 2;
    if (offsets[middle] < limit) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/// A graph that looks the same from every rank: rank r sends to r + o modulo n for each offset o.
///
/// With d offsets every rank has d out- and d in-neighbors; every edge and self-loop weighs
/// 1 / (d + 1), so the weights are doubly stochastic. Takes O(1) memory; a rank's neighborhood
/// takes O(degree) time.
///
/// The base of the regular graphs here, and of one's own: give it an `offset_set`. The weights stay
/// as they are; `adjacency` takes any.
template <offset_set Offsets>
class circulant {
 public:
  constexpr circulant() = default;
  constexpr explicit circulant(Offsets offsets) : offsets_(std::move(offsets)) {}

  [[nodiscard]] constexpr int size() const { return offsets_.size(); }

  /// \return d, the number of out-neighbors, and of in-neighbors, of every rank.
  [[nodiscard]] constexpr int degree() const { return offsets_.degree(); }

  [[nodiscard]] constexpr Offsets offsets() const { return offsets_; }

  /// \return the ranks that `rank` sends to, ascending.
  [[nodiscard]] constexpr auto out_neighbors(int rank) const {
    expect_rank(rank, size(), "out_neighbors");
    return indexed_view(receiver{offsets_, rank, offsets_below(offsets_, size() - rank)}, degree());
  }

  /// \return the ranks that send to `rank`, ascending.
  [[nodiscard]] constexpr auto in_neighbors(int rank) const {
    expect_rank(rank, size(), "in_neighbors");
    return indexed_view(sender{offsets_, rank, offsets_below(offsets_, rank + 1)}, degree());
  }

  /// \return the weight of an edge, or of a self-loop; 0 where there is none.
  [[nodiscard]] constexpr double weight(int source, int destination) const {
    expect_rank(source, size(), "weight");
    expect_rank(destination, size(), "weight");
    const int distance =
        destination >= source ? destination - source : size() - source + destination;
    const int k = offsets_below(offsets_, distance);
    const bool joined = distance == 0 || (k < degree() && offsets_[k] == distance);
    return joined ? 1.0 / (degree() + 1) : 0.0;
  }

  /// \return the whole neighborhood at once, which saves looking up each weight.
  [[nodiscard]] constexpr neighborhood neighborhood_at(int rank) const {
    neighborhood result{.self_weight = 1.0 / (degree() + 1)};
    for (const int source : in_neighbors(rank))
      result.sources.push_back({source, result.self_weight});
    for (const int destination : out_neighbors(rank)) result.destinations.push_back({destination});
    return result;
  }

  [[nodiscard]] constexpr edge_view<circulant> edges() const { return edge_view(*this); }

  bool operator==(const circulant&) const = default;

 private:
  /// The k-th receiver of `rank`: those beyond rank n - 1 wrap around to 0 and come first.
  struct receiver {
    Offsets offsets{};
    int rank = 0;
    int direct = 0;  // offsets that do not wrap around

    constexpr int operator()(std::ptrdiff_t k) const {
      const int wrapped = offsets.degree() - direct;
      const int index = static_cast<int>(k);
      return index < wrapped ? offsets[direct + index] - (offsets.size() - rank)
                             : rank + offsets[index - wrapped];
    }
  };

  /// The k-th sender to `rank`: the longest direct way comes from the lowest rank.
  struct sender {
    Offsets offsets{};
    int rank = 0;
    int direct = 0;

    constexpr int operator()(std::ptrdiff_t k) const {
      const int index = static_cast<int>(k);
      return index < direct
                 ? rank - offsets[direct - 1 - index]
                 : rank - offsets[offsets.degree() - 1 - (index - direct)] + offsets.size();
    }
  };

  Offsets offsets_{};
};

/// A graph that tells its offsets, by which it can be treated faster than rank by rank.
template <class G>
concept circulant_graph = graph<G> && requires(const G& graph) {
  { graph.offsets() } -> offset_set;
};

}  // namespace bluefog::topology
