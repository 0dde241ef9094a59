// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/amp.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/nn.hpp>
#include <bluefog/optim.hpp>
#include <bluefog/thread.hpp>
#include <bluefog/topology.hpp>

#include "gpu/finding.hpp"

/// A few steps of every optimizer with parameters on a device, against the same on the CPU.
namespace bluefog_test::gpu {

/// A net that begins alike on every device, and differently on every rank.
struct small_net : torch::nn::Module {
  small_net(int rank, at::Device device) {
    first = register_module("first", torch::nn::Linear(6, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    last = register_module("last", torch::nn::Linear(8, 3));
    const torch::NoGradGuard guard;
    int number = rank;
    for (at::Tensor& each : parameters())
      each.copy_(at::sin(at::arange(each.numel(), at::kFloat) * 1.7 + ++number).view(each.sizes()));
    to(device);
  }
  at::Tensor forward(const at::Tensor& x) {
    return last->forward(torch::tanh(norm->forward(first->forward(x))));
  }
  torch::nn::Linear first{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear last{nullptr};
};

/// \return the loss of a rank's batch of one step.
[[nodiscard]] inline at::Tensor loss_of(const at::Tensor& output, int rank, int step) {
  const auto wanted = (at::arange(output.size(0), at::kLong) + rank + step).remainder(3);
  return torch::cross_entropy_loss(output.to(at::kFloat), wanted.to(output.device()));
}
[[nodiscard]] inline at::Tensor batch_of(int rank, int step, at::Device device) {
  return at::cos(at::arange(60, at::kFloat) * 0.37 + rank + 10 * step).view({10, 6}).to(device);
}

inline constexpr int steps = 4;

/// Requires that the parameters are on `device` and have `gradients` there, or those that they
/// have.
inline void expects_on(at::Device device, const torch::nn::Module& net, bool gradients) {
  const auto require = [&](const at::Tensor& it, const std::string& name) {
    if (!it.defined() || it.device() != device)
      throw bluefog::error(name + " is not on " + device.str());
  };
  for (const auto& each : net.named_parameters()) {
    require(each.value(), each.key());
    const at::Tensor& gradient = each.value().grad();
    if (gradients || gradient.defined()) require(gradient, "the gradient of " + each.key());
  }
}

/// \return the parameters after the last step, on the CPU.
[[nodiscard]] inline std::vector<at::Tensor> parameters_of(const torch::nn::Module& net,
                                                           at::Device device,
                                                           bool gradients = true) {
  expects_on(device, net, gradients);
  std::vector<at::Tensor> result;
  for (const at::Tensor& each : net.parameters()) result.push_back(each.detach().cpu());
  return result;
}

[[nodiscard]] inline torch::optim::SGD sgd_over(const small_net& net) {
  return torch::optim::SGD(net.parameters(), torch::optim::SGDOptions(0.05).momentum(0.5));
}

/// Trains with what `wrap(sgd, net, comm)` makes. \return parameters and buffers, on the CPU.
template <class Comm, class Wrap>
[[nodiscard]] std::vector<at::Tensor> train(Comm& comm, at::Device device, const Wrap& wrap) {
  small_net net(comm.rank(), device);
  bluefog::broadcast_parameters(comm, net, 0);
  auto optimizer = wrap(sgd_over(net), net, comm);
  expects_on(device, net, false);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(optimizer.forward(net, batch_of(comm.rank(), step, device)), comm.rank(), step)
        .backward();
    optimizer.step();
  }
  auto result = parameters_of(net, device);
  for (const at::Tensor& each : net.buffers()) result.push_back(each.cpu());
  return result;
}

/// Steps with scaled losses. \param loss_in  the loss of a step. \param clip  called before each
/// step of the optimizer.
template <class Optimizer, class Loss, class Clip>
void take_scaled_steps(Optimizer& optimizer, bluefog::amp::grad_scaler& scaler, const Loss& loss_in,
                       const Clip& clip) {
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    scaler.scale(loss_in(step)).backward();
    clip();
    scaler.step(optimizer);
    scaler.update();
  }
}

/// Trains with scaled losses under autocast, one of which overflows on one rank.
template <class Comm>
[[nodiscard]] std::vector<at::Tensor> train_scaled(Comm& comm, at::Device device) {
  using namespace bluefog;
  small_net net(comm.rank(), device);
  broadcast_parameters(comm, net, 0);
  optim::gradient_allreduce optimizer(sgd_over(net), net, comm);
  expects_on(device, net, false);
  amp::grad_scaler scaler({.init_scale = 1024});
  const auto loss_in = [&](int step) {
    const amp::autocast_guard guard(device.type(), at::kBFloat16);
    const at::Tensor loss =
        loss_of(optimizer.forward(net, batch_of(comm.rank(), step, device)), comm.rank(), step);
    return step == 1 && comm.rank() == comm.size() - 1 ? loss * 1e38 * 1e38 : loss;
  };
  take_scaled_steps(optimizer, scaler, loss_in, [] {});
  auto result = parameters_of(net, device);
  result.push_back(at::full({}, scaler.get_scale(), at::kFloat));
  return result;
}

/// Trains a model in 16 bits behind parameters in 32, with scaled losses and clipping.
template <class Comm>
[[nodiscard]] std::vector<at::Tensor> train_narrow(Comm& comm, at::Device device) {
  using namespace bluefog;
  small_net net(comm.rank(), device);
  broadcast_parameters(comm, net, 0);
  auto sgd = sgd_over(net);
  auto mixed = amp::initialize(net, sgd, amp::opt_level::O2, {.type = at::kBFloat16});
  optim::gradient_allreduce optimizer(std::move(sgd), mixed, comm);
  amp::grad_scaler scaler({.init_scale = 256});
  const auto loss_in = [&](int step) {
    return loss_of(optimizer.forward(mixed, batch_of(comm.rank(), step, device)), comm.rank(),
                   step);
  };
  take_scaled_steps(optimizer, scaler, loss_in, [&] {
    scaler.unscale_(optimizer);
    amp::clip_grad_norm_(optimizer, scaler, 0.5);
  });
  return parameters_of(mixed, device);
}

/// `gradient_allreduce` where rank 0 has a batch less than the others.
template <class Comm>
[[nodiscard]] std::vector<at::Tensor> train_uneven(Comm& comm, at::Device device) {
  small_net net(comm.rank(), device);
  bluefog::broadcast_parameters(comm, net, 0);
  bluefog::optim::gradient_allreduce optimizer(sgd_over(net), net, comm, {.bucket_bytes = 128});
  for (int step = comm.rank() == 0 ? 1 : 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(net.forward(batch_of(comm.rank(), step, device)), comm.rank(), step).backward();
    optimizer.step();
  }
  if (optimizer.join() != (comm.size() - 1)) throw bluefog::error("another rank was the last");
  return parameters_of(net, device, /*gradients=*/false);  // who joined has perhaps none
}

/// Ranks that train each for itself, until all go on from where the last one is.
template <class Comm>
[[nodiscard]] std::vector<at::Tensor> train_resumed(Comm& comm, at::Device device) {
  small_net net(comm.rank(), device);
  auto optimizer = sgd_over(net);
  for (int step = 0; step < steps; ++step) {
    if (step == steps / 2) {
      bluefog::broadcast_parameters(comm, net, comm.size() - 1);
      bluefog::broadcast_optimizer_state(comm, optimizer, comm.size() - 1);
    }
    const int data = step < steps / 2 ? comm.rank() : 0;
    optimizer.zero_grad();
    loss_of(net.forward(batch_of(data, step, device)), data, step).backward();
    optimizer.step();
  }
  auto result = parameters_of(net, device);
  for (const at::Tensor& each : result)
    if (!bluefog::allreduce(comm, each, bluefog::reduce_op::max).allclose(each))
      throw bluefog::error("ranks go on from different states");
  return result;
}

/// `distributed_data_parallel`, with a step that adds up two backwards.
template <class Comm>
[[nodiscard]] std::vector<at::Tensor> train_data_parallel(Comm& comm, at::Device device) {
  small_net net(comm.rank(), device);
  bluefog::nn::distributed_data_parallel parallel(net, comm, {.bucket_bytes = 128});
  expects_on(device, net, false);
  auto optimizer = sgd_over(net);
  const auto backward = [&](int step) {
    loss_of(parallel.forward(batch_of(comm.rank(), step, device)), comm.rank(), step).backward();
  };
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    if (step == 2) {
      const auto guard = parallel.no_sync();
      backward(step + steps);
    }
    backward(step);
    optimizer.step();
  }
  return parameters_of(net, device);
}

/// Calls `visit(name, tolerance, run)` with `run(comm, device)` for each optimizer.
template <class Visit>
void visit_optimizers(const Visit& visit) {
  using namespace bluefog;
  const auto visit_wrapper = [&](const char* name, double tolerance, const auto& wrap) {
    visit(name, tolerance,
          [wrap](auto& comm, at::Device device) { return train(comm, device, wrap); });
  };
  constexpr double exact = 1e-4;  // but for the order of sums within products of matrices
  visit_wrapper("adapt_with_combine", exact, [](auto sgd, auto& net, auto& comm) {
    return optim::adapt_with_combine(
        std::move(sgd), net, comm, topology::one_peer_exponential(comm.size()),
        {.bucket_bytes = 128, .buffers = optim::buffer_policy::average});
  });
  visit_wrapper("adapt_with_combine, after_step", exact, [](auto sgd, auto& net, auto& comm) {
    return optim::adapt_with_combine(
        std::move(sgd), net, comm, topology::ring(comm.size()),
        {.start = optim::start::after_step, .global_average_every = 2});
  });
  visit_wrapper("adapt_with_combine, inside_backward", exact, [](auto sgd, auto& net, auto& comm) {
    return optim::adapt_with_combine(std::move(sgd), net, comm, topology::ring(comm.size()),
                                     {.start = optim::start::inside_backward, .bucket_bytes = 128});
  });
  visit_wrapper("adapt_then_combine", exact, [](auto sgd, auto& net, auto& comm) {
    return optim::adapt_then_combine(std::move(sgd), net, comm,
                                     topology::one_peer_exponential(comm.size()),
                                     {.bucket_bytes = 128});
  });
  visit_wrapper("gradient_allreduce", exact, [](auto sgd, auto& net, auto& comm) {
    return optim::gradient_allreduce(std::move(sgd), net, comm, {.bucket_bytes = 128});
  });
  visit_wrapper("gradient_allreduce, fp16", 1e-2, [](auto sgd, auto& net, auto& comm) {
    return optim::gradient_allreduce(std::move(sgd), net, comm,
                                     {.compression = optim::compression::fp16});
  });
  visit_wrapper("gradient_tracking", exact, [](auto sgd, auto& net, auto& comm) {
    return optim::gradient_tracking(std::move(sgd), net, comm, topology::ring(comm.size()));
  });
  visit_wrapper("exact_diffusion", exact, [](auto sgd, auto& net, auto& comm) {
    return optim::exact_diffusion(std::move(sgd), net, comm, topology::ring(comm.size()));
  });
  visit_wrapper("extra", exact, [](auto sgd, auto& net, auto& comm) {
    return optim::extra(std::move(sgd), net, comm, topology::ring(comm.size()));
  });
  visit_wrapper("decentlam", exact, [](auto sgd, auto& net, auto& comm) {
    return optim::decentlam(std::move(sgd), net, comm, topology::ring(comm.size()));
  });
  visit_wrapper("quasi_global_momentum", exact, [](auto sgd, auto& net, auto& comm) {
    return optim::quasi_global_momentum(std::move(sgd), net, comm, topology::ring(comm.size()));
  });
  visit("distributed_data_parallel", exact,
        [](auto& comm, at::Device device) { return train_data_parallel(comm, device); });
  visit("gradient_allreduce with a scaler", 2e-2,
        [](auto& comm, at::Device device) { return train_scaled(comm, device); });
  visit("gradient_allreduce of a narrow model", 2e-2,
        [](auto& comm, at::Device device) { return train_narrow(comm, device); });
  visit("gradient_allreduce with a batch less on one rank", exact,
        [](auto& comm, at::Device device) { return train_uneven(comm, device); });
  visit("parameters and the optimizer's state of one rank", exact,
        [](auto& comm, at::Device device) { return train_resumed(comm, device); });
}

[[nodiscard]] inline std::string difference(const at::Tensor& own, const at::Tensor& right,
                                            double tolerance) {
  if (own.allclose(right, tolerance, tolerance)) return "";
  return " differs from the CPU's by " + std::to_string((own - right).abs().max().item<double>());
}

/// Adds what every optimizer did. Collective.
template <class Comm>
void check_training(Comm& comm, at::Device device, findings& found) {
  visit_optimizers([&](const std::string& name, double tolerance, const auto& run) {
    found.add(name, [&]() -> std::string {
      std::vector<std::vector<at::Tensor>> wanted(static_cast<std::size_t>(comm.size()));
      bluefog::run_threads(comm.size(), [&](auto& threads) {
        wanted[static_cast<std::size_t>(threads.rank())] = run(threads, at::Device(at::kCPU));
      });
      const auto results = run(comm, device);
      const auto& right = wanted[static_cast<std::size_t>(comm.rank())];
      for (std::size_t i = 0; i < results.size(); ++i)
        if (const auto text = difference(results[i], right[i], tolerance); !text.empty())
          return "tensor " + std::to_string(i) + text;
      return "";
    });
  });
}

}  // namespace bluefog_test::gpu
