// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <iterator>
#include <ranges>
#include <vector>

#include <bluefog/topology.hpp>

#include "support/catch.hpp"
#include "topology/support.hpp"

using namespace bluefog::topology;
using bluefog::neighborhood;
using bluefog_test::holds;

namespace {

template <class Graph>
using neighbors_of = decltype(std::declval<const Graph&>().out_neighbors(0));
template <class Schedule>
using rounds_in = decltype(std::declval<const Schedule&>().rounds(0));
template <class Graph>
using edges_in = decltype(std::declval<const Graph&>().edges());

template <class Graph>
constexpr bool neighbors_are_a_view =
    graph<Graph> && std::ranges::random_access_range<neighbors_of<Graph>> &&
    std::ranges::sized_range<neighbors_of<Graph>> && std::ranges::view<neighbors_of<Graph>> &&
    std::ranges::common_range<neighbors_of<Graph>> &&
    std::same_as<std::ranges::range_value_t<neighbors_of<Graph>>, int> &&
    std::same_as<std::ranges::range_difference_t<neighbors_of<Graph>>, std::ptrdiff_t> &&
    std::ranges::view<edges_in<Graph>> && std::ranges::forward_range<edges_in<Graph>> &&
    !std::ranges::borrowed_range<edges_in<Graph>> && !schedule<Graph>;

static_assert(neighbors_are_a_view<exponential>);
static_assert(neighbors_are_a_view<symmetric_exponential>);
static_assert(neighbors_are_a_view<ring>);
static_assert(neighbors_are_a_view<mesh_grid_2d>);
static_assert(neighbors_are_a_view<star>);
static_assert(neighbors_are_a_view<fully_connected>);
static_assert(neighbors_are_a_view<shift>);
static_assert(neighbors_are_a_view<adjacency>);
static_assert(neighbors_are_a_view<one_peer_round<star>>);
static_assert(neighbors_are_a_view<pairing<inner_outer_ring_rule>>);

// What is computed lives in the iterators; what lies in memory is kept by the view.
static_assert(std::ranges::borrowed_range<neighbors_of<exponential>>);
static_assert(std::ranges::borrowed_range<neighbors_of<mesh_grid_2d>>);
static_assert(std::ranges::borrowed_range<neighbors_of<star>>);
static_assert(!std::ranges::borrowed_range<neighbors_of<adjacency>>);
static_assert(std::ranges::contiguous_range<neighbors_of<adjacency>>);

template <class Schedule>
constexpr bool rounds_are_endless =
    schedule<Schedule> && std::ranges::random_access_range<rounds_in<Schedule>> &&
    std::ranges::view<rounds_in<Schedule>> && std::ranges::borrowed_range<rounds_in<Schedule>> &&
    !std::ranges::sized_range<rounds_in<Schedule>> &&
    std::same_as<std::ranges::sentinel_t<rounds_in<Schedule>>, std::unreachable_sentinel_t> &&
    std::same_as<std::ranges::range_difference_t<rounds_in<Schedule>>, std::ptrdiff_t> &&
    std::same_as<std::ranges::range_reference_t<rounds_in<Schedule>>, neighborhood> &&
    !graph<Schedule>;

static_assert(rounds_are_endless<one_peer_exponential>);
static_assert(rounds_are_endless<one_peer_exponential_machines>);
static_assert(rounds_are_endless<one_peer<ring>>);
static_assert(rounds_are_endless<one_peer<adjacency>>);
static_assert(rounds_are_endless<inner_outer_ring>);
static_assert(rounds_are_endless<inner_outer_exponential>);
static_assert(rounds_are_endless<repeat<star>>);

// Template arguments are deduced.
static_assert(std::same_as<decltype(one_peer(ring(8))), one_peer<ring>>);
static_assert(std::same_as<decltype(repeat(star(8))), repeat<star>>);

// Rounds of circulant graphs are made without memory.
static_assert(std::same_as<decltype(one_peer(exponential(8)).round(0)), shift>);

constexpr int destination(const neighborhood& hood) {
  return hood.destinations[0].rank;
}

static_assert(holds(one_peer_exponential(64).rounds(0) | std::views::drop(3) | std::views::take(5) |
                        std::views::transform(destination),
                    {8, 16, 32, 1, 2}));
static_assert(holds(one_peer_exponential(8).rounds(5) | std::views::transform(destination) |
                        std::views::filter([](int rank) { return rank % 2 == 1; }) |
                        std::views::take(3),
                    {7, 1, 7}));
static_assert(holds(exponential(16).out_neighbors(15) | std::views::reverse, {7, 3, 1, 0}));
static_assert(holds(exponential(16).in_neighbors(3) | std::views::drop(1) |
                        std::views::filter([](int rank) { return rank != 2; }),
                    {11, 15}));
static_assert(std::ranges::find(exponential(16).out_neighbors(0), 8) !=
              exponential(16).out_neighbors(0).end());
static_assert(std::ranges::distance(ring(16).edges() | std::views::filter([](const auto& edge) {
                                      return edge.source < edge.destination;
                                    })) == 16);

/// A graph that a user writes: two ranks that exchange everything.
struct swap_graph {
  [[nodiscard]] constexpr int size() const { return 2; }
  [[nodiscard]] constexpr auto out_neighbors(int rank) const {
    return std::views::single(1 - rank);
  }
  [[nodiscard]] constexpr auto in_neighbors(int rank) const { return std::views::single(1 - rank); }
  [[nodiscard]] constexpr double weight(int source, int destination_rank) const {
    return source == destination_rank ? 0.0 : 1.0;
  }
  [[nodiscard]] constexpr auto edges() const { return edge_view(*this); }
  bool operator==(const swap_graph&) const = default;
};

/// A schedule that a user writes: swap in even rounds, rest in odd ones.
struct every_other_round {
  [[nodiscard]] constexpr int size() const { return 2; }
  [[nodiscard]] constexpr auto round(std::ptrdiff_t k) const {
    return shift(2, k % 2 == 0 ? 1 : 0);
  }
  [[nodiscard]] constexpr auto rounds(int rank) const { return rounds_of(*this, rank); }
  bool operator==(const every_other_round&) const = default;
};

static_assert(graph<swap_graph> && schedule<every_other_round> && schedule<one_peer<swap_graph>>);
static_assert(neighborhood_of(swap_graph{}, 0) ==
              neighborhood{.self_weight = 0, .sources = {{1}}, .destinations = {{1}}});
static_assert(every_other_round{}.rounds(0)[1] == neighborhood{});

/// What is no graph or schedule, by the one thing that it lacks.
struct without_weight {
  [[nodiscard]] int size() const { return 1; }
  [[nodiscard]] auto out_neighbors(int) const { return std::views::empty<int>; }
  [[nodiscard]] auto in_neighbors(int) const { return std::views::empty<int>; }
  [[nodiscard]] auto edges() const { return std::views::empty<directed_edge>; }
  bool operator==(const without_weight&) const = default;
};
struct with_a_vector_of_neighbors : swap_graph {
  [[nodiscard]] std::vector<int> out_neighbors(int) const { return {}; }
  bool operator==(const with_a_vector_of_neighbors&) const = default;
};
struct without_rounds {
  [[nodiscard]] int size() const { return 2; }
  [[nodiscard]] auto round(std::ptrdiff_t) const { return ring(2); }
  bool operator==(const without_rounds&) const = default;
};

}  // namespace

TEST_CASE("the concepts turn away what lacks a part", "[topology][ranges]") {
  STATIC_REQUIRE_FALSE(graph<without_weight>);
  STATIC_REQUIRE_FALSE(graph<with_a_vector_of_neighbors>);
  STATIC_REQUIRE_FALSE(graph<int>);
  STATIC_REQUIRE_FALSE(schedule<without_rounds>);
  STATIC_REQUIRE_FALSE(schedule<swap_graph>);
  STATIC_REQUIRE(graph_sequence<without_rounds>);
}

TEST_CASE("views outlive the graphs and schedules that made them", "[topology][ranges]") {
  const auto neighbors = adjacency(star(5)).out_neighbors(0);
  CHECK(holds(neighbors, {1, 2, 3, 4}));

  const auto rounds = one_peer(adjacency(star(5))).rounds(0);
  CHECK(rounds[3].destinations == bluefog::edges{{4}});
  const auto sources = one_peer(adjacency(star(5))).round(0).in_neighbors(0);
  CHECK(holds(sources, {1, 2, 3, 4}));

  const auto edges = adjacency(ring(3)).edges();
  CHECK(std::ranges::distance(edges) == 6);

  const auto iterator = one_peer(adjacency(star(5))).rounds(0).begin();
  CHECK((*(iterator + 2)).destinations == bluefog::edges{{3}});
}

TEST_CASE("pipelines run over rounds of a graph in memory", "[topology][ranges]") {
  std::vector<int> visited;
  for (const auto& hood :
       one_peer(adjacency(star(4, 1))).rounds(1) | std::views::drop(2) | std::views::take(4))
    visited.push_back(hood.destinations[0].rank);
  CHECK(visited == std::vector{0, 2, 3, 0});
}

TEST_CASE("iterators obey the laws of random access", "[topology][ranges]") {
  const auto view = exponential(4096).out_neighbors(1000);
  const auto first = view.begin();
  const auto last = view.end();
  CHECK(last - first == 12);
  CHECK(*(first + 3) == first[3]);
  CHECK(*(3 + first) == view[3]);
  CHECK((first <=> last) == std::strong_ordering::less);
  auto it = last;
  CHECK(*--it == view.back());
  it -= 5;
  CHECK(it-- == last - 6);
  CHECK(it++ == last - 7);
  CHECK(*it == *(last - 6));
  const std::vector<int> copied(first, last);
  CHECK(std::ranges::equal(copied, view));
  CHECK(std::ranges::is_sorted(view));
}
