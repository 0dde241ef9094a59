// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstdint>
#include <string_view>

#include <bluefog/backend/check.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/topology/concepts.hpp>
#include <bluefog/topology/neighborhood.hpp>
#include <bluefog/topology/neighborhood_of.hpp>

namespace bluefog {

/// Whom to average with: this rank's `neighborhood`, or a graph of all ranks.
template <class T>
concept neighbor_links = std::same_as<T, neighborhood> || topology::graph<T>;

namespace detail {

/// \return this rank's part of `links`.
/// \throws usage_error if a graph has another number of ranks than `size`.
template <neighbor_links Links>
[[nodiscard]] neighborhood links_of(std::string_view operation, const Links& links, int rank,
                                    int size, std::string_view what) {
  if constexpr (std::same_as<Links, neighborhood>) {
    return links;
  } else {
    expects(links.size() == size, operation, ": the graph has ", links.size(), " ranks, the ", what,
            " has ", size);
    return topology::neighborhood_of(links, rank);
  }
}

template <backend Backend, neighbor_links Links>
[[nodiscard]] neighborhood links_of(std::string_view operation, const communicator<Backend>& comm,
                                    const Links& links) {
  return links_of(operation, links, comm.rank(), comm.size(), "communicator");
}

/// Notes in `call` which graph `links` are of, for check mode. It takes a look at every edge.
template <backend Backend, neighbor_links Links>
[[nodiscard]] call_description of_graph(const communicator<Backend>& comm, const Links& links,
                                        call_description call) {
  if constexpr (!std::same_as<Links, neighborhood>) {
    if (!comm.checks()) return call;
    std::uint64_t hash = 14695981039346656037U;  // FNV-1a, a number at a time
    const auto take_in = [&](std::uint64_t number) { hash = (hash ^ number) * 1099511628211U; };
    for (int rank = 0; rank < links.size(); ++rank)
      take_in(std::bit_cast<std::uint64_t>(links.weight(rank, rank)));
    for (const topology::directed_edge& each : links.edges()) {
      take_in(static_cast<std::uint64_t>(each.source));
      take_in(static_cast<std::uint64_t>(each.destination));
      take_in(std::bit_cast<std::uint64_t>(each.weight));
    }
    call.graph = std::max<std::uint64_t>(1, hash);
  }
  return call;
}

}  // namespace detail
}  // namespace bluefog
