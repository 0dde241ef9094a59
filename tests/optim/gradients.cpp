// SPDX-License-Identifier: Apache-2.0
// gradient_allreduce: windows, what may be lost, what travels.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/amp/grad_scaler.hpp>
#include <bluefog/optim/adapt_then_combine.hpp>
#include <bluefog/optim/adapt_with_combine.hpp>
#include <bluefog/optim/gradient_allreduce.hpp>
#include <bluefog/optim/gradient_tracking.hpp>
#include <bluefog/optim/quasi_global_momentum.hpp>
#include <bluefog/tensor/allreduce.hpp>

#include "simulation.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;
using optim::gradient_allreduce;
using torch::optim::SGD;
using torch::optim::SGDOptions;

/// One parameter named "weight".
struct holder : torch::nn::Module {
  explicit holder(at::Tensor initial) { weight = register_parameter("weight", std::move(initial)); }
  at::Tensor weight;
};

/// A scalar loss whose gradient in `parameter` is `gradient`.
at::Tensor linear_loss(const at::Tensor& parameter, const at::Tensor& gradient) {
  return (parameter * gradient).sum();
}

template <class Comm>
void require_equal_on_ranks(Comm& comm, const torch::nn::Module& module,
                            std::source_location where = std::source_location::current()) {
  require_close(allreduce(comm, flatten(module)), flatten(module), 1e-12, where);
}

/// The mean over ranks of the gradients of the sum of the losses of `steps`, at `net`.
std::vector<at::Tensor> mean_gradient(mlp& net, int ranks, const std::vector<int>& steps,
                                      int first = 0) {
  at::Tensor sum = torch::zeros({}, at::kDouble);
  for (int rank = first; rank < ranks; ++rank)
    for (const int step : steps) sum = sum + loss_in_step(step)(net, rank) / ranks;
  return torch::autograd::grad({sum}, net->parameters());
}

/// Takes a step along `gradient`.
void descend(const torch::nn::Module& module, const std::vector<at::Tensor>& gradient,
             double rate) {
  const torch::NoGradGuard no_grad;
  auto parameters = module.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i] -= rate * gradient[i];
}

template <class Comm>
void backward(mlp& net, Comm& comm, int step) {
  loss_in_step(step)(net, comm.rank()).backward();
}

}  // namespace

RANKS_TEST("gradients are clipped after synchronize", "[optim][gradients][clip]") {
  captured_log log;
  holder model(torch::zeros({2}, at::kDouble));
  gradient_allreduce optimizer(SGD(model.parameters(), 1.0), model, comm);
  const auto of_rank = [](int rank) {
    return rank == 0   ? torch::tensor({3.0, 0.0}, at::kDouble)
           : rank == 1 ? torch::tensor({0.0, 4.0}, at::kDouble)
                       : torch::zeros({2}, at::kDouble);
  };
  linear_loss(model.weight, of_rank(comm.rank())).backward();
  optimizer.synchronize();
  at::Tensor mean = torch::zeros({2}, at::kDouble);
  for (int rank = 0; rank < comm.size(); ++rank) mean += of_rank(rank) / comm.size();
  require_close(model.weight.grad(), mean, 1e-15);
  const auto operations = comm.statistics().operations;
  optimizer.synchronize();  // nothing left to do
  require_equal(comm.statistics().operations, operations);
  require_close(model.weight.grad(), mean, 1e-15);
  require_close(model.weight, torch::zeros({2}, at::kDouble), 0);  // nothing is applied
  torch::nn::utils::clip_grad_norm_(model.parameters(), 1.0);
  const double norm = mean.norm().item<double>();
  const auto clipped = norm > 1 ? mean / norm : mean;
  require_close(model.weight.grad(), clipped, 1e-5);
  if (comm.size() == 2)
    require_close(model.weight.grad(), torch::tensor({0.6, 0.8}, at::kDouble), 1e-5);
  const at::Tensor used = model.weight.grad().clone();
  {
    auto guard = optimizer.skip_synchronize();
    optimizer.step();
  }
  require_equal(comm.statistics().operations, operations);
  require_close(model.weight, -used, 1e-15);
  optimizer.zero_grad();
  require_equal(log.count(""), 0);
}

RANKS_TEST("each rank's own gradient can be clipped before the reduction",
           "[optim][gradients][clip]") {
  holder model(torch::zeros({2}, at::kDouble));
  gradient_allreduce optimizer(
      SGD(model.parameters(), 1.0), model, comm,
      {.backward_passes_per_step = 2, .average_aggregated_gradients = false, .local_max_norm = 1});
  // The sum of two backwards is (3, 0) on even ranks and (0, 4) on odd ones.
  const bool even = comm.rank() % 2 == 0;
  const auto half = torch::tensor({even ? 1.5 : 0.0, even ? 0.0 : 2.0}, at::kDouble);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    linear_loss(model.weight, half).backward();
    linear_loss(model.weight, half).backward();
    optimizer.step();
    const double evens = (comm.size() + 1) / 2, n = comm.size();
    require_close(model.weight.grad(), torch::tensor({evens / n, (n - evens) / n}, at::kDouble),
                  1e-6);
  }

  amp::grad_scaler scaler;
  scaler.scale(linear_loss(model.weight, half)).backward();
  require_contains(require_throws<usage_error>([&] { scaler.step(optimizer); }), "local_max_norm");
  const auto refused = [&] {
    gradient_allreduce(SGD(model.parameters(), 1.0), model, comm, {.local_max_norm = -1});
  };
  require_contains(require_throws<usage_error>(refused), "local_max_norm must not be negative");
}

RANKS_TEST("where gradients are clipped on each rank, local steps clip them too",
           "[optim][gradients][clip]") {
  holder model(torch::zeros({2}, at::kDouble));
  gradient_allreduce optimizer(SGD(model.parameters(), 1.0), model, comm,
                               {.backward_passes_per_step = 2, .local_max_norm = 1});
  const bool even = comm.rank() % 2 == 0;
  const auto step = [&](auto act) {  // along (3, 0) on even ranks, (0, 4) on odd ones
    optimizer.zero_grad();
    linear_loss(model.weight, torch::tensor({even ? 3.0 : 0.0, even ? 0.0 : 4.0}, at::kDouble))
        .backward();
    act();
  };
  const auto steps = [&] { optimizer.step(); };
  const double evens = (comm.size() + 1) / 2, n = comm.size();
  const auto mean = torch::tensor({evens / n, (n - evens) / n}, at::kDouble);
  const auto own = torch::tensor({even ? 1.0 : 0.0, even ? 0.0 : 1.0}, at::kDouble);
  step(steps);
  require_close(model.weight, -own, 1e-5);
  step(steps);  // the window's last, after which parameters are averaged
  require_close(model.weight, -2 * mean, 1e-5);
  step(steps);
  require_close(model.weight, -2 * mean - own, 1e-5);
  step([&] { optimizer.flush(); });
  require_close(model.weight, -4 * mean, 1e-5);
}

RANKS_TEST("a step after synchronize without the guard does not average again, and warns once",
           "[optim][gradients]") {
  captured_log log;
  holder model(torch::zeros({2}, at::kDouble));
  gradient_allreduce optimizer(SGD(model.parameters(), 1.0), model, comm, {.op = reduce_op::sum});
  for (int step = 1; step <= 3; ++step) {
    linear_loss(model.weight, torch::ones({2}, at::kDouble)).backward();
    optimizer.synchronize();
    optimizer.step();
    optimizer.zero_grad();
    require_close(model.weight, torch::full({2}, -1.0 * comm.size() * step, at::kDouble), 1e-12);
  }
  require_equal(log.count("skip_synchronize"), 1);
  require_equal(log.count(""), 1);
}

RANKS_TEST("a change of gradients that have been sent has no effect, and a warning names one",
           "[optim][gradients][clip]") {
  using changing = std::function<void(at::Tensor&)>;
  const changing changes[] = {
      [](at::Tensor& weight) { weight.mutable_grad().mul_(0.5); },
      [](at::Tensor& weight) { weight.mutable_grad() = weight.grad() * 0.5; },
      [](at::Tensor& weight) { torch::nn::utils::clip_grad_norm_(weight, 1e-6); }};
  for (const auto& scale : changes) {
    captured_log log;
    mlp net = make_mlp(0), alone = make_mlp(0);
    gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm, {.bucket_bytes = 300});
    for (const int step : {1, 2, 3}) {
      optimizer.zero_grad();
      backward(net, comm, step);
      scale(net->second->weight);
      optimizer.step();
      descend(*alone, mean_gradient(alone, comm.size(), {step}), 0.1);
      require_close(flatten(*net), flatten(*alone), 1e-12);
    }
    require_equal(log.count("gradient of \"second.weight\" was changed after it was sent"), 1);
    require_equal(log.count(""), 1);
  }
  {  // before the last backward of a window nothing has been sent
    captured_log log;
    mlp net = make_mlp(0), alone = make_mlp(0);
    gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm,
                                 {.backward_passes_per_step = 2});
    backward(net, comm, 1);
    for (auto& each : net->parameters()) each.mutable_grad().mul_(0.5);
    backward(net, comm, 2);
    optimizer.step();
    descend(*alone, mean_gradient(alone, comm.size(), {1, 2, 2}), 0.1 / 4);
    require_close(flatten(*net), flatten(*alone), 1e-12);
    require_equal(log.count(""), 0);
  }
}

RANKS_TEST("a step reduces the gradients once, and a local one nothing", "[optim][gradients]") {
  const int n = comm.size();
  mlp net = make_mlp(0);
  gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.backward_passes_per_step = 2});
  const auto bytes = [&](auto&& act) {
    const auto before = comm.statistics().bytes_sent;
    act();
    return comm.statistics().bytes_sent - before;
  };
  const auto one = [&] { backward(net, comm, 1); };
  // One flag each, and one for notices.
  const double elements = 5 * 16 + 16 + 16 * 16 + 16 + 2 * 16 + 2 + 6 + 1;
  require_equal(bytes(one), std::int64_t{0});
  const auto whole = bytes([&] {
    one();
    optimizer.step();
  });
  require_near(static_cast<double>(whole), 2.0 * (n - 1) / n * elements * 8, 16);
  optimizer.zero_grad();
  one();
  require_equal(bytes([&] { optimizer.step(); }), std::int64_t{0});  // local
}

RANKS_TEST("J backwards are reduced as one, divided by J or not", "[optim][gradients]") {
  for (const bool average : {true, false}) {
    mlp net = make_mlp(0), alone = make_mlp(0);
    gradient_allreduce optimizer(
        SGD(net->parameters(), 0.1), net, comm,
        {.backward_passes_per_step = 3, .average_aggregated_gradients = average});
    for (int round = 0; round < 3; ++round) {
      optimizer.zero_grad(round != 1);  // also with gradients that stay where they are
      for (const int step : {1, 2, 3}) backward(net, comm, 3 * round + step);
      optimizer.step();
      const auto gradient =
          mean_gradient(alone, comm.size(), {3 * round + 1, 3 * round + 2, 3 * round + 3});
      descend(*alone, gradient, 0.1 / (average ? 3 : 1));
      require_close(flatten(*net), flatten(*alone), 1e-12);
    }
  }
}

RANKS_TEST("windows with local steps end with equal replicas", "[optim][gradients][counting]") {
  captured_log log;
  for (const std::string_view sequence : {"FsFsFS", "FFsFS", "FsFFS", "FsFsFSFFFSFFsFS"}) {
    mlp net = make_mlp(0);
    gradient_allreduce optimizer(sgd_of(net), net, comm, {.backward_passes_per_step = 3});
    int seed = 0;
    for (const char each : sequence) {
      if (each == 'F') {
        backward(net, comm, ++seed);
        continue;
      }
      const auto before = comm.statistics().operations;
      optimizer.step();
      optimizer.zero_grad();
      if (each == 's') require_equal(comm.statistics().operations, before);
      if (each == 'S') {
        require_equal(optimizer.passes_since_communication(), 0);
        require_equal_on_ranks(comm, *net);
      }
    }
  }
  require_equal(log.count(""), 0);
}

RANKS_TEST("an epoch's end is flushed by all ranks, also by those whose windows have ended",
           "[optim][gradients][counting]") {
  captured_log log;
  const int n = comm.size();
  const auto passes = [](int rank) { return rank == 0 ? 3 : 4; };
  for (const bool clears : {true, false}) {
    mlp net = make_mlp(0), alone = make_mlp(0);
    const auto options = SGDOptions(0.1).momentum(0.5);
    gradient_allreduce optimizer(SGD(net->parameters(), options), net, comm,
                                 {.backward_passes_per_step = 3, .bucket_bytes = 300});
    SGD plain(alone->parameters(), options);
    const auto plain_step = [&](const std::vector<at::Tensor>& gradient, double divisor) {
      for (std::size_t i = 0; i < gradient.size(); ++i)
        alone->parameters()[i].mutable_grad() = gradient[i] / divisor;
      plain.step();
    };
    for (int epoch = 0; epoch < 2; ++epoch) {
      const int first = 10 * epoch;
      for (int pass = 0; pass < passes(comm.rank()); ++pass) {
        backward(net, comm, first + pass);
        if (pass != 2) continue;
        optimizer.step();
        if (clears || comm.rank() != 0) optimizer.zero_grad();
      }
      optimizer.flush();
      optimizer.zero_grad();
      require_equal(optimizer.passes_since_communication(), 0);
      plain_step(mean_gradient(alone, n, {first, first + 1, first + 2}), 3);
      if (n > 1)  // rank 0 has zeros to add
        plain_step(mean_gradient(alone, n, {first + 3}, 1), 1);
      require_close(flatten(*net), flatten(*alone), 1e-12);
    }
  }
  // With local steps parameters are averaged, also on a rank that has taken none since.
  mlp net = make_mlp(0);
  std::vector<mlp> all;
  for (int rank = 0; rank < n; ++rank) all.push_back(make_mlp(0));
  gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.backward_passes_per_step = 3});
  for (int pass = 0; pass < 4; ++pass) {
    for (int rank = 0; rank < n; ++rank) {
      if (pass >= passes(rank)) continue;
      auto& own = all[static_cast<std::size_t>(rank)];
      own->zero_grad();
      loss_in_step(pass)(own, rank).backward();
      SGD(own->parameters(), 0.1).step();
    }
    if (pass >= 2) average_over_all(all);
    if (pass >= passes(comm.rank())) continue;
    backward(net, comm, pass);
    optimizer.step();
    optimizer.zero_grad();
  }
  optimizer.flush();
  require_close(flatten(*net), flatten(*all[0]), 1e-12);
  const auto before = flatten(*net);
  optimizer.flush();  // nothing to end on any rank
  require_same(flatten(*net), before);
  require_equal(log.count(""), 0);
}

RANKS_TEST("a cut window is stepped locally, reduced at once, or an error", "[optim][gradients]") {
  using optim::partial_window;
  {
    mlp net = make_mlp(0);
    gradient_allreduce optimizer(
        SGD(net->parameters(), 0.1), net, comm,
        {.backward_passes_per_step = 4, .partial_window = partial_window::error});
    for (const int step : {1, 2, 3}) backward(net, comm, step);
    const auto text = require_throws<usage_error>([&] { optimizer.step(); });
    require_contains(text, "3 of 4");
    require_contains(text, "\"first.weight\"");
    require_same_parameters(*net, *make_mlp(0));
    backward(net, comm, 4);
    optimizer.step();
  }
  const auto expected = [&](const std::vector<int>& steps) {
    mlp alone = make_mlp(0);
    const auto gradient = mean_gradient(alone, comm.size(), steps);
    descend(*alone, gradient, 0.1 / static_cast<double>(steps.size()));
    return flatten(*alone);
  };
  for (const bool by_step : {true, false}) {
    mlp net = make_mlp(0);
    gradient_allreduce optimizer(
        SGD(net->parameters(), 0.1), net, comm,
        {.backward_passes_per_step = 4,
         .partial_window = by_step ? partial_window::flush : partial_window::local});
    for (const int step : {1, 2, 3}) backward(net, comm, step);
    by_step ? static_cast<void>(optimizer.step()) : optimizer.flush();
    require_close(flatten(*net), expected({1, 2, 3}), 1e-12);
    require_equal(optimizer.passes_since_communication(), 0);
    optimizer.zero_grad();
    optimizer.flush();  // nothing to end
    require_close(flatten(*net), expected({1, 2, 3}), 1e-12);
    // The next window is whole: from here as if it were the first.
    mlp alone = make_mlp(0);
    restore(saved(net), alone);
    for (const int step : {4, 5, 6, 7}) backward(net, comm, step);
    optimizer.step();
    const auto gradient = mean_gradient(alone, comm.size(), {4, 5, 6, 7});
    descend(*alone, gradient, 0.1 / 4);
    require_close(flatten(*net), flatten(*alone), 1e-12);
  }
  {  // a flush after local steps: what was not stepped on is, then parameters are averaged
    mlp net = make_mlp(0);
    gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm,
                                 {.backward_passes_per_step = 4});
    backward(net, comm, 1);
    optimizer.step();
    optimizer.zero_grad();
    backward(net, comm, 2);
    optimizer.flush();
    at::Tensor mean = torch::zeros_like(flatten(*net));
    for (int rank = 0; rank < comm.size(); ++rank) {
      mlp alone = make_mlp(0);
      SGD plain(alone->parameters(), 0.1);
      for (const int step : {1, 2}) {
        plain.zero_grad();
        loss_in_step(step)(alone, rank).backward();
        plain.step();
      }
      mean += flatten(*alone) / comm.size();
    }
    require_close(flatten(*net), mean, 1e-12);
  }
}

RANKS_TEST("a backward too many warns, and is reduced with the others", "[optim][gradients]") {
  captured_log log;
  mlp net = make_mlp(0), alone = make_mlp(0);
  gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.average_aggregated_gradients = false, .bucket_bytes = 300});
  for (const bool none : {true, false}) {
    optimizer.zero_grad(none);
    backward(net, comm, 1);
    backward(net, comm, 2);
    optimizer.step();
    const auto gradient = mean_gradient(alone, comm.size(), {1, 2});
    descend(*alone, gradient, 0.1);
    require_close(flatten(*net), flatten(*alone), 1e-12);
  }
  require_equal(log.count("backward_passes_per_step is 1"), 1);
}

RANKS_TEST("zero_grad refuses to lose a backward, and names synchronize", "[optim][gradients]") {
  captured_log log;
  mlp net = make_mlp(0), alone = make_mlp(0);
  gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm);
  backward(net, comm, 1);
  const auto text = require_throws<usage_error>([&] { optimizer.zero_grad(); });
  require_contains(text, "synchronize()");
  require_contains(text, "1 backward ");
  optimizer.step();
  optimizer.zero_grad();
  const auto after_first = flatten(*net);
  backward(net, comm, 2);
  optimizer.synchronize();  // the results may be dropped
  optimizer.zero_grad();
  require_equal(optimizer.passes_since_communication(), 0);
  backward(net, comm, 3);
  optimizer.reset_passes();  // or the gradients as they are
  optimizer.zero_grad();
  require_same(flatten(*net), after_first);
  backward(net, comm, 4);
  optimizer.step();
  require_equal_on_ranks(comm, *net);
  require_equal(log.count(""), 0);
}

RANKS_TEST("a backward lost to another zero_grad than the wrapper's is found out",
           "[optim][gradients]") {
  captured_log log;
  const auto check = [&](auto& model, const auto& loss) {
    const auto expected = [&](const at::Tensor& before, const std::vector<int>& seeds) {
      at::Tensor mean = torch::zeros_like(before);
      for (int rank = 0; rank < comm.size(); ++rank)
        for (const int seed : seeds) {
          std::vector<at::Tensor> parts;
          for (const auto& part : torch::autograd::grad({loss(seed, rank)}, model.parameters()))
            parts.push_back(part.reshape(-1));
          mean += torch::cat(parts) / comm.size();
        }
      return before - 0.1 * mean / static_cast<double>(seeds.size());
    };
    const auto F = [&](int seed) { loss(seed, comm.rank()).backward(); };
    const auto refused = [](auto&& act) {
      const auto text = require_throws<usage_error>(act);
      require_contains(text, "lost 1 backward ");
      require_contains(text, "synchronize()");
    };
    for (const int passes : {1, 2}) {
      model.zero_grad();
      gradient_allreduce optimizer(SGD(model.parameters(), 0.1), model, comm,
                                   {.backward_passes_per_step = passes, .bucket_bytes = 300});
      torch::optim::Optimizer& base = optimizer;
      const auto before = flatten(model);
      F(1);
      model.zero_grad();
      refused([&] { F(2); });  // at the next backward
      base.zero_grad();
      F(3);
      base.zero_grad();
      refused([&] { optimizer.step(); });  // or where gradients are wanted
      F(4);
      base.zero_grad();
      refused([&] { optimizer.synchronize(); });
      F(5);
      base.zero_grad();
      refused([&] { optimizer.flush(); });
      require_same(flatten(model), before);
      // What is not lost: whole windows, results that are dropped, what a local step has used, and
      // gradients that are other tensors because there is a graph of them.
      std::vector<int> seeds = {6, 7};
      seeds.resize(static_cast<std::size_t>(passes));
      const auto wanted = expected(before, seeds);
      for (const int seed : seeds) loss(seed, comm.rank()).backward({}, true, passes == 2);
      optimizer.step();
      require_close(flatten(model), wanted, 1e-12);
      base.zero_grad();
      for (const int seed : seeds) F(seed);
      optimizer.synchronize();
      base.zero_grad();
      optimizer.reset_passes();
      for (int pass = 0; pass < 2; ++pass) {
        F(8);
        optimizer.step();
        base.zero_grad();
      }
    }
  };
  mlp net = make_mlp(0);
  check(*net, [&](int seed, int rank) { return loss_in_step(seed)(net, rank); });
  holder one(torch::zeros({3}, at::kDouble));
  check(one, [&](int seed, int rank) {
    return (one.weight - values({3}, 10 * seed + rank)).square().sum();
  });
  require_equal(log.count(""), 0);
}

RANKS_TEST("a generator and a discriminator with a wrapper each", "[optim][gradients]") {
  for (const bool by_module : {false, true}) {
    captured_log log;
    mlp generator(2, 8), discriminator(2, 8);
    mlp plain_generator(2, 8), plain_discriminator(2, 8);
    int seed = 1;
    for (auto* net : {&generator, &discriminator, &plain_generator, &plain_discriminator}) {
      (*net)->to(at::kDouble);
      fill(**net, 1 + seed++ % 2);
    }
    const auto options = SGDOptions(0.05).momentum(0.5);
    gradient_allreduce generates(SGD(generator->parameters(), options), generator, comm);
    gradient_allreduce judges(SGD(discriminator->parameters(), options), discriminator, comm);
    SGD plain_generates(plain_generator->parameters(), options);
    SGD plain_judges(plain_discriminator->parameters(), options);
    const auto judge_loss = [](mlp& g, mlp& d, int step, int rank) {
      const int data = 50 * step + rank;
      return d->forward(values({4, 2}, data)).square().mean() -
             torch::tanh(d->forward(g->forward(values({4, 2}, data + 7)).detach())).mean();
    };
    const auto generator_loss = [](mlp& g, mlp& d, int step, int rank) {
      return d->forward(g->forward(values({4, 2}, 50 * step + rank + 9))).square().mean();
    };
    const auto mean = [&](const auto& loss, int step) {
      at::Tensor sum = torch::zeros({}, at::kDouble);
      for (int rank = 0; rank < comm.size(); ++rank)
        sum = sum + loss(plain_generator, plain_discriminator, step, rank);
      return sum / comm.size();
    };
    for (int step = 0; step < 20; ++step) {
      by_module ? discriminator->zero_grad() : judges.zero_grad();
      judge_loss(generator, discriminator, step, comm.rank()).backward();
      judges.step();
      by_module ? generator->zero_grad() : generates.zero_grad();
      generator_loss(generator, discriminator, step, comm.rank()).backward();
      generates.step();

      plain_judges.zero_grad();
      mean(judge_loss, step).backward();
      plain_judges.step();
      plain_generates.zero_grad();
      mean(generator_loss, step).backward();
      plain_generates.step();
    }
    require_close(flatten(*generator), flatten(*plain_generator), 1e-10);
    require_close(flatten(*discriminator), flatten(*plain_discriminator), 1e-10);
    require_equal(log.count(""), 0);
  }
}

namespace {

/// Two parameters, each of which is a bucket of its own.
struct halves : torch::nn::Module {
  halves() {
    a = register_parameter("a", values({2}, 1));
    b = register_parameter("b", values({2}, 2));
  }
  at::Tensor a, b;
};

}  // namespace

RANKS_TEST("a generator's loss may run through another part of the discriminator on each rank",
           "[optim][gradients]") {
  const auto part = [](const auto& judge, int rank) { return rank % 2 == 0 ? judge.a : judge.b; };
  const auto wanted = [](int step, int rank) { return values({2}, 50 * step + rank); };
  for (const bool by_module : {false, true}) {
    captured_log log;
    holder maker(torch::ones({2}, at::kDouble));
    halves judge;
    gradient_allreduce makes(SGD(maker.parameters(), 0.1), maker, comm);
    gradient_allreduce judges(SGD(judge.parameters(), 0.1), judge, comm, {.bucket_bytes = 16});
    at::Tensor w = torch::ones({2}, at::kDouble);
    struct {
      at::Tensor a = values({2}, 1), b = values({2}, 2);
    } by_hand;
    for (int step = 0; step < 5; ++step) {
      by_module ? judge.zero_grad() : judges.zero_grad();
      const auto t = wanted(step, comm.rank());
      ((judge.a - t).square() + (judge.b + t).square()).sum().backward();
      judges.step();
      makes.zero_grad();
      const auto before = comm.statistics().operations;
      (maker.weight * part(judge, comm.rank())).sum().backward();
      if (step > 0) require_equal(comm.statistics().operations, before);  // it may be foreign again
      makes.step();

      at::Tensor mean = torch::zeros({2}, at::kDouble);
      for (int rank = 0; rank < comm.size(); ++rank) mean += wanted(step, rank) / comm.size();
      by_hand.a = by_hand.a - 0.2 * (by_hand.a - mean);
      by_hand.b = by_hand.b - 0.2 * (by_hand.b + mean);
      for (int rank = 0; rank < comm.size(); ++rank)
        w = w - 0.1 * part(by_hand, rank) / comm.size();
      require_close(judge.a, by_hand.a, 1e-12);
      require_close(judge.b, by_hand.b, 1e-12);
      require_close(maker.weight, w, 1e-12);
    }
    require_equal(log.count(""), 0);
  }
}

RANKS_TEST("where no backward tells an order, ranks stop asking rank 0 for one",
           "[optim][gradients]") {
  constexpr std::int64_t buckets = 6;  // one per parameter
  const auto operations = [&](auto act) {
    const auto before = comm.statistics().operations;
    act();
    return static_cast<std::int64_t>(comm.statistics().operations - before);
  };
  for (const bool by_hand : {true, false}) {
    mlp net = make_mlp(0);
    gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm,
                                 {.bucket_bytes = 8, .local_max_norm = by_hand ? 0.0 : 1.0});
    for (int step = 0; step < 8; ++step) {
      const auto sent = operations([&] {
        if (by_hand)
          for (auto& each : net->parameters()) each.mutable_grad() = torch::ones_like(each);
        else
          backward(net, comm, step);
        optimizer.step();
      });
      if (step >= (by_hand ? 4 : 1)) require_equal(sent, buckets);
      optimizer.zero_grad();
    }
  }
}

RANKS_TEST("a discriminator drops what the steps of any other wrapper have used",
           "[optim][gradients]") {
  const auto play = [&](auto wrap, bool skips) {
    captured_log log;
    mlp generator(2, 8), discriminator(2, 8);
    for (auto* net : {&generator, &discriminator}) {
      (*net)->to(at::kDouble);
      fill(**net, 1);
    }
    auto generates = wrap(SGD(generator->parameters(), 0.05), generator);
    gradient_allreduce judges(SGD(discriminator->parameters(), 0.05), discriminator, comm);
    amp::grad_scaler scaler({.init_scale = 4.0});
    for (int step = 0; step < 5; ++step) {
      const auto made = generator->forward(values({4, 2}, 50 * step + comm.rank()));
      judges.zero_grad();
      discriminator->forward(made.detach()).square().mean().backward();
      judges.step();
      generates.zero_grad();
      auto loss = discriminator->forward(made).square().mean();
      if (skips && step == 2) loss = loss * std::numeric_limits<double>::infinity();
      scaler.scale(loss).backward();
      scaler.step(generates);
      scaler.update();
    }
    judges.zero_grad();
    require_equal_on_ranks(comm, *discriminator);
    require(flatten(*generator).isfinite().all().template item<bool>(), "a bad step was taken");
    require_equal(log.count(""), 0);
  };
  for (const bool skips : {false, true}) {
    play([&](SGD inner, mlp& net) { return gradient_allreduce(std::move(inner), net, comm); },
         skips);
    play(
        [&](SGD inner, mlp& net) { return optim::adapt_with_combine(std::move(inner), net, comm); },
        skips);
    play([&](SGD inner, mlp& net) { return optim::gradient_tracking(std::move(inner), net, comm); },
         skips);
    play([&](SGD inner,
             mlp& net) { return optim::quasi_global_momentum(std::move(inner), net, comm); },
         skips);
  }
}

RANKS_TEST("a generator and a discriminator that average parameters", "[optim][counting]") {
  captured_log log;
  mlp generator(2, 8), discriminator(2, 8);
  generator->to(at::kDouble);
  discriminator->to(at::kDouble);
  fill(*generator, comm.rank());
  fill(*discriminator, 10 + comm.rank());
  const auto all = optim::communication_type::allreduce;
  optim::adapt_then_combine generates(SGD(generator->parameters(), 0.05), generator, comm,
                                      {.communication = all});
  optim::adapt_then_combine judges(SGD(discriminator->parameters(), 0.05), discriminator, comm,
                                   {.communication = all});
  for (int step = 0; step < 20; ++step) {
    judges.zero_grad();
    discriminator->forward(generator->forward(values({4, 2}, step)).detach()).mean().backward();
    judges.step();
    generates.zero_grad();
    discriminator->forward(generator->forward(values({4, 2}, step))).square().mean().backward();
    generates.step();
    require_equal_on_ranks(comm, *generator);
    require_equal_on_ranks(comm, *discriminator);
  }
  require_equal(log.count(""), 0);
}

RANKS_TEST("parameters used on one rank or on none", "[optim][gradients][unused]") {
  const int n = comm.size();
  mlp net = make_mlp(0);
  gradient_allreduce optimizer(SGD(net->parameters(), 1.0), net, comm, {.bucket_bytes = 64});
  const auto gradient = values({16, 5}, 3);
  for (int step = 0; step < 2; ++step) {
    optimizer.zero_grad();
    auto loss = linear_loss(net->last->bias, torch::ones({2}, at::kDouble));
    if (comm.rank() == 0) loss = loss + linear_loss(net->first->weight, gradient);
    loss.backward();
    // Some ranks have sent buckets by now that others send in synchronize(): the program's own
    // operations in between must not mind.
    const auto ranks = allreduce(comm, torch::full({40}, comm.rank(), at::kDouble), reduce_op::sum);
    require_equal(ranks[39].template item<double>(), n * (n - 1) / 2.0);
    optimizer.synchronize();
    require_close(net->first->weight.grad(), gradient / n, 1e-15);
    require_close(net->last->bias.grad(), torch::ones({2}, at::kDouble), 1e-15);
    require(!net->second->weight.grad().defined(), "a gradient out of nothing");
    auto guard = optimizer.skip_synchronize();
    optimizer.step();
  }
  require_same(net->second->weight, make_mlp(0)->second->weight);
}

RANKS_TEST("parameters frozen and unfrozen on all ranks, groups added", "[optim][gradients]") {
  mlp net = make_mlp(0), alone = make_mlp(0);
  SGD inner(net->first->parameters(), 0.1);
  gradient_allreduce optimizer(std::move(inner), net, comm);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(net->last->parameters()));
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(net->second->parameters()));
  SGD plain(alone->parameters(), 0.1);
  for (int step = 0; step < 6; ++step) {
    if (step == 1)
      for (auto* each : {&net, &alone}) (*each)->second->weight.requires_grad_(false);
    if (step == 3)
      for (auto* each : {&net, &alone}) (*each)->second->weight.requires_grad_(true);
    if (step == 4) {
      for (auto* each : {&net, &alone}) (*each)->second->weight.requires_grad_(false);
      require_equal(optimizer.passes_since_communication(), 0);
    }
    optimizer.zero_grad();
    plain.zero_grad();
    const auto before = comm.statistics().bytes_sent;
    backward(net, comm, step);
    optimizer.step();
    const double sent = static_cast<double>(comm.statistics().bytes_sent - before);
    const int n = comm.size();
    const auto bytes = [&](int elements) { return 2.0 * (n - 1) / n * elements * 8; };
    // Elements, a flag for each of the parameters, and one for notices.
    if (step == 2 || step == 5)
      require_near(sent, bytes(5 * 16 + 16 + 16 + 2 * 16 + 2 + 5 + 1), 16);
    at::Tensor sum = torch::zeros({}, at::kDouble);
    for (int rank = 0; rank < comm.size(); ++rank)
      sum = sum + loss_in_step(step)(alone, rank) / comm.size();
    sum.backward();
    plain.step();
    require_close(flatten(*net), flatten(*alone), 1e-12);
  }
}

RANKS_TEST("gradients travel compressed and are summed in single precision",
           "[optim][gradients][compression]") {
  const int n = comm.size();
  for (const auto compression : {optim::compression::fp16, optim::compression::bf16}) {
    holder model(torch::zeros({4}, at::kFloat));
    gradient_allreduce optimizer(SGD(model.parameters(), 1.0), model, comm,
                                 {.compression = compression});
    const at::Tensor gradient = compression == optim::compression::fp16
                                    ? torch::tensor({30000.0, 6e-8, 1.0, 1 + comm.rank() * 1.0})
                                    : torch::tensor({1e30, 6e-8, 1.0, 1 + comm.rank() * 1.0});
    const auto before = comm.statistics().bytes_sent;
    linear_loss(model.weight, gradient).backward();
    optimizer.step();
    require_near(static_cast<double>(comm.statistics().bytes_sent - before),
                 2.0 * (n - 1) / n * 6 * 2, 4);
    const at::Tensor mean = model.weight.grad();
    require(mean.scalar_type() == at::kFloat, "the gradient's own type");
    for (const int i : {0, 1, 2}) {
      const double got = mean[i].item<double>(), wanted = gradient[i].item<double>();
      require_near(got / wanted, 1, 0.01);
    }
    require_near(mean[3].item<double>(), (n + 1) / 2.0, 0.02);
    require_same(model.weight, -mean);
  }
}

RANKS_TEST("predivision and division by the passes are not done in the type of the wire",
           "[optim][gradients][compression]") {
  const int n = comm.size();
  struct row {
    reduce_op op;
    double predivide;
    int passes;
    double gradient;  // of the first pass; the others' is zero
    double wanted;
  };
  // Half precision ends at 65504, and at 6e-8.
  for (const auto& [op, predivide, passes, gradient, wanted] :
       {row{reduce_op::sum, 4, 1, 30000, 30000.0 * n}, row{reduce_op::average, 4, 1, 1e5, 1e5},
        row{reduce_op::average, 1, 4, 6e-8, 1.5e-8}}) {
    holder model(torch::zeros({3}));
    gradient_allreduce optimizer(SGD(model.parameters(), 1.0), model, comm,
                                 {.backward_passes_per_step = passes,
                                  .compression = optim::compression::fp16,
                                  .op = op,
                                  .predivide = predivide});
    for (int pass = 0; pass < passes; ++pass)
      linear_loss(model.weight, torch::full({3}, pass == 0 ? gradient : 0.0)).backward();
    optimizer.step();
    for (int i = 0; i < 3; ++i)
      require_near(-model.weight[i].template item<double>() / wanted, 1, 0.01);
  }
}

RANKS_TEST("sums, predivision, and refused options", "[optim][gradients]") {
  const int n = comm.size();
  holder model(torch::zeros({3}, at::kDouble));
  {
    gradient_allreduce optimizer(SGD(model.parameters(), 1.0), model, comm,
                                 {.op = reduce_op::sum, .predivide = 4});
    linear_loss(model.weight, torch::full({3}, 1.0 + comm.rank(), at::kDouble)).backward();
    optimizer.synchronize();
    require_close(model.weight.grad(), torch::full({3}, n * (n + 1) / 2.0, at::kDouble), 1e-13);
  }
  model.zero_grad();
  {
    gradient_allreduce optimizer(SGD(model.parameters(), 1.0), model, comm, {.predivide = 3});
    linear_loss(model.weight, torch::full({3}, 1.0 + comm.rank(), at::kDouble)).backward();
    optimizer.synchronize();
    require_close(model.weight.grad(), torch::full({3}, (n + 1) / 2.0, at::kDouble), 1e-13);
  }
  const auto refused = [&](optim::gradient_allreduce_options options) {
    return require_throws<usage_error>(
        [&] { gradient_allreduce(SGD(model.parameters(), 1.0), model, comm, options); });
  };
  require_contains(refused({.backward_passes_per_step = 0}), "backward_passes_per_step");
  require_contains(refused({.op = reduce_op::max}), "max");
  require_contains(refused({.predivide = 0}), "predivide");
  require_contains(refused({.bucket_bytes = -1}), "bucket_bytes");
}

RANKS_TEST("sparse gradients are refused by name, or sent as dense ones", "[optim][gradients]") {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(6, 2).sparse(true));
  table->to(at::kDouble);
  fill(*table, 1);
  const auto loss = [&] { return table->forward(torch::tensor({comm.rank() % 6, 0})).sum(); };
  {
    gradient_allreduce optimizer(SGD(table->parameters(), 1.0), table, comm);
    const auto text = require_throws<usage_error>([&] { loss().backward(); });
    require_contains(text, "\"weight\" is sparse");
    require_contains(text, "sparse_as_dense");
  }
  table->zero_grad();
  const auto before = table->weight.clone();
  gradient_allreduce optimizer(SGD(table->parameters(), 1.0), table, comm,
                               {.sparse_as_dense = true});
  loss().backward();
  optimizer.step();
  auto expected = before.clone();
  for (int rank = 0; rank < comm.size(); ++rank)
    for (const int row : {rank % 6, 0})
      expected[row] -= torch::ones({2}, at::kDouble) / comm.size();
  require_close(table->weight, expected, 1e-12);
}

RANKS_TEST("a converted model is an error of gradient_allreduce too", "[optim][gradients]") {
  mlp net = make_mlp(0);
  gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm);
  net->to(at::kFloat);
  const auto text = require_throws<usage_error>([&] { optimizer.zero_grad(); });
  require_contains(text, "was Double [2] on cpu when it was wrapped and is Float");
}

RANKS_TEST("gradient_allreduce moves, goes in flight, and takes closures", "[optim][gradients]") {
  mlp net = make_mlp(0), alone = make_mlp(0);
  using wrapper = gradient_allreduce<SGD, typename Comm::backend_type>;
  auto first = std::make_unique<wrapper>(SGD(net->parameters(), 0.1), net, comm);
  backward(net, comm, 1);
  wrapper moved(std::move(*first));
  first.reset();
  moved.step();
  moved.zero_grad();
  const auto loss = moved.step([&] {
    auto value = loss_in_step(2)(net, comm.rank());
    value.backward();
    return value;
  });
  require(loss.defined());
  for (const int step : {1, 2}) {
    const auto gradient = mean_gradient(alone, comm.size(), {step});
    descend(*alone, gradient, 0.1);
  }
  require_close(flatten(*net), flatten(*alone), 1e-12);
  moved.zero_grad();
  {
    wrapper last(std::move(moved));
    backward(net, comm, 3);
  }
  require_close(flatten(*net), flatten(*alone), 1e-12);
}

RANKS_TEST("a model reloaded under gradient_allreduce goes on learning", "[optim][gradients]") {
  mlp net = make_mlp(0), alone = make_mlp(0);
  gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm);
  for (int step = 0; step < 4; ++step) {
    if (step == 1 || step == 2) {
      if (step == 2) optimizer.zero_grad();
      restore(saved(make_mlp(20 + step)), net);
      fill(*alone, 20 + step);
    }
    if (step != 2) optimizer.zero_grad();
    backward(net, comm, step);
    optimizer.step();
    const auto gradient = mean_gradient(alone, comm.size(), {step});
    descend(*alone, gradient, 0.1);
    require_close(flatten(*net), flatten(*alone), 1e-12);
  }
}

RANKS_TEST("a guard against synchronizing may outlive its optimizer", "[optim][gradients]") {
  mlp net = make_mlp(0);
  using wrapper = gradient_allreduce<SGD, typename Comm::backend_type>;
  std::optional<typename wrapper::skip_guard> guard;
  auto optimizer = std::make_unique<wrapper>(SGD(net->parameters(), 0.1), net, comm);
  guard.emplace(optimizer->skip_synchronize());
  optimizer.reset();
  guard.reset();  // what the sanitizer looks at
}

RANKS_TEST("parameters that cannot travel are refused by name, those that are frozen may stay",
           "[optim][gradients]") {
  torch::nn::Module model;
  const at::Tensor phase = model.register_parameter("phase", torch::ones({2}, at::kComplexFloat));
  model.register_parameter("w", torch::zeros({2}));
  const auto wrap = [&] {
    gradient_allreduce optimizer(SGD(model.parameters(), SGDOptions(0.5)), model, comm);
    model.parameters()[1].sum().backward();
    optimizer.step();
  };
  require_contains(require_throws<usage_error>(wrap), "gradient_allreduce: \"phase\": ");
  phase.set_requires_grad(false);
  wrap();
  require_same(model.parameters()[1].detach(), torch::full({2}, -0.5));
}
