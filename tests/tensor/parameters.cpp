// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <bluefog/optim/state.hpp>
#include <bluefog/tensor/parameters.hpp>

#include "tensor/support.hpp"

using namespace bluefog_test;

namespace {

struct network_impl : torch::nn::Module {
  torch::nn::Linear linear{3, 2};
  torch::nn::BatchNorm1d norm{2};
  network_impl() {
    register_module("linear", linear);
    register_module("norm", norm);
    register_buffer("mask", at::zeros({2}, at::kBool));
  }
};

}  // namespace

// Fills parameters and buffers of `model` with what belongs to `rank`.
static void fill(torch::nn::Module& model, int rank) {
  const at::NoGradGuard no_grad;
  for (auto& x : model.parameters()) x.copy_(sample(rank, x.sizes()));
  for (auto& x : model.buffers()) x.copy_(sample(rank, x.sizes()));
}

static std::vector<at::Tensor> all_of(const torch::nn::Module& model) {
  auto all = model.parameters();
  for (const auto& x : model.buffers()) all.push_back(x);
  return all;
}

RANKS_TEST("broadcast_parameters gives every rank the root's parameters and buffers",
           "[tensor][parameters]") {
  const int root = comm.size() / 2;
  for (const bool by_holder : {true, false}) {
    network_impl model;
    fill(model, comm.rank());
    const auto holder = std::shared_ptr<network_impl>(&model, [](auto*) {});
    if (by_holder)
      bluefog::broadcast_parameters(comm, holder, root);
    else
      bluefog::broadcast_parameters(comm, model, root);
    for (const auto& x : all_of(model)) require_tensor(x, sample(root, x.sizes(), x.scalar_type()));
  }
  torch::nn::Linear linear(2, 2);
  bluefog::broadcast_parameters(comm, linear, root);
  const auto parameters = linear->parameters();
  require(parameters[0].requires_grad() && parameters[0].is_leaf());
  fill(*linear, comm.rank());
  bluefog::broadcast_parameters(comm, parameters, root);
  require_tensor(parameters[0], sample(root, {2, 2}, at::kFloat));
}

RANKS_TEST("allreduce_parameters averages what is floating and leaves counters alone",
           "[tensor][parameters]") {
  network_impl model;
  fill(model, comm.rank());
  bluefog::allreduce_parameters(comm, model);
  for (const auto& x : all_of(model)) {
    const auto own = sample(comm.rank(), x.sizes(), x.scalar_type());
    if (x.is_floating_point())
      require_tensor(x, samples(comm.size(), x.sizes()).mean(0).to(at::kFloat), 1e-6);
    else
      require_tensor(x, own);
  }
}

static void train(torch::optim::Optimizer& optimizer, int steps, int rank) {
  for (int step = 0; step < steps; ++step) {
    for (auto& group : optimizer.param_groups())
      for (auto& x : group.params()) x.mutable_grad() = sample(rank + step, x.sizes(), at::kFloat);
    optimizer.step();
  }
}

RANKS_TEST("broadcast_optimizer_state makes options and state exact, and empty state empty",
           "[optim][state]") {
  const int rank = comm.rank();
  for (const int steps_of_root : {0, 3}) {
    torch::nn::Linear model(3, 2);
    fill(*model, 0);
    std::vector<torch::optim::OptimizerParamGroup> groups{{{model->weight}}, {{model->bias}}};
    torch::optim::Adam adam(groups, torch::optim::AdamOptions(0.125 / (rank + 1)));
    static_cast<torch::optim::AdamOptions&>(adam.param_groups()[1].options())
        .lr(0.5 + rank)
        .weight_decay(0.25 * rank)
        .amsgrad(rank == 0);
    if (rank == 0)
      train(adam, steps_of_root, 7);
    else
      train(adam, rank, rank);
    fill(*model, 0);
    bluefog::broadcast_optimizer_state(comm, adam, 0);
    const auto& options =
        static_cast<const torch::optim::AdamOptions&>(adam.param_groups()[1].options());
    require_equal(options.lr(), 0.5);
    require_equal(options.weight_decay(), 0.0);
    require(options.amsgrad());
    require_equal(
        static_cast<const torch::optim::AdamOptions&>(adam.param_groups()[0].options()).lr(),
        0.125);
    require_equal(adam.state().size(), steps_of_root == 0 ? std::size_t{0} : std::size_t{2});

    // From here on all ranks do exactly what the root would have done alone.
    train(adam, 2, 1);
    for (const auto& x : model->parameters())
      require_tensor(x, bluefog::broadcast(comm, x.detach(), 0));
    fill(*model, 0);
    torch::nn::Linear alone(3, 2);
    fill(*alone, 0);
    std::vector<torch::optim::OptimizerParamGroup> same{{{alone->weight}}, {{alone->bias}}};
    torch::optim::Adam reference(same, torch::optim::AdamOptions(0.125));
    static_cast<torch::optim::AdamOptions&>(reference.param_groups()[1].options())
        .lr(0.5)
        .amsgrad(true);
    train(reference, steps_of_root, 7);
    train(reference, 2, 1);
    fill(*alone, 0);
    train(reference, 1, 2);
    train(adam, 1, 2);
    require_tensor(model->weight, alone->weight);
    require_tensor(model->bias, alone->bias);
  }
  torch::nn::Linear model(3, 2);
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(0.5 + rank).momentum(0.5));
  train(sgd, 1, rank);
  bluefog::broadcast_optimizer_state(comm, sgd, comm.size() - 1);
  require_equal(sgd.param_groups()[0].options().get_lr(), 0.5 + comm.size() - 1);
  require_throws<bluefog::usage_error>(
      [&] { bluefog::broadcast_optimizer_state(comm, sgd, comm.size()); });
}

RANKS_TEST("broadcast_optimizer_state keeps every bit of options and step counts",
           "[optim][state]") {
  using torch::optim::AdamOptions;
  const int rank = comm.rank(), root = comm.size() - 1;
  torch::nn::Linear model(3, 2);
  torch::optim::Adam adam(model->parameters(),
                          rank == root
                              ? AdamOptions(0.1).betas({0.87, 0.993}).eps(1e-9).weight_decay(0.3)
                              : AdamOptions(0.2).betas({0.5, 0.6}).eps(1e-3).weight_decay(0.7));
  const auto steps_of = [&](const at::Tensor& x) -> torch::optim::AdamParamState& {
    return static_cast<torch::optim::AdamParamState&>(*adam.state().at(x.unsafeGetTensorImpl()));
  };
  constexpr std::int64_t many = (std::int64_t{1} << 53) + 1;  // no float or double
  train(adam, 1, rank);
  for (const auto& x : model->parameters()) steps_of(x).step(rank == root ? many : 5);
  bluefog::broadcast_optimizer_state(comm, adam, root);
  const auto& options = static_cast<const AdamOptions&>(adam.param_groups()[0].options());
  require(options.lr() == 0.1, "the learning rate");
  require(std::get<0>(options.betas()) == 0.87, "the first beta");
  require(std::get<1>(options.betas()) == 0.993, "the second beta");
  require(options.eps() == 1e-9, "epsilon");
  require(options.weight_decay() == 0.3, "the weight decay");
  for (const auto& x : model->parameters()) require_equal(steps_of(x).step(), many);
}

RANKS_TEST("an optimizer keeps all options if the root's fit some of its groups only",
           "[optim][state]") {
  const double own = comm.rank() == 1 ? 0.5 : 0.25;
  std::vector<at::Tensor> second{torch::ones({2}, torch::requires_grad())};
  if (comm.rank() == 1) second.push_back(torch::ones({4}, torch::requires_grad()));
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{torch::ones({3}, torch::requires_grad())});
  groups.emplace_back(second);
  torch::optim::SGD sgd(groups, torch::optim::SGDOptions(own));
  if (comm.rank() == 1)
    require_throws<bluefog::mismatch_error>(
        [&] { bluefog::broadcast_optimizer_state(comm, sgd, 0); });
  else
    bluefog::broadcast_optimizer_state(comm, sgd, 0);
  for (const auto& group : sgd.param_groups())
    require_equal(static_cast<const torch::optim::SGDOptions&>(group.options()).lr(), own);
}

RANKS_TEST("where the root cannot write its optimizer's state nobody waits for it",
           "[optim][state]") {
  struct unwritable : torch::optim::SGD {
    using SGD::SGD;
    void save(torch::serialize::OutputArchive&) const override {
      throw std::runtime_error("no room");
    }
  };
  if (comm.size() == 1) return;
  const int root = comm.size() - 1;
  unwritable sgd(std::vector<at::Tensor>{torch::ones({3}, torch::requires_grad())},
                 torch::optim::SGDOptions(0.5));
  const auto broadcast = [&] { bluefog::broadcast_optimizer_state(comm, sgd, root); };
  if (comm.rank() == root)
    require_equal(require_throws_soon<std::runtime_error>(broadcast), "no room");
  else
    require_contains(require_throws_soon<bluefog::peer_error>(broadcast),
                     bluefog::concat("rank ", root, " could not write"));
  require(bluefog::allreduce(comm, torch::ones({1})).equal(torch::ones({1})));
}

RANKS_TEST("an optimizer that the root's state does not fit keeps its own", "[optim][state]") {
  torch::nn::Linear model(3, 2);
  auto parameters = model->parameters();
  if (comm.rank() == 1) parameters.pop_back();
  torch::optim::SGD sgd(parameters, torch::optim::SGDOptions(0.5).momentum(0.5));
  train(sgd, 1, 0);
  if (comm.rank() == 1)
    require_contains(require_throws<bluefog::mismatch_error>(
                         [&] { bluefog::broadcast_optimizer_state(comm, sgd, 0); }),
                     "does not fit");
  else
    bluefog::broadcast_optimizer_state(comm, sgd, 0);
  require_equal(sgd.state().size(), parameters.size());
}
