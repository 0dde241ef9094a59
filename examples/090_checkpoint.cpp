// SPDX-License-Identifier: Apache-2.0
//
// Stops a training in the middle of an epoch, goes on from files, and ends where a training that
// was never stopped ends. Between averages ranks have different parameters, so each has files of
// its own; what is evaluated in the end is the average.
//
//   mpirun -np 2 ./090_checkpoint [FOLDER]    where the files go, the present folder by default

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>

#include <torch/torch.h>

#include <bluefog/bluefog.hpp>

namespace {

using comm_type = bluefog::communicator<bluefog::mpi_backend>;
constexpr std::size_t samples = 512, batch_size = 16;

/// How far a training has come.
struct place {
  std::size_t epoch = 1;
  std::size_t batches = 0;  // of that epoch
  bool operator==(const place&) const = default;
};

torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(1, 32), torch::nn::Tanh(),
                               torch::nn::Linear(32, 1));
}

at::Tensor error_of(const at::Tensor& prediction, const at::Tensor& x) {
  return torch::mse_loss(prediction, (3 * x).sin());
}

/// Trains from one place to another, from files unless `begin` is the beginning, and leaves files
/// behind. \return the net of this rank.
torch::nn::Sequential train(comm_type& comm, place begin, place end,
                            const std::filesystem::path& folder) {
  const auto file = [&](const char* what) {
    return (folder / bluefog::concat(what, ".rank", comm.rank(), ".pt")).string();
  };
  const bool resumes = begin != place{};
  auto net = make_net();
  if (resumes)
    torch::load(net, file("net"));
  else
    bluefog::broadcast_parameters(comm, *net, 0);
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  bluefog::optim::adapt_with_combine optimizer(std::move(sgd), net, comm);
  if (resumes) torch::load(optimizer, file("optimizer"));  // momenta, and the schedule's round

  const auto x = torch::linspace(-1, 1, samples).view({-1, 1});
  const auto data = torch::data::datasets::TensorDataset(x).map(
      torch::data::transforms::Stack<torch::data::TensorExample>());
  bluefog::nn::distributed_sampler sampler(samples, comm);
  auto loader = torch::data::make_data_loader(data, sampler, batch_size);
  for (place now = begin; now != end;) {
    sampler.set_epoch(now.epoch);
    sampler.start_at(now.batches * batch_size);
    for (const auto& batch : *loader) {
      optimizer.zero_grad();
      error_of(optimizer.forward(net, batch.data), batch.data).backward();
      optimizer.step();
      ++now.batches;
      if (now == end) break;
    }
    if (now != end) now = {now.epoch + 1};
  }
  torch::save(net, file("net"));
  torch::save(optimizer, file("optimizer"));
  return net;
}

}  // namespace

int main(int argc, char** argv) {
  comm_type comm;
  const std::filesystem::path folder = argc > 1 ? argv[1] : ".";
  constexpr place begin, middle{.epoch = 21, .batches = 1}, end{.epoch = 41};

  const auto uninterrupted = train(comm, begin, end, folder);
  train(comm, begin, middle, folder);
  auto resumed = train(comm, middle, end, folder);

  auto difference = torch::zeros({1});
  for (const auto& each : resumed->named_parameters())
    difference = torch::max(
        difference, (each.value() - uninterrupted->named_parameters()[each.key()]).abs().max());
  difference = bluefog::allreduce(comm, difference.detach(), bluefog::reduce_op::max);

  bluefog::allreduce_parameters(comm, *resumed);  // one model: the average
  const auto x = torch::linspace(-1, 1, 101).view({-1, 1});
  const double error = error_of(resumed->forward(x), x).item<double>();
  if (comm.rank() == 0)
    std::printf(
        "parameters differ by at most %g from those of a training without a stop\n"
        "the averaged model's error is %s 0.01\n",
        difference.item<double>(), error < 0.01 ? "below" : "above");
}

// Expected output:
// parameters differ by at most 0 from those of a training without a stop
// the averaged model's error is below 0.01
