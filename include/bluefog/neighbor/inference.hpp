// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <ranges>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/gather.hpp>
#include <bluefog/collective/arguments.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/topology/adjacency.hpp>
#include <bluefog/topology/edge_view.hpp>

namespace bluefog {

/// A range of ranks in any order.
template <class Range>
concept rank_list = std::ranges::input_range<const Range> &&
                    std::convertible_to<std::ranges::range_reference_t<const Range>, int>;

namespace detail {

/// \return for every rank whether `ranks` holds it: this rank's row of the table.
/// \throws usage_error if `ranks` holds a rank twice, this rank, or one that does not exist.
template <backend Backend, rank_list Range>
[[nodiscard]] std::vector<std::uint8_t> row_of(std::string_view operation,
                                               const communicator<Backend>& comm,
                                               const Range& ranks, std::string_view what) {
  std::vector<std::uint8_t> row(static_cast<std::size_t>(comm.size()));
  for (const int rank : ranks) {
    expects_rank(operation, comm, rank, what);
    expects(rank != comm.rank(), operation, ": ", what, " ", rank, " is this rank itself");
    expects(std::exchange(row[static_cast<std::size_t>(rank)], std::uint8_t{1}) == 0, operation,
            ": ", what, " ", rank, " is given twice");
  }
  return row;
}

/// The rows of all ranks: entry (i, j) says whether rank i has named rank j.
template <backend Backend>
[[nodiscard]] std::vector<std::uint8_t> table_of(communicator<Backend>& comm,
                                                 std::string_view operation,
                                                 const std::vector<std::uint8_t>& row,
                                                 const call_options& options) {
  const auto table = std::make_shared<std::vector<std::uint8_t>>();
  comm.run(describe(comm, operation, options, ""),
           [&](auto context) { return gather_equal(context, row, table); });
  return std::move(*table);
}

/// \return the ranks that have named rank `self`, ascending.
[[nodiscard]] inline std::vector<int> column_of(const std::vector<std::uint8_t>& table, int size,
                                                int self) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank)
    if (table[static_cast<std::size_t>(rank) * static_cast<std::size_t>(size) +
              static_cast<std::size_t>(self)] != 0)
      ranks.push_back(rank);
  return ranks;
}

}  // namespace detail

/// Finds out who sends to this rank, where each rank knows only whom it sends to itself.
///
/// Collective: every rank must call it, in the same order as its other operations.
///
/// \param destinations  whom this rank sends to, in any order; a range of `int`.
/// \return the ranks that have named this rank, ascending.
/// \throws usage_error if a rank is named twice, is this rank, or does not exist; nothing was sent.
/// \note Sends n bytes to every rank, which count as control traffic.
template <backend Backend, rank_list Range = std::initializer_list<int>>
[[nodiscard]] std::vector<int> infer_sources(communicator<Backend>& comm, const Range& destinations,
                                             const call_options& options = {}) {
  const auto row = detail::row_of("infer_sources", comm, destinations, "destination");
  return detail::column_of(detail::table_of(comm, "infer_sources", row, options), comm.size(),
                           comm.rank());
}

/// Finds out whom this rank sends to, where each rank knows only whom it receives from itself.
///
/// \param sources  whom this rank receives from, in any order; a range of `int`.
/// \return the ranks that have named this rank, ascending. The rest is as in `infer_sources`.
template <backend Backend, rank_list Range = std::initializer_list<int>>
[[nodiscard]] std::vector<int> infer_destinations(communicator<Backend>& comm, const Range& sources,
                                                  const call_options& options = {}) {
  const auto row = detail::row_of("infer_destinations", comm, sources, "source");
  return detail::column_of(detail::table_of(comm, "infer_destinations", row, options), comm.size(),
                           comm.rank());
}

/// Puts together the graph of which each rank knows only whom it sends to.
///
/// Uniform weights that make every rank average what it gets:
/// \f$ W_{ij} = 1 / (1 + \mathrm{indegree}(j)) \f$ for an edge from i to j and for i = j, so every
/// column sums to 1 whatever the out-degrees are. Arguments and errors are those of
/// `infer_sources`.
/// \return the same graph on every rank.
template <backend Backend, rank_list Range = std::initializer_list<int>>
[[nodiscard]] topology::adjacency infer_adjacency(communicator<Backend>& comm,
                                                  const Range& destinations,
                                                  const call_options& options = {}) {
  const auto row = detail::row_of("infer_adjacency", comm, destinations, "destination");
  const auto table = detail::table_of(comm, "infer_adjacency", row, options);
  const int size = comm.size();
  std::vector<topology::directed_edge> edges;
  for (int destination = 0; destination < size; ++destination) {
    auto sources = detail::column_of(table, size, destination);
    sources.push_back(destination);
    for (const int source : sources)
      edges.push_back({source, destination, 1.0 / static_cast<double>(sources.size())});
  }
  return topology::adjacency(size, edges);
}

}  // namespace bluefog
