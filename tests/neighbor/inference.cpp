// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include <bluefog/neighbor/inference.hpp>
#include <bluefog/topology.hpp>

#include "collective/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

RANKS_TEST("sources and destinations are inferred from each other", "[neighbor][inference]") {
  const topology::exponential graph(comm.size());
  const auto out = graph.out_neighbors(comm.rank());
  const auto in = graph.in_neighbors(comm.rank());
  require(std::ranges::equal(infer_sources(comm, out), in));
  require(std::ranges::equal(infer_destinations(comm, in), out));

  const topology::star star(comm.size());
  std::vector<int> backwards(star.out_neighbors(comm.rank()).begin(),
                             star.out_neighbors(comm.rank()).end());
  std::ranges::reverse(backwards);
  require(std::ranges::equal(infer_sources(comm, backwards), star.in_neighbors(comm.rank())));
  require(infer_sources(comm, {}).empty(), "nobody sends, nobody receives");
}

RANKS_TEST("an inferred graph averages what every rank gets, whatever the out-degrees",
           "[neighbor][inference]") {
  if (comm.size() != 4) return;
  // In-degrees 2, 1, 2, 1, out-degrees 3, 1, 1, 1.
  const std::vector<std::vector<int>> destinations{{1, 2, 3}, {0}, {0}, {2}};
  const auto graph = infer_adjacency(comm, destinations[static_cast<std::size_t>(comm.rank())]);
  const double third = 1.0 / 3;
  const topology::adjacency wanted{
      {third, 0.5, third, 0.5}, {third, 0.5, 0, 0}, {third, 0, third, 0}, {0, 0, third, 0.5}};
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) require_near(graph.weight(i, j), wanted.weight(i, j), 1e-15);
  require(topology::is_column_stochastic(graph));
}

RANKS_TEST("lists of ranks that break a rule are refused by name", "[neighbor][inference]") {
  const int n = comm.size();
  auto text = require_throws<usage_error>([&] { static_cast<void>(infer_sources(comm, {n})); });
  require_contains(text, concat("infer_sources: destination must be in [0, ", n, "), got ", n));
  text = require_throws<usage_error>(
      [&] { static_cast<void>(infer_destinations(comm, {comm.rank()})); });
  require_contains(text, "infer_destinations: source ");
  require_contains(text, "is this rank itself");
  const int other = (comm.rank() + 1) % n;
  if (n > 1) {
    text = require_throws<usage_error>([&] {
      static_cast<void>(infer_adjacency(comm, {other, other}));
    });
    require_contains(text, "is given twice");
  }
}

RANKS_TEST("inference is control traffic", "[neighbor][inference]") {
  const auto traffic = traffic_of(comm, [&] { static_cast<void>(infer_sources(comm, {})); });
  require_equal(traffic.bytes_sent, 0);
  require_equal(traffic.operations, 1);
}
