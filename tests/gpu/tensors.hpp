// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/torch.h>

#include <bluefog/neighbor.hpp>
#include <bluefog/tensor.hpp>
#include <bluefog/thread.hpp>
#include <bluefog/topology.hpp>

#include "gpu/finding.hpp"
#include "gpu/weighted_ring.hpp"

/// Every operation on tensors of a device against what the thread backend computes on the CPU. On a
/// GPU it is run by tests/gpu.sh, elsewhere over a stand-in by the tests.
namespace bluefog_test::gpu {

using tensors = std::vector<at::Tensor>;

/// Numbers that are exact in every type, and sums and halves of which are.
[[nodiscard]] inline at::Tensor sample_tensor(int rank, at::IntArrayRef sizes,
                                              at::ScalarType type) {
  const std::int64_t count = c10::multiply_integers(sizes);
  const auto numbers = at::arange(count, at::kLong).mul(3).add(5 * rank).remainder(7).add(1);
  return numbers.view(sizes).to(type);
}

/// Ways in which a tensor may lie in memory.
struct arrangement {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> of;
};
[[nodiscard]] inline std::vector<arrangement> arrangements_of_matrices() {
  return {{"contiguous", [](const at::Tensor& x) { return x; }},
          {"transposed", [](const at::Tensor& x) { return x.t().contiguous().t(); }},
          {"strided",
           [](const at::Tensor& x) {
             const auto wide = at::zeros({x.size(0), 2 * x.size(1)}, x.options());
             const auto part = wide.slice(1, 0, std::nullopt, 2);
             part.copy_(x);
             return part;
           }},
          {"expanded", [](const at::Tensor& x) { return x.slice(0, 0, 1).expand(x.sizes()); }}};
}

[[nodiscard]] inline c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}
/// Another stream than the default one, of devices that have streams.
[[nodiscard]] inline c10::Stream other_stream(at::Device device) {
  const c10::impl::VirtualGuardImpl of(device.type());
  return device.is_cpu() ? of.getStream(device) : of.getStreamFromGlobalPool(device);
}

/// Runs `operation(comm, own tensors)` on `device` and compares with the thread backend on the CPU.
/// \param make  the tensors of a rank, on the CPU; \param arrange  puts one into place.
template <class Comm, class Make, class Arrange, class Operation>
[[nodiscard]] std::string compare_tensors(Comm& comm, at::Device device, const Make& make,
                                          const Arrange& arrange, const Operation& operation) {
  std::vector<tensors> wanted(static_cast<std::size_t>(comm.size()));
  bluefog::run_threads(comm.size(), [&](auto& threads) {
    tensors own;
    for (const at::Tensor& each : make(threads.rank())) own.push_back(arrange(each));
    wanted[static_cast<std::size_t>(threads.rank())] = operation(threads, std::move(own));
  });
  tensors own;
  for (const at::Tensor& each : make(comm.rank())) own.push_back(arrange(each.to(device)));
  const tensors results = operation(comm, std::move(own));
  const tensors& right = wanted[static_cast<std::size_t>(comm.rank())];
  if (results.size() != right.size()) return "another number of results";
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i].device() != device) return "a result on another device";
    if (results[i].strides() != right[i].strides()) return "a result arranged in another way";
    if (!results[i].cpu().equal(right[i])) return "another result than the thread backend's";
  }
  return "";
}

/// Each operation as `tensors(comm, tensors)`, in the blocking and the non-blocking form, apart and
/// in place.
template <class Visit>
void visit_operations(const Visit& visit) {
  using namespace bluefog;
  const auto many = [](const tensors& list) { return std::span<const at::Tensor>(list); };
  visit("allreduce", [=](auto& c, tensors x) { return allreduce(c, many(x)); });
  visit("allreduce, sum", [=](auto& c, tensors x) {
    return allreduce_nonblocking(c, many(x), reduce_op::sum).wait();
  });
  visit("allreduce, max",
        [=](auto& c, tensors x) { return allreduce(c, many(x), reduce_op::max); });
  visit("broadcast", [=](auto& c, tensors x) { return broadcast(c, many(x), c.size() - 1); });
  visit("neighbor_allreduce, one peer", [=](auto& c, tensors x) {
    const auto rounds = topology::one_peer_exponential(c.size()).rounds(c.rank());
    return neighbor_allreduce(c, many(x), neighborhood(rounds[0]));
  });
  visit("neighbor_allreduce, weighted destinations", [=](auto& c, tensors x) {
    return neighbor_allreduce_nonblocking(c, many(x), weighted_ring(c.rank(), c.size())).wait();
  });
  visit("pair_gossip", [=](auto& c, tensors x) {
    const int peer = c.rank() ^ 1;
    return peer < c.size() ? pair_gossip(c, many(x), peer, 0.25, 0.75) : x;
  });
  visit("hierarchical_neighbor_allreduce", [=](auto& c, tensors x) {
    // The thread backend has one machine; the others act as if they had.
    return c.machine_size() == 1
               ? hierarchical_neighbor_allreduce(c, many(x), topology::exponential(1))
               : allreduce(c, many(x));
  });
}

/// Operations that give one tensor for one.
template <class Visit>
void visit_gathers(const Visit& visit) {
  using namespace bluefog;
  visit("allgather, unequal", [](auto& c, tensors x) {
    return tensors{allgather(c, x[0].slice(0, 0, x[0].size(0) - c.rank()))};
  });
  visit("neighbor_allgather", [](auto& c, tensors x) {
    return tensors{neighbor_allgather_nonblocking(c, x[0], topology::ring(c.size())).wait()};
  });
}

/// Adds what every check finds. Collective.
template <class Comm>
void check_tensors(Comm& comm, at::Device device, findings& found) {
  using namespace bluefog;
  const auto as_it_is = [](const at::Tensor& x) { return x; };
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const auto matrix = [&](int rank) { return tensors{sample_tensor(rank, {37, 12}, type)}; };
    const std::string kind = c10::toString(type);
    for (const auto& [name, arrange] : arrangements_of_matrices()) {
      const auto check = [&](const std::string& what, const auto& operation) {
        found.add(what + ", " + kind + ", " + name,
                  [&] { return compare_tensors(comm, device, matrix, arrange, operation); });
      };
      visit_operations(check);
      visit_gathers(check);
    }
  }
  const auto check = [&](const std::string& what, const auto& make) {
    visit_operations([&](const std::string& name, const auto& operation) {
      found.add(name + ", " + what,
                [&] { return compare_tensors(comm, device, make, as_it_is, operation); });
    });
  };
  check("no elements", [](int rank) { return tensors{sample_tensor(rank, {0, 3}, at::kFloat)}; });
  check("no dimensions", [](int rank) { return tensors{sample_tensor(rank, {}, at::kFloat)}; });
  check("several at once", [](int rank) {
    return tensors{sample_tensor(rank, {5, 7}, at::kFloat), sample_tensor(rank, {3}, at::kHalf),
                   sample_tensor(rank, {0}, at::kFloat), sample_tensor(rank, {2, 2}, at::kFloat)};
  });
  const auto matrix = [](int rank) { return tensors{sample_tensor(rank, {64, 33}, at::kFloat)}; };
  const auto add = [&](const std::string& what, const auto& operation) {
    found.add(what, [&] { return compare_tensors(comm, device, matrix, as_it_is, operation); });
  };
  add("in place", [](auto& c, tensors x) {
    neighbor_allreduce_(c, x[0], topology::fully_connected(c.size()));
    allreduce_(c, x[0], reduce_op::sum);
    return x;
  });
  add("in place, another arrangement", [](auto& c, tensors x) {
    allreduce_(c, x[0].t(), reduce_op::sum);
    return x;
  });
  add("integers", [](auto& c, tensors x) {
    return tensors{allreduce(c, x[0].to(at::kLong), reduce_op::sum),
                   broadcast(c, x[0].to(at::kBool), 0)};
  });
  // What is computed on a stream just before, and just after, without waiting for it.
  add("on a stream of the program", [](auto& c, tensors x) {
    const c10::StreamGuard on(other_stream(x[0].device()));
    at::Tensor y = x[0].clone();
    for (int i = 0; i < 50; ++i) y.copy_(at::Tensor(y + 1));
    auto first = neighbor_allreduce_nonblocking(c, y, topology::fully_connected(c.size()));
    auto second = allgather_nonblocking(c, y.t());
    const at::Tensor beside = x[0] * 2;  // takes memory meanwhile
    tensors all{first.wait() * 2, second.wait() + 1, beside};
    if (!x[0].is_cpu()) current_stream(x[0].device()).synchronize();
    return all;
  });
  add("a result that is let go of before it has been used", [](auto& c, tensors x) {
    const c10::StreamGuard on(other_stream(x[0].device()));
    at::Tensor kept = at::empty({c.size() * x[0].size(0), x[0].size(1)}, x[0].options());
    kept.copy_(allgather(c, x[0]), /*non_blocking=*/true);
    const at::Tensor again = allgather(c, x[0] * 0);
    const at::Tensor result = kept + again;
    if (!x[0].is_cpu()) current_stream(x[0].device()).synchronize();
    return tensors{result};
  });
  add("gradients", [](auto& c, tensors x) {
    at::Tensor leaf = x[0].detach().requires_grad_();
    const auto mixed = neighbor_allreduce(c, leaf, topology::ring(c.size()));
    const auto gathered = allgather(c, leaf * 2);
    const auto from = neighbor_allgather(c, leaf, topology::ring(c.size()));
    const auto root = broadcast(c, leaf, 0);
    (mixed.sum() + gathered.sum() + from.sum() * 0.5 + root.sum() * (c.rank() + 1)).backward();
    return tensors{leaf.grad()};
  });
}

}  // namespace bluefog_test::gpu
