// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/csrc/autograd/autograd.h>

#include <bluefog/tensor.hpp>
#include <bluefog/thread.hpp>
#include <bluefog/topology.hpp>

#include "support/irregular_graph.hpp"
#include "tensor/support.hpp"

using namespace bluefog_test;
using bluefog::neighborhood;
using bluefog::reduce_op;

using tensor_function = std::function<at::Tensor(const at::Tensor&)>;

// A loss that weighs every rank and every element differently.
static at::Tensor loss_of(int rank, const at::Tensor& y) {
  const auto weights = at::arange(1, y.numel() + 1, at::kDouble).reshape(y.sizes()) * (rank + 1);
  return (y * y * weights).sum() / 16;
}

static at::Tensor input(int rank, at::IntArrayRef sizes) {
  return sample(rank, sizes).sub(2.5).mul(0.25).requires_grad_();
}

// Compares the gradient of the sum of all ranks' losses with central differences, which are exact
// for quadratics: one rank after the other moves one element after the other.
template <class Comm>
static void check_gradient(Comm& comm, const at::Tensor& x, const tensor_function& operation) {
  loss_of(comm.rank(), operation(x)).backward();
  const auto gradient = x.grad().clone();
  require_equal(gradient.sizes(), x.sizes());
  const auto total = [&](int rank, std::int64_t element, double step) {
    auto moved = x.detach().clone(at::MemoryFormat::Contiguous);
    if (rank == comm.rank() && element < moved.numel()) moved.view({-1})[element] += step;
    const auto loss = loss_of(comm.rank(), operation(moved.requires_grad_()));
    return bluefog::allreduce(comm, loss.detach(), reduce_op::sum).template item<double>();
  };
  const auto flat = gradient.contiguous().view({-1});
  const auto most = bluefog::allreduce(comm, at::full({}, x.numel()), reduce_op::max);
  for (int rank = 0; rank < comm.size(); ++rank)
    for (std::int64_t element = 0; element < most.template item<std::int64_t>(); ++element) {
      const double difference = (total(rank, element, 0.5) - total(rank, element, -0.5));
      if (rank == comm.rank() && element < x.numel())
        require_near(flat[element].template item<double>(), difference, 1e-9);
    }
}

// The gradient as a function of the input, itself an operation over all ranks.
static tensor_function gradient_of(const tensor_function& operation, int rank) {
  return [=](const at::Tensor& x) {
    return torch::autograd::grad({loss_of(rank, operation(x))}, {x}, {}, true, true).front();
  };
}

template <class Comm>
static void check_both_derivatives(Comm& comm, at::IntArrayRef sizes,
                                   const tensor_function& operation) {
  check_gradient(comm, input(comm.rank(), sizes), operation);
  check_gradient(comm, input(comm.rank(), sizes), gradient_of(operation, comm.rank()));
}

template <class Comm>
static neighborhood weighted_links(Comm& comm) {
  const int n = comm.size();
  if (n == 1) return {.self_weight = 0.5};
  neighborhood links{.self_weight = 0.5,
                     .sources = {{(comm.rank() + n - 1) % n, 0.25}},
                     .destinations = {{(comm.rank() + 1) % n, 1.0 + comm.rank()}}};
  return links;
}

RANKS_TEST("gradients of average and sum are the average and the sum", "[tensor][autograd]") {
  for (const auto op : {reduce_op::average, reduce_op::sum})
    check_both_derivatives(comm, {2, 2},
                           [&](const at::Tensor& x) { return bluefog::allreduce(comm, x, op); });
  check_gradient(comm, input(comm.rank(), {3}), [&](const at::Tensor& x) {
    return bluefog::allreduce(comm, x, reduce_op::average, {.scope = bluefog::scope::machine});
  });
}

RANKS_TEST("the gradient of broadcast is the sum at the root", "[tensor][autograd]") {
  const int root = comm.size() - 1;
  check_both_derivatives(comm, {3},
                         [&](const at::Tensor& x) { return bluefog::broadcast(comm, x, root); });
  auto x = input(comm.rank(), {3});
  bluefog::broadcast(comm, x, root).sum().backward();
  require_tensor(x.grad(),
                 at::full({3}, comm.rank() == root ? 1.0 * comm.size() : 0.0, at::kDouble));
}

RANKS_TEST("the gradient of allgather is the sum of the own slices", "[tensor][autograd]") {
  check_both_derivatives(comm, {1 + comm.rank() % 2, 2},
                         [&](const at::Tensor& x) { return bluefog::allgather(comm, x); });
  check_gradient(comm, input(comm.rank(), {}),
                 [&](const at::Tensor& x) { return bluefog::allgather(comm, x); });
}

RANKS_TEST("the gradient of neighbour operations is the transposed exchange",
           "[tensor][autograd]") {
  check_both_derivatives(comm, {3},
                         [&](const at::Tensor& x) { return bluefog::neighbor_allreduce(comm, x); });
  const auto links = weighted_links(comm);
  check_both_derivatives(
      comm, {2}, [&](const at::Tensor& x) { return bluefog::neighbor_allreduce(comm, x, links); });
  check_both_derivatives(comm, {1 + comm.rank() % 2, 2},
                         [&](const at::Tensor& x) { return bluefog::neighbor_allgather(comm, x); });
  check_both_derivatives(comm, {2}, [&](const at::Tensor& x) {
    return bluefog::hierarchical_neighbor_allreduce(comm, x);
  });
  const int peer = comm.rank() ^ 1;
  check_both_derivatives(comm, {2}, [&](const at::Tensor& x) {
    return peer < comm.size() ? bluefog::pair_gossip(comm, x, peer, 0.25, 0.5 + comm.rank())
                              : x * 1;
  });
}

TEST_CASE("the gradient of a mix between machines goes back along their links",
          "[tensor][autograd][hierarchical][thread]") {
  bluefog::run_threads(6,
                       [](auto& comm) {
                         const int machine = comm.machine_rank();
                         const neighborhood links{
                             .self_weight = 0.5,
                             .sources = {{(machine + 2) % 3, 0.25}},
                             .destinations = {{(machine + 1) % 3, 3.0 + machine}}};
                         check_both_derivatives(comm, {2}, [&](const at::Tensor& x) {
                           return bluefog::hierarchical_neighbor_allreduce(comm, x, links);
                         });
                       },
                       {.ranks_per_machine = 2});
}

RANKS_TEST(
    "what neighbor_allgather gives back is each source's own slice, in whatever order they are",
    "[tensor][autograd]") {
  if (comm.size() > 5) return;  // takes long and is more of the same
  for (const auto& links :
       {irregular_graph(comm.rank(), comm.size()), all_to_first(comm.rank(), comm.size())})
    check_both_derivatives(comm, {comm.rank() % 3, 2}, [&](const at::Tensor& x) {
      return bluefog::neighbor_allgather(comm, x, links);
    });
}

RANKS_TEST("gradients flow through transposed inputs, lists and requests", "[tensor][autograd]") {
  check_gradient(comm, input(comm.rank(), {2, 2}),
                 [&](const at::Tensor& x) { return bluefog::allreduce(comm, x.t()).t(); });
  check_gradient(comm, input(comm.rank(), {4}), [&](const at::Tensor& x) {
    const std::vector<at::Tensor> parts{x.slice(0, 0, 1), at::arange(2), x.slice(0, 1)};
    const auto results = bluefog::allreduce(comm, parts, reduce_op::sum);
    require(!results[1].requires_grad());
    return at::cat({results[0], results[2] * 2});
  });
  check_gradient(comm, input(comm.rank(), {4}), [&](const at::Tensor& x) {
    const std::vector<at::Tensor> parts{x.slice(0, 0, 1), x.slice(0, 1).to(at::kFloat)};
    const auto results =
        bluefog::neighbor_allreduce(comm, parts, bluefog::topology::ring(comm.size()));
    return at::cat({results[0], results[1].to(at::kDouble) * 0});
  });
  check_gradient(comm, input(comm.rank(), {2}), [&](const at::Tensor& x) {
    auto request = bluefog::allgather_nonblocking(comm, x);
    auto other = bluefog::allreduce_nonblocking(comm, x);
    return at::cat({request.wait(), other.wait()});
  });
}

RANKS_TEST("what cannot be differentiated is refused, unless nobody asks", "[tensor][autograd]") {
  auto x = input(comm.rank(), {2});
  for (const auto op : {reduce_op::min, reduce_op::max, reduce_op::product}) {
    require_contains(
        require_throws<bluefog::usage_error>([&] { return bluefog::allreduce(comm, x, op); }),
        "has no gradient");
    static_cast<void>(bluefog::allreduce(comm, x.detach(), op));
  }
  require_contains(require_throws<bluefog::usage_error>([&] { bluefog::allreduce_(comm, x); }),
                   "NoGradGuard");
  const at::NoGradGuard no_grad;
  require(!bluefog::allreduce(comm, x, reduce_op::max).requires_grad());
  bluefog::broadcast_(comm, x, 0);
  require_tensor(x, input(0, {2}));
  require(x.is_leaf() && x.requires_grad());
}

RANKS_TEST("autograd notices that a saved tensor has been changed in place", "[tensor][autograd]") {
  auto x = input(comm.rank(), {2});
  auto saved = x.detach().clone();
  const auto y = (x * saved).sum();
  bluefog::neighbor_allreduce_(comm, saved);
  require_contains(require_throws<c10::Error>([&] { y.backward(); }), "inplace operation");
}
