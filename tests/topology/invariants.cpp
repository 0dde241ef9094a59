// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <ranges>
#include <type_traits>
#include <vector>

#include <bluefog/topology.hpp>

#include "support/catch.hpp"
#include "topology/support.hpp"

using namespace bluefog::topology;
using bluefog_test::all_of_round;
using bluefog_test::index;

namespace {

/// What every graph promises, asked in every way that it can be asked.
void check_graph(const graph auto& graph) {
  const int n = graph.size();
  std::vector<directed_edge> expected;
  bool agree = true;
  for (int rank = 0; rank < n; ++rank) {
    const auto receivers = graph.out_neighbors(rank);
    const auto senders = graph.in_neighbors(rank);
    agree = agree &&
            std::ranges::adjacent_find(receivers, std::ranges::greater_equal{}) == receivers.end();
    agree =
        agree && std::ranges::adjacent_find(senders, std::ranges::greater_equal{}) == senders.end();
    for (int other = 0; other < n; ++other) {
      const bool sends = std::ranges::find(receivers, other) != receivers.end();
      const auto back = graph.in_neighbors(other);
      agree = agree && sends == (std::ranges::find(back, rank) != back.end());
      agree = agree && !(sends && other == rank);
      if (other != rank) agree = agree && sends == (graph.weight(rank, other) > 0);
      if (sends) expected.push_back({rank, other, graph.weight(rank, other)});
    }

    const auto hood = neighborhood_of(graph, rank);
    agree = agree && hood.self_weight == graph.weight(rank, rank);
    agree = agree && std::ranges::equal(hood.sources, senders, {}, &bluefog::edge::rank);
    agree = agree && std::ranges::equal(hood.destinations, receivers, {}, &bluefog::edge::rank);
    for (const auto& [source, weight] : hood.sources)
      agree = agree && weight == graph.weight(source, rank);
    for (const auto& [destination, weight] : hood.destinations) agree = agree && weight == 1.0;
  }
  CHECK(agree);
  CHECK(std::ranges::equal(graph.edges(), expected));
  CHECK(is_column_stochastic(graph, 1e-13));
}

}  // namespace

TEST_CASE("every graph keeps its promises for 1 to 64 ranks", "[topology][invariants]") {
  for (int n = 1; n <= 64; ++n) {
    CAPTURE(n);
    bluefog_test::for_each_graph(n, [&](const auto& graph) {
      REQUIRE(graph.size() == n);
      check_graph(graph);
      CHECK(is_doubly_stochastic(graph, 1e-13));
      if constexpr (circulant_graph<std::remove_cvref_t<decltype(graph)>>) {
        CHECK(is_regular(graph));
        for (int rank = 0; rank < n; ++rank)
          CHECK(std::ranges::ssize(graph.in_neighbors(rank)) == graph.degree());
      }
    });
  }
}

TEST_CASE("in every round of every schedule all ranks agree", "[topology][invariants]") {
  for (int n = 1; n <= 64; ++n) {
    CAPTURE(n);
    bluefog_test::for_each_schedule(n, [&](const auto& schedule) {
      REQUIRE(schedule.size() == n);
      for (const std::ptrdiff_t k : {0, 1, 2, 3, 5, 1000003}) {
        CAPTURE(k);
        const auto all = all_of_round(schedule, k);
        bool agree = true;
        for (int rank = 0; rank < n; ++rank) {
          const auto& mine = all[index(rank)];
          double sum = mine.self_weight;
          for (const auto& [source, weight] : mine.sources) {
            sum += weight;
            agree = agree && source != rank &&
                    std::ranges::count(all[index(source)].destinations, rank,
                                       &bluefog::edge::rank) == 1;
          }
          for (const auto& [destination, weight] : mine.destinations)
            agree = agree && std::ranges::count(all[index(destination)].sources, rank,
                                                &bluefog::edge::rank) == 1;
          agree = agree && std::abs(sum - 1) < 1e-13;
        }
        CHECK(agree);
      }
    });
  }
}

TEST_CASE("the rounds of a schedule are graphs", "[topology][invariants]") {
  for (const int n : {1, 2, 3, 6, 8, 12, 17}) {
    CAPTURE(n);
    bluefog_test::for_each_schedule(n, [&](const auto& schedule) {
      for (const std::ptrdiff_t k : {0, 1, 7}) {
        const auto round = schedule.round(k);
        check_graph(round);
        for (int rank = 0; rank < n; ++rank)
          CHECK(neighborhood_of(round, rank) == schedule.rounds(rank)[k]);
      }
    });
  }
}

TEST_CASE("rounds weigh a rank and its sources equally", "[topology][invariants]") {
  for (const int n : {1, 2, 3, 8, 12, 24}) {
    bluefog_test::for_each_schedule(n, [&]<class Schedule>(const Schedule& schedule) {
      if constexpr (!std::same_as<Schedule, repeat<mesh_grid_2d>>) {
        for (int k = 0; k < 12; ++k)
          for (const auto& hood : all_of_round(schedule, k)) {
            const double share = 1.0 / static_cast<double>(hood.sources.size() + 1);
            CHECK(hood.self_weight == share);
            for (const auto& source : hood.sources) CHECK(source.weight == share);
          }
      }
    });
  }
}

TEST_CASE("one peer means one source and one destination where promised",
          "[topology][invariants]") {
  const auto check = [](const auto& schedule, std::size_t expected) {
    for (int k = 0; k < 20; ++k)
      for (const auto& hood : all_of_round(schedule, k)) {
        CHECK(hood.sources.size() == expected);
        CHECK(hood.destinations.size() == expected);
      }
  };
  for (const int n : {1, 2, 5, 16, 33}) {
    const std::size_t expected = n == 1 ? 0 : 1;
    check(one_peer_exponential(n), expected);
    check(one_peer(ring(n)), expected);
    check(one_peer(fully_connected(n)), expected);
    check(one_peer_exponential_machines(4 * n, 4), expected);
  }
  check(inner_outer_ring(24, 4), 1);
  check(inner_outer_exponential(24, 6), 1);
}

TEST_CASE("large graphs and late rounds agree where asked", "[topology][invariants]") {
  for (const int n : {100, 1000, 1023, 1024, 4095, 4096}) {
    CAPTURE(n);
    const auto check = [&](const auto& graph) {
      for (const int rank : {0, 1, n / 2, n - 1}) {
        for (const int receiver : graph.out_neighbors(rank)) {
          const auto back = graph.in_neighbors(receiver);
          CHECK(std::ranges::binary_search(back, rank));
        }
        double sum = graph.weight(rank, rank);
        for (const int sender : graph.in_neighbors(rank)) sum += graph.weight(sender, rank);
        CHECK(sum == Approx(1.0).epsilon(1e-12));
      }
    };
    check(exponential(n));
    check(symmetric_exponential(n));
    check(ring(n));
    check(mesh_grid_2d(n));
    check(star(n, n / 2));
    check(one_peer_exponential(n).round(1'000'000'000'000'007));
    check(one_peer(mesh_grid_2d(n)).round(1'000'000'000'000'007));
    // A weight of the hub costs its degree, and here the hub has all weights asked.
    if (n <= 1024) check(one_peer(star(n)).round(1'000'000'000'000'007));
  }
}
