// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <ranges>
#include <utility>
#include <vector>

#include <bluefog/core/error.hpp>
#include <bluefog/topology/adjacency_data.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/edge_view.hpp>
#include <bluefog/topology/rank_check.hpp>
#include <bluefog/topology/shared.hpp>

namespace bluefog::topology {

/// A matrix of weights: row = source, column = destination, diagonal = self weights.
template <class M>
concept weight_rows =
    std::ranges::input_range<M> && std::ranges::input_range<std::ranges::range_reference_t<M>> &&
    std::convertible_to<std::ranges::range_reference_t<std::ranges::range_reference_t<M>>, double>;

namespace detail {

/// \return the entries of a matrix that are not 0, checked to be square.
[[nodiscard]] constexpr std::vector<directed_edge> entries_of(const weight_rows auto& rows) {
  const auto size = static_cast<int>(std::ranges::distance(rows));
  std::vector<directed_edge> entries;
  int source = 0;
  for (const auto& row : rows) {
    int destination = 0;
    for (const double weight : row) {
      if (destination < size && weight != 0.0) entries.push_back({source, destination, weight});
      ++destination;
    }
    expects(destination == size, "adjacency: row ", source, " must have ", size, " entries, got ",
            destination);
    ++source;
  }
  return entries;
}

/// \return the edges and self-loops of a graph.
[[nodiscard]] constexpr std::vector<directed_edge> entries_of(const graph auto& other) {
  std::vector<directed_edge> entries;
  for (const directed_edge each : other.edges()) entries.push_back(each);
  for (int rank = 0; rank < other.size(); ++rank)
    entries.push_back({rank, rank, other.weight(rank, rank)});
  return entries;
}

/// \return the edges in `range`, copied.
[[nodiscard]] constexpr std::vector<directed_edge> copy_of(auto&& range) {
  std::vector<directed_edge> entries;
  for (const directed_edge& each : range) entries.push_back(each);
  return entries;
}

}  // namespace detail

/// Any graph at all, given by its weight matrix or its edges, and checked.
///
/// Takes O(n + edges) memory, which copies share; `weight` costs O(log degree). An entry of weight
/// 0 is no edge. Unless told otherwise, what each destination receives must sum to 1, to 1e-9.
/// \see read_adjacency for one from a text file.
class adjacency {
 public:
  /// The graph of a single rank.
  constexpr adjacency() : adjacency(1, {{0, 0, 1.0}}) {}

  /// \param rows  n ranges of n numbers; row = source, column = destination.
  /// \throws usage_error naming the entry: if a row has another length; a weight is negative,
  ///         infinite or NaN; a sum that `options.check` asks for is not 1; or an edge has no
  ///         reverse although Metropolis-Hastings weights are wanted.
  template <class Matrix>
    requires weight_rows<const Matrix>
  constexpr explicit adjacency(const Matrix& rows, adjacency_options options = {})
      : data_(detail::make_adjacency(static_cast<int>(std::ranges::distance(rows)),
                                     detail::entries_of(rows), options)) {}
  constexpr explicit adjacency(std::initializer_list<std::initializer_list<double>> rows,
                               adjacency_options options = {})
      : data_(detail::make_adjacency(static_cast<int>(rows.size()), detail::entries_of(rows),
                                     options)) {}

  /// \param size   n, the number of ranks; at least 1.
  /// \param edges  in any order; one whose ends are equal gives a self weight, which is 0
  ///               otherwise. Unless weights are `given`, all that counts is which edges there are.
  /// \throws usage_error naming the edge: as above, and if a rank is out of range or an edge is
  ///         there twice.
  template <std::ranges::input_range Edges>
    requires std::convertible_to<std::ranges::range_reference_t<Edges>, directed_edge>
  constexpr adjacency(int size, Edges&& edges, adjacency_options options = {})
      : data_(detail::make_adjacency(size, detail::copy_of(edges), options)) {}
  constexpr adjacency(int size, std::initializer_list<directed_edge> edges,
                      adjacency_options options = {})
      : data_(detail::make_adjacency(size, detail::copy_of(edges), options)) {}

  /// Writes out another graph, with its weights as they are.
  template <class Graph>
    requires(!std::same_as<Graph, adjacency> && graph<Graph>)
  constexpr explicit adjacency(const Graph& other)
      : data_(detail::make_adjacency(other.size(), detail::entries_of(other),
                                     {.check = stochasticity::none})) {}

  [[nodiscard]] constexpr int size() const noexcept { return data_->size; }

  /// \return the ranks that `rank` sends to, ascending.
  [[nodiscard]] constexpr auto out_neighbors(int rank) const {
    expect_rank(rank, size(), "out_neighbors");
    return slice(data_->destinations, data_->out_first, rank);
  }

  /// \return the ranks that send to `rank`, ascending.
  [[nodiscard]] constexpr auto in_neighbors(int rank) const {
    expect_rank(rank, size(), "in_neighbors");
    return slice(data_->sources, data_->in_first, rank);
  }

  /// \return the weight of an edge, or of a self-loop; 0 where there is none.
  [[nodiscard]] constexpr double weight(int source, int destination) const {
    expect_rank(source, size(), "weight");
    expect_rank(destination, size(), "weight");
    const auto row = static_cast<std::size_t>(source);
    if (source == destination) return data_->self_weights[row];
    const int* const ranks = data_->destinations.data();
    const int* const last = ranks + data_->out_first[row + 1];
    const int* const found = std::lower_bound(ranks + data_->out_first[row], last, destination);
    return found != last && *found == destination
               ? data_->weights[static_cast<std::size_t>(found - ranks)]
               : 0.0;
  }

  [[nodiscard]] constexpr edge_view<adjacency> edges() const { return edge_view(*this); }

  bool operator==(const adjacency&) const = default;

 private:
  using storage = shared<adjacency_data>;

  [[nodiscard]] constexpr kept_ranks<storage> slice(const std::vector<int>& ranks,
                                                    const std::vector<std::size_t>& first,
                                                    int rank) const {
    const auto row = static_cast<std::size_t>(rank);
    return {data_, ranks.data() + first[row], ranks.data() + first[row + 1]};
  }

  storage data_;
};

static_assert(graph<adjacency>);

}  // namespace bluefog::topology
