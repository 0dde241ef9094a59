// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <list>
#include <numeric>
#include <ranges>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <bluefog/collective/allreduce.hpp>
#include <bluefog/collective/barrier.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/neighbor/allreduce_arrays.hpp>
#include <bluefog/topology.hpp>

#include "collective/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

namespace {

template <class Links>
concept mixes = requires(communicator<thread_backend>& comm, std::vector<float>& x, Links links) {
  neighbor_allreduce(comm, x, x, links);
};

using rows = std::vector<std::vector<float>>;
using made_rows = decltype(std::declval<rows&>() | std::views::transform([](const auto& row) {
                             return std::vector<float>(row.begin(), row.end());
                           }));
using spans_of_rows = decltype(std::declval<rows&>() | std::views::transform([](auto& row) {
                                 return std::span<float>(row);
                               }));
static_assert(contiguous_arrays<rows> && writable_arrays<rows&>);
static_assert(contiguous_arrays<spans_of_rows> && writable_arrays<spans_of_rows>);
static_assert(!contiguous_arrays<made_rows> &&
              !writable_arrays<made_rows>);  // gone when they leave

/// y_i of the definition, for `links` of rank i and destination weights 1.
double mixed(const neighborhood& links, int rank, std::size_t place) {
  double sum = links.self_weight * sample(rank, place);
  for (const auto& [source, weight] : links.sources) sum += weight * sample(source, place);
  return sum;
}

double precision_of(dtype type) {
  switch (type) {
    case dtype::float16: return 1.0 / 1024;
    case dtype::bfloat16: return 1.0 / 128;
    case dtype::float32: return 1e-6;
    default: return 1e-14;
  }
}

template <class T>
values<T> sampled(int rank, std::size_t count) {
  return values<T>(count, [&](std::size_t i) { return static_cast<float>(sample(rank, i)); });
}

/// Sends one hop to the right with factor 2, and receives with 0.25.
neighborhood hop(int rank, int size) {
  if (size == 1) return {.self_weight = 0.5};
  return {.self_weight = 0.5,
          .sources = {{(rank + size - 1) % size, 0.25}},
          .destinations = {{(rank + 1) % size, 2.0}}};
}

}  // namespace

TEST_CASE("neighbor_allreduce takes whole neighborhoods, not halves of one",
          "[neighbor][allreduce]") {
  STATIC_REQUIRE(mixes<neighborhood>);
  STATIC_REQUIRE(mixes<topology::ring>);
  STATIC_REQUIRE_FALSE(mixes<double>);                          // a self weight alone
  STATIC_REQUIRE_FALSE(mixes<edges>);                           // sources alone
  STATIC_REQUIRE_FALSE(mixes<topology::one_peer_exponential>);  // which round?
  STATIC_REQUIRE_FALSE(contiguous_elements<std::list<float>>);
}

RANKS_TEST(
    "neighbor_allreduce mixes with the weights of the graph, for every floating dtype and length",
    "[neighbor][allreduce]") {
  const auto check = [&](const topology::graph auto& graph) {
    const auto links = topology::neighborhood_of(graph, comm.rank());
    for (const dtype type : {dtype::float16, dtype::bfloat16, dtype::float32, dtype::float64})
      with_type(type, [&]<class T>() {
        if constexpr (!std::is_integral_v<T>)
          for (const std::size_t count : sizes) {
            auto in = sampled<T>(comm.rank(), count);
            values<T> out(count);
            neighbor_allreduce(comm, in, out, graph);
            const auto untouched = sampled<T>(comm.rank(), count);
            require(std::equal(in.begin(), in.end(), untouched.begin()), "the input has changed");
            for (std::size_t i = 0; i < count; i += 1 + count / 500) {
              const double wanted = mixed(links, comm.rank(), i);
              require_near(number(out[i]), wanted, precision_of(type) * std::abs(wanted));
            }
            neighbor_allreduce(comm, in, in, graph);
            require(std::equal(in.begin(), in.end(), out.begin()), "in place is another result");
          }
      });
  };
  const int n = comm.size();
  check(topology::exponential(n));
  check(topology::ring(n, topology::ring_style::left));
  check(topology::star(n));
  check(topology::mesh_grid_2d(n));
}

RANKS_TEST("without a graph neighbor_allreduce mixes over the exponential one",
           "[neighbor][allreduce]") {
  std::vector<double> x(9, comm.rank()), y(9), z(9);
  neighbor_allreduce(comm, x, y);
  neighbor_allreduce(comm, x, z, topology::exponential(comm.size()));
  require_equal(y, z);
  neighbor_allreduce_nonblocking(comm, x, z).wait();
  require_equal(y, z);
}

RANKS_TEST("a constant is a fixed point, and a column-stochastic round keeps what it should",
           "[neighbor][allreduce]") {
  std::vector<double> x(50, 3.25), y(50);
  neighbor_allreduce(comm, x, y, topology::star(comm.size()));
  for (const double each : y) require_near(each, 3.25, 1e-14);

  // All sum-preserving: what each source sends out sums to 1, so the mean over ranks stays.
  std::vector<double> z(50);
  std::iota(z.begin(), z.end(), 10.0 * comm.rank());
  std::vector<double> before(50), after(50);
  allreduce(comm, z, before);
  const topology::one_peer_exponential schedule(comm.size());
  for (int k = 0; k < 6; ++k) neighbor_allreduce(comm, z, z, schedule.round(k));
  neighbor_allreduce(comm, z, z, topology::mesh_grid_2d(comm.size()));
  allreduce(comm, z, after);
  for (std::size_t i = 0; i < after.size(); ++i) require_near(after[i], before[i], 1e-11);
}

RANKS_TEST("a destination's weight acts on the sender and a source's on the receiver",
           "[neighbor][allreduce]") {
  const auto n = comm.size();
  const int left = (comm.rank() + n - 1) % n;
  for (const std::size_t count : {1U, 5000U}) {
    std::vector<float> x(count), y(count);
    for (std::size_t i = 0; i < count; ++i) x[i] = static_cast<float>(sample(comm.rank(), i));
    const auto untouched = x;
    neighbor_allreduce(comm, x, y, hop(comm.rank(), n));
    require(x == untouched, "the input has changed");
    for (std::size_t i = 0; i < count; ++i) {
      const double wanted = 0.5 * sample(comm.rank(), i) + (n > 1 ? 0.25 * 2 * sample(left, i) : 0);
      require_near(y[i], wanted, 1e-5);
    }
  }
}

RANKS_TEST("a strict subset of the sources is matched by rank, not by position",
           "[neighbor][allreduce]") {
  const int n = comm.size();
  if (n < 3) return;
  // Everybody sends to everybody else but the last in line; rank 0 hears the last two, backwards.
  neighborhood links{.self_weight = 1.0};
  if (comm.rank() == 0) links.sources = {{n - 1, 10.0}, {n - 2, 100.0}};
  if (comm.rank() >= n - 2) links.destinations = {{0}};
  std::vector<double> x(3, comm.rank() + 1.0), y(3);
  neighbor_allreduce(comm, x, y, links);
  const double wanted = comm.rank() == 0 ? 1.0 + 10.0 * n + 100.0 * (n - 1) : comm.rank() + 1.0;
  for (const double each : y) require_near(each, wanted, 1e-12);
}

RANKS_TEST("empty sides scale one's own values and leave the input alone",
           "[neighbor][allreduce]") {
  std::vector<float> x(100, 2.0F), y(100);
  const auto traffic =
      traffic_of(comm, [&] { neighbor_allreduce(comm, x, y, neighborhood{.self_weight = 0.25}); });
  for (const float each : x) require_equal(each, 2.0F);
  for (const float each : y) require_equal(each, 0.5F);
  require_equal(traffic.bytes_sent, 0);
  require_equal(traffic.messages_sent, 0);
  require_equal(traffic.operations, 1);
}

RANKS_TEST("one side may be empty: some only send, some only receive", "[neighbor][allreduce]") {
  const int n = comm.size();
  neighborhood links{.self_weight = 0.0};
  if (comm.rank() == 0)
    for (int rank = 1; rank < n; ++rank) links.sources.push_back({rank, 1.0});
  else
    links = {.self_weight = 1.0, .destinations = {{0}}};
  std::vector<double> x(10, comm.rank() * comm.rank()), y(10);
  neighbor_allreduce(comm, x, y, links);
  const double wanted =
      comm.rank() == 0 ? (n - 1) * n * (2 * n - 1) / 6.0 : comm.rank() * comm.rank();
  for (const double each : y) require_near(each, wanted, 1e-12);
}

RANKS_TEST("log2 n one-peer rounds average exactly where n is a power of two",
           "[neighbor][allreduce]") {
  const int n = comm.size();
  if ((n & (n - 1)) != 0) return;
  std::vector<float> x(100, static_cast<float>(8 * comm.rank()));
  const topology::one_peer_exponential schedule(n);
  for (int k = 0; (1 << k) < n; ++k) neighbor_allreduce(comm, x, x, schedule.round(k));
  for (const float each : x) require_equal(each, 4.0F * static_cast<float>(n - 1));
}

RANKS_TEST("many averages are in flight, each with its own neighbours", "[neighbor][allreduce]") {
  const int n = comm.size();
  const topology::one_peer_exponential schedule(n);
  std::vector<std::vector<double>> x;
  for (int k = 0; k < 20; ++k) x.emplace_back(k % 3 == 0 ? 4000 : 3, comm.rank() + 10.0 * k);
  std::vector<request<void>> requests;
  for (int k = 0; k < 20; ++k) {
    auto& each = x[static_cast<std::size_t>(k)];
    requests.push_back(k % 2 == 0
                           ? neighbor_allreduce_nonblocking(comm, each, each, schedule.round(k))
                           : allreduce_nonblocking(comm, each, each));
  }
  while (!requests.empty()) {
    requests.back().wait();
    requests.pop_back();
  }
  for (int k = 0; k < 20; ++k) {
    double wanted = (n - 1) / 2.0;
    if (k % 2 == 0) {
      const auto links = schedule.rounds(comm.rank())[k];
      wanted = links.self_weight * comm.rank();
      for (const auto& [source, weight] : links.sources) wanted += weight * source;
    }
    for (const double each : x[static_cast<std::size_t>(k)])
      require_near(each, wanted + 10.0 * k, 1e-9);
  }
}

RANKS_TEST("a thousand arrays travel as one message per peer", "[neighbor][allreduce]") {
  const topology::ring graph(comm.size());
  const auto links = topology::neighborhood_of(graph, comm.rank());
  std::vector<std::vector<float>> arrays(1000);
  for (std::size_t k = 0; k < arrays.size(); ++k) {
    arrays[k].resize(k % 13);
    for (std::size_t i = 0; i < arrays[k].size(); ++i)
      arrays[k][i] = static_cast<float>(sample(comm.rank(), k + i));
  }
  std::vector<std::vector<float>> out = arrays;
  const auto traffic = traffic_of(comm, [&] { neighbor_allreduce(comm, arrays, out, graph); });
  require_equal(traffic.messages_sent, static_cast<std::int64_t>(links.destinations.size()));
  require_equal(traffic.operations, 1);
  for (std::size_t k = 0; k < arrays.size(); ++k)
    for (std::size_t i = 0; i < arrays[k].size(); ++i) {
      require_equal(arrays[k][i], static_cast<float>(sample(comm.rank(), k + i)));
      require_near(out[k][i], mixed(links, comm.rank(), k + i), 1e-5);
    }
  auto later = arrays;
  neighbor_allreduce_nonblocking(comm, arrays, later, graph).wait();
  require(later == out, "started: another result");
  neighbor_allreduce_nonblocking(comm, arrays, arrays, graph).wait();
  require(arrays == out, "in place is another result");
  arrays.pop_back();
  const auto text =
      require_throws<usage_error>([&] { neighbor_allreduce(comm, arrays, out, graph); });
  require_contains(text, "neighbor_allreduce: input has 999 arrays, output has 1000");
}

RANKS_TEST("neighbor_allreduce counts the bytes handed to each destination",
           "[neighbor][allreduce]") {
  std::vector<double> x(300);
  const topology::exponential graph(comm.size());
  const auto traffic = traffic_of(comm, [&] { neighbor_allreduce(comm, x, x, graph); });
  require_equal(traffic.bytes_sent, std::int64_t{2400} * graph.degree());
  require_equal(traffic.messages_sent, std::int64_t{graph.degree()});
  require_equal(traffic.control_bytes, 0);
}
