// SPDX-License-Identifier: Apache-2.0
// Life with a wrapped optimizer: what users do to models and optimizers between steps.
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/collective/barrier.hpp>
#include <bluefog/optim/adapt_then_combine.hpp>
#include <bluefog/optim/adapt_with_combine.hpp>
#include <bluefog/optim/exact_diffusion.hpp>
#include <bluefog/optim/gradient_allreduce.hpp>
#include <bluefog/optim/gradient_tracking.hpp>
#include <bluefog/optim/mixing_schedule.hpp>
#include <bluefog/optim/quasi_global_momentum.hpp>
#include <bluefog/topology/fully_connected.hpp>
#include <bluefog/topology/ring.hpp>

#include "simulation.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;
using optim::adapt_then_combine;
using optim::adapt_with_combine;
using torch::optim::SGD;
using torch::optim::SGDOptions;

template <class Optimizer>
void train(Optimizer& optimizer, mlp& net, int rank, int step) {
  optimizer.zero_grad();
  loss_in_step(step)(net, rank).backward();
  optimizer.step();
}

/// A simulation in which every rank has plain SGD with momentum.
simulation simulated_sgd(int ranks) {
  return {ranks, [](mlp& net) { return std::make_unique<SGD>(sgd_of(net)); }};
}

struct convolutional_impl : torch::nn::Module {
  convolutional_impl() {
    convolution =
        register_module("convolution", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    same = register_module("same", torch::nn::Linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& images) {
    const auto seen = torch::relu(norm(convolution(images))).mean(at::IntArrayRef{2, 3});
    return same(torch::tanh(same(seen)));  // one layer twice
  }
  torch::nn::Conv2d convolution{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear same{nullptr};
};
TORCH_MODULE_IMPL(convolutional, convolutional_impl);

convolutional make_convolutional(int seed) {
  convolutional net;
  net->to(at::kDouble);
  fill(*net, seed);
  return net;
}
/// The same with a weight in channels-last layout.
convolutional make_channels_last(int seed) {
  convolutional net = make_convolutional(seed);
  net->convolution->weight.set_data(
      net->convolution->weight.contiguous(at::MemoryFormat::ChannelsLast));
  return net;
}
at::Tensor convolutional_loss(convolutional& net, int rank, int step) {
  return loss_of(net->forward(values({2, 3, 6, 6}, 10 * step + rank)), rank);
}
bool channels_last(convolutional& net) {
  return net->convolution->weight.is_contiguous(at::MemoryFormat::ChannelsLast);
}

}  // namespace

RANKS_TEST("the model keeps its tensors, in one piece of memory", "[optim][arena]") {
  mlp net = make_mlp(comm.rank());
  const at::Tensor held = net->first->weight;
  const at::Tensor before = held.clone();
  auto* const object = net->first->weight.unsafeGetTensorImpl();
  adapt_with_combine optimizer(sgd_of(net), net, comm);
  require_equal(net->first->weight.unsafeGetTensorImpl(), object);
  require_same(held, before);
  train(optimizer, net, comm.rank(), 0);
  require_same(held, net->first->weight);
  require(!torch::equal(held, before), "a step changes what the user holds");
  const auto distance = static_cast<char*>(net->first->bias.data_ptr()) -
                        static_cast<char*>(net->first->weight.data_ptr());
  require_equal(distance, 16 * 5 * 8);
  for (const auto& each : net->parameters())
    require_equal(static_cast<std::int64_t>(each.storage().nbytes()), each.numel() * 8);
}

RANKS_TEST("a model saves the same with and without a wrapper, which saves itself",
           "[optim][saving]") {
  using torch::optim::Adam;
  using torch::optim::AdamOptions;
  const auto check = [&](const auto& wrap) {
    mlp net = make_mlp(3);
    const std::string plain = saved(net);
    auto optimizer = wrap(Adam(net->parameters(), 0.01), net);
    require(saved(net) == plain, "byte for byte");
    torch::optim::StepLR scheduler(optimizer, 2, 0.5);

    for (int step = 0; step < 3; ++step) {
      train(optimizer, net, comm.rank(), step);
      scheduler.step();
    }
    const std::string model = saved(net), state = saved(optimizer);
    require_equal(model.size(), plain.size());
    train(optimizer, net, comm.rank(), 3);
    train(optimizer, net, comm.rank(), 4);

    mlp again;
    again->to(at::kDouble);
    auto resumed = wrap(Adam(again->parameters(), AdamOptions(0.9).betas({0.5, 0.5})), again);
    restore(model, again);
    restore(state, resumed);
    require_equal(resumed.param_groups()[0].options().get_lr(), 0.005);
    const auto& options = static_cast<AdamOptions&>(resumed.param_groups()[0].options());
    require(options.betas() == AdamOptions().betas(), "all options are restored");
    for (const auto& each : again->parameters())
      require_equal(static_cast<torch::optim::AdamParamState&>(
                        *resumed.state().at(each.unsafeGetTensorImpl()))
                        .step(),
                    std::int64_t{3});
    if constexpr (requires { resumed.round(); }) require_equal(resumed.round(), std::int64_t{3});
    train(resumed, again, comm.rank(), 3);
    train(resumed, again, comm.rank(), 4);
    require_same_parameters(*again, *net);

    mlp alone = make_mlp(0);  // the user's optimizer reads what the wrapper wrote
    Adam unwrapped(alone->parameters(), 0.9);
    restore(state, unwrapped);
    require_equal(unwrapped.param_groups()[0].options().get_lr(), 0.005);
  };
  check([&](Adam inner, mlp& net) { return adapt_with_combine(std::move(inner), net, comm); });
  check([&](Adam inner, mlp& net) { return adapt_then_combine(std::move(inner), net, comm); });
  check(
      [&](Adam inner, mlp& net) { return optim::gradient_allreduce(std::move(inner), net, comm); });
}

RANKS_TEST("a window goes on where it was saved", "[optim][saving]") {
  if (comm.size() > 4) return;  // long enough
  constexpr int passes = 3;
  const auto check = [&](const auto& wrap) {
    const auto local_sgd = [&](auto& optimizer, mlp& net, int first, int last) {
      for (int step = first; step < last; ++step) train(optimizer, net, comm.rank(), step);
    };
    mlp net = make_mlp(0);
    auto optimizer = wrap(sgd_of(net), net);
    const std::string early = saved(optimizer);
    local_sgd(optimizer, net, 0, 2);
    const std::string model = saved(net), state = saved(optimizer);
    local_sgd(optimizer, net, 2, 6);

    mlp again = make_mlp(7);
    auto resumed = wrap(SGD(again->parameters(), 0.9), again);
    restore(model, again);
    restore(state, resumed);
    require_equal(resumed.passes_since_communication(), 2);
    const auto before = comm.statistics().operations;
    local_sgd(resumed, again, 2, 3);
    require(comm.statistics().operations > before, "the third pass ends the window");
    require_equal(resumed.passes_since_communication(), 0);
    local_sgd(resumed, again, 3, 6);
    require_same_parameters(*again, *net);
    require_equal(resumed.passes_since_communication(), 0);

    local_sgd(resumed, again, 6, 7);
    restore(early, resumed);  // before the first pass
    require_equal(resumed.passes_since_communication(), 0);
    SGD plain = sgd_of(again);
    local_sgd(resumed, again, 7, 8);
    restore(saved(plain), resumed);
    require_equal(resumed.passes_since_communication(), 0);
  };
  check([&](SGD inner, mlp& net) {
    return adapt_with_combine(std::move(inner), net, comm, {.num_steps_per_communication = passes});
  });
  check([&](SGD inner, mlp& net) {
    return adapt_then_combine(std::move(inner), net, comm, {.backward_passes_per_step = passes});
  });
  check([&](SGD inner, mlp& net) {
    return optim::gradient_allreduce(std::move(inner), net, comm,
                                     {.backward_passes_per_step = passes});
  });
}

RANKS_TEST("the state of a plain optimizer can be loaded into the wrapper", "[optim][saving]") {
  auto all = simulated_sgd(comm.size());
  mlp net = make_mlp(comm.rank());
  SGD plain = sgd_of(net);
  for (int step = 0; step < 2; ++step) train(plain, net, comm.rank(), step);
  const std::string state = saved(plain);
  mlp other = make_mlp(comm.rank());
  adapt_then_combine optimizer(SGD(other->parameters(), 0.7), other, comm);
  restore(saved(net), other);
  restore(state, optimizer);
  require_equal(optimizer.round(), std::int64_t{0});
  adapt_then_combine moved_in(std::move(plain), net, comm);  // keeps its momentum
  train(optimizer, other, comm.rank(), 5);
  train(moved_in, net, comm.rank(), 5);
  require_same_parameters(*other, *net);
}

RANKS_TEST("groups keep their own rates, and a scheduler drives them", "[optim][groups]") {
  simulation::make_optimizer make = [](mlp& net) {
    auto optimizer = std::make_unique<SGD>(net->first->parameters(), SGDOptions(0.2).momentum(0.9));
    torch::optim::OptimizerParamGroup rest(net->second->parameters(),
                                           std::make_unique<SGDOptions>(0.05));
    optimizer->add_param_group(rest);
    optimizer->add_param_group(torch::optim::OptimizerParamGroup(net->last->parameters()));
    return optimizer;
  };
  simulation all(comm.size(), make);
  std::vector<std::unique_ptr<torch::optim::StepLR>> schedulers;
  for (int rank = 0; rank < comm.size(); ++rank)
    schedulers.push_back(std::make_unique<torch::optim::StepLR>(all.optimizer(rank), 2, 0.5));
  mlp net = make_mlp(comm.rank());
  auto inner = make(net);
  adapt_then_combine optimizer(std::move(static_cast<SGD&>(*inner)), net, comm,
                               {.bucket_bytes = 400});
  torch::optim::StepLR scheduler(optimizer, 2, 0.5);
  for (int step = 0; step < 5; ++step) {
    all.step(sequence::adapt_first, loss_in_step(step));
    for (auto& each : schedulers) each->step();
    train(optimizer, net, comm.rank(), step);
    scheduler.step();
  }
  require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-12);
  require_equal(optimizer.param_groups().size(), std::size_t{3});
  require_near(optimizer.param_groups()[1].options().get_lr(), 0.05 / 4, 1e-15);
}

RANKS_TEST("frozen parameters neither change nor travel, until they are unfrozen",
           "[optim][frozen]") {
  const auto check = [&](sequence what, const auto& wrap) {
    auto all = simulated_sgd(comm.size());
    mlp net = make_mlp(comm.rank());
    const auto freeze = [&](bool frozen) {
      for (int rank = 0; rank < comm.size(); ++rank)
        for (auto& each : all.net(rank)->second->parameters()) each.requires_grad_(!frozen);
      for (auto& each : net->second->parameters()) each.requires_grad_(!frozen);
    };
    freeze(true);
    auto optimizer = wrap(sgd_of(net), net);
    const at::Tensor frozen = net->second->weight.clone();
    const auto bytes_of_step = [&](int step) {
      all.step(what, loss_in_step(step));
      const auto before = comm.statistics().bytes_sent;
      train(optimizer, net, comm.rank(), step);
      return comm.statistics().bytes_sent - before;
    };
    const std::int64_t with_padding = (80 + 16 + 32 + 2) * 8;  // every part ends on 64 bytes
    const std::int64_t sent = comm.size() == 1 ? 0 : with_padding;
    for (int step = 0; step < 2; ++step) require_equal(bytes_of_step(step), sent);
    require_same(net->second->weight, frozen);
    freeze(false);
    for (int step = 2; step < 5; ++step)
      require_equal(bytes_of_step(step), comm.size() == 1 ? 0 : sent + (256 + 16) * 8);
    require(!torch::equal(net->second->weight, frozen), "unfrozen parameters learn");
    freeze(true);
    require_equal(bytes_of_step(5), sent);
    require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-12);
  };
  check(sequence::combine_first,
        [&](SGD sgd, mlp& net) { return adapt_with_combine(std::move(sgd), net, comm); });
  check(sequence::adapt_first,
        [&](SGD sgd, mlp& net) { return adapt_then_combine(std::move(sgd), net, comm); });
}

RANKS_TEST("all parameters frozen at first, then all learning, counts from the first backward",
           "[optim][frozen]") {
  mlp net = make_mlp(comm.rank());
  for (auto& each : net->parameters()) each.requires_grad_(false);
  adapt_then_combine optimizer(sgd_of(net), net, comm);
  for (auto& each : net->parameters()) each.requires_grad_(true);
  train(optimizer, net, comm.rank(), 0);
  require_equal(optimizer.round(), std::int64_t{1});
}

RANKS_TEST("forwards of a model that is all frozen are no passes, of one in part they are",
           "[optim][frozen]") {
  for (const bool at_first : {false, true}) {
    mlp net = make_mlp(comm.rank());
    const auto freeze = [&](bool frozen) {
      for (auto& each : net->parameters()) each.requires_grad_(!frozen);
    };
    freeze(at_first);
    adapt_with_combine optimizer(sgd_of(net), net, comm, {.num_steps_per_communication = 2});
    const auto passes = [&] {
      const auto loss = loss_of(optimizer.forward(net, values({4, 5}, 1)), 1);
      if (loss.requires_grad()) loss.backward();
      return optimizer.passes_since_communication();
    };
    freeze(true);
    for (int pass = 0; pass < 2; ++pass) require_equal(passes(), 0);
    net->last->bias.requires_grad_(true);
    require_equal(passes(), 1);
    freeze(true);
    require_equal(passes(), 1);
    freeze(false);
    require_equal(passes(), 2);
    optimizer.step();
    require_equal(optimizer.round(), std::int64_t{1});
  }
}

RANKS_TEST("a rank that is late in steps in which nothing travels still knows which step it is at",
           "[optim][frozen]") {
  mlp net = make_mlp(comm.rank());
  for (auto& each : net->parameters()) each.requires_grad_(false);
  adapt_then_combine optimizer(sgd_of(net), net, comm);
  for (int step = 0; step < 3; ++step) {
    if (comm.rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    optimizer.step();
  }
  for (auto& each : net->parameters()) each.requires_grad_(true);
  train(optimizer, net, comm.rank(), 3);
  require_equal(optimizer.round(), std::int64_t{4});
}

namespace {

/// A matrix that is used twice under two names, and one that is not used.
struct tied : torch::nn::Module {
  tied() {
    encoder = register_parameter("encoder", values({4, 4}, 1));
    register_parameter("decoder", encoder);
    unused = register_parameter("unused", values({4, 4}, 2));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::matmul(torch::tanh(torch::matmul(x, encoder)), encoder.t());
  }
  at::Tensor encoder, unused;
};

}  // namespace

RANKS_TEST("tied and unused parameters travel once", "[optim][tied]") {
  tied net, alone;
  adapt_then_combine optimizer(SGD(net.parameters(), 0.1), net, comm);
  SGD plain(alone.parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {  // the same on every rank: averaging changes nothing
    const auto before = comm.statistics().bytes_sent;
    optimizer.zero_grad();
    loss_of(optimizer.forward(net, values({3, 4}, step)), step).backward();
    optimizer.step();
    require_equal(comm.statistics().bytes_sent - before, comm.size() == 1 ? 0 : 2 * 16 * 8);
    require_equal(optimizer.passes_since_communication(), 0);
    plain.zero_grad();
    loss_of(alone.forward(values({3, 4}, step)), step).backward();
    plain.step();
  }
  require_same_parameters(net, alone);
}

RANKS_TEST("adapt_with_combine averages over all ranks every second time, wherever it starts",
           "[optim][communication]") {
  if (comm.size() > 4) return;  // long enough
  using optim::start;
  for (const start when :
       {start::after_step, start::after_forward, start::at_step, start::inside_backward}) {
    auto all = simulated_sgd(comm.size());
    mlp net = make_mlp(comm.rank());
    adapt_with_combine optimizer(sgd_of(net), net, comm,
                                 {.start = when, .global_average_every = 2});
    for (int step = 1; step <= 5; ++step) {
      all.step(sequence::combine_first, loss_in_step(step), step % 2 == 0);
      train(optimizer, net, comm.rank(), step);
      require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-12);
    }
  }
}

RANKS_TEST("gradients clipped between backward and step are the ones used", "[optim][clip]") {
  for (const bool combine_first : {true, false}) {
    auto all = simulated_sgd(comm.size());
    mlp net = make_mlp(comm.rank());
    const auto clipped = [](mlp& model, int rank) {  // the gradient of a loss, clipped by hand
      const auto gradients =
          torch::autograd::grad({loss_in_step(rank)(model, rank)}, model->parameters());
      at::Tensor square = torch::zeros({}, at::kDouble);
      for (const auto& each : gradients) square += each.square().sum();
      const auto factor = 0.01 / (square.sqrt() + 1e-6);
      at::Tensor linear = torch::zeros({}, at::kDouble);
      for (std::size_t i = 0; i < gradients.size(); ++i)
        linear = linear + (model->parameters()[i] * gradients[i].detach() * factor).sum();
      return linear;
    };
    const auto check = [&](auto& optimizer) {
      for (int step = 0; step < 4; ++step) {
        all.step(combine_first ? sequence::combine_first : sequence::adapt_first, clipped);
        optimizer.zero_grad();
        loss_in_step(comm.rank())(net, comm.rank()).backward();
        torch::nn::utils::clip_grad_norm_(net->parameters(), 0.01);
        optimizer.step();
      }
      require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-10);
    };
    if (combine_first) {
      adapt_with_combine optimizer(sgd_of(net), net, comm);
      check(optimizer);
    } else {
      adapt_then_combine optimizer(sgd_of(net), net, comm);
      check(optimizer);
    }
  }
}

RANKS_TEST("a convolution in channels-last layout, batch norm and a layer used twice",
           "[optim][layout]") {
  const int n = comm.size();
  std::vector<convolutional> nets;
  std::vector<SGD> optimizers;
  for (int rank = 0; rank < n; ++rank) {
    nets.push_back(make_convolutional(rank));
    optimizers.emplace_back(nets.back()->parameters(), SGDOptions(0.1).momentum(0.9));
  }
  convolutional net = make_channels_last(comm.rank());
  adapt_with_combine optimizer(SGD(net->parameters(), SGDOptions(0.1).momentum(0.9)), net, comm,
                               topology::fully_connected(n));
  require(channels_last(net), "keeps layout");
  for (int step = 0; step < 4; ++step) {
    for (int rank = 0; rank < n; ++rank) {
      optimizers[static_cast<std::size_t>(rank)].zero_grad();
      convolutional_loss(nets[static_cast<std::size_t>(rank)], rank, step).backward();
    }
    average_over_all(nets);
    for (auto& each : optimizers) each.step();

    optimizer.zero_grad();
    convolutional_loss(net, comm.rank(), step).backward();
    for (std::size_t i = 0; i < net->parameters().size(); ++i)  // the gradient at the old place
      require_close(net->parameters()[i].grad(),
                    nets[static_cast<std::size_t>(comm.rank())]->parameters()[i].grad(), 1e-10);
    optimizer.step();
    require_equal(optimizer.round(), std::int64_t{step + 1});
  }
  require_close(flatten(*net), flatten(*nets[static_cast<std::size_t>(comm.rank())]), 1e-10);
  require(channels_last(net), "keeps layout");
}

RANKS_TEST("a model reloaded between steps goes on from what was loaded", "[optim][reload]") {
  for (const bool by_forward : {false, true})
    for (const bool between : {false, true}) {  // zero_grad and forward, or before zero_grad
      auto all = simulated_sgd(comm.size());
      mlp net = make_mlp(comm.rank());
      adapt_with_combine optimizer(sgd_of(net), net, comm);
      for (int step = 0; step < 4; ++step) {
        if (!between || step != 2) optimizer.zero_grad();
        if (step == 2) {
          for (int rank = 0; rank < comm.size(); ++rank) fill(*all.net(rank), 40 + rank);
          restore(saved(make_mlp(40 + comm.rank())), net);
          net->last->bias.set_data(net->last->bias.clone());
        }
        if (between && step == 2) static_cast<torch::optim::Optimizer&>(optimizer).zero_grad();
        all.step(sequence::combine_first, loss_in_step(step));
        if (by_forward) {
          const int seed = 31 * step + comm.rank();
          loss_of(optimizer.forward(net, values({4, 5}, seed)), seed).backward();
        } else {
          loss_in_step(step)(net, comm.rank()).backward();
        }
        optimizer.step();
        const auto off = flatten(*net) - flatten(*all.net(comm.rank()));
        require(off.abs().max().template item<double>() < 1e-12,
                concat("step ", step, ", by forward ", by_forward, ", between ", between, " off ",
                       off));
      }
    }
}

RANKS_TEST("a model in channels-last layout is saved and reloaded like any other",
           "[optim][reload][saving][layout]") {
  const auto step_on = [&](auto& optimizer, convolutional& net, int step) {
    convolutional_loss(net, comm.rank(), step).backward();
    optimizer.step();
  };
  convolutional net = make_channels_last(comm.rank());
  const std::string plain = saved(net), contiguous = saved(make_convolutional(comm.rank()));
  const auto graph = topology::fully_connected(comm.size());
  adapt_with_combine optimizer(SGD(net->parameters(), SGDOptions(0.1)), net, comm, graph);
  require(saved(net) == plain, "byte for byte");
  optimizer.zero_grad();
  step_on(optimizer, net, 0);

  for (const bool same_layout : {true, false}) {  // from a file of this layout and of another
    optimizer.zero_grad();
    restore(same_layout ? plain : contiguous, net);
    // What torch has to end with, from what all ranks have saved: averaged, then stepped.
    convolutional alone = make_convolutional(comm.rank());
    convolutional_loss(alone, comm.rank(), 7).backward();
    at::Tensor mean = torch::zeros_like(flatten(*alone));
    for (int rank = 0; rank < comm.size(); ++rank)
      mean += flatten(*make_convolutional(rank)) / comm.size();
    torch::nn::utils::vector_to_parameters(mean, alone->parameters());
    SGD(alone->parameters(), SGDOptions(0.1)).step();
    step_on(optimizer, net, 7);
    require(channels_last(net) || !same_layout, "keeps layout");
    require_close(flatten(*net), flatten(*alone), 1e-10);

    convolutional again = make_channels_last(77);
    restore(saved(net), again);
    require_same(flatten(*again), flatten(*net));
  }
}

RANKS_TEST("a converted model is an error that names the parameter", "[optim][reload]") {
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(sgd_of(net), net, comm);
  train(optimizer, net, comm.rank(), 0);
  net->to(at::kFloat);
  const auto text = require_throws<usage_error>([&] { optimizer.zero_grad(); });
  require_contains(text, "first.weight");
  require_contains(text, "was Double when it was wrapped and is Float now");
  net->to(at::kDouble);
  train(optimizer, net, comm.rank(), 1);

  net->last->bias.set_data(torch::zeros({3}, at::kDouble));
  require_contains(require_throws<usage_error>([&] { optimizer.step(); }), "last.bias");
  net->last->bias.set_data(torch::zeros({2}, at::kDouble));
  train(optimizer, net, comm.rank(), 2);

  // Its memory is still where it was, but it is not all of it.
  const at::Tensor whole = net->first->weight.detach();
  net->first->weight.set_data(whole.narrow(0, 0, 1));
  require_contains(require_throws<usage_error>([&] { optimizer.step(); }), "first.weight");
  net->first->weight.set_data(whole);
  train(optimizer, net, comm.rank(), 3);
}

RANKS_TEST("two tensors over one memory are refused by name", "[optim][tied]") {
  mlp net = make_mlp(0);
  mlp other = make_mlp(1);
  other->last->bias.set_data(net->last->bias);
  std::vector<at::Tensor> both = net->parameters();
  for (const auto& each : other->parameters()) both.push_back(each);
  const auto text =
      require_throws<usage_error>([&] { adapt_with_combine(SGD(both, 0.1), net, comm); });
  require_contains(text, "last.bias");
  other->last->bias.set_data(torch::zeros({2}, at::kDouble));

  // In part, too; what lies side by side in one piece of memory is no part of one another.
  const auto wrap = [&] { adapt_with_combine(SGD(both, 0.1), net, comm); };
  net->first->bias.set_data(other->first->weight.detach().view({-1}).narrow(0, 3, 16));
  const auto in_part = require_throws<usage_error>(wrap);
  require_contains(in_part, "first.bias");
  require_contains(in_part, "over one memory");
  const auto shared = torch::ones({32}, at::kDouble);
  net->first->bias.set_data(shared.narrow(0, 0, 16));
  other->first->bias.set_data(shared.narrow(0, 16, 16));
  wrap();
  require_close(net->first->bias, torch::ones({16}, at::kDouble), 0);
}

RANKS_TEST("groups added through the wrapper or through its base are averaged", "[optim][groups]") {
  auto all = simulated_sgd(comm.size());
  mlp net = make_mlp(comm.rank());
  const auto options = [] { return std::make_unique<SGDOptions>(SGDOptions(0.1).momentum(0.9)); };
  SGD first(net->first->parameters(), *options());
  adapt_then_combine optimizer(std::move(first), net, comm);
  optimizer.add_param_group({net->second->parameters(), options()});
  static_cast<torch::optim::Optimizer&>(optimizer).add_param_group(
      {net->last->parameters(), options()});
  for (int step = 0; step < 4; ++step) {
    all.step(sequence::adapt_first, loss_in_step(step));
    train(optimizer, net, comm.rank(), step);
  }
  require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-12);
}

RANKS_TEST("a closure is evaluated once, with gradients, and its loss returned",
           "[optim][closure]") {
  for (const bool combine_first : {true, false}) {
    auto all = simulated_sgd(comm.size());
    mlp net = make_mlp(comm.rank());
    int calls = 0;
    const auto check = [&](auto& optimizer) {
      for (int step = 0; step < 3; ++step) {
        all.step(combine_first ? sequence::combine_first : sequence::adapt_first,
                 loss_in_step(step));
        double inside = 0;
        const torch::NoGradGuard no_grad;
        const auto loss = optimizer.step([&] {
          ++calls;
          optimizer.zero_grad();
          auto value = loss_in_step(step)(net, comm.rank());
          value.backward();
          inside = value.template item<double>();
          return value;
        });
        require_equal(loss.template item<double>(), inside);
      }
      require_equal(calls, 3);
      require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-12);
    };
    if (combine_first) {
      adapt_with_combine optimizer(sgd_of(net), net, comm);
      check(optimizer);
    } else {
      adapt_then_combine optimizer(sgd_of(net), net, comm);
      check(optimizer);
    }
  }
}

RANKS_TEST("a wrapper may move between backward and step", "[optim][lifetime]") {
  auto all = simulated_sgd(comm.size());
  mlp net = make_mlp(comm.rank());
  std::optional<adapt_with_combine<SGD, typename Comm::backend_type>> holder;
  {
    adapt_with_combine optimizer(sgd_of(net), net, comm);
    all.step(sequence::combine_first, loss_in_step(0));
    loss_in_step(0)(net, comm.rank()).backward();
    holder.emplace(std::move(optimizer));
  }
  holder->step();
  for (int step = 1; step < 3; ++step) {
    all.step(sequence::combine_first, loss_in_step(step));
    train(*holder, net, comm.rank(), step);
  }
  require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-12);
}

RANKS_TEST("a wrapper may go while its parameters are on their way", "[optim][lifetime]") {
  mlp net = make_mlp(comm.rank());
  const auto before = flatten(*net);
  {
    adapt_with_combine optimizer(sgd_of(net), net, comm);
    loss_in_step(0)(net, comm.rank()).backward();
  }
  require_same(flatten(*net), before);
  loss_in_step(1)(net, comm.rank()).backward();  // no hook is left behind
  {
    auto optimizer = std::make_unique<adapt_then_combine<SGD, typename Comm::backend_type>>(
        sgd_of(net), net, comm);
    train(*optimizer, net, comm.rank(), 2);
  }
  const auto after = flatten(*net);
  SGD plain = sgd_of(net);
  plain.zero_grad();
  loss_in_step(3)(net, comm.rank()).backward();
  plain.step();
  require(!torch::equal(flatten(*net), after), "the parameters outlive the wrapper");
}

TEST_CASE("a rank that unwinds between backward and step does not wait for the others",
          "[optim][lifetime][thread]") {
  const auto run = [] {
    run_threads(3, [](communicator<thread_backend>& comm) {
      mlp net = make_mlp(comm.rank());
      adapt_with_combine optimizer(sgd_of(net), net, comm);
      if (comm.rank() == 1) {
        loss_in_step(0)(net, 1).backward();
        throw std::runtime_error("bad batch");
      }
      for (int step = 0; step < 2; ++step) train(optimizer, net, comm.rank(), step);
    });
  };
  CHECK_THROWS_WITH(run(), "bad batch");
}

RANKS_TEST("buffers to be averaged that cannot be written are refused by name",
           "[optim][buffers]") {
  mlp net = make_mlp(0);
  net->register_buffer("wide", torch::ones({1, 4}).expand({3, 4}));
  const auto wrap = [&](optim::buffer_policy policy) {
    adapt_with_combine optimizer(SGD(net->parameters(), SGDOptions(0.1)), net, comm,
                                 {.buffers = policy});
  };
  wrap(optim::buffer_policy::local);
  require_contains(require_throws<usage_error>([&] { wrap(optim::buffer_policy::average); }),
                   "adapt_with_combine: \"wide\": ");
}

namespace {

/// The wrappers that average parameters, each around SGD over the first two layers of `net`.
constexpr int averaging_kinds = 9;
template <class Comm, class Act>
void with_averaging(int kind, mlp& net, Comm& comm, const Act& act) {
  using optim::start;
  auto parameters = net->first->parameters();
  for (const auto& each : net->second->parameters()) parameters.push_back(each);
  SGD sgd(parameters, SGDOptions(0.1));
  const topology::ring right(comm.size(), topology::ring_style::right);
  const auto combine_first = [&](const auto& graph, optim::adapt_with_combine_options options) {
    options.bucket_bytes = 300;
    adapt_with_combine optimizer(std::move(sgd), net, comm, graph, options);
    act(optimizer);
  };
  constexpr start starts[] = {start::after_step, start::after_forward, start::at_step,
                              start::inside_backward};
  if (kind < 4) return combine_first(right, {.start = starts[kind]});
  if (kind == 4)
    return combine_first(right, {.communication = optim::communication_type::allreduce});
  if (kind == 5) {
    adapt_then_combine optimizer(std::move(sgd), net, comm, {.bucket_bytes = 300});
    act(optimizer);
  } else if (kind == 6) {
    optim::gradient_tracking optimizer(std::move(sgd), net, comm, right);
    act(optimizer);
  } else if (kind == 7) {
    optim::quasi_global_momentum optimizer(std::move(sgd), net, comm);
    act(optimizer);
  } else {
    optim::exact_diffusion optimizer(std::move(sgd), net, comm, topology::ring(comm.size()));
    act(optimizer);
  }
}

/// Steps until a rank hears that lists differ. \return what it hears.
template <class Optimizer>
std::string steps_until_told(Optimizer& optimizer, mlp& net, int rank) {
  constexpr int many = 40;
  for (int step = 0; step < many; ++step) try {
      train(optimizer, net, rank, step);
    } catch (const mismatch_error& problem) {
      return problem.what();
    }
  return "nothing";
}

/// What one rank does that the others do not.
enum class change { freezes, freezes_another, adds };

/// One rank changes what travels.
template <class Comm>
void tell_all_ranks(Comm& comm) {
  const int n = comm.size();
  if (n == 1 || !letter_backend<typename Comm::backend_type>) return;
  for (const int odd : {0, n - 1})
    for (int kind = 0; kind < averaging_kinds; ++kind)
      for (const auto what : {change::freezes, change::freezes_another, change::adds}) {
        mlp net = make_mlp(comm.rank());
        std::string text;
        with_averaging(kind, net, comm, [&](auto& optimizer) {
          for (int step = 0; step < 2; ++step) train(optimizer, net, comm.rank(), step);
          if (what == change::adds && comm.rank() == odd)
            optimizer.add_param_group(
                torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{net->last->bias}));
          else if (comm.rank() == odd)
            net->second->bias.requires_grad_(false);
          else if (what == change::freezes_another)
            net->first->bias.requires_grad_(false);  // as long
          text = steps_until_told(optimizer, net, comm.rank());
        });
        require_contains(text, ": ranks differ: ");
        require_contains(text, what == change::adds      ? "\"last.bias\""
                               : what == change::freezes ? "\"second.bias\""
                                                         : "\"first.bias\"");
        require_contains(text, "rank 0");
        for (auto& each : net->parameters()) each.requires_grad_(true);
        with_averaging(kind, net, comm, [&](auto& optimizer) {  // made anew, training goes on
          train(optimizer, net, comm.rank(), 5);
        });
      }
}

}  // namespace

RANKS_TEST("ranks that average different parameters of one size are told, all of them",
           "[optim][frozen]") {
  tell_all_ranks(comm);
}

RANKS_TEST("where ranks differ, adapt_then_combine has adapted on all of them and combined on none",
           "[optim][frozen]") {
  if (comm.size() == 1 || !letter_backend<typename std::decay_t<decltype(comm)>::backend_type>)
    return;
  mlp net = make_mlp(comm.rank());
  adapt_then_combine optimizer(SGD(net->parameters(), SGDOptions(0.1)), net, comm,
                               topology::fully_connected(comm.size()), {.bucket_bytes = 300});
  train(optimizer, net, comm.rank(), 0);
  if (comm.rank() == 0) net->second->bias.requires_grad_(false);
  optimizer.zero_grad();
  loss_in_step(1)(net, comm.rank()).backward();
  std::vector<at::Tensor> adapted;
  for (const auto& each : net->parameters())
    adapted.push_back(each.grad().defined() ? (each - 0.1 * each.grad()).detach() : each.clone());
  require_throws<mismatch_error>([&] { optimizer.step(); });
  for (std::size_t i = 0; i < adapted.size(); ++i)
    require_close(net->parameters()[i], adapted[i], 1e-14);
}

RANKS_TEST("whoever ends with parameters on their way answers ranks that have frozen some since",
           "[optim][frozen]") {
  if (comm.size() == 1 || !letter_backend<typename std::decay_t<decltype(comm)>::backend_type>)
    return;
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(SGD(net->parameters(), SGDOptions(0.1)), net, comm,
                               topology::fully_connected(comm.size()),
                               {.start = optim::start::after_step});
  train(optimizer, net, comm.rank(), 0);
  if (comm.rank() == 0) train(optimizer, net, comm.rank(), 1);  // sends for a third step
  barrier(comm);
  if (comm.rank() == 0) return;
  net->second->bias.requires_grad_(false);
  const auto told = require_throws<mismatch_error>([&] { train(optimizer, net, comm.rank(), 1); });
  require_contains(told, "second.bias");
}

TEST_CASE("in check mode too, ranks that average different parameters are told (threads)",
          "[optim][frozen][thread]") {
  run_threads(3, [](auto& comm) { tell_all_ranks(comm); }, {.check = true});
}
#ifdef BLUEFOG_TEST_MPI
TEST_CASE("in check mode too, ranks that average different parameters are told (MPI)",
          "[optim][frozen][mpi]") {
  on_mpi([](auto& comm) { tell_all_ranks(comm); }, {.check = true});
}
#endif

TEST_CASE("an override is for one communication, also where a later one is taken back",
          "[optim][schedule][thread]") {
  run_threads(4, [](auto& comm) {
    using optim::communication_type;
    const std::string_view name = "test";
    optim::detail::agreeing_group group(name, comm);
    const auto ring = topology::ring(4);
    optim::detail::mixing_schedule schedule(name, group, ring,
                                            communication_type::neighbor_allreduce);
    schedule.global_every(2);
    const int pair = comm.rank() ^ 1;
    const neighborhood once{.self_weight = 0.5, .sources = {{pair, 0.5}}, .destinations = {{pair}}};
    const auto usual = topology::neighborhood_of(ring, comm.rank());
    schedule.next(once);
    require(*schedule.begin().links == once);
    schedule.recall();
    require(*schedule.begin().links == once, "taken back, it is still to come");
    for (int time = 0; time < 2; ++time) {
      require(schedule.begin().type == communication_type::allreduce);
      if (time == 0) schedule.recall();
    }
    require(*schedule.begin().links == usual, "used once");

    const auto before = schedule.position();
    schedule.global_every(0);
    schedule.on_round([](std::int64_t) { return neighborhood{.sources = {{17}}}; });
    require_throws<usage_error>([&] { static_cast<void>(schedule.begin()); });
    require_equal(schedule.position().communications, before.communications);
    require_equal(schedule.position().round, before.round);
    schedule.on_round(nullptr);
    require(*schedule.begin().links == usual);
    require_equal(schedule.position().round, before.round + 1);
  });
}

RANKS_TEST("agreeing on what travels costs nothing until it changes", "[optim][frozen]") {
  const int n = comm.size();
  for (int kind = 0; kind < averaging_kinds; ++kind) {
    mlp net = make_mlp(comm.rank());
    with_averaging(kind, net, comm, [&](auto& optimizer) {
      const auto control = [&](int step) {
        const auto before = comm.statistics().control_messages;
        train(optimizer, net, comm.rank(), step);
        return comm.statistics().control_messages - before;
      };
      control(0);
      require_equal(control(1), std::int64_t{0});
      net->second->bias.requires_grad_(false);
      std::int64_t sent = 0;
      for (const int step : {2, 3, 4}) sent += control(step);
      require((sent > 0) == (n > 1), "ranks compare their lists once more");
      require_equal(control(5), std::int64_t{0});
    });
  }
}

#ifdef BLUEFOG_TEST_MPI
namespace {

/// A whole training that ends after main(), and so after MPI.
struct everything {
  communicator<mpi_backend> comm;
  mlp net = make_mlp(comm.rank());
  decltype(adapt_with_combine(std::declval<SGD>(), std::declval<mlp&>(),
                              std::declval<communicator<mpi_backend>&>())) optimizer{sgd_of(net),
                                                                                     net, comm};
};
std::optional<everything> outlives_mpi;

}  // namespace

// Started by CMakeLists.txt, which looks at how the process ends.
TEST_CASE("an optimizer that is a global outlives MPI", "[.][outlives-mpi]") {
  outlives_mpi.emplace();
  train(outlives_mpi->optimizer, outlives_mpi->net, outlives_mpi->comm.rank(), 0);
  CHECK(outlives_mpi->optimizer.round() == 1);
}
#endif
