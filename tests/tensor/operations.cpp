// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/core/InferenceMode.h>

#include <bluefog/tensor.hpp>
#include <bluefog/topology.hpp>

#include "support/irregular_graph.hpp"
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

// What the sources sent, one behind the other.
template <class Graph>
static at::Tensor gathered_around(const at::Tensor& all, const Graph& graph, int rank) {
  std::vector<at::Tensor> sources{all[0].slice(0, 0, 0)};
  for (const int source : graph.in_neighbors(rank)) sources.push_back(all[source]);
  return at::cat(sources);
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
      require_tensor(bluefog::neighbor_allgather(comm, x), gathered_around(all, graph, rank));
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

RANKS_TEST("tensors of a neighborhood are gathered in the order in which its sources are given",
           "[tensor][gather]") {
  const int rank = comm.rank();
  const int size = comm.size();
  const auto own = sample(rank, {rank % 3, 2});
  for (const auto& links : {irregular_graph(rank, size), all_to_first(rank, size)}) {
    std::vector<at::Tensor> sources{at::empty({0, 2}, at::kDouble)};
    for (const auto& source : links.sources)
      sources.push_back(sample(source.rank, {source.rank % 3, 2}));
    auto later = bluefog::neighbor_allgather_nonblocking(comm, own, links);
    require_tensor(bluefog::neighbor_allgather(comm, own, links), at::cat(sources));
    require_tensor(later.wait(), at::cat(sources));
  }
}

RANKS_TEST("what is asked for in inference mode arrives there, whoever makes the progress",
           "[tensor][layout]") {
  const c10::InferenceMode guard;
  const auto all = samples(comm.size(), {5, 3}, at::kDouble);
  for (const bool strided : {false, true}) {
    const at::Tensor x = strided ? all[comm.rank()].t().contiguous().t() : all[comm.rank()].clone();
    auto later = bluefog::allreduce_nonblocking(comm, x);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the communication thread's turn
    const at::Tensor mean = later.wait();
    require(mean.is_inference(), "made outside");
    require_tensor(mean, reduced(all, reduce_op::average));
    auto in_place = bluefog::allreduce_nonblocking_(comm, x, reduce_op::max);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    in_place.wait();
    require_tensor(x, reduced(all, reduce_op::max));
  }
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
    require_tensor(bluefog::neighbor_allgather(comm, x),
                   gathered_around(all, bluefog::topology::exponential(size), rank));
    if (at::isFloatingType(type)) {
      const double tolerance = type == at::kBFloat16 ? 0.05 : type == at::kHalf ? 0.01 : 1e-6;
      require_tensor(bluefog::allreduce(comm, x), all.to(at::kDouble).mean(0).to(type), tolerance);
      require_tensor(
          bluefog::neighbor_allreduce(comm, x),
          mixed(all.to(at::kDouble), bluefog::topology::exponential(size), rank).to(type),
          tolerance);
    } else {
      const auto name = bluefog::name_of(bluefog::dtype_from(type).value());
      require_contains(
          require_throws<bluefog::usage_error>([&] { return bluefog::allreduce(comm, x); }), name);
      require_contains(require_throws<bluefog::usage_error>(
                           [&] { return bluefog::neighbor_allreduce(comm, x); }),
                       name);
      require_throws<bluefog::usage_error>(
          [&] { return bluefog::hierarchical_neighbor_allreduce(comm, x); });
      if (size > 1)
        require_throws<bluefog::usage_error>(
            [&] { return bluefog::pair_gossip(comm, x, rank ^ 1); });
    }
  }
  const auto refuses = [&](const at::Tensor& x, const std::string& word) {
    require_contains(
        require_throws<bluefog::usage_error>([&] { return bluefog::broadcast(comm, x, 0); }), word);
    require_throws<bluefog::usage_error>([&] { return bluefog::allgather(comm, x); });
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

namespace {

/// Tensors of three types and many shapes, and what all ranks have of all of them.
class many_tensors {
 public:
  many_tensors(int count, int rank, int size) : all_(at::zeros({size, 0}, at::kDouble)) {
    std::vector<at::Tensor> all{all_};
    for (int i = 0; i < count; ++i) {
      const auto type = i % 3 == 0 ? at::kFloat : i % 3 == 1 ? at::kDouble : at::kBFloat16;
      const auto mine = sample(rank, {i % 4, 2}, type);
      own.push_back(i % 2 == 0 ? mine : mine.t().contiguous().t());
      all.push_back(samples(size, {i % 4 * 2}));
    }
    all_ = at::cat(all, 1);
    mine_ = all_[rank];
  }
  void reset() const {
    std::int64_t begin = 0;
    for (const auto& each : own) {
      each.copy_(mine_.narrow(0, begin, each.numel()).view(each.sizes()));
      begin += each.numel();
    }
  }
  /// Checks what an operation has made of all tensors.
  /// \param wanted  what it makes of all ranks' values, along the first dimension.
  template <class Wanted>
  void require_all(const std::vector<at::Tensor>& results, Wanted wanted) const {
    require_equal(results.size(), own.size());
    const at::Tensor exact = wanted(all_);
    std::vector<at::Tensor> parts;
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < own.size(); ++i) {
      require(results[i].scalar_type() == own[i].scalar_type(), "another type");
      require(results[i].sizes() == own[i].sizes(), "another shape");
      parts.push_back(exact.narrow(0, begin, own[i].numel()).to(own[i].scalar_type()));
      begin += own[i].numel();
    }
    const auto halves = [](const std::vector<at::Tensor>& list, bool are) {
      std::vector<at::Tensor> some;
      for (const auto& each : list)
        if ((each.scalar_type() == at::kBFloat16) == are) some.push_back(each);
      return flat(some, at::kDouble);
    };
    require_tensor(halves(results, true), halves(parts, true), 0.05);
    require_tensor(halves(results, false), halves(parts, false), 1e-6);
  }

  std::vector<at::Tensor> own;

 private:
  static at::Tensor flat(const std::vector<at::Tensor>& list, at::ScalarType type) {
    std::vector<at::Tensor> parts{at::empty({0}, type)};
    for (const auto& each : list) parts.push_back(each.to(type).reshape({-1}));
    return at::cat(parts);
  }

  at::Tensor all_;   // in double, one row per rank
  at::Tensor mine_;  // this rank's row
};

template <class Comm, class Operation>
std::int64_t messages_of(Comm& comm, Operation operation) {
  const auto before = comm.statistics().messages_sent;
  operation();
  return comm.statistics().messages_sent - before;
}

}  // namespace

RANKS_TEST("many tensors travel as one message per neighbour, however many and of whatever types",
           "[tensor][list]") {
  const int rank = comm.rank();
  const int size = comm.size();
  const bluefog::topology::exponential graph(size);
  const auto destinations = static_cast<std::int64_t>(graph.out_neighbors(rank).size());
  for (const int count : {0, 1, 1000}) {
    if (count == 1000 && size > 4) continue;  // takes long and is more of the same
    const many_tensors many(count, rank, size);
    const auto& own = many.own;
    const std::int64_t types = std::min(count, 3);
    std::vector<at::Tensor> results;
    require_equal(
        messages_of(comm, [&] { results = bluefog::neighbor_allreduce(comm, own, graph); }),
        destinations);
    many.require_all(results, [&](const at::Tensor& all) { return mixed(all, graph, rank); });
    many.require_all(bluefog::allreduce(comm, own, reduce_op::sum),
                     [](const at::Tensor& all) { return all.sum(0); });
    std::vector<at::Tensor> given;
    const auto told = messages_of(comm, [&] { given = bluefog::broadcast(comm, own, 0); });
    require_equal(told, std::int64_t{size > 1 ? 1 : 0});
    many.require_all(given, [](const at::Tensor& all) { return all[0]; });
    bluefog::neighbor_allreduce_(comm, own, graph);
    for (std::size_t i = 0; i < own.size(); ++i) require_tensor(own[i], results[i]);
    const auto reduced_all = messages_of(comm, [&] { bluefog::allreduce_(comm, own); });
    require_equal(reduced_all, size > 1 ? types : 0);
    many.reset();
    if (const int peer = rank ^ 1; peer < size) {
      const auto once =
          messages_of(comm, [&] { results = bluefog::pair_gossip_(comm, own, peer, 0.25, 0.75); });
      require_equal(once, std::int64_t{1});
      many.require_all(own,
                       [&](const at::Tensor& all) { return 0.25 * all[rank] + 0.75 * all[peer]; });
      for (std::size_t i = 0; i < own.size(); ++i) require(results[i].is_same(own[i]));
      many.reset();
      many.require_all(bluefog::pair_gossip(comm, own, peer),
                       [&](const at::Tensor& all) { return 0.5 * (all[rank] + all[peer]); });
    }
  }
}

RANKS_TEST("operations on many tensors may be in flight together, apart and in place",
           "[tensor][list][request]") {
  using list = std::vector<at::Tensor>;
  using definition = std::function<at::Tensor(const at::Tensor&)>;
  struct in_flight {
    many_tensors many;
    bool in_place;
    definition result;
    bluefog::request<list> pending;
  };
  const int rank = comm.rank();
  const int size = comm.size();
  const int peer = rank ^ 1;
  const bluefog::topology::exponential graph(size);
  std::vector<in_flight> started;
  const auto start = [&](bool in_place, definition result, const auto& operation) {
    many_tensors many(7, rank, size);
    auto pending = operation(many.own);
    started.push_back({std::move(many), in_place, std::move(result), std::move(pending)});
  };
  const auto sent = messages_of(comm, [&] {
    start(
        false, [](const at::Tensor& all) { return all.mean(0); },
        [&](const list& x) { return bluefog::allreduce_nonblocking(comm, x); });
    start(
        true, [](const at::Tensor& all) { return all.sum(0); },
        [&](const list& x) { return bluefog::allreduce_nonblocking_(comm, x, reduce_op::sum); });
    start(
        false, [&](const at::Tensor& all) { return all[size - 1]; },
        [&](const list& x) { return bluefog::broadcast_nonblocking(comm, x, size - 1); });
    start(
        true, [](const at::Tensor& all) { return all[0]; },
        [&](const list& x) { return bluefog::broadcast_nonblocking_(comm, x, 0); });
    start(
        false, [&](const at::Tensor& all) { return mixed_on_ring(all, rank); },
        [&](const list& x) {
          return bluefog::neighbor_allreduce_nonblocking(comm, x, weighted_ring(rank, size));
        });
    start(
        true, [&](const at::Tensor& all) { return mixed(all, graph, rank); },
        [&](const list& x) { return bluefog::neighbor_allreduce_nonblocking_(comm, x, graph); });
    if (comm.machine_size() == 1) {
      const auto halved = [](const at::Tensor& all) { return 0.5 * all.mean(0); };
      const neighborhood alone{.self_weight = 0.5};
      start(false, halved, [&](const list& x) {
        return bluefog::hierarchical_neighbor_allreduce_nonblocking(comm, x, alone);
      });
      start(true, halved, [&](const list& x) {
        return bluefog::hierarchical_neighbor_allreduce_nonblocking_(comm, x, alone);
      });
    }
    if (peer < size) {
      start(
          false, [&](const at::Tensor& all) { return 0.25 * all[rank] + 0.75 * all[peer]; },
          [&](const list& x) {
            return bluefog::pair_gossip_nonblocking(comm, x, peer, 0.25, 0.75);
          });
      start(
          true, [&](const at::Tensor& all) { return 0.5 * (all[rank] + all[peer]); },
          [&](const list& x) { return bluefog::pair_gossip_nonblocking_(comm, x, peer); });
    }
    for (; !started.empty(); started.pop_back()) {
      auto& [many, in_place, result, pending] = started.back();
      const list results = pending.wait();
      many.require_all(results, result);
      for (std::size_t i = 0; i < results.size(); ++i)
        require(results[i].is_same(many.own[i]) == in_place, "not where it should be");
      if (!in_place) many.require_all(many.own, [&](const at::Tensor& all) { return all[rank]; });
    }
  });
  const std::int64_t types = 3;
  const auto neighbors = static_cast<std::int64_t>(graph.out_neighbors(rank).size());
  std::int64_t wanted = neighbors;
  if (size > 1) wanted += 2 * types + 2 + 1;  // reductions, broadcasts, the ring
  if (comm.machine_size() == 1 && size > 1) wanted += 2 * types;
  if (peer < size) wanted += 2;
  require_equal(sent, wanted);
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
  auto first = all[rank].t().contiguous().t();
  auto root = bluefog::broadcast_nonblocking_(comm, first, 0);
  auto whole = all[rank].t().contiguous().t();
  auto sum = bluefog::allreduce_nonblocking_(comm, whole, reduce_op::sum);
  auto unweighted = bluefog::neighbor_allreduce_nonblocking(comm, x);
  auto machines = bluefog::hierarchical_neighbor_allreduce_nonblocking(comm, x);
  auto machine = all[rank].t().contiguous().t();
  auto machines_in_place = bluefog::hierarchical_neighbor_allreduce_nonblocking_(comm, machine);
  const int peer = rank ^ 1;
  auto both = all[rank].clone();
  std::vector<bluefog::request<at::Tensor>> pairs;
  if (peer < size) {
    pairs.push_back(bluefog::pair_gossip_nonblocking(comm, x, peer, 0.25, 0.75));
    pairs.push_back(bluefog::pair_gossip_nonblocking_(comm, both, peer));
  }
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
  require_tensor(around.wait(), gathered_around(all, bluefog::topology::exponential(size), rank));
  require(root.wait().is_same(first));
  require_tensor(first, all[0]);
  require_tensor(unweighted.wait(), mixed(all, bluefog::topology::exponential(size), rank), 1e-12);
  require(sum.wait().is_same(whole));
  require_tensor(whole, all.sum(0));
  const auto mean = machines.wait();
  require(machines_in_place.wait().is_same(machine));
  if (comm.machine_size() == 1) require_tensor(mean, all.mean(0), 1e-12);
  require_tensor(machine, mean);
  if (peer < size) {
    require(pairs[1].wait().is_same(both));
    require_tensor(both, 0.5 * (all[rank] + all[peer]), 1e-12);
    require_tensor(pairs[0].wait(), 0.25 * all[rank] + 0.75 * all[peer], 1e-12);
  }
  bluefog::allreduce_nonblocking(comm, at::ones({1000}));  // dropped: waits
}

TEST_CASE("hierarchical averages mix the means of machines", "[tensor][hierarchical][thread]") {
  bluefog::run_threads(
      6,
      [](auto& comm) {
        const auto all = samples(6, {5, 3});
        const bluefog::topology::ring machines(3);
        const auto mixed_means = [&](const at::Tensor& values) {
          at::Tensor sum = at::zeros(values[0].sizes(), at::kDouble);
          for (int machine = 0; machine < 3; ++machine)
            sum += machines.weight(machine, comm.machine_rank()) *
                   values.slice(0, 2 * machine, 2 * machine + 2).mean(0);
          return sum;
        };
        const at::Tensor wanted = mixed_means(all);
        const auto x = all[comm.rank()].t().contiguous().t();
        require_tensor(bluefog::hierarchical_neighbor_allreduce(comm, x, machines), wanted, 1e-12);
        auto request = bluefog::hierarchical_neighbor_allreduce_nonblocking(comm, x, machines);
        const auto y = x.clone();
        bluefog::hierarchical_neighbor_allreduce_nonblocking_(comm, y, machines).wait();
        require_tensor(y, wanted, 1e-12);
        require_tensor(request.wait(), wanted, 1e-12);
        for (const int count : {0, 1, 1000}) {
          const many_tensors many(count, comm.rank(), 6);
          const auto sent = messages_of(
              comm, [&] { bluefog::hierarchical_neighbor_allreduce_(comm, many.own, machines); });
          // The next machine and the one before it, and what is shared within the machine by type.
          require_equal(sent, std::int64_t{count == 0 ? 0 : 2} + std::min(count, 3));
          many.require_all(many.own, mixed_means);
          many.reset();
          auto apart =
              bluefog::hierarchical_neighbor_allreduce_nonblocking(comm, many.own, machines);
          const many_tensors others(count, comm.rank(), 6);
          bluefog::hierarchical_neighbor_allreduce_nonblocking_(comm, others.own, machines).wait();
          others.require_all(others.own, mixed_means);
          many.require_all(apart.wait(), mixed_means);
        }
      },
      {.ranks_per_machine = 2});
}

TEST_CASE("many tensors mixed between machines get the bits that each gets alone",
          "[tensor][hierarchical][thread]") {
  bluefog::run_threads(
      4,
      [](auto& comm) {
        const int other = 1 - comm.machine_rank();
        std::vector<at::Tensor> tensors;
        for (const auto type : {at::kFloat, at::kHalf, at::kDouble, at::kBFloat16, at::kFloat})
          for (const std::int64_t length : {0, 1, 77})
            tensors.push_back((sample(comm.rank(), {length}) / 3).to(type));
        for (const double weight : {1.0, 0.7}) {
          const bluefog::neighborhood links{
              .self_weight = 0.6, .sources = {{other, 0.4}}, .destinations = {{other, weight}}};
          std::vector<at::Tensor> together;
          const auto sent = messages_of(comm, [&] {
            together = bluefog::hierarchical_neighbor_allreduce(
                comm, std::span<const at::Tensor>(tensors), links);
          });
          require_equal(sent, std::int64_t{1 + 4});  // to the other machine; by type in its own
          const auto mean = [](int machine, at::IntArrayRef sizes) {
            return (sample(2 * machine, sizes) + sample(2 * machine + 1, sizes)) / 6;
          };
          for (std::size_t i = 0; i < tensors.size(); ++i) {
            const at::Tensor& x = tensors[i];
            const at::Tensor wanted =
                0.6 * mean(1 - other, x.sizes()) + 0.4 * weight * mean(other, x.sizes());
            require_tensor(together[i], wanted.to(x.scalar_type()), 0.03);
            require_tensor(bluefog::hierarchical_neighbor_allreduce(comm, x, links), together[i]);
          }
        }
      },
      {.ranks_per_machine = 2});
}

TEST_CASE("a reduction within machines leaves other machines alone, and so does its gradient",
          "[tensor][hierarchical][thread]") {
  bluefog::run_threads(
      6,
      [](auto& comm) {
        constexpr bluefog::allreduce_options within{.scope = bluefog::scope::machine};
        const auto all = samples(6, {5, 3});
        const int machine = comm.machine_rank();
        const auto here = all.slice(0, 2 * machine, 2 * machine + 2);
        const auto x = all[comm.rank()].t().contiguous().t();
        require_tensor(bluefog::allreduce(comm, x, reduce_op::average, within), here.mean(0));
        require_tensor(bluefog::allreduce_nonblocking(comm, x, reduce_op::max, within).wait(),
                       std::get<0>(here.max(0)));
        const std::vector<at::Tensor> list{x.clone(), x.to(at::kLong)};
        bluefog::allreduce_(comm, list, reduce_op::sum, within);
        require_tensor(list[0], here.sum(0));
        require_tensor(list[1], here.sum(0).to(at::kLong));
        const auto leaf = x.clone().requires_grad_();
        const auto y = bluefog::allreduce(comm, leaf, reduce_op::sum, within);
        (y * (comm.rank() + 1)).sum().backward();
        require_tensor(leaf.grad(), at::full({5, 3}, 4.0 * machine + 3, at::kDouble));
      },
      {.ranks_per_machine = 2});
}

TEST_CASE("check mode compares shapes, and whether a gradient is required",
          "[tensor][check][thread]") {
  bluefog::run_threads(3,
                       [](auto& comm) {
                         const auto x = sample(0, {2, 3});
                         const auto turned = comm.rank() == 1 ? x.t() : x;
                         const auto shapes = require_throws<bluefog::mismatch_error>(
                             [&] { return bluefog::allreduce(comm, turned); });
                         require_contains(shapes, "[2, 3]");
                         require_contains(shapes, "[3, 2]");
                         auto leaf = x.clone().requires_grad_(comm.rank() == 2);
                         require_contains(require_throws<bluefog::mismatch_error>([&] {
                                            return bluefog::neighbor_allreduce(comm, leaf);
                                          }),
                                          "with gradient");
                         require_contains(require_throws<bluefog::mismatch_error>(
                                              [&] { return bluefog::allgather(comm, leaf); }),
                                          "with gradient");
                         require_tensor(bluefog::allreduce(comm, x), x, 1e-12);
                       },
                       {.check = true});
}
