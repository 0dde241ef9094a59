// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <vector>

#include <bluefog/topology.hpp>

#include "support/catch.hpp"
#include "topology/support.hpp"

using namespace bluefog::topology;

namespace {

static_assert(is_doubly_stochastic(exponential(8)) && is_regular(exponential(8)));
static_assert(is_doubly_stochastic(mesh_grid_2d(8)) && !is_regular(mesh_grid_2d(8)));
static_assert(is_doubly_stochastic(star(8)) && !is_regular(star(8)));
static_assert(is_regular(exponential(8, 3)) && is_regular(symmetric_exponential(8)) &&
              is_regular(ring(8)) && is_regular(ring(8, ring_style::left)) &&
              is_regular(fully_connected(8)));
static_assert(is_equivalent(exponential(4), exponential(4, 2)));
static_assert(is_equivalent(ring(3), fully_connected(3)));
static_assert(!is_equivalent(ring(4), fully_connected(4)));
static_assert(!is_equivalent(ring(4), ring(5)));
static_assert(is_equivalent(one_peer_exponential(8).round(0), ring(8, ring_style::right)));

}  // namespace

TEST_CASE("stochasticity is told apart by side", "[topology][properties]") {
  const adjacency by_column({{0.5, 0.2}, {0.5, 0.8}});
  CHECK(is_column_stochastic(by_column));
  CHECK_FALSE(is_row_stochastic(by_column));
  CHECK_FALSE(is_doubly_stochastic(by_column));
  const adjacency by_row({{0.5, 0.5}, {0.2, 0.8}}, {.check = stochasticity::row});
  CHECK_FALSE(is_column_stochastic(by_row));
  CHECK(is_row_stochastic(by_row));
  CHECK(is_column_stochastic(one_peer(star(6)).round(0)));
  CHECK_FALSE(is_row_stochastic(one_peer(star(6)).round(0)));
}

TEST_CASE("equivalent means the same weights exactly", "[topology][properties]") {
  const adjacency a({{0.5, 0.5}, {0.5, 0.5}});
  const adjacency b({{0.5, 0.5 + 1e-12}, {0.5, 0.5}});
  CHECK(is_equivalent(a, ring(2)));
  CHECK_FALSE(is_equivalent(a, b));
  CHECK_FALSE(is_equivalent(adjacency({{1, 0}, {0, 1}}), a));
}

TEST_CASE("the weight matrix is that of the weights", "[topology][properties]") {
  for (int n = 1; n <= 12; ++n)
    bluefog_test::for_each_graph(n, [&](const auto& graph) {
      const auto flat = weight_matrix(graph);
      std::vector<double> expected;
      for (const auto& row : bluefog_test::weights_of(graph))
        expected.insert(expected.end(), row.begin(), row.end());
      CHECK(flat == expected);
    });
}

TEST_CASE("a graph is drawn edge by edge", "[topology][dot]") {
  CHECK(to_dot(star(3)) ==
        "digraph topology {\n"
        "  0 [label=\"0\\n0.3333\"];\n"
        "  1 [label=\"1\\n0.6667\"];\n"
        "  2 [label=\"2\\n0.6667\"];\n"
        "  0 -> 1 [label=\"0.3333\"];\n"
        "  0 -> 2 [label=\"0.3333\"];\n"
        "  1 -> 0 [label=\"0.3333\"];\n"
        "  2 -> 0 [label=\"0.3333\"];\n"
        "}\n");
  CHECK(to_dot(ring(2), {.weights = false}) ==
        "digraph topology {\n  0;\n  1;\n  0 -> 1;\n  1 -> 0;\n}\n");
  CHECK(to_dot(adjacency(), {.precision = 2}) == "digraph topology {\n  0 [label=\"0\\n1\"];\n}\n");
}
