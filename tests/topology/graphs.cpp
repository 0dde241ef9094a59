// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <utility>
#include <vector>

#include <bluefog/topology.hpp>

#include "support/catch.hpp"
#include "topology/support.hpp"

using namespace bluefog::topology;
using bluefog::edges;
using bluefog::neighborhood;
using bluefog_test::holds;
using bluefog_test::index;
using bluefog_test::matrix;
using bluefog_test::weights_of;

namespace {

// The worked examples for eight ranks.
static_assert(holds(exponential(8).out_neighbors(0), {1, 2, 4}));
static_assert(holds(exponential(8).in_neighbors(0), {4, 6, 7}));
static_assert(holds(exponential(8).in_neighbors(3), {1, 2, 7}));
static_assert(neighborhood_of(exponential(8), 0) ==
              neighborhood{.self_weight = 0.25,
                           .sources = {{4, 0.25}, {6, 0.25}, {7, 0.25}},
                           .destinations = {{1}, {2}, {4}}});
static_assert(holds(exponential(8, 3).out_neighbors(0), {1, 3}));
static_assert(holds(exponential(8, 3).in_neighbors(0), {5, 7}));
static_assert(holds(exponential(8, 3).in_neighbors(3), {0, 2}));
static_assert(exponential(8, 3).weight(0, 3) == 1.0 / 3);
static_assert(holds(symmetric_exponential(8).out_neighbors(0), {1, 4, 7}));
static_assert(holds(symmetric_exponential(8).in_neighbors(0), {1, 4, 7}));
static_assert(holds(symmetric_exponential(8).in_neighbors(3), {2, 4, 7}));
static_assert(symmetric_exponential(8).weight(3, 3) == 0.25);
static_assert(holds(symmetric_exponential(8, 2).out_neighbors(0), {1, 2, 4, 6, 7}));
static_assert(holds(symmetric_exponential(8, 2).in_neighbors(3), {1, 2, 4, 5, 7}));
static_assert(symmetric_exponential(8, 2).weight(0, 7) == 1.0 / 6);
static_assert(mesh_grid_2d(8).rows() == 2 && mesh_grid_2d(8).columns() == 4);
static_assert(holds(mesh_grid_2d(8).out_neighbors(0), {1, 4}));
static_assert(holds(mesh_grid_2d(8).in_neighbors(3), {2, 7}));
static_assert(holds(star(8).out_neighbors(0), {1, 2, 3, 4, 5, 6, 7}));
static_assert(holds(star(8).in_neighbors(3), {0}));
static_assert(star(8).weight(0, 0) == 0.125 && star(8).weight(0, 5) == 0.125);
static_assert(star(8).weight(5, 5) == 0.875 && star(8).weight(5, 6) == 0.0);
static_assert(holds(star(8, 2).out_neighbors(2), {0, 1, 3, 4, 5, 6, 7}));
static_assert(holds(ring(8).out_neighbors(0), {1, 7}));
static_assert(holds(ring(8).in_neighbors(3), {2, 4}));
static_assert(ring(8).weight(7, 0) == 1.0 / 3);
static_assert(holds(ring(8, ring_style::left).out_neighbors(0), {7}));
static_assert(holds(ring(8, ring_style::left).in_neighbors(0), {1}));
static_assert(holds(ring(8, ring_style::left).in_neighbors(3), {4}));
static_assert(holds(ring(8, ring_style::right).out_neighbors(0), {1}));
static_assert(holds(ring(8, ring_style::right).in_neighbors(0), {7}));
static_assert(holds(ring(8, ring_style::right).in_neighbors(3), {2}));
static_assert(ring(8, ring_style::right).weight(7, 0) == 0.5);
static_assert(holds(fully_connected(8).out_neighbors(3), {0, 1, 2, 4, 5, 6, 7}));
static_assert(fully_connected(8).weight(3, 5) == 0.125);

// A circulant graph takes a few words, however many ranks it has, and so do its views.
static_assert(sizeof(exponential) <= 16 && sizeof(symmetric_exponential) <= 16);
constexpr auto kept = exponential(4096).out_neighbors(4095);
static_assert(kept.size() == 12 && kept.front() == 0 && kept.back() == 2047);

/// From the definition: weight(i, j) = x[(j - i) mod n].
matrix circulant_matrix(const std::vector<double>& x) {
  const std::size_t n = x.size();
  matrix w(n, std::vector<double>(n));
  for (std::size_t i = 0; i < n; ++i)
    for (std::size_t j = 0; j < n; ++j) w[i][j] = x[(j + n - i) % n];
  return w;
}

/// The matrix whose offsets 0 and those that `chosen` picks share the weight equally.
matrix uniform_circulant(int n, auto&& chosen) {
  std::vector<double> x(index(n), 0.0);
  x[0] = 1;
  for (int offset = 1; offset < n; ++offset)
    if (chosen(offset)) x[index(offset)] = 1;
  const auto count = static_cast<double>(std::ranges::count(x, 1.0));
  for (double& value : x) value /= count;
  return circulant_matrix(x);
}

/// Whether some ranks of a circulant graph send to, and receive from, just the ranks at these
/// distances, all with the same weight.
bool has_offsets(const auto& graph, const std::vector<int>& offsets) {
  const int n = graph.size();
  const double share = 1.0 / static_cast<double>(offsets.size() + 1);
  bool right = graph.degree() == static_cast<int>(offsets.size());
  for (const int rank : {0, n / 3, n - 1}) {
    std::vector<int> receivers;
    std::vector<int> senders;
    for (const int offset : offsets) {
      receivers.push_back((rank + offset) % n);
      senders.push_back((rank - offset + n) % n);
    }
    right = right && graph.weight(rank, rank) == share;
    if (!offsets.empty())
      right = right && graph.weight(rank, receivers.back()) == share &&
              graph.weight(senders.front(), rank) == share;
    std::ranges::sort(receivers);
    std::ranges::sort(senders);
    right = right && std::ranges::equal(graph.out_neighbors(rank), receivers) &&
            std::ranges::equal(graph.in_neighbors(rank), senders);
  }
  return right;
}

bool is_power(int value, int base) {
  while (value % base == 0) value /= base;
  return value == 1;
}

}  // namespace

TEST_CASE("circulant graphs have the matrices of their definition", "[topology][graphs]") {
  for (int n = 1; n <= 64; ++n) {
    CAPTURE(n);
    for (int base : {2, 3, 4, 7, 10}) {
      CAPTURE(base);
      CHECK(weights_of(exponential(n, base)) ==
            uniform_circulant(n, [&](int o) { return is_power(o, base); }));
      CHECK(weights_of(symmetric_exponential(n, base)) ==
            uniform_circulant(n, [&](int o) { return is_power(o <= n / 2 ? o : n - o, base); }));
    }
    CHECK(weights_of(ring(n)) == uniform_circulant(n, [&](int o) { return o == 1 || o == n - 1; }));
    CHECK(weights_of(ring(n, ring_style::left)) ==
          uniform_circulant(n, [&](int o) { return o == n - 1; }));
    CHECK(weights_of(ring(n, ring_style::right)) ==
          uniform_circulant(n, [&](int o) { return o == 1; }));
    CHECK(weights_of(fully_connected(n)) == uniform_circulant(n, [](int) { return true; }));
  }
}

TEST_CASE("the exponential graph is right for every size up to 4096", "[topology][graphs]") {
  for (const int base : {2, 3, 7})
    for (int n = 1; n <= 4096; ++n) {
      std::vector<int> powers;
      for (int offset = 1; offset < n; offset *= base) powers.push_back(offset);
      if (!has_offsets(exponential(n, base), powers))
        FAIL_CHECK("exponential, base " << base << ", " << n << " ranks");
    }
}

TEST_CASE("the symmetric exponential graph is right for every size up to 4096",
          "[topology][graphs]") {
  CHECK(symmetric_exponential(4096) == symmetric_exponential(4096, 4));
  for (const int base : {4, 3, 7})
    for (int n = 1; n <= 4096; ++n) {
      std::vector<int> both_ways;  // powers, as far as half way around
      for (int offset = 1; 2 * offset <= n; offset *= base) both_ways.push_back(offset);
      for (int offset = 1; 2 * offset < n; offset *= base) both_ways.push_back(n - offset);
      std::ranges::sort(both_ways);
      if (!has_offsets(symmetric_exponential(n, base), both_ways))
        FAIL_CHECK("symmetric_exponential, base " << base << ", " << n << " ranks");
    }
}

TEST_CASE("rings are right for every size up to 4096", "[topology][graphs]") {
  if (!has_offsets(ring(2), {1})) FAIL_CHECK("ring, 2 ranks");
  for (int n = 3; n <= 4096; ++n)
    if (!has_offsets(ring(n), {1, n - 1}) || !has_offsets(ring(n, ring_style::left), {n - 1}) ||
        !has_offsets(ring(n, ring_style::right), {1}))
      FAIL_CHECK("ring, " << n << " ranks");
}

TEST_CASE("the star is right for every size up to 4096", "[topology][graphs]") {
  for (int n = 2; n <= 4096; ++n) {
    const int center = n / 3;
    const star graph(n, center);
    const auto leaves = graph.out_neighbors(center);
    const double share = 1.0 / n;
    bool right = static_cast<int>(leaves.size()) == n - 1 &&
                 static_cast<int>(graph.in_neighbors(center).size()) == n - 1 &&
                 graph.weight(center, center) == share;
    for (const int rank : {0, center - 1, center + 1, n / 2, n - 1}) {
      if (rank < 0 || rank == center || rank >= n) continue;
      const int place = rank < center ? rank : rank - 1;  // all ranks in order but the center
      right = right && leaves[place] == rank && graph.in_neighbors(center)[place] == rank &&
              holds(graph.out_neighbors(rank), {center}) &&
              holds(graph.in_neighbors(rank), {center}) && graph.weight(rank, center) == share &&
              graph.weight(center, rank) == share && graph.weight(rank, rank) == 1 - share;
    }
    if (!right) FAIL_CHECK("star, " << n << " ranks");
  }
}

TEST_CASE("the grid is right for every size up to 4096", "[topology][graphs]") {
  for (int n = 1; n <= 4096; ++n) {
    int rows = 1;
    while ((rows + 1) * (rows + 1) <= n) ++rows;
    while (n % rows != 0) --rows;
    const int columns = n / rows;
    const mesh_grid_2d graph(n);
    // The ranks next to one, as places in the grid.
    const auto around = [&](int rank) {
      std::vector<int> near;
      for (const auto& [down, right] :
           std::initializer_list<std::pair<int, int>>{{-1, 0}, {0, -1}, {0, 1}, {1, 0}}) {
        const int row = rank / columns + down;
        const int column = rank % columns + right;
        if (row >= 0 && row < rows && column >= 0 && column < columns)
          near.push_back(row * columns + column);
      }
      return near;
    };
    bool right = graph.rows() == rows && graph.columns() == columns;
    for (const int rank : {0, n / 3, n - 1}) {
      const auto near = around(rank);
      double kept_weight = 1;
      right = right && std::ranges::equal(graph.out_neighbors(rank), near) &&
              std::ranges::equal(graph.in_neighbors(rank), near);
      for (const int other : near) {
        const double share =
            1.0 / static_cast<double>(1 + std::max(near.size(), around(other).size()));
        right = right && graph.weight(rank, other) == share;
        kept_weight -= share;
      }
      right = right && std::abs(graph.weight(rank, rank) - kept_weight) < 1e-15;
    }
    if (!right) FAIL_CHECK("mesh_grid_2d, " << n << " ranks");
  }
}

TEST_CASE("powers are recognised in whole numbers", "[topology][graphs]") {
  // Logarithms in floating point miss these.
  CHECK(exponential(244, 3).weight(0, 243) > 0);
  CHECK(exponential(59050, 3).weight(0, 59049) > 0);
  CHECK(exponential(59050, 9).weight(0, 59049) > 0);
  CHECK(exponential(1001, 10).weight(0, 1000) > 0);
  CHECK(exponential(2147483647).degree() == 31);
  CHECK(exponential(2147483647).out_neighbors(2147483646)[30] == 1073741823);
}

TEST_CASE("the grid has Metropolis-Hastings weights", "[topology][graphs]") {
  const double q = 0.25;
  const double t = 1.0 / 3;
  const double s = 5.0 / 12;
  const matrix expected{{s, q, 0, 0, t, 0, 0, 0}, {q, q, q, 0, 0, q, 0, 0},
                        {0, q, q, q, 0, 0, q, 0}, {0, 0, q, s, 0, 0, 0, t},
                        {t, 0, 0, 0, s, q, 0, 0}, {0, q, 0, 0, q, q, q, 0},
                        {0, 0, q, 0, 0, q, q, q}, {0, 0, 0, t, 0, 0, q, s}};
  const auto actual = weights_of(mesh_grid_2d(2, 4));
  for (std::size_t i = 0; i < 8; ++i)
    for (std::size_t j = 0; j < 8; ++j) CHECK(actual[i][j] == Approx(expected[i][j]).margin(1e-15));

  CHECK(mesh_grid_2d(8) == mesh_grid_2d(2, 4));
  CHECK(mesh_grid_2d(7) == mesh_grid_2d(1, 7));
  CHECK(mesh_grid_2d(36) == mesh_grid_2d(6, 6));
  CHECK(mesh_grid_2d(4096) == mesh_grid_2d(64, 64));

  CHECK(mesh_grid_2d(3).weight(0, 0) == Approx(2.0 / 3));
  CHECK(mesh_grid_2d(3).weight(1, 1) == Approx(1.0 / 3));
  CHECK(mesh_grid_2d(5).weight(2, 3) == Approx(1.0 / 3));
}

TEST_CASE("the grid recomputed from its definition", "[topology][graphs]") {
  for (int rows = 1; rows <= 6; ++rows) {
    for (int columns = 1; columns <= 6; ++columns) {
      const mesh_grid_2d graph(rows, columns);
      const int n = rows * columns;
      const auto near = [&](int a, int b) {
        return std::abs(a / columns - b / columns) + std::abs(a % columns - b % columns) == 1;
      };
      const auto degree = [&](int a) {
        int count = 1;
        for (int b = 0; b < n; ++b) count += near(a, b) ? 1 : 0;
        return count;
      };
      for (int i = 0; i < n; ++i) {
        double kept_weight = 1;
        for (int j = 0; j < n; ++j) {
          const double expected = near(i, j) ? 1.0 / std::max(degree(i), degree(j)) : 0.0;
          if (i != j) CHECK(graph.weight(i, j) == expected);
          kept_weight -= expected;
        }
        CHECK(graph.weight(i, i) == Approx(kept_weight).margin(1e-15));
      }
    }
  }
}

TEST_CASE("small graphs are what they degenerate to", "[topology][graphs]") {
  bluefog_test::for_each_graph(1, [](const auto& graph) {
    CHECK(weights_of(graph) == matrix{{1.0}});
    CHECK(graph.out_neighbors(0).empty());
  });
  const matrix halves{{0.5, 0.5}, {0.5, 0.5}};
  CHECK(weights_of(exponential(2)) == halves);
  CHECK(weights_of(symmetric_exponential(2)) == halves);
  CHECK(weights_of(mesh_grid_2d(2)) == halves);
  CHECK(weights_of(star(2)) == halves);
  CHECK(weights_of(star(2, 1)) == halves);
  CHECK(weights_of(ring(2)) == halves);
  CHECK(weights_of(ring(2, ring_style::left)) == halves);
  CHECK(weights_of(ring(2, ring_style::right)) == halves);
  CHECK(weights_of(fully_connected(2)) == halves);
  const double t = 1.0 / 3;
  CHECK(weights_of(exponential(3)) == matrix{{t, t, t}, {t, t, t}, {t, t, t}});
  CHECK(weights_of(star(3)) == matrix{{t, t, t}, {t, 1 - t, 0}, {t, 0, 1 - t}});
  CHECK(exponential(5).degree() == 3);
  CHECK(holds(exponential(4).out_neighbors(0), {1, 2}));
}

TEST_CASE("graphs refuse what makes no sense", "[topology][graphs]") {
  using bluefog::usage_error;
  using bluefog_test::ContainsSubstring;
  CHECK_THROWS_WITH(exponential(0), ContainsSubstring("exponential: size must be at least 1"));
  CHECK_THROWS_WITH(exponential(4, 1), ContainsSubstring("base must be at least 2, got 1"));
  CHECK_THROWS_AS(symmetric_exponential(-1), usage_error);
  CHECK_THROWS_AS(symmetric_exponential(4, 0), usage_error);
  CHECK_THROWS_AS(ring(0), usage_error);
  CHECK_THROWS_WITH(ring(4, static_cast<ring_style>(7)), ContainsSubstring("got number 7"));
  CHECK_THROWS_AS(star(0), usage_error);
  CHECK_THROWS_WITH(star(4, 4), ContainsSubstring("star, center: rank must be in [0, 4), got 4"));
  CHECK_THROWS_AS(mesh_grid_2d(0), usage_error);
  CHECK_THROWS_AS(mesh_grid_2d(0, 3), usage_error);
  CHECK_THROWS_AS(mesh_grid_2d(65536, 65536), usage_error);
  CHECK_THROWS_AS(fully_connected(0), usage_error);
  CHECK_THROWS_AS(shift(4, 4), usage_error);

  bluefog_test::for_each_graph(6, [](const auto& graph) {
    CHECK_THROWS_AS(graph.out_neighbors(6), usage_error);
    CHECK_THROWS_AS(graph.in_neighbors(-1), usage_error);
    CHECK_THROWS_AS(graph.weight(0, 6), usage_error);
    CHECK_THROWS_WITH(neighborhood_of(graph, 6),
                      ContainsSubstring("neighborhood_of: rank must be in [0, 6), got 6"));
  });
}

TEST_CASE("graphs are regular values", "[topology][graphs]") {
  CHECK(exponential(8) == exponential(8));
  CHECK(exponential(8) != exponential(9));
  CHECK(exponential(8) != exponential(8, 3));
  CHECK(ring(8) != ring(8, ring_style::left));
  CHECK(star(8) != star(8, 1));
  CHECK(exponential() == exponential(1));
  CHECK(adjacency(star(5)) == adjacency(star(5)));
  CHECK(adjacency(star(5)) != adjacency(star(6)));
}
