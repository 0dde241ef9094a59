// SPDX-License-Identifier: Apache-2.0
#include <list>
#include <ranges>
#include <string>
#include <utility>
#include <vector>

#include <bluefog/topology.hpp>

#include "support/catch.hpp"

using bluefog::edge;
using bluefog::edges;
using bluefog::neighborhood;

namespace {

constexpr neighborhood half_and_half{
    .self_weight = 0.5, .sources = {{1, 0.5}}, .destinations = {{2}}};

static_assert(half_and_half.sources.size() == 1 && half_and_half.sources[0] == edge{1, 0.5});
static_assert(half_and_half.destinations == edges{{2, 1.0}});
static_assert(neighborhood{} == neighborhood{.self_weight = 1.0});
static_assert(half_and_half != neighborhood{.self_weight = 0.5});

constexpr edges first_edges(int count) {
  edges result;
  for (int rank = 0; rank < count; ++rank) result.push_back({rank, 1.0 / count});
  return result;
}

static_assert(first_edges(9).size() == 9 && first_edges(9)[8].rank == 8, "more than fit inline");
static_assert(first_edges(4) != first_edges(5));

static_assert(std::ranges::contiguous_range<edges>);
static_assert(std::ranges::contiguous_range<const edges>);
static_assert(std::ranges::sized_range<edges>);
static_assert(!std::ranges::borrowed_range<edges>);
static_assert(!std::constructible_from<edges, std::vector<std::string>>);

}  // namespace

TEST_CASE("edges hold what was put in, inline or not", "[topology][neighborhood]") {
  for (int count = 0; count <= 20; ++count) {
    const edges built = first_edges(count);
    REQUIRE(built.size() == static_cast<std::size_t>(count));
    CHECK(built.empty() == (count == 0));
    int rank = 0;
    for (const edge& each : built) CHECK(each == edge{rank++, 1.0 / count});

    edges copied = built;
    CHECK(copied == built);
    const edges moved = std::move(copied);
    CHECK(moved == built);

    copied = built;  // a moved-from sequence may be used again
    copied.push_back({99, 0.25});
    CHECK(copied.size() == built.size() + 1);
    CHECK(copied != built);
  }
}

TEST_CASE("up to four edges lie inside the object", "[topology][neighborhood]") {
  for (int count = 1; count <= 6; ++count) {
    const edges built = first_edges(count);
    const auto* object = reinterpret_cast<const char*>(&built);
    const auto* element = reinterpret_cast<const char*>(built.data());
    CHECK((element >= object && element < object + sizeof built) == (count <= 4));
  }
}

TEST_CASE("an element may be appended to its own sequence", "[topology][neighborhood]") {
  for (int count : {3, 4, 5, 8, 16}) {
    edges built = first_edges(count);
    built.push_back(built[1]);
    CHECK(built[static_cast<std::size_t>(count)] == edge{1, 1.0 / count});
  }
}

TEST_CASE("edges come from any range of edges", "[topology][neighborhood]") {
  const std::list<edge> listed{{3, 0.25}, {5, 0.75}};
  CHECK(edges(listed) == edges{{3, 0.25}, {5, 0.75}});

  const neighborhood hood{.sources = std::views::iota(0, 6) |
                                     std::views::filter([](int rank) { return rank % 2 == 1; }) |
                                     std::views::transform([](int rank) { return edge{rank}; })};
  CHECK(hood.sources == edges{{1}, {3}, {5}});
}

TEST_CASE("weights may be changed in place", "[topology][neighborhood]") {
  edges built = first_edges(5);
  for (edge& each : built) each.weight *= 2;
  built[0].rank = 7;
  CHECK(built[0] == edge{7, 0.4});
  CHECK(built[4].weight == 0.4);
}
