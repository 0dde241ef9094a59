// SPDX-License-Identifier: Apache-2.0
// Tensors in host memory on an NCCL communicator, which are staged; over the stand-in.
#include <memory>
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

namespace {

/// Two parameters of one size, which messages cannot tell apart.
struct pair_of_parameters : torch::nn::Module {
  pair_of_parameters()
      : first(register_parameter("first", torch::zeros({3}, at::kDouble))),
        second(register_parameter("second", torch::zeros({3}, at::kDouble))) {}
  at::Tensor forward() { return (first + second).sum(); }
  at::Tensor first, second;
};

}  // namespace

TEST_CASE("what one rank freezes is an error on all ranks over NCCL too, which then go on",
          "[nccl][optim]") {
  CHECK(on_ranks(3, [](nccl_communicator& comm) {
          auto net = std::make_shared<pair_of_parameters>();
          optim::adapt_then_combine optimizer(torch::optim::SGD(net->parameters(), 0.1), *net, comm,
                                              topology::ring(comm.size()));
          const auto step = [&] {
            optimizer.zero_grad();
            optimizer.forward(*net).backward();
            optimizer.step();
          };
          step();
          if (comm.rank() == 2) net->first.requires_grad_(false);
          require_contains(require_throws<mismatch_error>(step), "\"first\"");
          net->first.requires_grad_(false);
          optimizer.reset_passes();
          step();
          require(net->second.allclose(at::full({3}, -0.3, at::kDouble)), "three steps adapt");
        }) == "");
}

TEST_CASE("a rank without batches answers with zeros over NCCL too", "[nccl][optim]") {
  CHECK(on_ranks(3, [](nccl_communicator& comm) {
          auto net = std::make_shared<pair_of_parameters>();
          optim::gradient_allreduce optimizer(torch::optim::SGD(net->parameters(), 3.0), *net,
                                              comm);
          for (int batch = 0; batch <= comm.rank(); ++batch) {
            optimizer.zero_grad();
            net->forward().backward();
            optimizer.step();
          }
          require_equal(optimizer.join(), 2);
          require(net->first.allclose(at::full({3}, -6.0, at::kDouble)), "3, 2 and 1 gradients");
        }) == "");
}
