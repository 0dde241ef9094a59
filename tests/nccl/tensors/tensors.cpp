// SPDX-License-Identifier: Apache-2.0
// Optimizers of tensors in host memory on an NCCL communicator, which are staged; over the
// stand-in. The shared tests of operations on tensors are compiled beside it.
#include <memory>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/optim.hpp>
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
