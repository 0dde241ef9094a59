// SPDX-License-Identifier: Apache-2.0
// Must not compile: LBFGS would have to communicate within its step. The build says under which
// wrapper.
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/lbfgs.h>

#include <bluefog/optim/adapt_with_combine.hpp>
#include <bluefog/optim/gradient_allreduce.hpp>
#include <bluefog/thread.hpp>

void wrap(bluefog::communicator<bluefog::thread_backend>& comm, const torch::nn::Module& model,
          const std::vector<at::Tensor>& parameters) {
  torch::optim::LBFGS inner(parameters);
  bluefog::optim::BLUEFOG_TEST_WRAPPER optimizer(std::move(inner), model, comm);
}
