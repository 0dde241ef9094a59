// SPDX-License-Identifier: Apache-2.0
// gradient_allreduce where ranks differ: in how much data they have, in what learns, in order.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <bluefog/optim/adapt_then_combine.hpp>
#include <bluefog/optim/gradient_allreduce.hpp>
#include <bluefog/optim/state.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/tensor/broadcast.hpp>
#include <bluefog/tensor/parameters.hpp>

#include "simulation.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;
using optim::gradient_allreduce;
using optim::partial_window;
using optim::uneven;
using torch::optim::SGD;
using torch::optim::SGDOptions;

template <class Comm>
void require_equal_on_ranks(Comm& comm, const at::Tensor& x,
                            std::source_location where = std::source_location::current()) {
  require_same(x, broadcast(comm, x.detach().clone(), 0), where);
}

/// One step of `optimizer` with the mean over ranks of the mean over `passes` of their gradients, a
/// rank without passes giving zero.
void step_with_mean(mlp& net, torch::optim::Optimizer& optimizer,
                    const std::vector<std::vector<int>>& passes) {
  optimizer.zero_grad();
  std::size_t active = 0, total = 0;
  for (const auto& of_rank : passes) {
    active += of_rank.empty() ? 0 : 1;
    total += of_rank.size();
  }
  const double weight = static_cast<double>(active) / static_cast<double>(total * passes.size());
  for (std::size_t rank = 0; rank < passes.size(); ++rank)
    for (const int seed : passes[rank])
      (loss_in_step(seed)(net, static_cast<int>(rank)) * weight).backward();
  optimizer.step();
}

/// How many batches a rank has: rank 0 the most, each next one two fewer.
int batches_of(int rank, int ranks) {
  return 1 + 2 * (ranks - 1 - rank);
}

/// Two layers that one can tell apart.
struct pair_impl : torch::nn::Module {
  pair_impl() {
    first = register_parameter("first", torch::zeros({3}, at::kDouble));
    second = register_parameter("second", torch::zeros({2}, at::kDouble));
  }
  at::Tensor forward() { return first.sum() + 2 * second.sum(); }
  at::Tensor first, second;
};
TORCH_MODULE_IMPL(two, pair_impl);

}  // namespace

RANKS_TEST("a rank without batches answers with zeros until all have joined",
           "[optim][gradients][join]") {
  const int n = comm.size();
  mlp net = make_mlp(0), alone = make_mlp(0);
  const auto options = SGDOptions(0.1).momentum(0.9);
  gradient_allreduce optimizer(SGD(net->parameters(), options), net, comm, {.bucket_bytes = 700});
  SGD plain(alone->parameters(), options);
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (int batch = 0; batch < batches_of(comm.rank(), n); ++batch) {
      optimizer.zero_grad();
      loss_in_step(50 * epoch + batch)(net, comm.rank()).backward();
      optimizer.step();
    }
    require_equal(optimizer.join(), 0);
    for (int batch = 0; batch < batches_of(0, n); ++batch) {
      std::vector<std::vector<int>> passes(static_cast<std::size_t>(n));
      for (int rank = 0; rank < n; ++rank)
        if (batch < batches_of(rank, n))
          passes[static_cast<std::size_t>(rank)].push_back(50 * epoch + batch);
      step_with_mean(alone, plain, passes);
    }
    require_close(flatten(*net), flatten(*alone), 1e-12);
    require_equal_on_ranks(comm, flatten(*net));
  }
}

RANKS_TEST("whoever joins last is known to all, the highest of several",
           "[optim][gradients][join]") {
  const int n = comm.size();
  two net;
  gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm);
  const auto train = [&](int batches) {
    for (int batch = 0; batch < batches; ++batch) {
      optimizer.zero_grad();
      net->forward().backward();
      optimizer.step();
    }
    return optimizer.join();
  };
  require_equal(train(2), n - 1);
  require_equal(train(comm.rank() == n / 2 ? 3 : 1), n / 2);
  require_equal(train(0), n - 1);
}

RANKS_TEST("all ranks stop after the same step if that is asked for", "[optim][gradients][join]") {
  const int n = comm.size();
  mlp net = make_mlp(0), alone = make_mlp(0);
  gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm, {.uneven = uneven::stop});
  SGD plain(alone->parameters(), 0.1);
  const int fewest = 2;
  for (int epoch = 0; epoch < 2; ++epoch) {
    int steps = 0;
    for (int batch = 0; batch < (comm.rank() == 0 ? fewest : fewest + 3); ++batch) {
      optimizer.zero_grad();
      loss_in_step(50 * epoch + batch)(net, comm.rank()).backward();
      optimizer.step();
      if (optimizer.ended()) break;
      ++steps;
    }
    require_equal(steps, fewest);
    if (optimizer.ended() && epoch == 0) {
      loss_in_step(0)(net, comm.rank()).backward();
      require_contains(require_throws<usage_error>([&] { optimizer.step(); }), "join()");
    }  // which join() gives up
    require_equal(optimizer.join(), n - 1);
    require(!optimizer.ended());
    for (int batch = 0; batch < fewest; ++batch) {
      const std::vector<std::vector<int>> passes(static_cast<std::size_t>(n), {50 * epoch + batch});
      step_with_mean(alone, plain, passes);
    }
    require_close(flatten(*net), flatten(*alone), 1e-12);
  }
}

RANKS_TEST("a window cut by the end of a rank's data is reduced with the others' windows",
           "[optim][gradients][join]") {
  const int n = comm.size();
  mlp net = make_mlp(0), alone = make_mlp(0);
  gradient_allreduce optimizer(
      SGD(net->parameters(), 0.1), net, comm,
      {.backward_passes_per_step = 2, .partial_window = partial_window::flush});
  SGD plain(alone->parameters(), 0.1);
  const auto batches = [&](int rank) { return rank == 0 ? 3 : 4; };
  for (int batch = 0; batch < batches(comm.rank()); ++batch) {
    loss_in_step(batch)(net, comm.rank()).backward();
    if (batch % 2 == 0) continue;
    optimizer.step();
    optimizer.zero_grad();
  }
  require_equal(optimizer.join(), n - 1);
  std::vector<std::vector<int>> passes(static_cast<std::size_t>(n), {0, 1});
  step_with_mean(alone, plain, passes);
  for (auto& each : passes) each = {2, 3};
  passes[0] = {2};
  step_with_mean(alone, plain, passes);
  require_close(flatten(*net), flatten(*alone), 1e-12);
}

RANKS_TEST("joining is refused where steps could be local", "[optim][gradients][join]") {
  two net;
  gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.backward_passes_per_step = 2});
  require_contains(require_throws<usage_error>([&] { optimizer.join(); }), "partial_window");
}

RANKS_TEST("joining is refused while momenta may differ because of local steps before",
           "[optim][gradients][join][state]") {
  mlp net = make_mlp(0);
  gradient_allreduce optimizer(sgd_of(net), net, comm, {.backward_passes_per_step = 2});
  for (const int pass : {0, 1}) {
    loss_in_step(pass)(net, comm.rank()).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  mlp again = make_mlp(0);
  gradient_allreduce resumed(
      sgd_of(again), again, comm,
      {.backward_passes_per_step = 2, .partial_window = partial_window::flush});
  restore(saved(net), again);
  restore(saved(optimizer), resumed);
  require_contains(require_throws<usage_error>([&] { resumed.join(); }), "broadcast_from()");
  resumed.broadcast_from(0);
  require_equal(resumed.join(), comm.size() - 1);
}

RANKS_TEST("broadcast_from makes replicas equal, after which gradients suffice again",
           "[optim][gradients][state]") {
  mlp net = make_mlp(0);
  gradient_allreduce optimizer(sgd_of(net), net, comm,
                               {.backward_passes_per_step = 2, .bucket_bytes = 700});
  const auto window = [&](int seed, bool local) {
    for (const int pass : {0, 1}) {
      loss_in_step(seed + pass)(net, comm.rank()).backward();
      if (local || pass == 1) {
        optimizer.step();
        optimizer.zero_grad();
      }
    }
  };
  const auto operations = [&](auto&& act) {
    const auto before = comm.statistics().operations;
    act();
    return comm.statistics().operations - before;
  };
  window(0, false);
  const auto plain = operations([&] { window(2, false); });
  window(4, true);  // momenta differ from now on
  require(operations([&] { window(6, false); }) > plain, "parameters are averaged as well");
  optimizer.broadcast_from(comm.size() - 1);
  require_equal(operations([&] { window(8, false); }), plain);
  require_equal_on_ranks(comm, flatten(*net));
}

RANKS_TEST("what is frozen, unfrozen or added on one rank only is an error on all",
           "[optim][gradients][frozen]") {
  if (comm.size() == 1) return;
  for (const int odd : {0, comm.size() - 1}) {
    two net;
    SGD inner({net->first}, 0.1);
    gradient_allreduce optimizer(std::move(inner), net, comm);
    const auto step = [&] {
      optimizer.zero_grad();
      net->forward().backward();
      optimizer.step();
    };
    const auto refused = [&] {
      optimizer.zero_grad();
      if (net->first.requires_grad() || net->second.requires_grad()) net->forward().backward();
      const auto text = require_throws_soon<mismatch_error>([&] { optimizer.step(); });
      require_contains(text, "gradient_allreduce: ranks differ");
      require_contains(text, "rank 0");
      require_contains(text, "rank " + std::to_string(odd == 0 ? 1 : odd));
      return text;
    };
    step();
    const auto before = net->first.clone();
    if (comm.rank() == odd) net->first.requires_grad_(false);
    require_contains(refused(), "\"first\"");
    require_same(net->first, before);
    net->first.requires_grad_(false);
    optimizer.zero_grad();
    optimizer.step();  // nothing learns, on all ranks
    if (comm.rank() == odd) net->first.requires_grad_(true);
    require_contains(refused(), "\"first\"");
    net->first.requires_grad_(true);
    step();
    require_close(net->first, before - 0.1, 1e-14);
    if (comm.rank() == odd)
      optimizer.add_param_group(torch::optim::OptimizerParamGroup({net->second}));
    require_contains(refused(), "\"second\"");
    if (comm.rank() != odd)
      optimizer.add_param_group(torch::optim::OptimizerParamGroup({net->second}));
    step();
    require_close(net->second, torch::full({2}, -0.2, at::kDouble), 1e-14);
    require_equal_on_ranks(comm, flatten(*net));
  }
}

RANKS_TEST(
    "with several buckets too, ranks that differ are told by name, before or after some left",
    "[optim][gradients][frozen]") {
  const int n = comm.size();
  if (n == 1) return;
  const auto soon = [](const auto& act) {
    auto text = require_throws_soon<mismatch_error>(act);
    require_contains(text, "gradient_allreduce: ranks differ");
    require_contains(text, "rank 0");
    return text;
  };
  const std::int64_t small = 300;  // six buckets
  for (const int odd : {0, n - 1}) {
    const auto other = "rank " + std::to_string(odd == 0 ? 1 : odd);
    mlp wide(5, comm.rank() == odd ? 17 : 16);
    const auto shapes = soon([&] {
      gradient_allreduce(SGD(wide->parameters(), 0.1), wide, comm, {.bucket_bytes = small});
    });
    require_contains(shapes, "\"first.weight\"");
    require_contains(shapes, "[17, 5]");
    require_contains(shapes, other);

    mlp net = make_mlp(0), alone = make_mlp(0);
    gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm, {.bucket_bytes = small});
    SGD plain(alone->parameters(), 0.1);
    const auto backward = [&](int step) {
      optimizer.zero_grad();
      loss_in_step(step)(net, comm.rank()).backward();
    };
    for (const bool midway : {false, true})  // frozen while the first buckets are on their way
      for (const bool two : {false, true}) {
        if (midway) backward(0);
        if (comm.rank() == odd)
          net->second->bias.requires_grad_(false);
        else if (two)
          net->first->bias.requires_grad_(false);  // as long
        if (!midway) backward(0);
        const auto before = flatten(*net);
        const auto text = soon([&] { optimizer.step(); });
        require_contains(text, two ? "\"first.bias\"" : "\"second.bias\"");
        require_contains(text, other);
        require_same(flatten(*net), before);
        for (auto& each : net->parameters()) each.requires_grad_(true);
        backward(1);
        optimizer.step();
        step_with_mean(alone, plain,
                       std::vector<std::vector<int>>(static_cast<std::size_t>(n), {1}));
        require_close(flatten(*net), flatten(*alone), 1e-12);
      }
  }
}

RANKS_TEST("a rank whose loss reaches no parameter takes part in the step",
           "[optim][gradients][unused]") {
  two net;
  gradient_allreduce optimizer(SGD(net->parameters(), 1.0), net, comm);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    if (comm.rank() == step % comm.size()) net->forward().backward();
    optimizer.step();
  }
  require_close(net->first, torch::full({3}, -3.0 / comm.size(), at::kDouble), 1e-14);
}

RANKS_TEST("passes that reach no parameter are not counted, and the step is made with the others",
           "[optim][gradients][unused][counting]") {
  two net;
  gradient_allreduce optimizer(
      SGD(net->parameters(), 1.0), net, comm,
      {.backward_passes_per_step = 2, .partial_window = partial_window::flush});
  for (int window = 0; window < 3; ++window) {
    for (const int pass : {0, 1})  // one or both of them reach something
      if ((comm.rank() + window + pass) % 3 != 0) net->forward().backward();
    optimizer.step();
    optimizer.zero_grad();
    require_close(net->first, torch::full({3}, -1.0 - window, at::kDouble), 1e-14);
  }
  if (comm.rank() == 0) net->forward().backward();  // on the others nothing does
  optimizer.step();
  require_equal_on_ranks(comm, net->first);
}

RANKS_TEST("a window with local steps finds out too that ranks differ",
           "[optim][gradients][frozen]") {
  if (comm.size() == 1) return;
  two net;
  gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.backward_passes_per_step = 2});
  const auto pass = [&] {
    optimizer.zero_grad();
    net->forward().backward();
    optimizer.step();
  };
  pass();
  if (comm.rank() == 1) net->second.requires_grad_(false);
  require_contains(require_throws_soon<mismatch_error>(pass), "\"second\"");
}

RANKS_TEST("buckets follow the order of rank 0's first backward, the step is the same",
           "[optim][gradients][buckets]") {
  const int n = comm.size();
  mlp net = make_mlp(0), alone = make_mlp(0);
  // The layers are handed over in another order than they are used in.
  std::vector<at::Tensor> parameters = net->last->parameters();
  for (auto* layer : {&net->first, &net->second})
    for (const auto& each : (*layer)->parameters()) parameters.push_back(each);
  gradient_allreduce optimizer(SGD(parameters, 0.1), net, comm, {.bucket_bytes = 400});
  SGD plain(alone->parameters(), 0.1);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const auto before = comm.statistics().operations;
    decltype(comm.statistics().operations) during = 0;
    auto x = values({4, 5}, 31 * step + comm.rank()).requires_grad_();
    auto begun = x * 1.0;
    begun.register_hook([&](const at::Tensor&) { during = comm.statistics().operations - before; });
    loss_of(net->forward(begun), 31 * step + comm.rank()).backward();
    // At first the bucket that is sent first waits for the layer that is ready last but one. The
    // last layer's own is complete long before the input's gradient is.
    if (step > 0) require(during >= 1, "a bucket has left during the backward");
    optimizer.step();
    step_with_mean(alone, plain,
                   std::vector<std::vector<int>>(static_cast<std::size_t>(n), {step}));
    require_close(flatten(*net), flatten(*alone), 1e-12);
  }
}

RANKS_TEST("a rank that overruns, gives up or loses its window keeps in step with the others",
           "[optim][gradients][counting]") {
  if (comm.size() == 1 || comm.size() > 4) return;  // long enough
  const auto ranks = static_cast<std::size_t>(comm.size());
  enum class odd { overruns, overruns_twice, raises, gives_up, loses };
  for (const odd what :
       {odd::overruns, odd::overruns_twice, odd::raises, odd::gives_up, odd::loses})
    for (const int passes : {1, 2}) {
      const std::size_t who = passes == 1 ? ranks - 1 : 0;
      const bool here = comm.rank() == static_cast<int>(who);
      captured_log log;
      mlp net = make_mlp(0), alone = make_mlp(0);
      gradient_allreduce optimizer(
          SGD(net->parameters(), 0.1), net, comm,
          {.backward_passes_per_step = passes,
           .bucket_bytes = 300,  // six of them
           .on_miscount = what == odd::raises ? optim::miscount::raise : optim::miscount::warn});
      SGD plain(alone->parameters(), 0.1);
      const auto backward = [&](int seed) { loss_in_step(seed)(net, comm.rank()).backward(); };
      for (int step = 0; step < 3; ++step) {
        std::vector<int> usual;
        for (int pass = 0; pass < passes; ++pass) usual.push_back(10 * step + pass);
        std::vector<std::vector<int>> used(ranks, usual);
        optimizer.zero_grad(step % 2 == 0);
        for (const int seed : usual) backward(seed);
        if (step != 1) {
          auto& own = used[who];
          if (what == odd::overruns) own.push_back(10 * step + 5);
          if (what == odd::overruns_twice) own.insert(own.end(), {10 * step + 5, 10 * step + 6});
          if (what == odd::gives_up || what == odd::loses)
            for (int& seed : own) seed += 7;
          if (here && what == odd::raises)
            require_throws<usage_error>([&] { backward(10 * step + 5); });
          if (here && what == odd::gives_up) optimizer.reset_passes();
          if (here && what == odd::loses) {
            net->zero_grad();
            require_contains(require_throws<usage_error>([&] { backward(10 * step + 5); }),
                             "gradients were cleared");
          }
          if (here && (what == odd::gives_up || what == odd::loses)) optimizer.zero_grad();
          if (here)
            for (const int seed : own)
              if (std::ranges::find(usual, seed) == usual.end()) backward(seed);
        }
        optimizer.step();
        step_with_mean(alone, plain, used);
        require_close(flatten(*net), flatten(*alone), 1e-12);
      }
      const bool warns = here && (what == odd::overruns || what == odd::overruns_twice);
      require_equal(log.count("backward_passes_per_step"), warns ? 1 : 0);
    }
}

RANKS_TEST("groups of ranks train apart", "[optim][gradients][groups]") {
  auto half = comm.split(comm.rank() % 2);
  two net;
  gradient_allreduce optimizer(SGD(net->parameters(), 1.0), net, half);
  (net->first.sum() * comm.rank()).backward();
  optimizer.step();
  double sum = 0;
  for (int rank = comm.rank() % 2; rank < comm.size(); rank += 2) sum += rank;
  require_close(net->first, torch::full({3}, -sum / half.size(), at::kDouble), 1e-14);
}

RANKS_TEST("N passes are one pass over an N-fold batch", "[optim][gradients][aggregation]") {
  const int n = comm.size();
  const auto batch = [&](mlp& net, int step, std::int64_t begin, std::int64_t count) {
    const auto x = values({12 * n, 5}, step), y = values({12 * n, 2}, step + 50);
    return torch::mse_loss(net->forward(x.narrow(0, begin, count)), y.narrow(0, begin, count));
  };
  // By the wrapper, or by the user, who divides the loss.
  for (const bool average : {true, false}) {
    mlp net = make_mlp(0), alone = make_mlp(0);
    const auto options = SGDOptions(0.1).momentum(0.9);
    gradient_allreduce optimizer(
        SGD(net->parameters(), options), net, comm,
        {.backward_passes_per_step = 3, .average_aggregated_gradients = average});
    SGD plain(alone->parameters(), options);
    torch::optim::StepLR schedule(optimizer, 2, 0.5), plain_schedule(plain, 2, 0.5);
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      for (int pass = 0; pass < 3; ++pass) {
        const auto loss = batch(net, step, 12 * comm.rank() + 4 * pass, 4);
        (average ? loss : loss / 3).backward();
      }
      optimizer.step();
      schedule.step();  // per update, not per batch
      plain.zero_grad();
      batch(alone, step, 0, 12 * n).backward();
      plain.step();
      plain_schedule.step();
      require_close(flatten(*net), flatten(*alone), 1e-12);
    }
  }
}

RANKS_TEST("a batch may call backward several times", "[optim][gradients][aggregation]") {
  const int n = comm.size();
  captured_log log;
  // Two batches of two backwards each; the sum over ranks and batches, divided by what is asked.
  for (const bool average : {true, false}) {
    mlp net = make_mlp(0), alone = make_mlp(0);
    gradient_allreduce optimizer(
        SGD(net->parameters(), 0.1), net, comm,
        {.backward_passes_per_step = 2 * 2, .average_aggregated_gradients = average});
    SGD plain(alone->parameters(), 0.1);
    const auto parts = [](mlp& model, int seed) {
      const auto y = model->forward(values({4, 5}, seed));
      return std::vector<at::Tensor>{y.select(1, 0).square().mean(), y.select(1, 1).cos().mean()};
    };
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      plain.zero_grad();
      for (const int data : {0, 1}) {
        const auto losses = parts(net, 100 * step + 10 * data + comm.rank());
        losses[0].backward({}, /*retain_graph=*/true);
        losses[1].backward();
        for (int rank = 0; rank < n; ++rank)
          for (const auto& loss : parts(alone, 100 * step + 10 * data + rank))
            (loss / n / (average ? 4 : 1)).backward({}, /*retain_graph=*/true);
      }
      optimizer.step();
      plain.step();
      require_close(flatten(*net), flatten(*alone), 1e-12);
    }
  }
}

RANKS_TEST("adapt_then_combine over all ranks adapts with N passes as with an N-fold batch",
           "[optim][aggregation]") {
  const int n = comm.size();
  mlp net = make_mlp(0), alone = make_mlp(0);
  optim::adapt_then_combine optimizer(
      SGD(net->parameters(), 0.1), net, comm,
      {.backward_passes_per_step = 3, .communication = optim::communication_type::allreduce});
  SGD plain(alone->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    for (int pass = 0; pass < 3; ++pass)
      (loss_in_step(10 * step + pass)(net, comm.rank()) / 3).backward();
    optimizer.step();
    // Without momentum, the mean of the ranks' steps is the step with the mean gradient.
    step_with_mean(alone, plain,
                   std::vector<std::vector<int>>(static_cast<std::size_t>(n),
                                                 {10 * step, 10 * step + 1, 10 * step + 2}));
    require_close(flatten(*net), flatten(*alone), 1e-12);
  }
}
