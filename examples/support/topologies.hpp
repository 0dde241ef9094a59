// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <stdexcept>
#include <string>

#include <bluefog/topology.hpp>

namespace example {

/// \return the static graph of that name, written out, so that all have one type.
/// \throws std::invalid_argument for another name.
inline bluefog::topology::adjacency make_graph(const std::string& name, int size) {
  using namespace bluefog::topology;
  if (name == "exponential") return adjacency(exponential(size));
  if (name == "symmetric_exponential") return adjacency(symmetric_exponential(size));
  if (name == "ring") return adjacency(ring(size));
  if (name == "mesh_grid_2d") return adjacency(mesh_grid_2d(size));
  if (name == "star") return adjacency(star(size));
  if (name == "fully_connected") return adjacency(fully_connected(size));
  throw std::invalid_argument("make_graph: no graph is called " + name);
}

/// Calls `body` with the topology of that name: a graph, or a schedule.
template <class Body>
  requires(std::invocable<Body&, bluefog::topology::adjacency> &&
           std::invocable<Body&, bluefog::topology::one_peer_exponential>)
void with_topology(const std::string& name, int size, Body body) {
  if (name == "one_peer_exponential") {
    body(bluefog::topology::one_peer_exponential(size));
  } else {
    body(make_graph(name, size));
  }
}

}  // namespace example
