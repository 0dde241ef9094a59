// SPDX-License-Identifier: Apache-2.0
//
// Who averages with whom. Prints a graph with its weights, what it promises, and what becomes of
// it when every rank talks to one neighbor per round; writes it for Graphviz. Needs neither MPI
// nor libtorch, and one process.
//
//   ./010_topologies --topology mesh_grid_2d --size 6 --dot grid.dot && dot -Tsvg grid.dot -o
//   grid.svg
//
// --topology is one of the names below or a text file: the number of ranks on its first line, then
// an edge per line, "source destination weight".
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <ranges>
#include <stdexcept>
#include <string>

#include <CLI/CLI.hpp>

#include <bluefog/topology.hpp>

namespace topology = bluefog::topology;

namespace {

std::string text_of(const bluefog::edges& edges) {
  std::string text;
  for (const auto& [rank, weight] : edges) text += (text.empty() ? "" : " ") + std::to_string(rank);
  return text.empty() ? "-" : text;
}

/// What each rank sends and receives, and with what weights.
void print_graph(const topology::graph auto& graph) {
  std::printf("rank | self weight | sends to       | receives from\n");
  for (int rank = 0; rank < graph.size(); ++rank) {
    const auto hood = topology::neighborhood_of(graph, rank);
    std::printf("%4d | %11.4f | %-14s |", rank, hood.self_weight,
                text_of(hood.destinations).c_str());
    for (const auto& [source, weight] : hood.sources) std::printf(" %d x %.4f", source, weight);
    std::printf("\n");
  }
}

void print_properties(const topology::graph auto& graph) {
  const auto answer = [](bool yes) { return yes ? "yes" : "no"; };
  std::printf("\ncolumn stochastic %s, row stochastic %s, regular %s\n",
              answer(topology::is_column_stochastic(graph)),
              answer(topology::is_row_stochastic(graph)), answer(topology::is_regular(graph)));
  std::printf("spectral gap %.6f\n", topology::spectral_gap(graph));
}

/// The first rounds of rank 0. A schedule is a range without end, so one takes what one needs.
void print_rounds(const topology::schedule auto& schedule) {
  std::printf("\none peer per round, rank 0:\n");
  int round = 0;
  for (const auto& hood : schedule.rounds(0) | std::views::take(4))
    std::printf("round %d: self weight %.4f, sends to %s, receives from %s\n", round++,
                hood.self_weight, text_of(hood.destinations).c_str(),
                text_of(hood.sources).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  std::string name = "exponential";
  std::string dot_file;
  int size = 8;

  const auto show = [&](const topology::graph auto& graph) {
    std::printf("%s, %d ranks\n\n", name.c_str(), graph.size());
    print_graph(graph);
    print_properties(graph);
    print_rounds(topology::one_peer(graph));
    if (!dot_file.empty()) {
      std::ofstream out(dot_file);
      topology::write_dot(out, graph);
      if (!out.flush()) throw std::runtime_error("cannot write " + dot_file);
      std::printf("\nwrote %s\n", dot_file.c_str());
    }
  };
  using topology::ring_style;
  const std::map<std::string, std::function<void()>> graphs{
      {"exponential", [&] { show(topology::exponential(size)); }},
      {"symmetric_exponential", [&] { show(topology::symmetric_exponential(size)); }},
      {"ring", [&] { show(topology::ring(size)); }},
      {"ring_left", [&] { show(topology::ring(size, ring_style::left)); }},
      {"ring_right", [&] { show(topology::ring(size, ring_style::right)); }},
      {"mesh_grid_2d", [&] { show(topology::mesh_grid_2d(size)); }},
      {"star", [&] { show(topology::star(size)); }},
      {"fully_connected", [&] { show(topology::fully_connected(size)); }},
  };

  CLI::App app("Prints a topology.");
  std::string names;
  for (const auto& [known, print] : graphs) names += (names.empty() ? "" : ", ") + known;
  app.add_option("--topology", name, names + ", or a text file")->capture_default_str();
  app.add_option("--size", size, "number of ranks, unless read from a file")->capture_default_str();
  app.add_option("--dot", dot_file, "write the graph there for Graphviz");
  CLI11_PARSE(app, argc, argv);

  try {
    if (const auto found = graphs.find(name); found != graphs.end()) {
      found->second();
    } else if (std::filesystem::exists(name)) {
      show(topology::read_adjacency(std::filesystem::path(name)));
    } else {
      std::fprintf(stderr, "%s is neither a file nor one of %s\n", name.c_str(), names.c_str());
      return 1;
    }
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
  }
  return 0;
}

// Expected output:
// exponential, 8 ranks
//
// rank | self weight | sends to       | receives from
//    0 |      0.2500 | 1 2 4          | 4 x 0.2500 6 x 0.2500 7 x 0.2500
//    1 |      0.2500 | 2 3 5          | 0 x 0.2500 5 x 0.2500 7 x 0.2500
//    2 |      0.2500 | 3 4 6          | 0 x 0.2500 1 x 0.2500 6 x 0.2500
//    3 |      0.2500 | 4 5 7          | 1 x 0.2500 2 x 0.2500 7 x 0.2500
//    4 |      0.2500 | 0 5 6          | 0 x 0.2500 2 x 0.2500 3 x 0.2500
//    5 |      0.2500 | 1 6 7          | 1 x 0.2500 3 x 0.2500 4 x 0.2500
//    6 |      0.2500 | 0 2 7          | 2 x 0.2500 4 x 0.2500 5 x 0.2500
//    7 |      0.2500 | 0 1 3          | 3 x 0.2500 5 x 0.2500 6 x 0.2500
//
// column stochastic yes, row stochastic yes, regular yes
// spectral gap 0.500000
//
// one peer per round, rank 0:
// round 0: self weight 0.5000, sends to 1, receives from 7
// round 1: self weight 0.5000, sends to 2, receives from 6
// round 2: self weight 0.5000, sends to 4, receives from 4
// round 3: self weight 0.5000, sends to 1, receives from 7
