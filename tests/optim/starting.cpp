// SPDX-License-Identifier: Apache-2.0
// When the averaging optimizers begin to send, and what may happen meanwhile.
#include <chrono>
#include <cstdint>
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
#include <bluefog/optim/state.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/tensor/broadcast.hpp>
#include <bluefog/topology.hpp>

#include "simulation.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;
using optim::adapt_then_combine;
using optim::adapt_with_combine;
using optim::adapt_with_combine_options;
using optim::buffer_policy;
using optim::communication_type;
using optim::gradient_allreduce;
using optim::start;
using torch::optim::SGD;
using torch::optim::SGDOptions;

/// A window of a user's program: F a forward with its backward, s a step that may not communicate,
/// S one that has to; gradients are cleared after each step.
template <class Optimizer, class Comm>
void play(Optimizer& optimizer, mlp& net, Comm& comm, std::string_view sequence, int& seed,
          bool by_forward) {
  for (const char each : sequence) {
    if (each == 'F') {
      const auto input = values({4, 5}, 40 * ++seed + comm.rank());
      loss_of(by_forward ? optimizer.forward(net, input) : net->forward(input), seed).backward();
      continue;
    }
    const auto before = comm.statistics().operations;
    optimizer.step();
    optimizer.zero_grad();
    if (each == 's') require_equal(comm.statistics().operations, before);
    require_equal(optimizer.passes_since_communication() == 0, each == 'S');
  }
}

/// The parameters after each of `windows`, with J = `passes`.
template <class Comm>
std::vector<at::Tensor> trajectory(Comm& comm, start when, int passes,
                                   const std::vector<std::string_view>& windows, bool by_forward) {
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(
      sgd_of(net), net, comm,
      {.num_steps_per_communication = passes, .start = when, .bucket_bytes = 700});
  std::vector<at::Tensor> points;
  int seed = 0;
  for (const auto& each : windows) {
    play(optimizer, net, comm, each, seed, by_forward);
    points.push_back(flatten(*net));
  }
  return points;
}

}  // namespace

RANKS_TEST("whenever parameters begin to travel, they arrive the same, bit for bit",
           "[optim][start]") {
  struct program {
    int passes;
    std::vector<std::string_view> windows;
  };
  const program programs[] = {{1, {"FS", "FS", "FS", "FS", "FS"}},
                              {3, {"FsFsFS", "FsFsFS", "FFFS", "FsFFS", "FFsFS", "FFFS"}}};
  for (const auto& [passes, windows] : programs)
    for (const bool by_forward : {true, false}) {
      const auto wanted = trajectory(comm, start::at_step, passes, windows, by_forward);
      for (const start when : all_starts) {
        const auto got = trajectory(comm, when, passes, windows, by_forward);
        for (std::size_t i = 0; i < got.size(); ++i) require_same(got[i], wanted[i]);
      }
    }
}

RANKS_TEST("the trajectory is the definition's, whenever parameters begin to travel",
           "[optim][start]") {
  for (const start when : all_starts) {
    simulation all(comm.size(), [](mlp& net) {
      return std::make_unique<torch::optim::Adam>(net->parameters(), 0.01);
    });
    mlp net = make_mlp(comm.rank());
    adapt_with_combine optimizer(torch::optim::Adam(net->parameters(), 0.01), net, comm,
                                 {.start = when, .bucket_bytes = 300});
    for (int step = 0; step < 5; ++step) {
      all.step(sequence::combine_first, loss_in_step(step));
      train_by_forward(optimizer, net, comm.rank(), step);
      require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-10);
    }
  }
}

RANKS_TEST("a pass too many on one rank adds to its gradient alone, wherever communication begins",
           "[optim][start][counting]") {
  const int n = comm.size(), odd = n - 1;
  if (n > 4) return;  // long enough
  const auto follow = [&](sequence what, int passes, bool by_forward, bool refuses,
                          const auto& wrap) {
    captured_log log;
    simulation all(n, [](mlp& net) { return std::make_unique<SGD>(net->parameters(), 0.1); });
    mlp net = make_mlp(comm.rank());
    auto optimizer = wrap(SGD(net->parameters(), 0.1), net);
    for (int step = 0; step < 3; ++step) {
      const auto more = [&](int rank) { return rank == odd && step != 1 ? 1 : 0; };
      all.step(what, [&](mlp& each, int rank) {
        at::Tensor sum = torch::zeros({}, at::kDouble);
        for (int pass = 0; pass < passes + (refuses ? 0 : more(rank)); ++pass)
          sum = sum + loss_in_step(10 * step + pass)(each, rank);
        return sum;
      });
      optimizer.zero_grad();
      for (int pass = 0; pass < passes + more(comm.rank()); ++pass) {
        const int seed = 31 * (10 * step + pass) + comm.rank();
        const auto input = values({4, 5}, seed);
        const auto learn = [&] {
          loss_of(by_forward ? optimizer.forward(net, input) : net->forward(input), seed)
              .backward();
        };
        if (refuses && pass == passes)
          require_contains(require_throws<usage_error>(learn), "has to follow each");
        else
          learn();
      }
      optimizer.step();
      require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-12);
    }
    require_equal(log.count("has to follow every"),
                  comm.rank() == odd && (by_forward || !refuses) ? 1 : 0);
  };
  for (const int passes : {1, 2}) {
    for (const start when : all_starts)
      for (const bool by_forward : {false, true})
        follow(sequence::combine_first, passes, by_forward, when == start::inside_backward,
               [&](SGD sgd, mlp& net) {
                 return adapt_with_combine(
                     std::move(sgd), net, comm,
                     {.num_steps_per_communication = passes, .start = when, .bucket_bytes = 300});
               });
    follow(sequence::adapt_first, passes, true, false, [&](SGD sgd, mlp& net) {
      return adapt_then_combine(std::move(sgd), net, comm,
                                {.backward_passes_per_step = passes, .bucket_bytes = 300});
    });
  }
}

RANKS_TEST("what was begun after the step is not part of what is saved", "[optim][start][saving]") {
  for (const start when : {start::after_step, start::inside_backward}) {
    mlp net = make_mlp(comm.rank());
    adapt_with_combine optimizer(sgd_of(net), net, comm,
                                 {.start = when, .global_average_every = 3});
    for (int step = 0; step < 4; ++step) train_by_forward(optimizer, net, comm.rank(), step);
    const std::string model = saved(net), state = saved(optimizer);
    for (int step = 4; step < 8; ++step) train_by_forward(optimizer, net, comm.rank(), step);

    for (const start later : all_starts) {
      mlp again = make_mlp(77);
      adapt_with_combine resumed(sgd_of(again), again, comm,
                                 {.start = later, .global_average_every = 3});
      train_by_forward(resumed, again, comm.rank(), 9);  // its own communication is given up
      restore(model, again);
      restore(state, resumed);
      for (int step = 4; step < 8; ++step) train_by_forward(resumed, again, comm.rank(), step);
      require_same_parameters(*again, *net);
    }
  }
}

RANKS_TEST("a step more than there are backwards takes back what it would change",
           "[optim][start]") {
  std::optional<at::Tensor> wanted;
  for (const start when : {start::at_step, start::after_step, start::inside_backward}) {
    mlp net = make_mlp(comm.rank());
    adapt_with_combine optimizer(sgd_of(net), net, comm, {.start = when});
    for (int step = 0; step < 3; ++step) {
      train_by_forward(optimizer, net, comm.rank(), step);
      optimizer.step();  // with the same gradients once more, alone
    }
    if (!wanted) wanted = flatten(*net);
    require_same(flatten(*net), *wanted);
  }
}

RANKS_TEST("a parameter changed on its way is an error that names it and the remedy",
           "[optim][start]") {
  const auto edit = [](mlp& net) {
    const torch::NoGradGuard no_grad;
    net->second->bias.mul_(0.5);
  };
  for (const start when : {start::after_forward, start::after_step, start::at_step}) {
    mlp net = make_mlp(comm.rank());
    adapt_with_combine optimizer(sgd_of(net), net, comm, {.start = when});
    train_by_forward(optimizer, net, comm.rank(), 0);
    optimizer.zero_grad();
    loss_of(optimizer.forward(net, values({4, 5}, 1)), 1).backward();
    edit(net);
    if (when == start::at_step) {
      optimizer.step();
    } else {
      const auto text = require_throws<usage_error>([&] { optimizer.step(); });
      require_contains(text, "second.bias");
      require_contains(text, "start::at_step");
    }
    train_by_forward(optimizer, net, comm.rank(), 2);
  }
  {  // after the step is before the forward
    simulation all(comm.size(), [](mlp& net) { return std::make_unique<SGD>(sgd_of(net)); });
    mlp net = make_mlp(comm.rank());
    adapt_with_combine optimizer(sgd_of(net), net, comm);
    for (int step = 0; step < 3; ++step) {
      all.step(sequence::combine_first, loss_in_step(step));
      train_by_forward(optimizer, net, comm.rank(), step);
      for (int rank = 0; rank < comm.size(); ++rank) edit(all.net(rank));
      edit(net);
    }
    require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-12);
  }
}

RANKS_TEST("what is not on its way may be changed", "[optim][start]") {
  for (const start when : all_starts) {
    if (when == start::inside_backward) continue;  // the backward uses it
    mlp net = make_mlp(comm.rank()), alone = make_mlp(comm.rank());
    adapt_with_combine optimizer(sgd_of(net), net, comm,
                                 {.communication = communication_type::none, .start = when});
    SGD plain = sgd_of(alone);
    for (int step = 0; step < 3; ++step) {
      for (auto* each : {&net, &alone}) {
        loss_in_step(step)(*each, comm.rank()).backward();
        const torch::NoGradGuard no_grad;
        (*each)->second->weight.clamp_(-0.1, 0.1);
      }
      optimizer.step();
      plain.step();
      optimizer.zero_grad();
      plain.zero_grad();
    }
    require_same_parameters(*net, *alone);
  }
}

RANKS_TEST(
    "an optimizer's state can be another rank's in mid-training, whenever communication starts",
    "[optim][start][saving]") {
  const auto play = [&](start when) {
    mlp net = make_mlp(comm.rank());
    adapt_with_combine optimizer(sgd_of(net), net, comm, {.start = when});
    for (int step = 0; step < 3; ++step) train_by_forward(optimizer, net, comm.rank(), step);
    broadcast_optimizer_state(comm, optimizer, comm.size() - 1);
    if (comm.size() > 1) require_equal(optimizer.round(), 3);  // nothing is on its way
    for (int step = 3; step < 6; ++step) train_by_forward(optimizer, net, comm.rank(), step);
    return flatten(*net);
  };
  const auto wanted = play(start::at_step);
  for (const start when : all_starts) require_same(play(when), wanted);
}

RANKS_TEST("flush averages what is on its way, reset_passes averages nothing", "[optim][start]") {
  for (const start when : all_starts) {
    mlp net = make_mlp(comm.rank());
    adapt_with_combine optimizer(sgd_of(net), net, comm, topology::fully_connected(comm.size()),
                                 {.start = when});
    train_by_forward(optimizer, net, comm.rank(), 0);
    const auto apart = flatten(*net);
    optimizer.reset_passes();
    require_same(flatten(*net), apart);
    optimizer.flush();
    require_close(flatten(*net), allreduce(comm, apart), 1e-12);
    require_equal(optimizer.round(), std::int64_t{2});
    train_by_forward(optimizer, net, comm.rank(), 1);
    require_equal(optimizer.passes_since_communication(), 0);
  }
}

RANKS_TEST("a model reloaded while it is on its way goes on from what was loaded",
           "[optim][start]") {
  for (const start when : {start::after_step, start::inside_backward}) {
    mlp net = make_mlp(comm.rank()), alone = make_mlp(40 + comm.rank());
    adapt_with_combine optimizer(SGD(net->parameters(), 0.1), net, comm, {.start = when});
    train_by_forward(optimizer, net, comm.rank(), 0);
    restore(saved(alone), net);
    SGD plain(alone->parameters(), 0.1);
    loss_in_step(1)(alone, comm.rank()).backward();
    plain.step();
    train_by_forward(optimizer, net, comm.rank(), 1);
    require_same_parameters(*net, *alone);
    require_equal(optimizer.passes_since_communication(), 0);
    const auto apart = flatten(*net);
    optimizer.flush();
    require_close(allreduce(comm, flatten(*net)), allreduce(comm, apart), 1e-12);
  }
}

RANKS_TEST("a window given up leaves no trace, whenever its communication began",
           "[optim][start]") {
  const int n = comm.size();
  for (const start when : {start::after_step, start::after_forward, start::at_step}) {
    mlp net = make_mlp(comm.rank());
    adapt_with_combine optimizer(SGD(net->parameters(), 0.0), net, comm, {.start = when});
    const int right = (comm.rank() + 1) % n, left = (comm.rank() + n - 1) % n;
    if (n > 1)
      optimizer.next(
          {.self_weight = 0.75, .sources = {{right, 0.25}}, .destinations = {{left, 1.0}}});
    loss_of(optimizer.forward(net, values({4, 5}, 1)), 1).backward();
    optimizer.reset_passes();
    optimizer.zero_grad();
    require_same_parameters(*net, *make_mlp(comm.rank()));
    require_equal(optimizer.round(), std::int64_t{0});
    train_by_forward(optimizer, net, comm.rank(), 1);
    if (n > 1)  // the neighbours of the next communication are still those
      require_close(flatten(*net),
                    0.75 * flatten(*make_mlp(comm.rank())) + 0.25 * flatten(*make_mlp(right)),
                    1e-12);
  }
}

RANKS_TEST("a backward that takes the step has to be followed by what ends it", "[optim][start]") {
  mlp net = make_mlp(comm.rank());
  const auto wrap = [&](auto inner) {
    adapt_with_combine optimizer(std::move(inner), net, comm, {.start = start::inside_backward});
    return optimizer;
  };
  {
    auto optimizer = wrap(sgd_of(net));
    const auto before = flatten(*net);
    loss_in_step(0)(net, comm.rank()).backward();
    require(!torch::equal(flatten(*net), before), "the backward adapts");
    require_contains(
        require_throws<usage_error>([&] { loss_in_step(1)(net, comm.rank()).backward(); }),
        "inside_backward");
    require_contains(require_throws<usage_error>([&] { optimizer.skip_step(); }),
                     "inside_backward");
    amp::grad_scaler scaler;
    static_cast<void>(scaler.scale(torch::ones({})));
    require_contains(require_throws<usage_error>([&] { scaler.step(optimizer); }),
                     "before gradients can be unscaled");
    optimizer.step();
    train_by_forward(optimizer, net, comm.rank(), 2);
    optimizer.zero_grad();
    loss_in_step(3)(net, comm.rank()).backward();
    optimizer.flush();  // ends it, too
    loss_in_step(4)(net, comm.rank()).backward();
    optimizer.reset_passes();
    train_by_forward(optimizer, net, comm.rank(), 5);
    require_equal(optimizer.passes_since_communication(), 0);
  }
  struct own_sgd : SGD {
    using SGD::SGD;
  };
  require_contains(
      require_throws<usage_error>([&] { wrap(own_sgd(net->parameters(), SGDOptions(0.1))); }),
      "AdamW");
}

TEST_CASE("a step that has failed inside a backward is not gone on with",
          "[optim][start][thread]") {
  run_threads(2,
              [](auto& comm) {
                mlp net = make_mlp(comm.rank());
                adapt_with_combine optimizer(
                    sgd_of(net), net, comm, {.start = start::inside_backward, .bucket_bytes = 300});
                const auto backward = [&](int step) {
                  optimizer.zero_grad();
                  loss_in_step(step)(net, comm.rank()).backward();
                };
                for (int step = 0; step < 2 - comm.rank(); ++step) {
                  backward(step);
                  optimizer.step();
                }
                if (comm.rank() == 1) return;  // without whom the next backward fails
                require_throws<error>([&] { backward(2); });
                const auto left = flatten(*net);
                optimizer.reset_passes();
                require_same(flatten(*net), left);
                require_throws<error>([&] { optimizer.step(); });  // all of it anew
                require_same(flatten(*net), left);
              },
              {.timeout = std::chrono::seconds(5)});
}

RANKS_TEST("stepping inside the backward follows groups, freezing, reloading and moving",
           "[optim][start]") {
  const auto run = [&](start when) {
    mlp net = make_mlp(comm.rank());
    adapt_with_combine first(SGD(net->first->parameters(), SGDOptions(0.1).momentum(0.9)), net,
                             comm, {.start = when, .bucket_bytes = 300});
    first.add_param_group(torch::optim::OptimizerParamGroup(net->second->parameters(),
                                                            std::make_unique<SGDOptions>(0.05)));
    for (int step = 0; step < 2; ++step) train_by_forward(first, net, comm.rank(), step);
    first.flush();  // nothing is on its way where parameters come and go
    first.add_param_group(torch::optim::OptimizerParamGroup(net->last->parameters()));
    auto optimizer = std::move(first);
    for (int step = 2; step < 9; ++step) {
      if (step == 4 || step == 6) optimizer.flush();
      if (step == 4) net->second->weight.requires_grad_(false);
      if (step == 6) net->second->weight.requires_grad_(true);
      train_by_forward(optimizer, net, comm.rank(), step);
    }
    optimizer.flush();
    restore(saved(make_mlp(40 + comm.rank())), net);
    for (int step = 9; step < 12; ++step) {
      optimizer.step([&] {
        optimizer.zero_grad();
        auto loss = loss_in_step(step)(net, comm.rank());
        if (step < 11) loss = loss + optimizer.forward(net, values({4, 5}, step)).sum();
        loss.backward();
        return loss;
      });
    }
    return flatten(*net);
  };
  const auto wanted = run(start::at_step);
  for (const start when : all_starts) require_same(run(when), wanted);
}

RANKS_TEST("operations of the program may come at any time between forward and step",
           "[optim][start]") {
  for (const start when : all_starts) {
    mlp net = make_mlp(comm.rank());
    adapt_with_combine optimizer(sgd_of(net), net, comm, {.start = when});
    for (int step = 0; step < 3; ++step) {
      // Even ranks issue it before the forward, odd ones after: its order among the wrapper's own
      // operations differs over ranks.
      at::Tensor sum;
      const auto ask = [&] {
        sum = allreduce(comm, torch::full({1}, 1.0, at::kDouble), reduce_op::sum);
      };
      const int seed = 31 * step + comm.rank();
      optimizer.zero_grad();
      if (comm.rank() % 2 == 0) ask();
      const auto loss = loss_of(optimizer.forward(net, values({4, 5}, seed)), seed);
      if (comm.rank() % 2 != 0) ask();
      loss.backward();
      optimizer.step();
      require_equal(sum.item<double>(), static_cast<double>(comm.size()));
    }
    require_equal(
        optimizer.round(),
        std::int64_t{when == start::after_step || when == start::inside_backward ? 4 : 3});
  }
}

namespace {

/// A batch norm and a count that a user keeps.
struct normalized_impl : torch::nn::Module {
  normalized_impl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(5));
    layer = register_module("layer", torch::nn::Linear(5, 2));
    scale = register_buffer("scale", torch::ones({1}, at::kFloat));
    seen = register_buffer("seen", torch::zeros({1}, at::kInt));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen += 1;
    return layer(norm(x));
  }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear layer{nullptr};
  at::Tensor scale, seen;
};
TORCH_MODULE_IMPL(normalized, normalized_impl);

normalized make_normalized(int seed) {
  normalized net;
  net->to(at::kDouble);
  net->scale.set_data(torch::full({1}, 2.0, at::kFloat));
  net->seen.set_data(torch::zeros({1}, at::kInt));  // it was made floating, too
  fill(*net, seed);
  return net;
}

}  // namespace

RANKS_TEST("buffers stay local, or floating ones are averaged as the parameters are",
           "[optim][buffers]") {
  const int n = comm.size();
  const auto batch = [](int rank, int step) { return values({6, 5}, 90 * step + rank) + rank; };
  const auto check = [&](auto wrap, buffer_policy policy) {
    normalized net = make_normalized(comm.rank());
    auto optimizer = wrap(SGD(net->parameters(), 0.1), net);
    for (int step = 0; step < 3; ++step) {
      at::Tensor means, variances;  // over ranks, of what each has after its forward
      optimizer.zero_grad();
      loss_of(optimizer.forward(net, batch(comm.rank(), step)), step).backward();
      const auto own_mean = net->norm->running_mean.clone();
      means = allreduce(comm, own_mean);
      variances = allreduce(comm, net->norm->running_var.clone());
      optimizer.step();
      if (policy == buffer_policy::local) {
        require_same(net->norm->running_mean, own_mean);
      } else {
        require_close(net->norm->running_mean, means, 1e-12);
        require_close(net->norm->running_var, variances, 1e-12);
      }
      require_equal(net->norm->num_batches_tracked.template item<double>(), step + 1.0);
      require_equal(net->seen.template item<int>(), step + 1);
      require_equal(net->scale.template item<float>(), 2.0F);  // a constant is a fixed point
    }
  };
  for (const buffer_policy policy : {buffer_policy::local, buffer_policy::average}) {
    for (const start when : all_starts)
      check(
          [&](SGD sgd, normalized& net) {
            return adapt_with_combine(std::move(sgd), net, comm, topology::fully_connected(n),
                                      {.start = when, .buffers = policy});
          },
          policy);
    check(
        [&](SGD sgd, normalized& net) {
          return adapt_then_combine(std::move(sgd), net, comm, topology::fully_connected(n),
                                    {.buffers = policy});
        },
        policy);
    check(
        [&](SGD sgd, normalized& net) {
          return gradient_allreduce(std::move(sgd), net, comm, {.buffers = policy});
        },
        policy);
  }
}

RANKS_TEST("buffers that stay local move no byte", "[optim][buffers]") {
  const auto bytes = [&](buffer_policy policy) {
    normalized net = make_normalized(comm.rank());
    adapt_with_combine optimizer(SGD(net->parameters(), 0.1), net, comm,
                                 topology::fully_connected(comm.size()), {.buffers = policy});
    const auto before = comm.statistics().bytes_sent;
    loss_of(optimizer.forward(net, values({6, 5}, comm.rank())), 1).backward();
    optimizer.step();
    return comm.statistics().bytes_sent - before;
  };
  // Two norms' parameters of 5, each padded to 8, a matrix of 10, padded to 16, and a bias of 2.
  const std::int64_t parameters = (8 + 8 + 16 + 2) * 8, buffers = 10 * 8 + 4;
  const std::int64_t others = comm.size() - 1;
  require_equal(bytes(buffer_policy::local), others * parameters);
  require_equal(bytes(buffer_policy::average), others * (parameters + buffers));

  const auto reduced = [&](buffer_policy policy) {
    normalized net = make_normalized(0);
    gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm, {.buffers = policy});
    const auto before = comm.statistics().bytes_sent;
    loss_of(net->forward(values({6, 5}, comm.rank())), 1).backward();
    optimizer.step();
    return comm.statistics().bytes_sent - before;
  };
  require_near(static_cast<double>(reduced(buffer_policy::average) - reduced(buffer_policy::local)),
               2.0 * static_cast<double>(others * buffers) / comm.size(), 2);
}

RANKS_TEST("buffers mix with the weights of a schedule, and not in local steps",
           "[optim][buffers]") {
  const int n = comm.size();
  normalized net = make_normalized(comm.rank());
  adapt_then_combine optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.backward_passes_per_step = 2, .buffers = buffer_policy::average});
  const auto forward = [&](int step) {
    optimizer.zero_grad();
    loss_of(optimizer.forward(net, values({6, 5}, 7 * step + comm.rank())), step).backward();
  };
  forward(0);
  const auto before = comm.statistics().operations;
  const auto alone = net->norm->running_mean.clone();
  optimizer.step();
  require_equal(comm.statistics().operations, before);
  require_same(net->norm->running_mean, alone);
  forward(1);
  const auto own = net->norm->running_mean.clone();
  const auto sum = allreduce(comm, own);
  optimizer.step();
  const auto with_left = [&] {  // the schedule's first round: half of rank - 1
    if (n == 1) return own;
    auto one_of = torch::zeros({n, 5}, at::kDouble);
    one_of[comm.rank()] = own;
    one_of = allreduce(comm, one_of, reduce_op::sum);
    return 0.5 * own + 0.5 * one_of[(comm.rank() + n - 1) % n];
  }();
  require_close(net->norm->running_mean, with_left, 1e-12);
  require_close(allreduce(comm, net->norm->running_mean), sum, 1e-12);  // the mean is kept
}

RANKS_TEST("buffers of gradient_allreduce rest in local steps and are averaged when a window ends",
           "[optim][buffers][gradients]") {
  normalized net = make_normalized(0);
  gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.backward_passes_per_step = 3, .buffers = buffer_policy::average});
  const at::Tensor& mean = net->norm->running_mean;
  const auto pass = [&](int seed) {
    loss_of(net->forward(values({6, 5}, 7 * seed + comm.rank())), seed).backward();
  };
  const auto step = [&] {
    optimizer.step();
    optimizer.zero_grad();
  };
  for (const bool scaled_out : {false, true}) {  // a step that a scaler leaves out averages as well
    pass(0);
    const auto alone = mean.clone();
    const auto before = comm.statistics().operations;
    step();
    require_equal(comm.statistics().operations, before);
    require_same(mean, alone);
    pass(1);
    pass(2);
    const auto expected = allreduce(comm, mean.clone());
    scaled_out ? optimizer.skip_step() : static_cast<void>(optimizer.step());
    optimizer.zero_grad();
    require_close(mean, expected, 1e-12);
  }
  pass(3);
  step();
  pass(4);
  const auto expected = allreduce(comm, mean.clone());
  optimizer.flush();
  require_close(mean, expected, 1e-12);
}

RANKS_TEST("a rank that has joined has no say in the buffers, and takes them over",
           "[optim][buffers][join]") {
  const int n = comm.size();
  normalized net = make_normalized(0);
  gradient_allreduce optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.buffers = buffer_policy::average});
  const at::Tensor& mean = net->norm->running_mean;
  at::Tensor alone;
  for (int batch = 0; batch < (comm.rank() == n - 1 ? 3 : 1); ++batch) {
    optimizer.zero_grad();
    loss_of(net->forward(values({6, 5}, 7 * batch + comm.rank())), batch).backward();
    alone = mean.clone();
    const auto expected = batch == 0 ? allreduce(comm, alone) : alone;
    optimizer.step();
    require_close(mean, expected, 1e-12);
  }
  require_equal(optimizer.join(), n - 1);
  require_close(mean, broadcast(comm, alone, n - 1), 1e-12);
}

RANKS_TEST("ranks whose buffers differ, or what becomes of them, are told", "[optim][buffers]") {
  if (comm.size() == 1) return;
  normalized net = make_normalized(0);
  {
    normalized other = make_normalized(0);
    if (comm.rank() == 1) other->scale.set_data(torch::ones({2}, at::kFloat));
    require_contains(require_throws<mismatch_error>([&] {
                       gradient_allreduce(SGD(other->parameters(), 0.1), other, comm,
                                          {.buffers = buffer_policy::average});
                     }),
                     "gradient_allreduce: ranks differ: parameter ");
  }
  require_contains(require_throws<mismatch_error>([&] {
                     adapt_with_combine(SGD(net->parameters(), 0.1), net, comm,
                                        {.buffers = comm.rank() == 1 ? buffer_policy::average
                                                                     : buffer_policy::local});
                   }),
                   "scale");
}
