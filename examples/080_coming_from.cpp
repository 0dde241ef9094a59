// SPDX-License-Identifier: Apache-2.0
//
// The loops of BlueFog, Horovod, PyTorch's DistributedDataParallel, its GradScaler and apex, as
// they are written here. Each fits a plane of which every rank sees its own part, and prints how
// far off it is.
//
//   mpirun -np 2 ./080_coming_from

#include <algorithm>
#include <cstdio>
#include <utility>

#include <torch/torch.h>

#include <bluefog/bluefog.hpp>

namespace {

using bluefog::amp::grad_scaler;
using bluefog::amp::unscale;
using bluefog::optim::communication_type;
using bluefog::topology::exponential;

using comm_type = bluefog::communicator<bluefog::mpi_backend>;
constexpr int steps = 400;

struct batch {
  at::Tensor x, y;
};

// Points of the plane y = 2 x0 - x1 + 0.5, others on each rank and in each step.
batch next_batch() {
  const auto x = torch::randn({16, 2});
  return {x, x.matmul(torch::tensor({{2.0F}, {-1.0F}})) + 0.5};
}

double error_of(torch::nn::Linear& model, comm_type& comm) {
  bluefog::allreduce_parameters(comm, *model);
  const auto weight = (model->weight - torch::tensor({{2.0F, -1.0F}})).abs().max().item<double>();
  return std::max(weight, (model->bias - 0.5).abs().max().item<double>());
}

double from_bluefog(comm_type& comm) {
  torch::nn::Linear model(2, 1);
  torch::optim::SGD sgd(model->parameters(), 0.1);

  bluefog::broadcast_parameters(comm, *model, 0);
  bluefog::optim::adapt_with_combine optimizer(
      std::move(sgd), model, comm, exponential(comm.size()), {.num_steps_per_communication = 2});
  for (int step = 0; step < steps; ++step) {
    const auto [x, y] = next_batch();
    optimizer.zero_grad();
    torch::mse_loss(optimizer.forward(model, x), y).backward();
    optimizer.step();
    if (step == steps / 2) optimizer.communication(communication_type::allreduce);
  }
  return error_of(model, comm);
}

double from_horovod(comm_type& comm) {
  torch::nn::Linear model(2, 1);
  torch::optim::SGD sgd(model->parameters(), 0.1);

  bluefog::broadcast_parameters(comm, *model, 0);
  bluefog::broadcast_optimizer_state(comm, sgd, 0);
  bluefog::optim::gradient_allreduce optimizer(std::move(sgd), model, comm,
                                               {.backward_passes_per_step = 2});
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int pass = 0; pass < 2; ++pass) {
      const auto [x, y] = next_batch();
      torch::mse_loss(model->forward(x), y).backward();
    }
    optimizer.synchronize();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    const auto guard = optimizer.skip_synchronize();
    optimizer.step();
  }
  return error_of(model, comm);
}

double from_ddp(comm_type& comm) {
  torch::nn::Linear model(2, 1);

  bluefog::nn::distributed_data_parallel net(model, comm);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    {
      const auto guard = net.no_sync();
      const auto [x, y] = next_batch();
      (torch::mse_loss(net.forward(x), y) / 2).backward();
    }
    const auto [x, y] = next_batch();
    (torch::mse_loss(net.forward(x), y) / 2).backward();
    optimizer.step();
  }
  return error_of(model, comm);
}

double from_grad_scaler(comm_type& comm) {
  torch::nn::Linear model(2, 1);
  torch::optim::SGD sgd(model->parameters(), 0.1);
  bluefog::optim::adapt_then_combine optimizer(std::move(sgd), model, comm);

  grad_scaler scaler;
  for (int step = 0; step < steps; ++step) {
    const auto [x, y] = next_batch();
    optimizer.zero_grad();
    at::Tensor loss;
    {
      const bluefog::amp::autocast_guard guard(at::kCPU, at::kBFloat16);
      loss = torch::mse_loss(optimizer.forward(model, x).to(at::kFloat), y);
    }
    scaler.scale(loss).backward();
    scaler.unscale_(optimizer);
    bluefog::amp::clip_grad_norm_(optimizer, scaler, 1.0);
    scaler.step(optimizer);
    scaler.update();
  }
  return error_of(model, comm);
}

double from_apex(comm_type& comm) {
  torch::nn::Linear model(2, 1);
  torch::optim::SGD sgd(model->parameters(), 0.1);

  bluefog::broadcast_parameters(comm, *model, 0);
  auto net = bluefog::amp::initialize(model, sgd, bluefog::amp::opt_level::O1);
  bluefog::optim::gradient_allreduce optimizer(std::move(sgd), net, comm,
                                               {.backward_passes_per_step = 2});
  grad_scaler scaler;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (const auto when : {unscale::later, unscale::now}) {
      const auto [x, y] = next_batch();
      const auto loss = torch::mse_loss(optimizer.forward(net, x).to(at::kFloat), y);
      scale_loss(loss, optimizer, scaler, {.unscale = when},
                 [](const at::Tensor& scaled) { scaled.backward(); });
    }
    scaler.step(optimizer);
    scaler.update();
  }
  return error_of(model, comm);
}

}  // namespace

int main() {
  comm_type comm;
  torch::manual_seed(static_cast<std::uint64_t>(comm.rank()));
  const std::pair<const char*, double> results[] = {{"BlueFog", from_bluefog(comm)},
                                                    {"Horovod", from_horovod(comm)},
                                                    {"DDP", from_ddp(comm)},
                                                    {"GradScaler", from_grad_scaler(comm)},
                                                    {"apex", from_apex(comm)}};
  for (const auto& [library, error] : results)
    if (comm.rank() == 0)
      std::printf("%-10s %s\n", library, error < 0.02 ? "within 0.02" : "not there");
}

// Expected output:
// BlueFog    within 0.02
// Horovod    within 0.02
// DDP        within 0.02
// GradScaler within 0.02
// apex       within 0.02
