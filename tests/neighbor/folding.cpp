// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include <bluefog/core/kernels.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/neighbor/folding.hpp>
#include <bluefog/topology.hpp>

#include "backend/support.hpp"
#include "collective/support.hpp"
#include "support/faulty_backend.hpp"
#include "support/irregular_graph.hpp"

using namespace bluefog;
using namespace bluefog_test;
using namespace std::chrono_literals;

#ifndef BLUEFOG_TEST_SANITIZED  // sanitizers have operators of their own
namespace {

/// Bytes of temporary memory that is large, now and at most.
struct large_memory {
  static constexpr std::size_t large = 64 << 10;
  static inline std::atomic<std::size_t> used = 0;
  static inline std::atomic<std::size_t> most = 0;

  static void count(std::size_t bytes) noexcept {
    const std::size_t now = used += bytes;
    std::size_t known = most;
    while (known < now && !most.compare_exchange_weak(known, now)) continue;
  }
};

}  // namespace

// Temporary memory is what is allocated with an alignment; the size stands in front of it.
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto front = static_cast<std::size_t>(alignment);
  void* const whole = std::aligned_alloc(front, (bytes + 2 * front - 1) / front * front);
  if (whole == nullptr) throw std::bad_alloc();
  std::memcpy(whole, &bytes, sizeof bytes);
  if (bytes >= large_memory::large) large_memory::count(bytes);
  return static_cast<std::byte*>(whole) + front;
}
void operator delete(void* data, std::align_val_t alignment) noexcept {
  if (data == nullptr) return;
  void* const whole = static_cast<std::byte*>(data) - static_cast<std::size_t>(alignment);
  std::size_t bytes = 0;
  std::memcpy(&bytes, whole, sizeof bytes);
  if (bytes >= large_memory::large) large_memory::used -= bytes;
  std::free(whole);
}
void operator delete(void* data, std::size_t /*bytes*/, std::align_val_t alignment) noexcept {
  operator delete(data, alignment);
}
#endif

namespace {

/// What rank `rank` has in place `place`: a number that sums have to round.
template <class T>
[[nodiscard]] T value_of(int rank, std::size_t place) {
  return static_cast<T>(1.0 / (3 + 7 * rank + static_cast<int>(place % 1009)));
}
template <class T>
[[nodiscard]] std::vector<T> values_of(int rank, std::size_t count) {
  std::vector<T> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = value_of<T>(rank, i);
  return values;
}

/// y_i of the definition: products and sums in the order of the sources, fused.
template <class T>
[[nodiscard]] std::vector<T> mixed(const neighborhood& links, int rank, std::size_t count,
                                   auto destination_weight) {
  std::vector<T> sums(count);
  for (std::size_t i = 0; i < count; ++i) {
    sums[i] = static_cast<T>(links.self_weight) * value_of<T>(rank, i);
    for (const auto& [source, weight] : links.sources) {
      const T sent = static_cast<T>(destination_weight(source)) * value_of<T>(source, i);
      sums[i] = std::fma(static_cast<T>(weight), sent, sums[i]);
    }
  }
  return sums;
}

/// An average on its way, as an optimizer holds it.
struct flight {
  std::shared_ptr<job> way;
  std::shared_ptr<bluefog::detail::arrivals> arrived;
  const_buffer own;
};

/// Starts to average each of `buckets`, which must stay.
template <backend Backend, class T>
[[nodiscard]] std::vector<flight> start_all(communicator<Backend>& comm,
                                            const std::vector<std::vector<T>>& buckets,
                                            const neighborhood& links) {
  const auto shared = std::make_shared<bluefog::detail::landing>();
  std::vector<flight> flights;
  for (const auto& bucket : buckets) {
    const auto own = as_buffer(bucket);
    const auto arrived = std::make_shared<bluefog::detail::arrivals>();
    auto call = bluefog::detail::check_mix(comm, "folding", own, own, links, {});
    auto way = comm.start(std::move(call), [&](auto context) {
      if (bluefog::detail::folds<Backend>(links, own.type))
        return bluefog::detail::fold_task(context, own, links, arrived,
                                          bluefog::detail::turn(shared));
      return bluefog::detail::fetch_task(context, own.data, bluefog::detail::packed_layout(own),
                                         links, arrived);
    });
    flights.push_back({std::move(way), arrived, own});
  }
  return flights;
}

/// \return the average. \throws what the operation has failed with.
template <class T, backend Backend>
[[nodiscard]] std::vector<T> finish(communicator<Backend>& comm, flight& each,
                                    const neighborhood& links) {
  bluefog::detail::finish(*comm.driver(), each.way);
  std::vector<T> result(static_cast<std::size_t>(each.own.count));
  const auto out = as_mutable_buffer(result);
  if (bluefog::detail::folds<Backend>(links, each.own.type)) {
    if (!result.empty()) std::memcpy(out.data, each.arrived->front().data(), out.bytes());
  } else {
    bluefog::detail::combine(each.own.data, out.data, bluefog::detail::packed_layout(each.own),
                             links, *each.arrived);
  }
  return result;
}

template <class T, class Comm>
void require_exact(Comm& comm, const neighborhood& links, auto destination_weight,
                   const std::vector<std::size_t>& counts = {37, 1, 515, 0, 8}) {
  std::vector<std::vector<T>> buckets;
  for (const std::size_t count : counts) buckets.push_back(values_of<T>(comm.rank(), count));
  auto flights = start_all(comm, buckets, links);
  for (std::size_t k = 0; k < buckets.size(); ++k) {
    const auto average = finish<T>(comm, flights[k], links);
    require(average == mixed<T>(links, comm.rank(), buckets[k].size(), destination_weight),
            "the definition, bit for bit");
    std::vector<T> at_once(buckets[k].size());
    neighbor_allreduce(comm, buckets[k], at_once, links);
    require(average == at_once, "neighbor_allreduce, bit for bit");
  }
}

template <class Comm>
void require_exact(Comm& comm, const topology::graph auto& graph) {
  const auto links = topology::neighborhood_of(graph, comm.rank());
  const auto one = [](int) { return 1.0; };
  require_exact<float>(comm, links, one);
  require_exact<double>(comm, links, one);
}

}  // namespace

TEST_CASE("only sums of several float32 or float64 arrays are kept as they come",
          "[neighbor][folding]") {
  const neighborhood one{.sources = {{1}}}, two{.sources = {{1}, {2}}};
  for (const dtype type : {dtype::float16, dtype::bfloat16, dtype::float32, dtype::float64}) {
    CHECK_FALSE(bluefog::detail::folds<thread_backend>(one, type));
    CHECK(bluefog::detail::folds<thread_backend>(two, type) ==
          (type == dtype::float32 || type == dtype::float64));
  }
}

RANKS_TEST("values that are added as they come make the average of one pass, bit for bit",
           "[neighbor][folding]") {
  require_exact(comm, topology::exponential(comm.size()));
  require_exact(comm, topology::fully_connected(comm.size()));
  require_exact(comm, topology::star(comm.size()));
  const auto links = irregular_graph(comm.rank(), comm.size());
  const auto weight = [&](int source) {
    for (const edge& each : irregular_graph(source, comm.size()).destinations)
      if (each.rank == comm.rank()) return each.weight;
    fail_here("no such edge", std::source_location::current());
  };
  require_exact<float>(comm, links, weight);
  require_exact<double>(comm, links, weight);
}

RANKS_TEST("ranks may have other orders of their sources", "[neighbor][folding]") {
  auto links = topology::neighborhood_of(topology::fully_connected(comm.size()), comm.rank());
  std::ranges::rotate(links.sources, links.sources.begin() + links.sources.size() / 2);
  if (comm.rank() % 2 == 1) std::ranges::reverse(links.sources);
  require_exact<double>(comm, links, [](int) { return 1.0; },
                        {9001, 300, 9001});  // some longer than MPI sends at once
}

#ifndef BLUEFOG_TEST_SANITIZED
TEST_CASE("of many arrays under way each has one sum, and all of a rank one array that comes",
          "[neighbor][folding][thread]") {
  constexpr std::size_t ranks = 8, parts = 6, count = large_memory::large;
  constexpr std::size_t bytes = count * sizeof(float);
  const topology::exponential graph(ranks);  // of three sources
  large_memory::most = large_memory::used.load();
  const std::size_t before = large_memory::most;
  run_threads(ranks, [&](communicator<thread_backend>& comm) {
    const auto links = topology::neighborhood_of(graph, comm.rank());
    std::vector<std::vector<float>> buckets;  // each a little longer than the one before
    for (std::size_t k = 0; k < parts; ++k)
      buckets.push_back(values_of<float>(comm.rank(), count - 100 * (parts - k)));
    for (int again = 0; again < 3; ++again) {
      auto flights = start_all(comm, buckets, links);
      for (flight& each : flights) bluefog::detail::finish(*comm.driver(), each.way);
    }
  });
  CHECK(large_memory::most - before >= ranks * (parts - 1) * bytes);
  CHECK(large_memory::most - before <= ranks * (parts + 1) * bytes);
}
#endif

TEST_CASE(
    "a fault among several neighbours ends in an error or in nothing, and later averages hold",
    "[neighbor][folding][thread]") {
  using faulty = faulty_backend<thread_backend>;
  const log_capture quiet;
  std::atomic<int> failed = 0, completed = 0, recoveries = 0;
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    constexpr int size = 4;
    const bool lossy = seed % 4 != 0;
    std::barrier<> together(size);
    std::atomic<int> wounded = 0;
    std::atomic<int> lost = 0;
    std::atomic<bool> recovered = false;
    std::vector<std::shared_ptr<fault_state>> states;
    std::mutex mutex;
    const auto failures = run_wrapped(
        size,
        [&](thread_backend inner) {
          faulty transport(std::move(inner), {.seed = seed,
                                              .delay = static_cast<int>(seed % 5),
                                              .reorder = seed % 2 == 0,
                                              .drop = lossy ? 0.1 : 0,
                                              .drop_before = 6});
          const std::scoped_lock lock(mutex);
          states.push_back(transport.state());
          return transport;
        },
        [&](communicator<faulty>& comm) {
          const auto links =
              topology::neighborhood_of(topology::fully_connected(size), comm.rank());
          const std::vector buckets{values_of<double>(comm.rank(), 1000),
                                    values_of<double>(comm.rank(), 5),
                                    values_of<double>(comm.rank(), 300)};
          const auto average_all = [&] {
            int failures_here = 0;
            auto flights = start_all(comm, buckets, links);
            for (std::size_t k = 0; k < buckets.size(); ++k) try {
                require(finish<double>(comm, flights[k], links) ==
                            mixed<double>(links, comm.rank(), buckets[k].size(),
                                          [](int) { return 1.0; }),
                        "a wrong average");
                ++completed;
              } catch (const error&) {
                ++failures_here;
                ++failed;
              }
            return failures_here;
          };
          if (average_all() > 0) ++wounded;
          for (int attempt = 0; attempt < 20 && !recovered; ++attempt) {
            if (comm.rank() == 0) lost = 0;
            together.arrive_and_wait();
            lost += average_all();
            together.arrive_and_wait();
            if (comm.rank() == 0) recovered = lost == 0;
            together.arrive_and_wait();
          }
        },
        {.check = seed % 3 == 0, .timeout = lossy ? 1000ms : 60'000ms, .stall_warning = 200ms},
        [&] { together.arrive_and_drop(); });
    INFO("seed " << seed);
    const auto problem = first_text(failures);
    UNSCOPED_INFO(problem);
    REQUIRE((problem.empty() || problem.find("communicator (operation 0)") == 0));
    for (const auto& state : states) REQUIRE(state->living == 0);
    REQUIRE((recovered || !problem.empty()));
    if (!lossy) REQUIRE(wounded == 0);
    if (recovered && wounded > 0) ++recoveries;
  }
  CHECK(completed > 0);
  CHECK(failed > 0);
  CHECK(recoveries > 0);
}
