// SPDX-License-Identifier: Apache-2.0
//
// What a rank pays to learn its place in a topology: make the graph, and from it the rank's
// neighborhood. The peer makes the dense n x n matrix of doubles and reads its row and column; the
// limit is O(degree) time and memory.
//
// The contestants alternate within each of nine rounds after two warm-ups; printed are the medians.
// Bytes are what the graph and one neighborhood hold, on the heap and off it. The goals for
// circulant graphs at n = 4096: 5 us per rank, out of reach of the full one, whose degree is n - 1,
// and memory in proportion to the degree.
// Of a schedule the graph is a late round; below it stands its round 0, which has to cost as much.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <malloc.h>

#include <bluefog/topology.hpp>

#include "foreign_load.hpp"
#include "json_lines.hpp"

namespace {
std::size_t heap_bytes = 0;
}  // namespace

void* operator new(std::size_t size) {
  void* const memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  heap_bytes += malloc_usable_size(memory);
  return memory;
}
void operator delete(void* memory) noexcept {
  if (memory != nullptr) heap_bytes -= malloc_usable_size(memory);
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  operator delete(memory);
}

namespace {

using namespace bluefog::topology;
using bluefog::neighborhood;
using clock_type = std::chrono::steady_clock;

constexpr int warm_ups = 2;
constexpr int rounds = 9;
constexpr std::ptrdiff_t late = 1'000'000'007;  // a round of a schedule is a graph as any other
constexpr int places = 64;                      // ranks per timing, spread over the graph

json_lines lines;  // that lack how busy the machine was

/// \return the most bytes that a graph and a neighborhood of this degree are to take: two lists of
///         edges of 16 bytes, with room for as many again, and 256 bytes beside.
std::size_t most_bytes(std::size_t degree) {
  return 256 + degree * 2 * 2 * sizeof(bluefog::edge);
}

double microseconds_since(clock_type::time_point start) {
  return std::chrono::duration<double, std::micro>(clock_type::now() - start).count();
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

/// The neighborhood as one finds it in a dense matrix, with the matrix made first.
neighborhood by_dense_matrix(const std::vector<double>& first_row, const graph auto& graph,
                             int rank) {
  const std::size_t n = first_row.size();
  const bool circulant = first_row[0] > 0;
  auto matrix = circulant ? std::vector<double>(n * n) : weight_matrix(graph);
  for (std::size_t i = 0; circulant && i < n; ++i)  // every row is the first one, rotated
    std::rotate_copy(first_row.begin(), first_row.end() - static_cast<std::ptrdiff_t>(i),
                     first_row.end(), matrix.begin() + static_cast<std::ptrdiff_t>(i * n));
  neighborhood result{.self_weight = 0.0};
  const auto r = static_cast<std::size_t>(rank);
  for (std::size_t j = 0; j < n; ++j) {
    if (j == r) continue;
    if (matrix[j * n + r] > 0) result.sources.push_back({static_cast<int>(j), matrix[j * n + r]});
    if (matrix[r * n + j] > 0) result.destinations.push_back({static_cast<int>(j)});
  }
  result.self_weight = matrix[r * n + r];
  return result;
}

/// Makes the graph and one neighborhood, for ranks spread from `rank` on.
/// \return microseconds per rank, and how many edges they have, which keeps the work from being
///         optimised away.
std::pair<double, std::size_t> time_of_places(int n, int rank, const auto& make) {
  std::size_t edges = 0;
  const auto start = clock_type::now();
  for (int place = 0; place < places; ++place) {
    const auto hood = neighborhood_of(make(n), (rank + place * n / places) % n);
    edges += hood.sources.size() + hood.destinations.size();
  }
  return {microseconds_since(start) / places, edges};
}

void measure(const char* name, int n, auto make) {
  std::vector<double> first_row(static_cast<std::size_t>(n), 0.0);
  if constexpr (circulant_graph<decltype(make(n))>)
    for (int j = 0; j < n; ++j) first_row[static_cast<std::size_t>(j)] = make(n).weight(0, j);

  std::vector<double> ours;
  std::vector<double> dense;
  std::vector<double> ratios;
  for (int round = -warm_ups; round < rounds; ++round) {
    const int rank = (round + warm_ups) * n / (rounds + warm_ups);
    const auto start = clock_type::now();
    const auto expected = by_dense_matrix(first_row, make(n), rank);
    const double dense_time = microseconds_since(start);

    const auto [our_time, edges] = time_of_places(n, rank, make);
    if (neighborhood_of(make(n), rank) != expected || edges == 0) {
      std::fprintf(stderr, "topology_cost: %s differs from its matrix at rank %d\n", name, rank);
      std::exit(1);
    }
    if (round < 0) continue;
    ours.push_back(our_time);
    dense.push_back(dense_time);
    ratios.push_back(dense_time / our_time);
  }

  const std::size_t before = heap_bytes;
  const auto graph = make(n);
  const auto hood = neighborhood_of(graph, 0);
  const std::size_t bytes = sizeof graph + sizeof hood + heap_bytes - before;
  const auto dense_bytes =
      static_cast<std::size_t>(n) * static_cast<std::size_t>(n) * sizeof(double);
  const bool goal = first_row[0] > 0 && n == 4096;
  const std::size_t degree = hood.sources.size();
  const char* const in_time = !goal ? "-" : median(ours) <= 5 ? "met" : "MISSED";
  const char* const in_bytes = !goal ? "-" : bytes <= most_bytes(degree) ? "met" : "MISSED";
  std::printf("%-29s %5d %10.3f %12.1f %10.0f %9zu %12zu %6s %6s\n", name, n, median(ours),
              median(dense), median(ratios), bytes, dense_bytes, in_time, in_bytes);
  lines.add(
      "{\"id\": \"B18\", \"benchmark\": \"topology_cost\", \"topology\": \"%s\", \"n\": %d, "
      "\"us_per_rank\": %.4f, \"dense_us\": %.2f, \"ratio\": %.1f, \"bytes_per_rank\": %zu, "
      "\"dense_bytes\": %zu, \"most_bytes\": %zu, \"goal\": \"%s\", \"goal_bytes\": \"%s\", "
      "\"foreign_load\": ",
      name, n, median(ours), median(dense), median(ratios), bytes, dense_bytes, most_bytes(degree),
      in_time, in_bytes);
}

/// Measures a late round of the schedules that `make` makes, and round 0 in turn with it.
void measure_schedule(const char* name, int n, auto make) {
  const auto in_round = [&](std::ptrdiff_t k) {
    return [&make, k](int size) { return make(size).round(k); };
  };
  measure(name, n, in_round(late));

  std::vector<double> first_times;
  std::vector<double> late_times;
  std::vector<double> ratios;
  for (int round = -warm_ups; round < rounds; ++round) {
    const int rank = (round + warm_ups) * n / (rounds + warm_ups);
    const auto [first, edges] = time_of_places(n, rank, in_round(0));
    const auto [later, late_edges] = time_of_places(n, rank, in_round(late));
    if (edges == 0 || late_edges == 0) {
      std::fprintf(stderr, "topology_cost: %s has no edges\n", name);
      std::exit(1);
    }
    if (round < 0) continue;
    first_times.push_back(first);
    late_times.push_back(later);
    ratios.push_back(later / first);
  }
  std::printf("%-29s %5d %10.3f   a late round takes %.2f of it\n", "  round 0", n,
              median(first_times), median(ratios));
  lines.add(
      "{\"id\": \"B18\", \"benchmark\": \"topology_cost\", \"topology\": \"%s\", \"n\": %d, "
      "\"us_round_0\": %.4f, \"us_late_round\": %.4f, \"late_over_round_0\": %.3f, "
      "\"foreign_load\": ",
      name, n, median(first_times), median(late_times), median(ratios));
}

}  // namespace

int main() {
  const foreign_load others;
  std::printf("%-29s %5s %10s %12s %10s %9s %12s %6s %6s\n", "topology", "n", "us/rank", "dense us",
              "ratio", "bytes", "dense bytes", "time", "memory");
  for (int n = 16; n <= 4096; n *= 4) {
    measure("exponential", n, [](int size) { return exponential(size); });
    measure("exponential base 3", n, [](int size) { return exponential(size, 3); });
    measure("symmetric_exponential", n, [](int size) { return symmetric_exponential(size); });
    measure("ring", n, [](int size) { return ring(size); });
    measure("ring left", n, [](int size) { return ring(size, ring_style::left); });
    measure("ring right", n, [](int size) { return ring(size, ring_style::right); });
    measure("mesh_grid_2d", n, [](int size) { return mesh_grid_2d(size); });
    measure("star", n, [](int size) { return star(size); });
    measure("fully_connected", n, [](int size) { return fully_connected(size); });
    measure_schedule("one_peer_exponential", n,
                     [](int size) { return one_peer_exponential(size); });
    measure_schedule("one_peer_exponential_machines", n,
                     [](int size) { return one_peer_exponential_machines(4 * size, 4); });
    measure_schedule("one_peer(mesh_grid_2d)", n,
                     [](int size) { return one_peer(mesh_grid_2d(size)); });
    measure_schedule("inner_outer_ring", n, [](int size) { return inner_outer_ring(size, 4); });
    measure_schedule("inner_outer_exponential", n,
                     [](int size) { return inner_outer_exponential(size, 4); });
  }
  lines.print(others.report());
}
