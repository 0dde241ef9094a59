// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <map>
#include <numeric>
#include <vector>

#include <bluefog/topology.hpp>

#include "support/catch.hpp"
#include "topology/support.hpp"

using namespace bluefog::topology;
using bluefog_test::all_of_round;

namespace {

const double pi = std::acos(-1.0);

double radius(const graph auto& graph) {
  return 1 - spectral_gap(graph);
}

/// ||x_k - mean|| / ||x_0 - mean|| after k rounds from x_i = i.
double decay(const schedule auto& schedule, int rounds) {
  std::vector<double> x(static_cast<std::size_t>(schedule.size()));
  std::iota(x.begin(), x.end(), 0.0);
  const double mean = (static_cast<double>(x.size()) - 1) / 2;
  const auto distance = [&] {
    double sum = 0;
    for (const double value : x) sum += (value - mean) * (value - mean);
    return std::sqrt(sum);
  };
  const double before = distance();
  for (int k = 0; k < rounds; ++k) x = bluefog_test::mix(all_of_round(schedule, k), x);
  return distance() / before;
}

}  // namespace

TEST_CASE("spectral radii are those of the table", "[topology][spectral_gap]") {
  struct row {
    int n;
    double exponential, both_ways, one_way, grid, star, symmetric;
  };
  const std::array table{
      row{4, 1. / 3, .3333333, .7071068, .3333333, .75, .3333333},
      row{5, .25, .5393447, .8090170, .8726780, .8, .5393447},
      row{7, .3535534, .7489932, .9009689, .9339792, .8571429, .7489932},
      row{8, .5, .8047379, .9238795, .8535534, .875, .5},
      row{12, .6, .9106836, .9659258, .8635827, .9166667, .6},
      row{16, .6, .9492530, .9807853, .8686406, .9375, .6},
      row{32, 2. / 3, .9871902, .9951847, .9657783, .96875, 2. / 3},
      row{64, 5. / 7, .9967898, .9987955, .9677046, .984375, 5. / 7},
  };
  for (const auto& expected : table) {
    const int n = expected.n;
    CAPTURE(n);
    CHECK(radius(exponential(n)) == Approx(expected.exponential).margin(6e-8));
    CHECK(radius(ring(n)) == Approx(expected.both_ways).margin(6e-8));
    CHECK(radius(ring(n, ring_style::left)) == Approx(expected.one_way).margin(6e-8));
    CHECK(radius(ring(n, ring_style::right)) == Approx(expected.one_way).margin(6e-8));
    CHECK(radius(mesh_grid_2d(n)) == Approx(expected.grid).margin(6e-8));
    CHECK(radius(star(n)) == Approx(expected.star).margin(6e-8));
    CHECK(radius(symmetric_exponential(n)) == Approx(expected.symmetric).margin(6e-8));
    CHECK(radius(fully_connected(n)) == 0);
  }
  CHECK(radius(exponential(1024)) == Approx(9. / 11).margin(1e-9));
  CHECK(radius(ring(1024)) == Approx(.9999875).margin(6e-8));
  CHECK(radius(ring(1024, ring_style::left)) == Approx(.9999953).margin(6e-8));
  CHECK(radius(symmetric_exponential(1024)) == Approx(9. / 11).margin(1e-9));
}

TEST_CASE("spectral radii of other bases", "[topology][spectral_gap]") {
  CHECK(radius(exponential(8, 3)) == Approx(.577350).margin(5e-7));
  CHECK(radius(exponential(64, 3)) == Approx(.688745).margin(5e-7));
  CHECK(radius(exponential(4, 4)) == Approx(.707107).margin(5e-7));
  CHECK(radius(exponential(8, 4)) == Approx(.745356).margin(5e-7));
  CHECK(radius(exponential(64, 4)) == Approx(.818284).margin(5e-7));
  CHECK(radius(symmetric_exponential(8, 2)) == Approx(1. / 3).margin(1e-9));
}

TEST_CASE("spectral radii meet their closed forms", "[topology][spectral_gap]") {
  for (int n = 2; n <= 256; ++n) {
    CAPTURE(n);
    const int degree = exponential(n).degree();
    if (n % 2 == 0) {
      CHECK(radius(exponential(n)) == Approx(1 - 2.0 / (1 + degree)).margin(1e-9));
    } else {
      CHECK(radius(exponential(n)) < 1 - 2.0 / (1 + degree) - 0.08);
    }
    if (n >= 4) CHECK(radius(ring(n)) == Approx((1 + 2 * std::cos(2 * pi / n)) / 3).margin(1e-9));
    CHECK(radius(ring(n, ring_style::left)) == Approx(std::cos(pi / n)).margin(1e-9));
    if (n >= 3 && n <= 64) CHECK(radius(star(n, n / 2)) == Approx(1 - 1.0 / n).margin(1e-9));
  }
  CHECK(radius(star(512)) == Approx(1 - 1.0 / 512).margin(1e-9));
}

TEST_CASE("the dense way and the Fourier way agree", "[topology][spectral_gap]") {
  for (int n = 2; n <= 64; ++n) {
    CAPTURE(n);
    CHECK(spectral_gap(adjacency(exponential(n))) ==
          Approx(spectral_gap(exponential(n))).margin(1e-9));
    CHECK(spectral_gap(adjacency(exponential(n, 3))) ==
          Approx(spectral_gap(exponential(n, 3))).margin(1e-9));
    CHECK(spectral_gap(adjacency(ring(n, ring_style::left))) ==
          Approx(spectral_gap(ring(n, ring_style::left))).margin(1e-9));
    CHECK(spectral_gap(adjacency(fully_connected(n))) == Approx(1).margin(1e-9));
    // Eigenvalues that coincide many times over are the hard case.
    for (const int offset : {n / 3, n / 2})
      CHECK(spectral_gap(adjacency(shift(n, offset))) ==
            Approx(spectral_gap(shift(n, offset))).margin(1e-9));
  }
}

TEST_CASE("the gap of a directed graph that is only row stochastic", "[topology][spectral_gap]") {
  // The cycle with self-loops and one more edge, 0 -> n/2; each sender splits evenly.
  const auto extended_cycle = [](int n) {
    std::vector<directed_edge> edges{{0, n / 2}};
    for (int rank = 0; rank < n; ++rank) edges.push_back({rank, (rank + 1) % n});
    return adjacency(n, edges, {.weights = weighting::uniform, .check = stochasticity::row});
  };
  CHECK(radius(extended_cycle(4)) == Approx(0.571521329861).margin(1e-9));
  CHECK(radius(extended_cycle(8)) == Approx(0.837307168944).margin(1e-9));
}

TEST_CASE("ranks that do not reach each other have no gap", "[topology][spectral_gap]") {
  CHECK(spectral_gap(adjacency({{1, 0}, {0, 1}})) == Approx(0).margin(1e-12));
  CHECK(spectral_gap(shift(6, 0)) == Approx(0).margin(1e-12));
  CHECK(spectral_gap(shift(6, 2)) == Approx(0).margin(1e-12));
  CHECK(spectral_gap(adjacency({{0, 1}, {1, 0}})) == Approx(0).margin(1e-12));
  CHECK(spectral_gap(exponential(1)) == 1);
  CHECK(spectral_gap(star(1)) == 1);
}

TEST_CASE("the dense way ends at 512 ranks", "[topology][spectral_gap]") {
  CHECK_THROWS_WITH(spectral_gap(star(513)),
                    bluefog_test::ContainsSubstring("at most 512 ranks, got 513"));
  CHECK_NOTHROW(spectral_gap(exponential(4096)));
  CHECK_NOTHROW(spectral_gap(fully_connected(4096)));
}

TEST_CASE("consensus decays as in the table", "[topology][spectral_gap]") {
  const std::map<int, std::array<double, 5>> eight{
      {1, {6.7062318014e-1, 5.5694271266e-1, 7.1443450831e-1, 4.2257712736e-1, 8.1649658093e-1}},
      {2, {5.2509062514e-1, 3.8880620814e-1, 6.2513019477e-1, 1.8898223650e-1, 5.3452248382e-1}},
      {3, {4.2065987747e-1, 3.1034822408e-1, 5.4698892043e-1, 8.6258194918e-2, 0}},
      {4, {3.3826130599e-1, 2.6002720145e-1, 4.7861530537e-1, 3.9763063143e-2, 0}},
      {8, {1.4184080733e-1, 1.3713196926e-1, 2.8055550493e-1, 1.8798148686e-3, 0}},
      {16, {2.4948048506e-2, 3.8634247134e-2, 9.6401372873e-2, 4.8069419763e-6, 0}},
      {32, {7.7180479016e-4, 3.0666451314e-3, 1.1381829280e-2, 5.2948621783e-11, 0}}};
  for (const auto& [k, expected] : eight) {
    CAPTURE(k);
    CHECK(decay(repeat(ring(8)), k) == Approx(expected[0]).epsilon(1e-9));
    CHECK(decay(repeat(mesh_grid_2d(8)), k) == Approx(expected[1]).epsilon(1e-9));
    CHECK(decay(repeat(star(8)), k) == Approx(expected[2]).epsilon(1e-9));
    CHECK(decay(repeat(exponential(8)), k) == Approx(expected[3]).epsilon(1e-9).margin(1e-15));
    CHECK(decay(one_peer_exponential(8), k) == Approx(expected[4]).epsilon(1e-9));
  }
  const std::map<int, std::array<double, 3>> sixteen{
      {1, {8.3470475388e-1, 4.8166378315e-1, 9.0748521297e-1}},
      {2, {7.6116716553e-1, 2.4806071363e-1, 7.6696498885e-1}},
      {3, {7.0654169158e-1, 1.2939533586e-1, 5.0874701907e-1}},
      {4, {6.6100639136e-1, 6.7913522867e-2, 0}},
      {8, {5.2314075148e-1, 5.3794395755e-3, 0}},
      {16, {3.4195375164e-1, 4.3451716761e-5, 0}},
      {32, {1.4852340002e-1, 8.7146852470e-9, 0}}};
  for (const auto& [k, expected] : sixteen) {
    CAPTURE(k);
    CHECK(decay(repeat(ring(16)), k) == Approx(expected[0]).epsilon(1e-9));
    CHECK(decay(repeat(exponential(16)), k) == Approx(expected[1]).epsilon(1e-9).margin(1e-15));
    CHECK(decay(one_peer_exponential(16), k) == Approx(expected[2]).epsilon(1e-9));
  }
  CHECK(decay(one_peer_exponential(12), 4) == Approx(1.7239570679e-1).epsilon(1e-9));
  CHECK(decay(one_peer_exponential(12), 8) == Approx(3.4962986172e-2).epsilon(1e-9));
  CHECK(decay(one_peer_exponential(12), 16) == Approx(1.5148527400e-3).epsilon(1e-9));
  CHECK(decay(one_peer_exponential(12), 32) == Approx(2.8955313392e-6).epsilon(1e-9));
}

TEST_CASE("the eigenvalues of a symmetric graph lie between those of the table",
          "[topology][spectral_gap]") {
  CHECK(symmetric_spectrum(mesh_grid_2d(16)).smallest == Approx(-0.430843).margin(6e-7));
  CHECK(symmetric_spectrum(mesh_grid_2d(9)).smallest == Approx(-0.316228).margin(6e-7));
  CHECK(symmetric_spectrum(symmetric_exponential(16)).smallest == Approx(-0.482843).margin(6e-7));
  CHECK(symmetric_spectrum(star(8)).largest == Approx(1 - 1. / 8).margin(1e-9));
  for (const int n : {1, 2, 7, 40}) {
    CHECK(symmetric_spectrum(fully_connected(n)).smallest == Approx(0).margin(1e-9));
    CHECK(symmetric_spectrum(fully_connected(n)).largest == Approx(0).margin(1e-9));
  }
  for (const int n : {3, 4, 5, 8, 31, 64}) {
    double smallest = 1, largest = -1;
    for (int k = 1; k < n; ++k) {
      const double value = (1 + 2 * std::cos(2 * pi * k / n)) / 3;
      smallest = std::min(smallest, value);
      largest = std::max(largest, value);
    }
    CHECK(symmetric_spectrum(ring(n)).smallest == Approx(smallest).margin(1e-9));
    CHECK(symmetric_spectrum(ring(n)).largest == Approx(largest).margin(1e-9));
    CHECK(symmetric_spectrum(adjacency(ring(n))).smallest == Approx(smallest).margin(1e-9));
    CHECK(symmetric_spectrum(adjacency(ring(n))).largest == Approx(largest).margin(1e-9));
  }
  const adjacency swap({{0, 1}, {1, 0}});
  CHECK(symmetric_spectrum(swap).smallest == Approx(-1).margin(1e-9));
}

TEST_CASE("a graph is symmetric if every edge goes both ways with one weight",
          "[topology][spectral_gap]") {
  for (const int n : {1, 2, 3, 8}) {
    CHECK(is_symmetric(ring(n)));
    CHECK(is_symmetric(mesh_grid_2d(n)));
    CHECK(is_symmetric(star(n)));
    CHECK(is_symmetric(symmetric_exponential(n)));
    CHECK(is_symmetric(exponential(n)) == (n < 4));
  }
  CHECK_FALSE(is_symmetric(ring(3, ring_style::left)));
  CHECK_THROWS_AS(symmetric_spectrum(exponential(8)), bluefog::usage_error);
}
