// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <bluefog/tensor.hpp>
#include <bluefog/topology.hpp>

#include "tensor/support.hpp"

using namespace bluefog_test;
using bluefog::neighborhood;
using bluefog::reduce_op;

// The definitions, recomputed from the inputs of all ranks.
static at::Tensor reduced(const at::Tensor& all, reduce_op op) {
  switch (op) {
    case reduce_op::average: return all.sum(0) / all.size(0);
    case reduce_op::sum: return all.sum(0).to(all.scalar_type());
    case reduce_op::min: return std::get<0>(all.min(0));
    case reduce_op::max: return std::get<0>(all.max(0));
    case reduce_op::product: return all.prod(0).to(all.scalar_type());
  }
  return {};
}

template <class Graph>
static at::Tensor mixed(const at::Tensor& all, const Graph& graph, int rank) {
  at::Tensor sum = graph.weight(rank, rank) * all[rank];
  for (const int source : graph.in_neighbors(rank)) sum += graph.weight(source, rank) * all[source];
  return sum;
}

// A neighborhood on a directed ring, weighted on both sides.
static neighborhood weighted_ring(int rank, int size) {
  if (size == 1) return {.self_weight = 0.5};
  return {.self_weight = 0.5,
          .sources = {{(rank + size - 1) % size, 0.25}},
          .destinations = {{(rank + 1) % size, 3.0}}};
}
static at::Tensor mixed_on_ring(const at::Tensor& all, int rank) {
  const auto size = static_cast<int>(all.size(0));
  at::Tensor sum = 0.5 * all[rank];
  if (size > 1) sum += 0.75 * all[(rank + size - 1) % size];
  return sum;
}

RANKS_TEST("every operation takes every arrangement in memory and gives the same one back",
           "[tensor][layout]") {
  const int rank = comm.rank();
  const int size = comm.size();
  const bluefog::topology::exponential graph(size);
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{4, 3}, {2, 3, 4, 5}}) {
    const auto all = samples(size, sizes);
    for (const auto& [name, x] : arrangements(all[rank])) {
      const auto before = x.clone();
      const auto as_before = [&](const at::Tensor& y) {
        require(y.strides() == at::empty_like(x).strides(), name);
        require_tensor(x, before);
      };
      const auto a = bluefog::allreduce(comm, x);
      require_tensor(a, reduced(all, reduce_op::average), 1e-12);
      as_before(a);
      const auto b = bluefog::broadcast(comm, x, size - 1);
      require_tensor(b, all[size - 1]);
      as_before(b);
      const auto c = bluefog::neighbor_allreduce(comm, x);
      require_tensor(c, mixed(all, graph, rank), 1e-12);
      as_before(c);
      const auto d = bluefog::neighbor_allreduce(comm, x, weighted_ring(rank, size));
      require_tensor(d, mixed_on_ring(all, rank), 1e-12);
      as_before(d);
      const auto e = bluefog::hierarchical_neighbor_allreduce(comm, x);
      if (comm.machine_size() == 1) require_tensor(e, all.mean(0), 1e-12);
      as_before(e);
      if (const int peer = rank ^ 1; peer < size) {
        const auto f = bluefog::pair_gossip(comm, x, peer, 0.25, 0.75);
        require_tensor(f, 0.25 * all[rank] + 0.75 * all[peer], 1e-12);
        as_before(f);
      }
      const auto g = bluefog::allgather(comm, x);
      require_tensor(g, all.flatten(0, 1));
      require(g.suggest_memory_format() == x.suggest_memory_format(), name);
      std::vector<at::Tensor> sources{all[0].slice(0, 0, 0)};
      for (const int source : graph.in_neighbors(rank)) sources.push_back(all[source]);
      require_tensor(bluefog::neighbor_allgather(comm, x), at::cat(sources));
    }
  }
}

RANKS_TEST("what is in place writes through strides, and nothing else", "[tensor][layout]") {
  const int rank = comm.rank();
  const int size = comm.size();
  const auto all = samples(size, {4, 3});
  for (const auto& [name, arranged] : arrangements(all[rank])) {
    const at::Tensor x = arranged;
    const auto reset = [&] { x.copy_(all[rank]); };
    const auto version = x._version();
    require(bluefog::allreduce_(comm, x, reduce_op::sum).is_same(x));
    require_tensor(x, all.sum(0));
    require(x._version() > version, "autograd cannot see that " + name + " has changed");
    reset();
    bluefog::broadcast_(comm, x, 0);
    require_tensor(x, all[0]);
    reset();
    bluefog::neighbor_allreduce_(comm, x, weighted_ring(rank, size));
    require_tensor(x, mixed_on_ring(all, rank), 1e-12);
    reset();
    bluefog::hierarchical_neighbor_allreduce_(comm, x);
    if (comm.machine_size() == 1) require_tensor(x, all.mean(0), 1e-12);
    reset();
    if (const int peer = rank ^ 1; peer < size) {
      bluefog::pair_gossip_(comm, x, peer);
      require_tensor(x, 0.5 * (all[rank] + all[peer]), 1e-12);
    }
  }
  const auto base = at::full({4, 3}, -1.0);
  base.select(1, 0).copy_(all[rank].select(1, 0));
  bluefog::allreduce_(comm, base.select(1, 0));
  require_tensor(base.select(1, 0), all.select(2, 0).mean(0).to(at::kFloat), 1e-6);
  require_tensor(base.slice(1, 1), at::full({4, 2}, -1.0));

  const auto one_place = at::ones({3}).expand({4, 3});
  require_contains(
      require_throws<bluefog::usage_error>([&] { bluefog::neighbor_allreduce_(comm, one_place); }),
      "one place in memory");
}

RANKS_TEST("ranks may keep one tensor in different arrangements", "[tensor][layout]") {
  const auto all = samples(comm.size(), {4, 3});
  const auto choices = arrangements(all[comm.rank()]);
  const auto& x = choices[static_cast<std::size_t>(comm.rank()) % choices.size()].tensor;
  require_tensor(bluefog::allreduce(comm, x, reduce_op::sum), all.sum(0));
  require_tensor(bluefog::neighbor_allreduce(comm, x),
                 mixed(all, bluefog::topology::exponential(comm.size()), comm.rank()), 1e-12);
}

RANKS_TEST("expanded, empty and 0-dimensional tensors, and views with a sign, travel",
           "[tensor][layout]") {
  const int rank = comm.rank();
  const int size = comm.size();
  const auto expanded = at::full({1, 3}, rank + 1.0, at::kDouble).expand({4, 3});
  require_tensor(bluefog::allreduce(comm, expanded, reduce_op::max),
                 at::full({4, 3}, 1.0 * size, at::kDouble));
  const auto scalar = at::full({}, rank + 1.0, at::kDouble);
  require_tensor(bluefog::allreduce(comm, scalar, reduce_op::sum),
                 at::full({}, size * (size + 1) / 2.0, at::kDouble));
  require_tensor(bluefog::allgather(comm, scalar), at::arange(1, size + 1, at::kDouble));
  require_tensor(bluefog::broadcast(comm, scalar, 0), at::ones({}, at::kDouble));
  const auto empty = at::empty({0, 3}, at::kDouble);
  require_tensor(bluefog::allreduce(comm, empty), empty);
  require_tensor(bluefog::neighbor_allreduce(comm, empty), empty);
  require_tensor(bluefog::hierarchical_neighbor_allreduce(comm, empty), empty);
  require_tensor(bluefog::broadcast(comm, empty, 0), empty);
  require_tensor(bluefog::allgather(comm, empty), empty);
  require_tensor(bluefog::neighbor_allgather(comm, empty), empty);
  const auto negative = at::imag(at::complex(scalar, scalar).conj());  // a view with a pending sign
  require(negative.is_neg());
  require_tensor(bluefog::allreduce(comm, negative, reduce_op::min),
                 at::full({}, -1.0 * size, at::kDouble));
}

RANKS_TEST("the first dimension of gathered tensors may differ", "[tensor][gather]") {
  const int rank = comm.rank();
  const int size = comm.size();
  std::vector<at::Tensor> parts;
  for (int each = 0; each < size; ++each) parts.push_back(sample(each, {each % 3, 2}));
  const auto x = parts[static_cast<std::size_t>(rank)].t().contiguous().t();
  require_tensor(bluefog::allgather(comm, x), at::cat(parts));
  std::vector<at::Tensor> sources{at::empty({0, 2}, at::kDouble)};
  for (const int source : bluefog::topology::exponential(size).in_neighbors(rank))
    sources.push_back(parts[static_cast<std::size_t>(source)]);
  require_tensor(bluefog::neighbor_allgather(comm, x), at::cat(sources));
}

RANKS_TEST("each type works with each operation or is refused by name", "[tensor][dtype]") {
  const int rank = comm.rank();
  const int size = comm.size();
  for (const auto type : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong,
                          at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    const auto all = samples(size, {7}, type);
    const at::Tensor x = all[rank].clone();
    for (const auto op : {reduce_op::sum, reduce_op::min, reduce_op::max, reduce_op::product}) {
      if (op == reduce_op::product && size > 3) continue;  // leaves int8 and the exact halves
      require_tensor(bluefog::allreduce(comm, x, op), reduced(all, op));
    }
    require_tensor(bluefog::broadcast(comm, x, 0), all[0]);
    require_tensor(bluefog::allgather(comm, x), all.flatten());
    bluefog::neighbor_allgather(comm, x);
    if (at::isFloatingType(type)) {
      const double tolerance = type == at::kBFloat16 ? 0.05 : type == at::kHalf ? 0.01 : 1e-6;
      require_tensor(bluefog::allreduce(comm, x), all.to(at::kDouble).mean(0).to(type), tolerance);
      require_tensor(
          bluefog::neighbor_allreduce(comm, x),
          mixed(all.to(at::kDouble), bluefog::topology::exponential(size), rank).to(type),
          tolerance);
    } else {
      const auto name = bluefog::name_of(bluefog::dtype_from(type).value());
      require_contains(require_throws<bluefog::usage_error>([&] { bluefog::allreduce(comm, x); }),
                       name);
      require_contains(
          require_throws<bluefog::usage_error>([&] { bluefog::neighbor_allreduce(comm, x); }),
          name);
      require_throws<bluefog::usage_error>(
          [&] { bluefog::hierarchical_neighbor_allreduce(comm, x); });
      if (size > 1)
        require_throws<bluefog::usage_error>([&] { bluefog::pair_gossip(comm, x, rank ^ 1); });
    }
  }
  const auto refuses = [&](const at::Tensor& x, const std::string& word) {
    require_contains(require_throws<bluefog::usage_error>([&] { bluefog::broadcast(comm, x, 0); }),
                     word);
    require_throws<bluefog::usage_error>([&] { bluefog::allgather(comm, x); });
    require_throws<bluefog::usage_error>([&] { bluefog::allreduce_(comm, x); });
  };
  refuses(at::ones({2}, at::kComplexFloat), "ComplexFloat");
  refuses(at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8), "QInt8");
  refuses(at::ones({2, 2}).to_sparse(), "Sparse");
  refuses(at::Tensor(), "undefined");
  refuses(at::empty({2}, at::device(at::kMeta)), "meta");
}

RANKS_TEST("halves are summed in float32 and rounded once", "[tensor][dtype]") {
  const auto x = at::full({3}, comm.rank() == 0 ? 256.0 : 1.0, at::kBFloat16);
  const auto wanted = at::full({3}, 255.0 + comm.size(), at::kFloat).to(at::kBFloat16);
  require_tensor(bluefog::allreduce(comm, x, reduce_op::sum), wanted);
}

RANKS_TEST("many tensors travel as one message per neighbour, however many and of whatever types",
           "[tensor][list]") {
  const int rank = comm.rank();
  const int size = comm.size();
  const bluefog::topology::exponential graph(size);
  const auto destinations = static_cast<std::int64_t>(graph.out_neighbors(rank).size());
  for (const int count : {0, 1, 1000}) {
    std::vector<at::Tensor> all;
    std::vector<at::Tensor> own;
    for (int i = 0; i < count; ++i) {
      const auto type = i % 3 == 0 ? at::kFloat : i % 3 == 1 ? at::kDouble : at::kBFloat16;
      all.push_back(samples(size, {i % 4, 2}, type));
      own.push_back(i % 2 == 0 ? all.back()[rank].clone() : all.back()[rank].t().contiguous().t());
    }
    const auto begin = comm.statistics();
    const auto results = bluefog::neighbor_allreduce(comm, own, graph);
    require_equal(comm.statistics().messages_sent - begin.messages_sent, destinations);
    require_equal(results.size(), own.size());
    const auto sums = bluefog::allreduce(comm, own, reduce_op::sum);
    const auto first = bluefog::broadcast(comm, own, 0);
    for (std::size_t i = 0; i < own.size(); ++i) {
      const auto type = own[i].scalar_type();
      require_tensor(results[i], mixed(all[i].to(at::kDouble), graph, rank).to(type),
                     type == at::kBFloat16 ? 0.05 : 1e-6);
      require_tensor(sums[i], all[i].to(at::kDouble).sum(0).to(type));
      require_tensor(first[i], all[i][0]);
    }
    bluefog::neighbor_allreduce_(comm, own, graph);
    for (std::size_t i = 0; i < own.size(); ++i) require_tensor(own[i], results[i]);
    const auto middle = comm.statistics();
    bluefog::allreduce_(comm, own);
    const std::int64_t types = std::min(count, 3);
    require_equal(comm.statistics().messages_sent - middle.messages_sent, size > 1 ? types : 0);
    if (const int peer = rank ^ 1; peer < size) bluefog::pair_gossip_(comm, own, peer);
    bluefog::hierarchical_neighbor_allreduce_(comm, own,
                                              bluefog::topology::exponential(comm.machine_size()));
  }
}

RANKS_TEST("requests hold results and what is sent, and may be waited for in any order",
           "[tensor][request]") {
  const int rank = comm.rank();
  const int size = comm.size();
  const auto all = samples(size, {50, 4});
  auto x = all[rank].clone();
  auto average = bluefog::allreduce_nonblocking(comm, x.t());
  auto neighbors = bluefog::neighbor_allreduce_nonblocking(comm, x, weighted_ring(rank, size));
  auto gathered = bluefog::allgather_nonblocking(comm, x, {.name = "gather"});
  auto around = bluefog::neighbor_allgather_nonblocking(comm, x);
  auto last = bluefog::broadcast_nonblocking(comm, x, size - 1);
  std::vector<at::Tensor> list{all[rank].clone(), at::arange(3)};
  auto several = bluefog::allreduce_nonblocking_(comm, list, reduce_op::sum);
  auto here = all[rank].t().contiguous().t();
  auto in_place = bluefog::neighbor_allreduce_nonblocking_(comm, here);
  x.reset();  // the requests keep what they need
  require_tensor(in_place.wait(), mixed(all, bluefog::topology::exponential(size), rank), 1e-12);
  require_tensor(here, mixed(all, bluefog::topology::exponential(size), rank), 1e-12);
  require_tensor(last.wait(), all[size - 1]);
  require_equal(several.wait().size(), std::size_t{2});
  require_tensor(list[0], all.sum(0));
  require_tensor(list[1], at::arange(3) * size);
  require_tensor(gathered.wait(), all.flatten(0, 1));
  require_tensor(neighbors.wait(), mixed_on_ring(all, rank), 1e-12);
  require_tensor(average.wait(), all.mean(0).t(), 1e-12);
  require_throws<bluefog::usage_error>([&] { average.wait(); });
  around.wait();
  bluefog::allreduce_nonblocking(comm, at::ones({1000}));  // dropped: waits
}

TEST_CASE("hierarchical averages mix the means of machines", "[tensor][hierarchical][thread]") {
  bluefog::run_threads(
      6,
      [](auto& comm) {
        const auto all = samples(6, {5, 3});
        const bluefog::topology::ring machines(3);
        at::Tensor wanted = at::zeros({5, 3}, at::kDouble);
        for (int machine = 0; machine < 3; ++machine)
          wanted += machines.weight(machine, comm.machine_rank()) *
                    all.slice(0, 2 * machine, 2 * machine + 2).mean(0);
        const auto x = all[comm.rank()].t().contiguous().t();
        require_tensor(bluefog::hierarchical_neighbor_allreduce(comm, x, machines), wanted, 1e-12);
        const std::vector<at::Tensor> list{x, x.to(at::kFloat)};
        const auto results = bluefog::hierarchical_neighbor_allreduce(comm, list, machines);
        require_tensor(results[0], wanted, 1e-12);
        require_tensor(results[1], wanted.to(at::kFloat), 1e-5);
      },
      {.nodes_per_machine = 2});
}

TEST_CASE("check mode compares shapes, and whether a gradient is required",
          "[tensor][check][thread]") {
  bluefog::run_threads(
      3,
      [](auto& comm) {
        const auto x = sample(0, {2, 3});
        const auto turned = comm.rank() == 1 ? x.t() : x;
        const auto shapes =
            require_throws<bluefog::mismatch_error>([&] { bluefog::allreduce(comm, turned); });
        require_contains(shapes, "[2, 3]");
        require_contains(shapes, "[3, 2]");
        auto leaf = x.clone().requires_grad_(comm.rank() == 2);
        require_contains(require_throws<bluefog::mismatch_error>(
                             [&] { bluefog::neighbor_allreduce(comm, leaf); }),
                         "with gradient");
        require_contains(
            require_throws<bluefog::mismatch_error>([&] { bluefog::allgather(comm, leaf); }),
            "with gradient");
        require_tensor(bluefog::allreduce(comm, x), x, 1e-12);
      },
      {.check = true});
}
