// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <cuda_runtime_api.h>

#include <bluefog/collective.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/nccl.hpp>
#include <bluefog/neighbor.hpp>
#include <bluefog/thread.hpp>
#include <bluefog/topology.hpp>

#include "gpu/finding.hpp"
#include "gpu/weighted_ring.hpp"

/// Every operation on device memory against what the thread backend computes on the host. On a GPU
/// it is run by tests/gpu.sh, over the stand-in by the tests.
namespace bluefog_test::gpu {

/// An array in memory of the current device.
template <class T>
class device_array {
 public:
  explicit device_array(std::span<const T> values) : size_(values.size()) {
    void* memory = nullptr;
    bluefog::nccl::check(cudaMalloc(&memory, size_ * sizeof(T)), "cudaMalloc");
    data_ = static_cast<T*>(memory);
    bluefog::nccl::check(
        cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  device_array(const device_array&) = delete;
  device_array& operator=(const device_array&) = delete;
  ~device_array() { static_cast<void>(cudaFree(data_)); }

  [[nodiscard]] std::span<T> values() const { return {data_, size_}; }
  void copy_to(std::span<T> out) const {
    bluefog::nccl::check(cudaMemcpy(out.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost),
                         "cudaMemcpy");
  }

 private:
  std::size_t size_;
  T* data_ = nullptr;
};

/// Numbers that are exact in every type.
template <class T>
[[nodiscard]] std::vector<T> sample(int rank, std::size_t count) {
  std::vector<T> values;
  for (std::size_t i = 0; i < count; ++i)
    values.push_back(
        static_cast<T>(static_cast<float>(1 + (rank * 5 + static_cast<int>(i % 11)) % 7)));
  return values;
}

/// Runs `operation(comm, in, out)` on device memory, then on host memory, which is staged, and
/// compares both with the thread backend, bit for bit. \param options  the thread backend's.
template <class T, class Comm, class Operation>
[[nodiscard]] std::string compare(Comm& comm, std::size_t count, std::size_t results,
                                  const Operation& operation,
                                  const bluefog::communicator_options& options = {}) {
  const auto index = static_cast<std::size_t>(comm.rank());
  std::vector<std::vector<T>> wanted(static_cast<std::size_t>(comm.size()),
                                     std::vector<T>(results));
  bluefog::run_threads(
      comm.size(),
      [&](auto& threads) {
        const auto x = sample<T>(threads.rank(), count);
        operation(threads, std::span<const T>(x),
                  std::span<T>(wanted[static_cast<std::size_t>(threads.rank())]));
      },
      options);
  const auto x = sample<T>(comm.rank(), count);
  const auto differs = [&](const std::vector<T>& y) {
    return std::memcmp(y.data(), wanted[index].data(), results * sizeof(T)) != 0;
  };

  const device_array<T> in(x);
  std::vector<T> y(results);
  const device_array<T> out(y);
  operation(comm, std::span<const T>(in.values()), out.values());
  out.copy_to(y);
  if (differs(y)) return "device memory: another result than the thread backend's";

  std::vector<T> z(results);
  operation(comm, std::span<const T>(x), std::span<T>(z));
  return differs(z) ? "host memory: another result than the thread backend's" : "";
}

template <class T, class Comm>
void check_floating(Comm& comm, std::string_view type, findings& found) {
  using namespace bluefog;
  const auto add = [&](std::string_view name, std::size_t results, const auto& operation) {
    constexpr std::size_t count = 10007;
    found.add(std::string(name) + ", " + std::string(type),
              [&] { return compare<T>(comm, count, results == 0 ? count : results, operation); });
  };
  add("neighbor_allreduce, one peer", 0, [](auto& c, auto in, auto out) {
    const auto rounds = topology::one_peer_exponential(c.size()).rounds(c.rank());
    neighbor_allreduce(c, in, out, rounds[0]);
  });
  add("neighbor_allreduce, ring", 0,
      [](auto& c, auto in, auto out) { neighbor_allreduce(c, in, out, topology::ring(c.size())); });
  add("neighbor_allreduce, weighted destinations", 0, [](auto& c, auto in, auto out) {
    neighbor_allreduce(c, in, out, weighted_ring(c.rank(), c.size()));
  });
  add("pair_gossip", 0, [](auto& c, auto in, auto out) {
    const int peer = c.rank() ^ 1;
    if (peer < c.size())
      pair_gossip(c, in, out, peer, 0.25, 0.75);
    else
      neighbor_allreduce(c, in, out, neighborhood{});
  });
  add("hierarchical_neighbor_allreduce", 0, [](auto& c, auto in, auto out) {
    // The thread backend has one machine; the others act as if they had.
    if (c.machine_size() == 1)
      hierarchical_neighbor_allreduce(c, in, out, topology::exponential(1));
    else
      allreduce(c, in, out, reduce_op::average);
  });
  add("allreduce, average", 0,
      [](auto& c, auto in, auto out) { allreduce(c, in, out, reduce_op::average); });
}

template <class T, class Comm>
void check_any(Comm& comm, std::string_view type, findings& found) {
  using namespace bluefog;
  constexpr std::size_t count = 10007;
  const auto n = static_cast<std::size_t>(comm.size());
  const auto add = [&](std::string_view name, std::size_t results, const auto& operation) {
    found.add(std::string(name) + ", " + std::string(type),
              [&] { return compare<T>(comm, count, results, operation); });
  };
  add("broadcast", count, [](auto& c, auto in, auto out) { broadcast(c, in, out, c.size() - 1); });
  add("allreduce, sum", count,
      [](auto& c, auto in, auto out) { allreduce(c, in, out, reduce_op::sum); });
  add("allreduce, product", count,
      [](auto& c, auto in, auto out) { allreduce(c, in, out, reduce_op::product); });
  add("allreduce, min", count,
      [](auto& c, auto in, auto out) { allreduce(c, in, out, reduce_op::min); });
  add("allreduce, max", count,
      [](auto& c, auto in, auto out) { allreduce(c, in, out, reduce_op::max); });
  // Rank r gives count - r elements.
  add("allgather, unequal", n * count - n * (n - 1) / 2, [](auto& c, auto in, auto out) {
    allgather(c, in.first(in.size() - static_cast<std::size_t>(c.rank())), out);
  });
  if (n > 1)
    add("neighbor_allgather",
        static_cast<std::size_t>(topology::ring(comm.size()).in_neighbors(comm.rank()).size()) *
            count,
        [](auto& c, auto in, auto out) {
          neighbor_allgather(c, in, out, topology::ring(c.size()));
        });
}

/// Operations over machines, where each rank is taken for one: so machines mix.
template <class Comm>
void check_machines(Comm& comm, findings& found) {
  using namespace bluefog;
  constexpr std::size_t count = 10007;
  const communicator_options options{.ranks_per_machine = 1};
  found.add("a communicator of machines with a rank each", [&]() -> std::string {
    Comm apart(nccl_backend(nccl::meet_over(comm)), options);
    const auto check = [&](const std::string& what, const auto& operation) {
      const auto problem = compare<float>(apart, count, count, operation, options);
      return problem.empty() ? problem : what + ", " + problem;
    };
    if (apart.machine_size() != comm.size()) return "another number of machines";
    const std::string mixed =
        check("hierarchical_neighbor_allreduce", [](auto& c, auto in, auto out) {
          hierarchical_neighbor_allreduce(c, in, out, topology::ring(c.machine_size()));
        });
    if (!mixed.empty()) return mixed;
    return check("allreduce within machines", [](auto& c, auto in, auto out) {
      allreduce(c, in, out, reduce_op::sum, {.scope = scope::machine});
    });
  });
}

/// Operations without arrays of elements.
template <class Comm>
void check_objects(Comm& comm, findings& found) {
  found.add("broadcast_object", [&]() -> std::string {
    for (int root = 0; root < comm.size(); ++root) {
      const std::string own = "rank " + std::to_string(comm.rank());
      const std::string given = bluefog::broadcast_object(comm, own, root);
      if (given != "rank " + std::to_string(root)) return "gives '" + given + "'";
    }
    return "";
  });
  found.add("barrier", [&]() -> std::string {
    bluefog::barrier(comm);
    auto later = bluefog::barrier_nonblocking(comm);
    later.wait();
    return "";
  });
  found.add("any_of", [&]() -> std::string {
    if (bluefog::any_of(comm, false)) return "is true where no rank's flag is";
    for (int rank = 0; rank < comm.size(); ++rank)
      if (!bluefog::any_of(comm, rank == comm.rank()))
        return "is false where one rank's flag is true";
    return "";
  });
  found.add("infer_sources and infer_destinations", [&]() -> std::string {
    // Each rank names the next one.
    const int n = comm.size();
    const std::vector<int> next{(comm.rank() + 1) % n}, previous{(comm.rank() + n - 1) % n};
    if (n == 1) return "";
    if (bluefog::infer_sources(comm, next) != previous) return "names other sources";
    return bluefog::infer_destinations(comm, previous) == next ? "" : "names other destinations";
  });
}

/// Adds what every check finds. Collective.
template <class Comm>
void check_operations(Comm& comm, findings& found) {
  const bluefog::nccl::device_scope scope(comm.transport().device());
  check_floating<float>(comm, "float32", found);
  check_floating<double>(comm, "float64", found);
  check_floating<bluefog::float16>(comm, "float16", found);
  check_floating<bluefog::bfloat16>(comm, "bfloat16", found);
  check_any<float>(comm, "float32", found);
  check_any<bluefog::bfloat16>(comm, "bfloat16", found);
  check_any<std::int64_t>(comm, "int64", found);
  check_any<std::int16_t>(comm, "int16", found);
  check_any<std::uint8_t>(comm, "uint8", found);
  check_objects(comm, found);
  check_machines(comm, found);
}

}  // namespace bluefog_test::gpu
