// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <bluefog/collective/allgather.hpp>
#include <bluefog/neighbor/allreduce.hpp>
#include <bluefog/neighbor/hierarchical_allreduce.hpp>
#include <bluefog/topology.hpp>

#include "collective/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

namespace {

/// The mean over the ranks of a machine.
double machine_mean(int machine, int local_size, std::size_t place) {
  double sum = 0;
  for (int i = 0; i < local_size; ++i) sum += sample(machine * local_size + i, place);
  return sum / local_size;
}

/// The definition, for destination weights 1.
double mixed(const neighborhood& machines, int machine, int local_size, std::size_t place) {
  double sum = machines.self_weight * machine_mean(machine, local_size, place);
  for (const auto& [source, weight] : machines.sources)
    sum += weight * machine_mean(source, local_size, place);
  return sum;
}

/// Calls `act` with communicators of every layout that divides the ranks evenly.
template <class Comm, class Act>
void on_layouts(Comm& comm, Act act) {
  for (int local_size = 1; local_size <= comm.size(); ++local_size) {
    if (comm.size() % local_size != 0) continue;
    auto laid_out = with_options(comm, {.ranks_per_machine = local_size});
    act(laid_out);
  }
}

}  // namespace

RANKS_TEST("hierarchical averages follow their definition, for every layout, dtype and length",
           "[neighbor][hierarchical]") {
  on_layouts(comm, [](auto& laid_out) {
    const topology::ring machines(laid_out.machine_size());
    const int machine = laid_out.machine_rank();
    const auto links = topology::neighborhood_of(machines, machine);
    for (const dtype type : {dtype::float16, dtype::bfloat16, dtype::float32, dtype::float64})
      with_type(type, [&]<class T>() {
        if constexpr (!std::is_integral_v<T>)
          for (const std::size_t count : {0U, 1U, 7U, 5000U}) {
            const auto fill = [&](std::size_t i) {
              return static_cast<float>(sample(laid_out.rank(), i));
            };
            values<T> in(count, fill), out(count);
            hierarchical_neighbor_allreduce(laid_out, in, out, machines);
            const double precision = type == dtype::float64   ? 1e-13
                                     : type == dtype::float32 ? 1e-5
                                     : type == dtype::float16 ? 1.0 / 512
                                                              : 1.0 / 64;
            for (std::size_t i = 0; i < count; ++i) {
              require_equal(number(in[i]), number(static_cast<T>(fill(i))));
              const double wanted = mixed(links, machine, laid_out.local_size(), i);
              require_near(number(out[i]), wanted, precision * std::abs(wanted));
            }
            values<T> later(count);
            hierarchical_neighbor_allreduce_nonblocking(laid_out, in, later, machines).wait();
            require(std::equal(later.begin(), later.end(), out.begin()), "started: another result");
            hierarchical_neighbor_allreduce_nonblocking(laid_out, in, in, machines).wait();
            require(std::equal(in.begin(), in.end(), out.begin()), "in place is another result");
          }
      });
  });
}

RANKS_TEST("a dynamic neighborhood of machines needs no graph, and may weigh what it sends",
           "[neighbor][hierarchical]") {
  on_layouts(comm, [](auto& laid_out) {
    const int m = laid_out.machine_size();
    const int machine = laid_out.machine_rank();
    neighborhood links{.self_weight = 0.5};
    if (m > 1) {
      links.sources = {{(machine + m - 1) % m, 0.25}};
      links.destinations = {{(machine + 1) % m, 2.0}};
    }
    std::vector<double> x(101), y(101);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = sample(laid_out.rank(), i);
    hierarchical_neighbor_allreduce(laid_out, x, y, links);
    const int local = laid_out.local_size();
    for (std::size_t i = 0; i < x.size(); ++i) {
      double wanted = 0.5 * machine_mean(machine, local, i);
      if (m > 1) wanted += 0.5 * machine_mean((machine + m - 1) % m, local, i);
      require_near(y[i], wanted, 1e-12);
    }
  });
}

RANKS_TEST("all ranks of a machine get the same bits", "[neighbor][hierarchical]") {
  on_layouts(comm, [](auto& laid_out) {
    std::vector<float> x(333);
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = std::sin(static_cast<float>(sample(laid_out.rank(), i) + laid_out.rank()));
    hierarchical_neighbor_allreduce(laid_out, x, x, topology::ring(laid_out.machine_size()));
    const auto all = allgather(laid_out, x);
    const auto first = static_cast<std::size_t>(laid_out.machine_rank() * laid_out.local_size());
    for (std::size_t i = 0; i < x.size(); ++i) require_equal(x[i], all[first * x.size() + i]);
  });
}

RANKS_TEST("with one rank per machine it is a neighbor_allreduce, with one machine an average",
           "[neighbor][hierarchical]") {
  std::vector<double> x(50, comm.rank()), y(50), z(50);
  auto apart = with_options(comm, {.ranks_per_machine = 1});
  hierarchical_neighbor_allreduce(apart, x, y, topology::exponential(comm.size()));
  neighbor_allreduce(comm, x, z, topology::exponential(comm.size()));
  require_equal(y, z);
  auto together = with_options(comm, {.ranks_per_machine = comm.size()});
  hierarchical_neighbor_allreduce(together, x, y, neighborhood{});
  for (const double each : y) require_near(each, (comm.size() - 1) / 2.0, 1e-12);
}

RANKS_TEST("16-bit floats are rounded once inside a machine", "[neighbor][hierarchical]") {
  if (comm.size() != 8) return;
  auto together = with_options(comm, {.ranks_per_machine = 8});
  std::vector<float16> x(20, float16(comm.rank() == 0 ? 256.0F : 1.0F)), y(20);
  hierarchical_neighbor_allreduce(together, x, y, neighborhood{.self_weight = 8.0});
  for (const auto each : y) require_equal(static_cast<float>(each), 263.0F);
  std::vector<float16> large(20, float16(30000.0F));  // the machine's sum would be infinite
  hierarchical_neighbor_allreduce(together, large, large, neighborhood{});
  for (const auto each : large) require_equal(static_cast<float>(each), 30000.0F);
}

RANKS_TEST("uneven machines and graphs of another size are refused by name",
           "[neighbor][hierarchical]") {
  std::vector<float> x(3);
  if (comm.size() == 3 || comm.size() == 5) {
    auto uneven = with_options(comm, {.ranks_per_machine = 2});
    const auto text = require_throws<usage_error>(
        [&] { hierarchical_neighbor_allreduce(uneven, x, x, neighborhood{}); });
    require_contains(text, "hierarchical_neighbor_allreduce: every machine needs the same number");
    require_contains(text, "machine 0 has ranks 0, 1; ");
    require_contains(text, concat("has rank ", comm.size() - 1));
  }
  auto apart = with_options(comm, {.ranks_per_machine = 1});
  auto text = require_throws<usage_error>(
      [&] { hierarchical_neighbor_allreduce(apart, x, x, topology::ring(comm.size() + 1)); });
  require_contains(text, concat("the graph has ", comm.size() + 1));
  text = require_throws<usage_error>([&] {
    hierarchical_neighbor_allreduce(apart, x, x, neighborhood{.sources = {{comm.size()}}});
  });
  require_contains(text, concat("source 0 must be in [0, ", comm.size(), ")"));
}

RANKS_TEST("a hierarchical average counts the sum of its parts", "[neighbor][hierarchical]") {
  on_layouts(comm, [](auto& laid_out) {
    const topology::ring machines(laid_out.machine_size());
    const auto destinations =
        static_cast<std::int64_t>(machines.out_neighbors(laid_out.machine_rank()).size());
    const std::int64_t local = laid_out.local_size();
    std::vector<double> x(static_cast<std::size_t>(local) * 100);
    const auto traffic =
        traffic_of(laid_out, [&] { hierarchical_neighbor_allreduce(laid_out, x, x, machines); });
    const std::int64_t bytes = local * 800;
    require_equal(traffic.bytes_sent,
                  2 * (local - 1) * bytes / local + destinations * bytes / local);
    require_equal(traffic.messages_sent, destinations + (local > 1 ? 1 : 0));
    require_equal(traffic.control_bytes, 0);
  });
}
