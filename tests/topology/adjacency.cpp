// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <list>
#include <ranges>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <bluefog/topology.hpp>

#include "support/catch.hpp"
#include "topology/support.hpp"

using namespace bluefog::topology;
using bluefog::usage_error;
using bluefog_test::ContainsSubstring;
using bluefog_test::holds;
using bluefog_test::weights_of;

namespace {

static_assert(adjacency({{0.5, 0.5}, {0.5, 0.5}}).weight(0, 1) == 0.5);
static_assert(holds(adjacency(star(5, 2)).out_neighbors(2), {0, 1, 3, 4}));
static_assert(is_equivalent(adjacency(exponential(8)), exponential(8)));

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

adjacency read(const std::string& text, adjacency_options options = {}) {
  std::istringstream stream(text);
  return read_adjacency(stream, "graph.txt", options);
}

}  // namespace

TEST_CASE("adjacency takes a matrix of any shape of range", "[topology][adjacency]") {
  const std::vector<std::vector<double>> rows{{0.5, 0.25, 0}, {0.5, 0.25, 1}, {0, 0.5, 0}};
  const adjacency graph(rows);
  CHECK(weights_of(graph) == rows);
  CHECK(holds(graph.out_neighbors(0), {1}));
  CHECK(holds(graph.out_neighbors(1), {0, 2}));
  CHECK(holds(graph.in_neighbors(1), {0, 2}));
  CHECK(holds(graph.in_neighbors(2), {1}));

  const std::array<std::array<float, 2>, 2> halves{{{0.5F, 0.5F}, {0.5F, 0.5F}}};
  CHECK(is_equivalent(adjacency(halves), exponential(2)));
  CHECK(adjacency(std::list<std::vector<int>>{{1}}).size() == 1);
}

TEST_CASE("adjacency takes weighted edges in any order", "[topology][adjacency]") {
  const adjacency graph(
      3, {{2, 1, 0.5}, {0, 0, 0.5}, {1, 0, 0.5}, {0, 1, 0.25}, {1, 1, 0.25}, {1, 2, 1.0}});
  CHECK(weights_of(graph) == bluefog_test::matrix{{0.5, 0.25, 0}, {0.5, 0.25, 1}, {0, 0.5, 0}});

  auto made = std::views::iota(0, 5) | std::views::transform([](int rank) {
                return directed_edge{rank, (rank + 1) % 5};
              }) |
              std::views::filter([](const directed_edge&) { return true; });
  CHECK(is_equivalent(adjacency(5, made, {.weights = weighting::uniform}),
                      ring(5, ring_style::right)));
}

TEST_CASE("uniform weights follow the degree of who must sum to one", "[topology][adjacency]") {
  // Rank 0 sends to all, 1 and 2 to rank 0, 3 to rank 2.
  const std::vector<directed_edge> edges{{0, 1}, {0, 2}, {0, 3}, {1, 0}, {2, 0}, {3, 2}};
  const adjacency receiving(4, edges, {.weights = weighting::uniform});
  CHECK(is_column_stochastic(receiving));
  CHECK_FALSE(is_row_stochastic(receiving));
  CHECK(receiving.weight(1, 0) == 1.0 / 3);
  CHECK(receiving.weight(3, 3) == 0.5);

  const adjacency sending(4, edges, {.weights = weighting::uniform, .check = stochasticity::row});
  CHECK(is_row_stochastic(sending));
  CHECK_FALSE(is_column_stochastic(sending));
  CHECK(sending.weight(0, 3) == 0.25);
  CHECK(sending.weight(3, 2) == 0.5);
}

TEST_CASE("Metropolis-Hastings weights make any undirected graph doubly stochastic",
          "[topology][adjacency]") {
  const mesh_grid_2d grid(3, 5);
  std::vector<directed_edge> edges;
  for (const auto edge : grid.edges()) edges.push_back({edge.source, edge.destination});
  const adjacency same(15, edges, {.weights = weighting::metropolis_hastings});
  for (int i = 0; i < 15; ++i)
    for (int j = 0; j < 15; ++j)
      CHECK(same.weight(i, j) == Approx(grid.weight(i, j)).margin(1e-15));

  const adjacency wheel(
      5, {{0, 1}, {1, 0}, {0, 2}, {2, 0}, {0, 3}, {3, 0}, {1, 2}, {2, 1}, {3, 4}, {4, 3}},
      {.weights = weighting::metropolis_hastings, .check = stochasticity::doubly});
  CHECK(wheel.weight(0, 1) == 0.25);
  CHECK(wheel.weight(3, 4) == 1.0 / 3);
  CHECK_THROWS_WITH(
      adjacency(3, {{0, 1}, {1, 0}, {1, 2}}, {.weights = weighting::metropolis_hastings}),
      ContainsSubstring("got (1, 2) without (2, 1)"));
}

TEST_CASE("a refused graph is told by its entry", "[topology][adjacency]") {
  CHECK_THROWS_WITH(adjacency({{1.5, 0.5}, {-0.5, 0.5}}),
                    ContainsSubstring("weight(1, 0) must be finite and not negative, got -0.5"));
  CHECK_THROWS_WITH(adjacency({{1, not_a_number}, {0, 1}}),
                    ContainsSubstring("weight(0, 1) must be finite and not negative, got nan"));
  CHECK_THROWS_WITH(adjacency({{1, 0}, {0, infinity}}), ContainsSubstring("weight(1, 1)"));
  CHECK_THROWS_WITH(adjacency({{0.5, 0.5}, {0.4, 0.5}}),
                    ContainsSubstring("rank 0 receives (column 0) must sum to 1, got 0.9"));
  CHECK_THROWS_WITH(adjacency({{1, 0, 0}, {0, 1}, {0, 0, 1}}),
                    ContainsSubstring("row 1 must have 3 entries, got 2"));
  CHECK_THROWS_WITH(adjacency({{1, 0}, {0, 1, 0}}),
                    ContainsSubstring("row 1 must have 2 entries, got 3"));
  CHECK_THROWS_WITH(adjacency(std::vector<std::vector<double>>{}),
                    ContainsSubstring("size must be at least 1"));
  CHECK_THROWS_WITH(adjacency(3, {{0, 3, 1.0}}),
                    ContainsSubstring("ranks must be in [0, 3), got edge (0, 3)"));
  CHECK_THROWS_WITH(adjacency(3, {{-1, 0, 1.0}}), ContainsSubstring("got edge (-1, 0)"));
  CHECK_THROWS_WITH(adjacency(3, {{0, 1}, {1, 2}, {0, 1}}, {.weights = weighting::uniform}),
                    ContainsSubstring("edge (0, 1) must be given once, got it twice"));
  CHECK_THROWS_AS(adjacency(0, std::vector<directed_edge>{}), usage_error);
  CHECK_THROWS_AS(adjacency({{0.5, 0.5}, {0.4, 0.5}}), usage_error);
}

TEST_CASE("a graph is checked for the sums that are asked for", "[topology][adjacency]") {
  const std::vector<std::vector<double>> by_column{{0.5, 0.2}, {0.5, 0.8}};
  const std::vector<std::vector<double>> by_row{{0.5, 0.5}, {0.2, 0.8}};
  CHECK_NOTHROW(adjacency(by_column));
  CHECK_THROWS_WITH(adjacency(by_column, {.check = stochasticity::row}),
                    ContainsSubstring("rank 0 sends (row 0) must sum to 1, got 0.7"));
  CHECK_THROWS_AS(adjacency(by_column, {.check = stochasticity::doubly}), usage_error);
  CHECK_THROWS_AS(adjacency(by_row), usage_error);
  CHECK_NOTHROW(adjacency(by_row, {.check = stochasticity::row}));
  CHECK_NOTHROW(adjacency({{0, 7}, {3, 0}}, {.check = stochasticity::none}));
  CHECK_NOTHROW(adjacency({{1.0 / 3, 2.0 / 3}, {2.0 / 3, 1.0 / 3}}));
}

TEST_CASE("a graph is read from text", "[topology][adjacency]") {
  const auto graph = read(
      "# three ranks\n"
      "3\n"
      "\n"
      "0 0 0.5   # what rank 0 keeps\n"
      "1 0 0.5\n"
      "0 1 0.25\n"
      "1\t1\t0.25\r\n"
      "2 1 5e-1\n"
      "1 2 1");
  CHECK(weights_of(graph) == bluefog_test::matrix{{0.5, 0.25, 0}, {0.5, 0.25, 1}, {0, 0.5, 0}});
  CHECK(is_equivalent(read("2\n0 1\n1 0\n", {.weights = weighting::uniform}), ring(2)));
}

TEST_CASE("refused text is told by its line", "[topology][adjacency]") {
  CHECK_THROWS_WITH(read(""), ContainsSubstring("graph.txt: must hold the number of ranks"));
  CHECK_THROWS_WITH(read("0 1 0.5\n"), ContainsSubstring("graph.txt:1: the first line"));
  CHECK_THROWS_WITH(read("-3\n"), ContainsSubstring("graph.txt:1: the first line"));
  CHECK_THROWS_WITH(read("2\n0 1 half\n"), ContainsSubstring("graph.txt:2"));
  CHECK_THROWS_WITH(read("2\n\n0 1\n"), ContainsSubstring("graph.txt:3"));
  CHECK_THROWS_WITH(read("2\n0 1 0.5 7\n"), ContainsSubstring("got \"0 1 0.5 7\""));
  CHECK_THROWS_WITH(read("2\n0 1.5 0.5\n"), ContainsSubstring("graph.txt:2"));
  CHECK_THROWS_WITH(read("2\n0 0 1\n1 1 nan\n"),
                    ContainsSubstring("graph.txt: adjacency: weight(1, 1)"));
  CHECK_THROWS_WITH(read("2\n0 5 1\n"), ContainsSubstring("got edge (0, 5)"));
  CHECK_THROWS_WITH(read_adjacency(std::filesystem::path("no/such/file")),
                    ContainsSubstring("file must be readable, got no/such/file"));
}

TEST_CASE("a graph is read from a file", "[topology][adjacency]") {
  const auto file = std::filesystem::temp_directory_path() / "bluefog_adjacency_test.txt";
  std::ofstream(file) << "3\n0 1\n1 2\n2 0\n";
  CHECK(is_equivalent(read_adjacency(file, {.weights = weighting::uniform}),
                      ring(3, ring_style::right)));
  std::filesystem::remove(file);
}

TEST_CASE("copies share what they hold, in several threads too", "[topology][adjacency]") {
  const adjacency original(mesh_grid_2d(16));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&original] {
      for (int i = 0; i < 1000; ++i) {
        const adjacency copy = original;
        const auto neighbors = copy.out_neighbors(i % 16);
        if (neighbors.data() != original.out_neighbors(i % 16).data()) std::abort();
      }
    });
  for (auto& thread : threads) thread.join();

  adjacency moved = original;
  const adjacency target = std::move(moved);
  CHECK(target == original);
  moved = target;
  CHECK(moved == original);
}

TEST_CASE("a graph of 4096 ranks takes memory by its edges", "[topology][adjacency]") {
  const adjacency graph{exponential(4096)};
  CHECK(std::ranges::distance(graph.edges()) == 4096 * 12);
  CHECK(holds(graph.out_neighbors(0), {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048}));
  CHECK(is_doubly_stochastic(graph));
}
