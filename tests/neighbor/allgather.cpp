// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <bluefog/collective/barrier.hpp>
#include <bluefog/neighbor/allgather.hpp>
#include <bluefog/topology.hpp>

#include "collective/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

namespace {

std::size_t share(int rank, std::size_t scale) {
  return static_cast<std::size_t>(rank * rank % 5) * scale;
}

template <class T>
values<T> part(int rank, std::size_t scale) {
  return values<T>(share(rank, scale), [&](std::size_t i) {
    if constexpr (std::is_same_v<T, bool>)
      return sample(rank, i) % 2 == 0;
    else if constexpr (std::is_integral_v<T>)
      return sample(rank, i);
    else
      return static_cast<float>(sample(rank, i));
  });
}

}  // namespace

RANKS_TEST("neighbor_allgather concatenates what in-neighbours give, ascending, for every dtype",
           "[neighbor][allgather]") {
  const auto check = [&](const topology::graph auto& graph) {
    for (const dtype type : dtypes)
      with_type(type, [&]<class T>() {
        for (const std::size_t scale : {0U, 1U, 3000U}) {
          std::vector<values<T>> parts;
          std::size_t total = 0;
          for (const int source : graph.in_neighbors(comm.rank()))
            total += parts.emplace_back(part<T>(source, scale)).size();
          const auto mine = part<T>(comm.rank(), scale);
          values<T> out(total);
          neighbor_allgather(comm, mine, out, graph);
          const T* next = out.begin();
          for (const auto& each : parts) {
            require(std::equal(each.begin(), each.end(), next), "another order or other data");
            next += each.size();
          }
          if constexpr (!std::is_same_v<T, bool>) {
            const auto made = neighbor_allgather(comm, mine, graph);
            require(std::equal(made.begin(), made.end(), out.begin(), out.end()));
            auto later = neighbor_allgather_nonblocking(comm, mine, graph);
            require(later.wait() == made);
          }
        }
      });
  };
  check(topology::exponential(comm.size()));
  check(topology::star(comm.size()));
}

RANKS_TEST("a neighborhood's sources are kept in the order in which they are given",
           "[neighbor][allgather]") {
  const int n = comm.size();
  neighborhood links;
  for (int k = n - 1; k > 0; --k) {
    links.sources.push_back({(comm.rank() + k) % n, 0.125});  // weights play no part
    links.destinations.push_back({(comm.rank() + k) % n, 8.0});
  }
  const auto got = neighbor_allgather(comm, std::vector<int>(2, comm.rank()), links);
  require_equal(got.size(), 2 * links.sources.size());
  for (std::size_t i = 0; i < got.size(); ++i) require_equal(got[i], links.sources[i / 2].rank);
  require(neighbor_allgather(comm, got, neighborhood{}).empty(), "no sources, no values");
}

RANKS_TEST("without a graph neighbor_allgather goes over the exponential one",
           "[neighbor][allgather]") {
  std::vector<int> expected;  // the ranks 1, 2, 4, ... behind
  for (int rank = 0; rank < comm.size(); ++rank)
    for (int distance = 1; distance < comm.size(); distance *= 2)
      if ((rank + distance) % comm.size() == comm.rank()) expected.push_back(rank);
  const std::vector<int> mine(1, comm.rank());
  std::vector<int> out(expected.size(), -1);
  neighbor_allgather(comm, mine, out);
  require(out == expected);
  require(neighbor_allgather(comm, mine) == expected);
  std::ranges::fill(out, -1);
  neighbor_allgather_nonblocking(comm, mine, out).wait();
  require(out == expected);
  require(neighbor_allgather_nonblocking(comm, mine).wait() == expected);
  require(neighbor_allgather(comm, mine, {}).empty());
  require(neighbor_allgather_nonblocking(comm, mine, {}).wait().empty());
}

RANKS_TEST("neighbor_allgather may write over its input", "[neighbor][allgather]") {
  const int n = comm.size();
  if (n == 1) return;
  const neighborhood links{.sources = {{(comm.rank() + n - 1) % n}},
                           .destinations = {{(comm.rank() + 1) % n}}};
  std::vector<int> x(20000, comm.rank());
  neighbor_allgather(comm, x, x, links);
  for (const int each : x) require_equal(each, (comm.rank() + n - 1) % n);
}

RANKS_TEST("an output of another length is refused by its owner, who holds up nobody",
           "[neighbor][allgather]") {
  const int n = comm.size();
  if (n == 1) return;
  const topology::ring graph(n, topology::ring_style::right);
  const int source = *graph.in_neighbors(0).begin();
  for (const std::size_t count : {3U, 50000U}) {
    const std::vector<float> mine(count, static_cast<float>(comm.rank()));
    std::vector<float> out(comm.rank() == 0 ? count + 1 : count);
    if (comm.rank() == 0) {
      const auto text =
          require_throws<mismatch_error>([&] { neighbor_allgather(comm, mine, out, graph); });
      require_contains(text, concat("rank 0 has room for ", count + 1, " elements, rank ", source,
                                    " gives ", count));
      for (const float each : out) require_equal(each, 0.0F);
    } else {
      neighbor_allgather(comm, mine, out, graph);
      for (const float each : out)
        require_equal(each, static_cast<float>(*graph.in_neighbors(comm.rank()).begin()));
    }
    barrier(comm);
  }
}

RANKS_TEST("neighbor_allgather counts the bytes handed to each destination",
           "[neighbor][allgather]") {
  const topology::exponential graph(comm.size());
  const std::vector<double> mine(10 + share(comm.rank(), 1));
  const auto traffic =
      traffic_of(comm, [&] { static_cast<void>(neighbor_allgather(comm, mine, graph)); });
  require_equal(traffic.bytes_sent, static_cast<std::int64_t>(8 * mine.size()) * graph.degree());
  require_equal(traffic.messages_sent, std::int64_t{graph.degree()});
  require_equal(traffic.control_messages, std::int64_t{graph.degree()});  // the sizes
}
