// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ostream>
#include <sstream>
#include <string>
#include <utility>

#include <bluefog/topology/concepts.hpp>

namespace bluefog::topology {

/// How a graph is drawn.
struct dot_options {
  bool weights = true;  ///< label edges with their weights, and ranks with their self weights
  int precision = 4;    ///< significant digits of a weight
};

/// Writes a graph in the language of Graphviz, e.g. for `dot -Tsvg`.
template <graph Graph>
void write_dot(std::ostream& out, const Graph& graph, dot_options options = {}) {
  const auto number = [&](double value) {
    std::ostringstream text;
    text.precision(options.precision);
    text << value;
    return std::move(text).str();
  };
  out << "digraph topology {\n";
  for (int rank = 0; rank < graph.size(); ++rank) {
    out << "  " << rank;
    if (options.weights)
      out << " [label=\"" << rank << "\\n" << number(graph.weight(rank, rank)) << "\"]";
    out << ";\n";
  }
  for (const auto& [source, destination, weight] : graph.edges()) {
    out << "  " << source << " -> " << destination;
    if (options.weights) out << " [label=\"" << number(weight) << "\"]";
    out << ";\n";
  }
  out << "}\n";
}

/// \return what `write_dot` writes.
template <graph Graph>
[[nodiscard]] std::string to_dot(const Graph& graph, dot_options options = {}) {
  std::ostringstream text;
  write_dot(text, graph, options);
  return std::move(text).str();
}

}  // namespace bluefog::topology
