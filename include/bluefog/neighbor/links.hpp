// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <string_view>

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

}  // namespace detail
}  // namespace bluefog
