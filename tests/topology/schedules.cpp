// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include <bluefog/topology.hpp>

#include "support/catch.hpp"
#include "topology/support.hpp"

using namespace bluefog::topology;
using bluefog::edges;
using bluefog::neighborhood;
using bluefog_test::all_of_round;
using bluefog_test::index;

namespace {

/// Whether rank r sends to `receivers[r]` alone in round k, for all ranks.
template <std::size_t N>
constexpr bool sends(const schedule auto& schedule, std::ptrdiff_t k,
                     const std::array<int, N>& receivers) {
  for (std::size_t rank = 0; rank < N; ++rank)
    if (schedule.rounds(static_cast<int>(rank))[k].destinations != edges{{receivers[rank]}})
      return false;
  return schedule.size() == static_cast<int>(N);
}

// The worked examples for eight ranks.
static_assert(one_peer_exponential(8).rounds(0)[0] ==
              neighborhood{.self_weight = 0.5, .sources = {{7, 0.5}}, .destinations = {{1}}});
static_assert(sends<8>(one_peer_exponential(8), 0, {1, 2, 3, 4, 5, 6, 7, 0}));
static_assert(sends<8>(one_peer_exponential(8), 1, {2, 3, 4, 5, 6, 7, 0, 1}));
static_assert(sends<8>(one_peer_exponential(8), 2, {4, 5, 6, 7, 0, 1, 2, 3}));
static_assert(sends<8>(one_peer_exponential(8), 3, {1, 2, 3, 4, 5, 6, 7, 0}));

static_assert(sends<8>(one_peer(ring(8)), 0, {1, 2, 3, 4, 5, 6, 7, 0}));
static_assert(sends<8>(one_peer(ring(8)), 1, {7, 0, 1, 2, 3, 4, 5, 6}));
static_assert(sends<8>(one_peer(ring(8)), 2, {1, 2, 3, 4, 5, 6, 7, 0}));
static_assert(sends<8>(one_peer(fully_connected(8)), 3, {4, 5, 6, 7, 0, 1, 2, 3}));
static_assert(sends<8>(one_peer(fully_connected(8)), 6, {7, 0, 1, 2, 3, 4, 5, 6}));
static_assert(sends<8>(one_peer(fully_connected(8)), 7, {1, 2, 3, 4, 5, 6, 7, 0}));

static_assert(sends<8>(one_peer(star(8)), 0, {1, 0, 0, 0, 0, 0, 0, 0}));
static_assert(sends<8>(one_peer(star(8)), 3, {4, 0, 0, 0, 0, 0, 0, 0}));
static_assert(one_peer(star(8)).rounds(0)[0].sources.size() == 7);
static_assert(one_peer(star(8)).rounds(0)[0].self_weight == 0.125);
static_assert(one_peer(star(8)).rounds(2)[0].sources.empty());
static_assert(one_peer(star(8)).rounds(2)[0].self_weight == 1.0);

static_assert(sends<8>(one_peer(mesh_grid_2d(8)), 0, {1, 2, 3, 7, 5, 6, 7, 3}));
static_assert(sends<8>(one_peer(mesh_grid_2d(8)), 1, {4, 5, 6, 2, 0, 1, 2, 6}));
static_assert(sends<8>(one_peer(mesh_grid_2d(8)), 2, {1, 0, 1, 7, 5, 4, 5, 3}));
static_assert(sends<8>(one_peer(mesh_grid_2d(8)), 3, {4, 2, 3, 2, 0, 6, 7, 6}));
static_assert(sends<8>(one_peer(mesh_grid_2d(8)), 4, {1, 5, 6, 7, 5, 1, 2, 3}));
static_assert(sends<8>(one_peer(mesh_grid_2d(8)), 5, {4, 0, 1, 2, 0, 4, 5, 6}));
static_assert(sends<8>(one_peer(mesh_grid_2d(8)), 6, {1, 2, 3, 7, 5, 6, 7, 3}));

static_assert(sends<4>(one_peer_exponential_machines(8, 2), 0, {1, 2, 3, 0}));
static_assert(sends<4>(one_peer_exponential_machines(8, 2), 1, {2, 3, 0, 1}));
static_assert(sends<4>(one_peer_exponential_machines(8, 2), 2, {1, 2, 3, 0}));
static_assert(sends<6>(one_peer_exponential_machines(6, 1), 2, {4, 5, 0, 1, 2, 3}));

static_assert(sends<8>(inner_outer_ring(8, 4), 0, {4, 2, 3, 1, 0, 6, 7, 5}));
static_assert(sends<8>(inner_outer_ring(8, 4), 1, {2, 5, 3, 0, 6, 1, 7, 4}));
static_assert(sends<8>(inner_outer_ring(8, 4), 2, {1, 3, 6, 0, 5, 7, 2, 4}));
static_assert(sends<8>(inner_outer_ring(8, 4), 3, {1, 2, 0, 7, 5, 6, 4, 3}));
static_assert(sends<8>(inner_outer_ring(8, 4), 4, {4, 2, 3, 1, 0, 6, 7, 5}));

static_assert(sends<8>(inner_outer_exponential(8, 4), 0, {4, 2, 3, 1, 0, 6, 7, 5}));
static_assert(sends<8>(inner_outer_exponential(8, 4), 1, {3, 5, 0, 2, 7, 1, 4, 6}));
static_assert(sends<8>(inner_outer_exponential(8, 4), 2, {1, 3, 6, 0, 5, 7, 2, 4}));
static_assert(sends<8>(inner_outer_exponential(8, 4), 3, {2, 0, 1, 7, 6, 4, 5, 3}));

// On one machine the outgoing rank is silent.
static_assert(inner_outer_ring(4, 4).rounds(0)[0] == neighborhood{});
static_assert(inner_outer_exponential(4, 4).rounds(1)[5] == neighborhood{});
static_assert(inner_outer_ring(4, 4).rounds(1)[0].destinations == edges{{2}});

static_assert(one_peer_exponential(1).rounds(0)[5] == neighborhood{});
static_assert(one_peer(ring(1)).rounds(0)[0] == neighborhood{});
static_assert(one_peer(star(1)).rounds(0)[0] == neighborhood{});
static_assert(repeat(ring(8)).rounds(0)[9] == neighborhood_of(ring(8), 0));
static_assert(repeat(star(8)).round(3) == star(8));

/// From the definition: who sends to whom when each rank takes turns among its out-neighbors,
/// sorted clockwise.
std::map<int, std::vector<int>> senders_by_definition(const graph auto& graph, int t) {
  const int n = graph.size();
  std::map<int, std::vector<int>> senders;
  for (int k = 0; k < n; ++k) {
    std::vector<int> clockwise;
    for (int distance = 1; distance < n; ++distance)
      if (graph.weight(k, (k + distance) % n) > 0) clockwise.push_back((k + distance) % n);
    if (!clockwise.empty()) senders[clockwise[index(t) % clockwise.size()]].push_back(k);
  }
  return senders;
}

void check_one_peer(const graph auto& graph) {
  const one_peer schedule(graph);
  for (int t = 0; t < 13; ++t) {
    auto senders = senders_by_definition(graph, t);
    for (int rank = 0; rank < graph.size(); ++rank) {
      CAPTURE(graph.size(), t, rank);
      CHECK(std::ranges::equal(schedule.rounds(rank)[t].sources, senders[rank], {},
                               &bluefog::edge::rank));
    }
  }
}

/// The whole part of the logarithm of `value`, at least 1, to base 2.
int log2_of(int value) {
  int result = 0;
  while (value >= 2) {
    value /= 2;
    ++result;
  }
  return result;
}

/// Whom one rank sends to and receives from.
struct peers {
  int destination;
  int source;

  bool operator==(const peers&) const = default;
};

int wrapped(int value, int size) {
  return (value % size + size) % size;
}

/// From the definition of BlueFog's GetInnerOuterRingDynamicSendRecvRanks: in step t, local rank
/// t mod L of each machine goes around the machines, the others around their machine without it.
peers inner_outer_ring_by_definition(int size, int local_size, int rank, int t) {
  const int machines = size / local_size, machine = rank / local_size, local = rank % local_size;
  const int outgoing = t % local_size;
  if (local == outgoing)
    return {wrapped(machine + 1, machines) * local_size + local,
            wrapped(machine - 1, machines) * local_size + local};
  int next = wrapped(local + 1, local_size);
  if (next == outgoing) next = wrapped(local + 2, local_size);
  int last = wrapped(local - 1, local_size);
  if (last == outgoing) last = wrapped(local - 2, local_size);
  return {machine * local_size + next, machine * local_size + last};
}

/// From the definition of BlueFog's GetExp2DynamicSendRecvMachineRanks, with machines for ranks.
peers one_peer_exponential_machines_by_definition(int size, int local_size, int machine, int t) {
  const int machines = size / local_size;
  if (machines == 1) return {machine, machine};
  const int distance = 1 << (t % (log2_of(machines - 1) + 1));
  return {wrapped(machine + distance, machines), wrapped(machine - distance, machines)};
}

/// From the definition of BlueFog's GetInnerOuterExpo2DynamicSendRecvRanks, with Ko = log2(M - 1)
/// and Ki = log2(L - 2) rounded down. With one machine, where BlueFog has no answer, the outgoing
/// rank has nobody else to send to.
peers inner_outer_exponential_by_definition(int size, int local_size, int rank, int t) {
  const int machine = rank / local_size, local = rank % local_size;
  const int outgoing = t % local_size;
  if (local == outgoing) {
    const peers machines =
        one_peer_exponential_machines_by_definition(size, local_size, machine, t);
    return {machines.destination * local_size + local, machines.source * local_size + local};
  }
  const int step = 1 << (t % (log2_of(local_size - 2) + 1));
  const int ahead = step + (step >= wrapped(outgoing - local, local_size) ? 1 : 0);
  const int behind = step + (step >= wrapped(local - outgoing, local_size) ? 1 : 0);
  return {machine * local_size + wrapped(local + ahead, local_size),
          machine * local_size + wrapped(local - behind, local_size)};
}

/// What a rank does in a round: half its own value and half its source's, or nothing at all.
neighborhood halves_with(peers wanted, int rank) {
  if (wanted == peers{rank, rank}) return {};
  return {.self_weight = 0.5,
          .sources = {{wanted.source, 0.5}},
          .destinations = {{wanted.destination}}};
}

/// Compares a schedule with its definition for some ranks, in rounds early and late in its period.
void check_definition(const char* name, const schedule auto& schedule, int size, int local_size,
                      auto&& definition, const std::vector<int>& ranks) {
  for (const int rank : ranks) {
    const auto rounds = schedule.rounds(rank);
    for (const int t : {0, 1, 2, 3, 5, 11, 10 * local_size + 7}) {
      if (rounds[t] != halves_with(definition(size, local_size, rank, t), rank))
        FAIL_CHECK(name << ", " << size << " ranks, " << local_size << " per machine: rank " << rank
                        << " in round " << t);
    }
  }
}

void check_definitions(int machines, int local_size, auto&& sample) {
  const int size = machines * local_size;
  check_definition("one_peer_exponential_machines", one_peer_exponential_machines(size, local_size),
                   size, local_size, one_peer_exponential_machines_by_definition, sample(machines));
  if (local_size < 3) return;
  check_definition("inner_outer_ring", inner_outer_ring(size, local_size), size, local_size,
                   inner_outer_ring_by_definition, sample(size));
  check_definition("inner_outer_exponential", inner_outer_exponential(size, local_size), size,
                   local_size, inner_outer_exponential_by_definition, sample(size));
}

/// The largest singular value of prod W_t - J over the first rounds, by power iteration.
double distance_to_average(const schedule auto& schedule, int rounds) {
  const auto n = index(schedule.size());
  std::vector<std::vector<neighborhood>> all;
  for (int k = 0; k < rounds; ++k) all.push_back(all_of_round(schedule, k));
  const auto apply = [&](std::vector<double> x) {
    for (const auto& round : all) x = bluefog_test::mix(round, x);
    return x;
  };
  // The columns of the product, one unit vector at a time.
  std::vector<std::vector<double>> columns;
  for (std::size_t j = 0; j < n; ++j) {
    std::vector<double> unit(n, 0.0);
    unit[j] = 1;
    columns.push_back(apply(unit));
    for (double& value : columns.back()) value -= 1.0 / static_cast<double>(n);
  }
  std::vector<double> v(n);
  for (std::size_t j = 0; j < n; ++j) v[j] = std::sin(1.0 + static_cast<double>(j));
  double norm = 0;
  for (int step = 0; step < 2000; ++step) {
    std::vector<double> w(n, 0.0);
    for (std::size_t j = 0; j < n; ++j)
      for (std::size_t i = 0; i < n; ++i) w[i] += columns[j][i] * v[j];
    std::vector<double> u(n, 0.0);
    for (std::size_t j = 0; j < n; ++j)
      for (std::size_t i = 0; i < n; ++i) u[j] += columns[j][i] * w[i];
    norm = std::sqrt(std::inner_product(u.begin(), u.end(), u.begin(), 0.0));
    if (norm == 0) return 0;
    for (std::size_t j = 0; j < n; ++j) v[j] = u[j] / norm;
  }
  return std::sqrt(norm);
}

/// After some periods of `one_peer_exponential(n)`: the product is circulant, so its distance to
/// the average is the largest Fourier coefficient of one row, that of the constant left out.
double residual_after(int periods, int n) {
  std::vector<double> row(index(n), 0.0);
  row[0] = 1;
  const one_peer_exponential schedule(n);
  for (int k = 0; k < periods * schedule.period(); ++k)
    row = bluefog_test::mix(all_of_round(schedule, k), row);
  std::vector<double> cosine, sine;
  for (int i = 0; i < n; ++i) {
    const double angle = 2 * std::acos(-1.0) * i / n;
    cosine.push_back(std::cos(angle));
    sine.push_back(std::sin(angle));
  }
  double largest = 0;
  for (int j = 1; j < n; ++j) {
    double real = 0;
    double imaginary = 0;
    for (int i = 0; i < n; ++i) {
      real += row[index(i)] * cosine[index(i * j % n)];
      imaginary += row[index(i)] * sine[index(i * j % n)];
    }
    largest = std::max(largest, std::hypot(real, imaginary));
  }
  return largest;
}

/// The same by theory: r^m with r = max_j |sin(pi 2^tau j / n)| / (2^tau |sin(pi j / n)|).
double residual_by_theory(int periods, int n) {
  int reach = 1;  // 2^tau
  while (reach < n) reach *= 2;
  const double angle = std::acos(-1.0) / n;
  double largest = 0;
  for (int j = 1; j < n; ++j)
    largest = std::max(largest,
                       std::abs(std::sin(angle * (reach * j % n)) / (reach * std::sin(angle * j))));
  return std::pow(largest, periods);
}

/// Averages numbers of n ranks in these rounds, one after the other, and expects the mean exactly.
template <class Value>
void check_exact_average(int n, const std::vector<int>& order) {
  std::vector<Value> x;
  for (int rank = 0; rank < n; ++rank) x.push_back(static_cast<Value>((rank * 37 + 11) % 101 - 40));
  const Value mean = std::accumulate(x.begin(), x.end(), Value{0}) / static_cast<Value>(n);
  const one_peer_exponential schedule(n);
  for (const int k : order) x = bluefog_test::mix(all_of_round(schedule, k), x);
  CHECK(std::ranges::count(x, mean) == n);
}

/// As many rounds in a row as n, a power of two, has digits, from `first` on.
std::vector<int> rounds_from(int first, int n) {
  std::vector<int> order(index(log2_of(n)));
  std::iota(order.begin(), order.end(), first);
  return order;
}

}  // namespace

TEST_CASE("one_peer follows its definition on any graph", "[topology][schedules]") {
  for (const int n : {1, 2, 3, 4, 6, 8, 9, 12, 16, 17}) {
    bluefog_test::for_each_graph(n, [](const auto& graph) { check_one_peer(graph); });
  }
  // A graph in which degrees differ, and a rank that nobody and one that sends to nobody.
  check_one_peer(adjacency(5, {{0, 1}, {0, 2}, {0, 3}, {1, 3}, {2, 1}, {2, 3}, {3, 1}, {4, 0}},
                           {.weights = weighting::uniform}));
}

TEST_CASE("one_peer over the exponential graph is one_peer_exponential", "[topology][schedules]") {
  for (int n = 1; n <= 64; ++n)
    for (int k = 0; k < 8; ++k)
      CHECK(one_peer(exponential(n)).round(k) == one_peer_exponential(n).round(k));
}

TEST_CASE("one_peer_exponential doubles its distance up to every size of 4096",
          "[topology][schedules]") {
  for (int n = 1; n <= 4096; ++n) {
    std::vector<int> distances;
    for (int distance = 1; distance < n; distance *= 2) distances.push_back(distance);
    if (n == 1) distances.push_back(0);
    const auto tau = static_cast<int>(distances.size());
    const one_peer_exponential schedule(n);
    bool right = schedule.size() == n && schedule.period() == tau;
    for (int k = 0; k <= 2 * tau; ++k) {
      const int distance = distances[index(k % tau)];
      right = right && schedule.round(k) == shift(n, distance);
      for (const int rank : {0, n / 3, n - 1})
        right = right &&
                schedule.rounds(rank)[k] ==
                    halves_with({wrapped(rank + distance, n), wrapped(rank - distance, n)}, rank);
    }
    if (!right) FAIL_CHECK("one_peer_exponential, " << n << " ranks");
  }
}

TEST_CASE("one_peer_exponential averages exactly after log2 n rounds, bit for bit",
          "[topology][schedules]") {
  for (int n = 1; n <= 1024; n *= 2) {
    CAPTURE(n);
    check_exact_average<double>(n, rounds_from(5, n));
    check_exact_average<float>(n, rounds_from(5, n));
  }
}

TEST_CASE("one_peer_exponential averages exactly in any order of its rounds",
          "[topology][schedules]") {
  for (int n = 1; n <= 16; n *= 2) {
    auto order = rounds_from(0, n);
    do {
      CAPTURE(n, order);
      check_exact_average<float>(n, order);
    } while (std::ranges::next_permutation(order).found);
  }
  std::mt19937 random(2020);
  for (int n = 32; n <= 1024; n *= 2) {
    auto order = rounds_from(7, n);
    for (int turn = 0; turn < 5; ++turn) {
      std::ranges::shuffle(order, random);
      CAPTURE(n, order);
      check_exact_average<double>(n, order);
      check_exact_average<float>(n, order);
    }
  }
}

TEST_CASE("one_peer_exponential leaves the residual of theory otherwise", "[topology][schedules]") {
  const std::map<int, double> known{{3, .25},        {5, .202254},   {6, .216506},  {7, .125},
                                    {9, .117462},    {10, .192355},  {11, .219584}, {12, .209129},
                                    {15, .0625},     {17, .0614358}, {24, .20734},  {63, .015625},
                                    {1000, .0234153}};
  for (const auto& [n, residual] : known)
    CHECK(residual_after(1, n) == Approx(residual).epsilon(5e-6));

  for (int n = 2; n <= 64; ++n)
    for (const int periods : {1, 2, 3}) {
      CAPTURE(n, periods);
      CHECK(residual_after(periods, n) == Approx(residual_by_theory(periods, n)).margin(1e-14));
    }
}

TEST_CASE("one_peer_exponential leaves a quarter at most", "[topology][schedules]") {
  for (int n = 2; n <= 256; ++n) {
    const double most = n == 3 ? .25 : n == 11 ? .219584 : .217349;
    const double residual = residual_after(1, n);
    if (residual > most + 5e-7)
      FAIL_CHECK(n << " ranks leave " << residual << ", more than " << most);
  }
}

TEST_CASE("schedules among machines follow their definitions", "[topology][schedules]") {
  const auto all = [](int count) {
    std::vector<int> ranks(index(count));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  };
  for (int local_size = 1; local_size <= 64; ++local_size)
    for (int machines = 1; machines * local_size <= 64; ++machines)
      check_definitions(machines, local_size, all);

  const auto some = [](int count) {
    std::vector<int> ranks;
    for (int rank = 0; rank < count; rank += 1 + count / 64) ranks.push_back(rank);
    return ranks;
  };
  for (const int local_size : {1, 2, 4, 8, 64, 1024, 4096})
    check_definitions(4096 / local_size, local_size, some);
  check_definitions(819, 5, some);
}

TEST_CASE("inner and outer schedules mix as fast as they should", "[topology][schedules]") {
  const inner_outer_exponential fast(8, 4);
  CHECK(distance_to_average(fast, 4) == Approx(.2904).margin(5e-5));
  CHECK(distance_to_average(fast, 8) == Approx(.0501).margin(5e-5));
  CHECK(distance_to_average(fast, 16) == Approx(.00213).margin(5e-6));
  const inner_outer_ring slow(8, 4);
  CHECK(distance_to_average(slow, 4) == Approx(.4040).margin(5e-5));
  CHECK(distance_to_average(slow, 8) == Approx(.1185).margin(5e-5));
  CHECK(distance_to_average(slow, 16) == Approx(.0134).margin(5e-5));
}

TEST_CASE("schedules repeat, however late the round", "[topology][schedules]") {
  const std::ptrdiff_t late = 840 * std::ptrdiff_t{1'000'000'000'000};  // a multiple of all periods
  for (const int n : {2, 5, 8, 12}) {
    bluefog_test::for_each_schedule(n, [&](const auto& schedule) {
      for (int k = 0; k < 3; ++k)
        for (int rank = 0; rank < n; ++rank)
          CHECK(schedule.rounds(rank)[late * 11 + k] == schedule.rounds(rank)[k]);
    });
  }
}

TEST_CASE("schedules refuse what makes no sense", "[topology][schedules]") {
  using bluefog::usage_error;
  using bluefog_test::ContainsSubstring;
  CHECK_THROWS_AS(one_peer_exponential(0), usage_error);
  CHECK_THROWS_WITH(inner_outer_ring(8, 2),
                    ContainsSubstring("inner_outer_ring: local_size must be at least 3, got 2"));
  CHECK_THROWS_WITH(
      inner_outer_exponential(9, 4),
      ContainsSubstring(
          "inner_outer_exponential: size must be a multiple of local_size, got 9 and 4"));
  CHECK_THROWS_AS(inner_outer_exponential(8, 1), usage_error);
  CHECK_THROWS_AS(one_peer_exponential_machines(8, 3), usage_error);
  CHECK_THROWS_AS(one_peer_exponential_machines(8, 0), usage_error);

  bluefog_test::for_each_schedule(6, [](const auto& schedule) {
    CHECK_THROWS_WITH(schedule.round(-1), ContainsSubstring("must not be negative, got -1"));
    CHECK_THROWS_AS(schedule.rounds(6), usage_error);
    CHECK_THROWS_AS(schedule.rounds(-1), usage_error);
  });
}
