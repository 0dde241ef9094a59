// SPDX-License-Identifier: Apache-2.0
//
// The smallest training: every rank sees a line of another height, and together they find the
// middle one, each averaging with one other rank per step.
//
//   mpirun -np 2 ./001_fit_a_line

#include <cstdio>

#include <torch/torch.h>

#include <bluefog/bluefog.hpp>

int main() {
  bluefog::communicator<bluefog::mpi_backend> comm;
  torch::nn::Linear model(1, 1);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  bluefog::optim::adapt_with_combine optimizer(std::move(sgd), model, comm);
  const auto x = torch::linspace(-1, 1, 64).view({64, 1});
  for (int step = 0; step < 300; ++step) {
    optimizer.zero_grad();
    torch::mse_loss(optimizer.forward(model, x), 3 * x + comm.rank()).backward();
    optimizer.step();
  }
  bluefog::allreduce_parameters(comm, *model);
  if (comm.rank() == 0)
    std::printf("%d ranks agree on y = %.2f x + %.2f\n", comm.size(), model->weight.item<float>(),
                model->bias.item<float>());
}

// Expected output:
// 2 ranks agree on y = 3.00 x + 0.50
