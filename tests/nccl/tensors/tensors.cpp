// SPDX-License-Identifier: Apache-2.0
// Tensors in host memory on an NCCL communicator, which are staged; over the stand-in.
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/collective.hpp>
#include <bluefog/neighbor.hpp>
#include <bluefog/optim.hpp>
#include <bluefog/tensor.hpp>
#include <bluefog/topology.hpp>

#include "nccl/support.hpp"

using namespace bluefog;
using namespace bluefog_test;

namespace {

using nccl_communicator = communicator<nccl_backend>;

std::string on_ranks(int ranks, void (*body)(nccl_communicator&)) {
  return run_nccl_ranks(ranks, body, {});
}

}  // namespace

TEST_CASE("tensors in host memory, of any layout, travel over NCCL", "[nccl][tensor]") {
  for (const int ranks : {1, 2, 3})
    CHECK(
        on_ranks(ranks, [](nccl_communicator& comm) {
          const int n = comm.size();
          const double mean = (n - 1) / 2.0;
          const auto x = at::full({4, 3}, comm.rank(), at::kFloat).t();  // not contiguous
          require(neighbor_allreduce(comm, x, topology::fully_connected(n))
                      .allclose(at::full({3, 4}, mean, at::kFloat)));
          require(
              allreduce(comm, x.to(at::kBFloat16)).allclose(at::full({3, 4}, mean, at::kBFloat16)));
          require(broadcast(comm, x, n - 1).equal(at::full({3, 4}, n - 1, at::kFloat)));
          const auto rows = at::full({comm.rank() + 1, 2}, comm.rank(), at::kLong);
          const auto all = allgather(comm, rows);
          require_equal(all.size(0), n * (n + 1) / 2);
          require_equal(all[-1][0].item<std::int64_t>(), std::int64_t{n - 1});
          auto pending = allreduce_nonblocking(comm, x, reduce_op::sum);
          require(pending.wait().allclose(at::full({3, 4}, n * mean, at::kFloat)));
        }) == "");
}

TEST_CASE("gradients of tensors travel over NCCL", "[nccl][tensor]") {
  CHECK(on_ranks(2, [](nccl_communicator& comm) {
          const auto x = at::ones({3}, at::kDouble).requires_grad_();
          (allreduce(comm, x, reduce_op::sum) * (comm.rank() + 1.0)).sum().backward();
          require(x.grad().equal(at::full({3}, 3.0, at::kDouble)));
        }) == "");
}

TEST_CASE("an optimizer averages parameters in host memory over NCCL", "[nccl][optim]") {
  CHECK(on_ranks(2, [](nccl_communicator& comm) {
          torch::nn::Linear model(2, 1);
          {
            const torch::NoGradGuard guard;
            model->weight.fill_(comm.rank());
            model->bias.fill_(comm.rank());
          }
          optim::adapt_then_combine optimizer(
              torch::optim::SGD(model->parameters(), torch::optim::SGDOptions(0.0)), *model, comm,
              topology::fully_connected(comm.size()));
          optimizer.zero_grad();
          optimizer.forward(model, at::ones({1, 2})).sum().backward();
          optimizer.step();
          require(model->weight.allclose(at::full({1, 2}, 0.5)), "the mean of the ranks");
        }) == "");
}
