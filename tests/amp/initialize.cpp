// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/amp.hpp>
#include <bluefog/nn/distributed_data_parallel.hpp>
#include <bluefog/optim.hpp>
#include <bluefog/tensor/broadcast.hpp>
#include <bluefog/topology/fully_connected.hpp>

#include "optim/support.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;
using amp::autocast_guard;
using amp::opt_level;
using torch::optim::SGD;
using torch::optim::SGDOptions;

/// A linear layer, a batch norm and another linear layer.
struct normed_impl : torch::nn::Module {
  normed_impl() {
    first = register_module("first", torch::nn::Linear(5, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    last = register_module("last", torch::nn::Linear(16, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(norm(first(x)))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE_IMPL(normed, normed_impl);

normed make_normed(int seed) {
  normed net;
  fill(*net, seed);
  return net;
}
at::Tensor input(int seed) {
  return values({8, 5}, seed, at::kFloat);
}

template <class Net>
at::ScalarType type_of(Net& net, const char* name) {
  return net->named_parameters()[name].scalar_type();
}

}  // namespace

TEST_CASE("within an autocast_guard products are in 16 bits, and after it as before",
          "[amp][autocast]") {
  const at::Tensor a = values({4, 4}, 1, at::kFloat);
  const at::Tensor b = values({4, 4}, 2, at::kFloat);
  const auto product = [&] { return torch::mm(a, b).scalar_type(); };
  const at::Tensor rounded = torch::mm(a.to(at::kBFloat16), b.to(at::kBFloat16));
  CHECK(product() == at::kFloat);
  {
    const autocast_guard guard(at::kCPU, at::kBFloat16);
    CHECK(torch::mm(a, b).equal(rounded));
    {
      const autocast_guard off(at::kCPU, at::kBFloat16, /*enabled=*/false);
      CHECK(product() == at::kFloat);
    }
    {
      const autocast_guard half(at::kCPU, at::kHalf);
      CHECK(product() == at::kHalf);
    }
    CHECK(product() == at::kBFloat16);
  }
  CHECK(product() == at::kFloat);
  try {
    const autocast_guard guard(at::kCPU, at::kBFloat16);
    throw std::runtime_error("a forward that fails");
  } catch (const std::runtime_error&) {
    CHECK(product() == at::kFloat);
  }
}

TEST_CASE("copies in 16 bits do not outlive the guard: parameters may change", "[amp][autocast]") {
  torch::nn::Linear net(5, 2);
  fill(*net, 1);
  const at::Tensor x = input(1);
  const auto answer = [&] {
    const autocast_guard guard(at::kCPU);
    return net(x).detach();
  };
  const at::Tensor before = answer();
  const torch::NoGradGuard no_graph;
  net->weight.mul_(2);
  net->bias.mul_(2);
  CHECK(answer().equal(before * 2));
}

TEST_CASE("opt levels choose what is narrow", "[amp][initialize]") {
  for (const auto level : {opt_level::O0, opt_level::O1, opt_level::O2, opt_level::O3}) {
    normed net = make_normed(1);
    SGD sgd(net->parameters(), 0.1);
    auto mixed = amp::initialize(net, sgd, level);
    const bool narrow = level == opt_level::O2 || level == opt_level::O3;
    const auto all = level == opt_level::O3 ? at::kBFloat16 : at::kFloat;
    CHECK(type_of(net, "first.weight") == (narrow ? at::kBFloat16 : at::kFloat));
    CHECK(type_of(net, "norm.weight") == all);
    CHECK(net->norm->running_var.scalar_type() == all);
    REQUIRE(mixed.named_parameters().size() == net->named_parameters().size());
    for (const auto& item : mixed.named_parameters()) {
      CHECK(item.value().scalar_type() == all);
      CHECK(item.value().is_leaf());
      CHECK(net->named_parameters().contains(item.key()));
    }
    for (std::size_t i = 0; i < 6; ++i)
      CHECK(sgd.param_groups()[0].params()[i].is_same(mixed.parameters()[i]));
    CHECK(mixed.forward(input(2)).scalar_type() == at::kFloat);
    mixed.eval();
    CHECK_FALSE(net->is_training());
    CHECK_FALSE(net->norm->is_training());
  }
}

TEST_CASE("O0 is the model itself, O1 its forward under a guard", "[amp][initialize]") {
  normed net = make_normed(1), same = make_normed(1);
  SGD sgd(net->parameters(), 0.1);
  auto plain = amp::initialize(net, sgd, opt_level::O0);
  CHECK(plain.forward(input(2)).equal(same->forward(input(2))));
  auto cast = amp::initialize(net, sgd, opt_level::O1);
  const autocast_guard guard(at::kCPU);
  CHECK(cast.forward(input(2)).equal(same->forward(input(2)).to(at::kFloat)));
}

TEST_CASE("what O2 trains can be loaded into the model it was made from, and goes on",
          "[amp][initialize]") {
  normed net = make_normed(1), other = make_normed(2), plain = make_normed(3);
  SGD sgd(net->parameters(), 0.1), second(other->parameters(), 0.1);
  auto mixed = amp::initialize(net, sgd, opt_level::O2);
  auto resumed = amp::initialize(other, second, opt_level::O2);
  const auto train = [](auto& model, SGD& optimizer) {
    optimizer.zero_grad();
    loss_of(model.forward(input(1)), 1).backward();
    optimizer.step();
  };
  train(mixed, sgd);
  train(resumed, second);
  std::stringstream stream;
  torch::save(mixed, stream);
  torch::load(plain, stream);
  require_same_parameters(*plain, mixed);
  CHECK(plain->norm->running_mean.equal(net->norm->running_mean));
  stream.seekg(0);
  torch::load(resumed, stream);
  train(mixed, sgd);
  train(resumed, second);
  require_same_parameters(resumed, mixed);
  mixed.refresh();
  CHECK(net->first->weight.detach().equal(mixed.parameters()[0].detach().to(at::kBFloat16)));
}

TEST_CASE("frozen parameters stay frozen, tied ones tied, and gradients add up",
          "[amp][initialize]") {
  normed net = make_normed(1);
  net->first->weight.set_requires_grad(false);
  SGD sgd(net->parameters(), 0.1);
  auto mixed = amp::initialize(net, sgd, opt_level::O2);
  auto named = mixed.named_parameters();
  loss_of(mixed.forward(input(1)), 1).backward();
  const at::Tensor once = named["last.weight"].grad().clone();
  CHECK_FALSE(named["first.weight"].requires_grad());
  CHECK_FALSE(named["first.weight"].grad().defined());
  // Two forwards before their backwards.
  mixed.zero_grad();
  const at::Tensor first = loss_of(mixed.forward(input(1)), 1);
  const at::Tensor second = loss_of(mixed.forward(input(1)), 1);
  first.backward();
  second.backward();
  CHECK(named["last.weight"].grad().equal(2 * once));
  // A parameter that is thawed, and one that is frozen, on the way.
  named["first.weight"].set_requires_grad(true);
  named["last.weight"].set_requires_grad(false);
  mixed.zero_grad();
  loss_of(mixed.forward(input(1)), 1).backward();
  CHECK(named["first.weight"].grad().defined());
  CHECK_FALSE(named["last.weight"].grad().defined());
  struct twins : torch::nn::Module {
    twins() {
      weight = register_parameter("weight", torch::ones({2, 2}));
      register_parameter("again", weight);
    }
    at::Tensor forward(const at::Tensor& x) { return torch::mm(x, weight); }
    at::Tensor weight;
  } tied;
  SGD one({tied.weight}, 0.1);
  auto narrow = amp::initialize(tied, one, opt_level::O2);
  const auto parameters = narrow.parameters();
  REQUIRE(parameters.size() == 2);
  CHECK(parameters[0].is_same(parameters[1]));
  narrow.forward(torch::ones({2, 2})).sum().backward();
  CHECK(parameters[0].grad().equal(torch::full({2, 2}, 2.0F)));
}

TEST_CASE("masters save what 16 bits would lose", "[amp][initialize]") {
  // 1 + 2^-12 is 1 in bfloat16: only a master can collect steps of that size.
  for (const auto level : {opt_level::O2, opt_level::O3}) {
    torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
    const torch::NoGradGuard no_graph;
    net->weight.fill_(1);
    SGD sgd(net->parameters(), std::ldexp(1, -12));
    auto mixed = amp::initialize(net, sgd, level);
    for (int step = 0; step < 1024; ++step) {
      const torch::AutoGradMode graph(true);
      sgd.zero_grad();
      mixed.forward(torch::ones({1, 1})).sum().backward();
      sgd.step();
    }
    CHECK(mixed.parameters()[0].to(at::kFloat).item<float>() ==
          (level == opt_level::O2 ? 0.75F : 1.0F));
  }
}

TEST_CASE("a model that has masters is initialized for no other optimizer", "[amp][initialize]") {
  normed net = make_normed(1);
  SGD sgd(net->first->parameters(), 0.1), second(net->last->parameters(), 0.1);
  auto mixed = amp::initialize(net, sgd, opt_level::O2);
  for (const auto level : {opt_level::O0, opt_level::O1, opt_level::O2, opt_level::O3}) {
    CHECK_THROWS_WITH(amp::initialize(net, second, level),
                      ContainsSubstring("give one optimizer all parameters"));
    CHECK_THROWS_AS(amp::initialize(net, sgd, level), usage_error);
  }
  CHECK(second.param_groups()[0].params()[0].is_same(net->last->weight));
  const at::Tensor before = mixed.parameters()[0].detach().clone();
  loss_of(mixed.forward(input(1)), 1).backward();
  sgd.step();
  CHECK(mixed.parameters()[0].scalar_type() == at::kFloat);
  CHECK_FALSE(mixed.parameters()[0].equal(before));
  CHECK_THROWS_AS(amp::initialize(net, second, opt_level::O2), usage_error);

  for (const auto level : {opt_level::O1, opt_level::O3}) {  // without masters
    normed plain = make_normed(1);
    SGD one(plain->first->parameters(), 0.1), other(plain->last->parameters(), 0.1);
    CHECK_NOTHROW(amp::initialize(plain, one, level));
    auto twice = amp::initialize(plain, other, level);
    loss_of(twice.forward(input(1)), 1).backward();
    CHECK(other.param_groups()[0].params()[0].grad().defined());
  }
}

RANKS_TEST("initialize comes before the wrapper and before the first step", "[amp][initialize]") {
  normed net = make_normed(1);
  optim::adapt_with_combine optimizer(SGD(net->parameters(), 0.1), net, comm);
  const auto text = require_throws<usage_error>(
      [&] { static_cast<void>(amp::initialize(net, optimizer, opt_level::O2)); });
  require_contains(text, "before");
  require_equal(type_of(net, "first.weight"), at::kFloat);

  normed other = make_normed(1);
  SGD stepped(other->parameters(), SGDOptions(0.1).momentum(0.9));
  loss_of(other->forward(input(1)), 1).backward();
  stepped.step();
  require_throws<usage_error>(
      [&] { static_cast<void>(amp::initialize(other, stepped, opt_level::O2)); });
  require_throws<usage_error>([&] {
    static_cast<void>(amp::initialize(other, stepped, opt_level::O1, {.type = at::kFloat}));
  });
}

RANKS_TEST("with O1 optimizer.forward computes in 16 bits and counts", "[amp][initialize]") {
  mlp net = make_mlp(1, at::kFloat), same = make_mlp(1, at::kFloat);
  SGD sgd(net->parameters(), 0.1);
  auto mixed = amp::initialize(net, sgd, opt_level::O1);
  optim::adapt_with_combine optimizer(std::move(sgd), mixed, comm,
                                      {.num_steps_per_communication = 2});
  const at::Tensor answer = optimizer.forward(mixed, input(1));
  require_equal(answer.scalar_type(), at::kFloat);
  require_equal(optimizer.passes_since_communication(), 1);
  mixed.eval();
  static_cast<void>(optimizer.forward(mixed, input(1)));
  require_equal(optimizer.passes_since_communication(), 1);
  const autocast_guard guard(at::kCPU);
  require_same(answer.detach(), same->forward(input(1)).to(at::kFloat).detach());
}

namespace {

template <class Comm>
void step_masters(Comm& comm, at::ScalarType type) {
  const auto count = static_cast<std::size_t>(comm.size());
  const auto data = [](int pass, std::size_t rank) {
    return input(100 * pass + static_cast<int>(rank));
  };
  // By hand, all ranks: a float32 copy is stepped, a model in 16 bits computes.
  struct replica {
    explicit replica(at::ScalarType type) : narrow(make_mlp(1, type)) {}
    mlp wide = make_mlp(1, at::kFloat);
    mlp narrow;
  };
  const auto replicas = [&] {
    std::vector<replica> made;
    for (std::size_t rank = 0; rank < count; ++rank) made.emplace_back(type);
    return made;
  };
  auto all = replicas();
  const double scale = type == at::kHalf ? 16 : 65536;  // float16 ends at 65504
  amp::grad_scaler scaler({.init_scale = scale, .growth_interval = 2});

  const auto check = [&](auto& optimizer, auto& mixed, bool reduces) {
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      for (const int pass : {2 * step, 2 * step + 1}) {
        const at::Tensor answer =
            optimizer.forward(mixed, data(pass, static_cast<std::size_t>(comm.rank())));
        scaler.scale(loss_of(answer, pass)).backward();
      }
      require_equal(optimizer.passes_since_communication(), 2);
      scaler.step(optimizer);
      scaler.update();

      const torch::NoGradGuard no_graph;
      std::vector<std::vector<at::Tensor>> gradients(count);
      for (std::size_t rank = 0; rank < count; ++rank) {
        auto& [wide, narrow] = all[rank];
        const auto from = wide->parameters();
        const auto to = narrow->parameters();
        for (std::size_t i = 0; i < from.size(); ++i) {
          to[i].copy_(from[i]);
          gradients[rank].push_back(torch::zeros_like(from[i]));
        }
        for (const int pass : {2 * step, 2 * step + 1}) {
          const torch::AutoGradMode graph(true);
          narrow->zero_grad();
          const at::Tensor answer = narrow->forward(data(pass, rank).to(type));
          (loss_of(answer.to(at::kFloat), pass) * scale).backward();
          for (std::size_t i = 0; i < from.size(); ++i)
            gradients[rank][i] += to[i].grad().to(at::kFloat) / scale;
        }
      }
      for (std::size_t i = 0; i < gradients[0].size(); ++i) {
        at::Tensor mean = torch::zeros_like(gradients[0][i]);
        at::Tensor middle = mean.clone();
        for (std::size_t rank = 0; rank < count; ++rank) {
          mean += gradients[rank][i] / (2.0 * comm.size());
          middle += all[rank].wide->parameters()[i] / comm.size();
        }
        for (std::size_t rank = 0; rank < count; ++rank) {
          at::Tensor w = all[rank].wide->parameters()[i];
          if (!reduces) w.copy_(middle);
          w -= 0.5 * (reduces ? mean : gradients[rank][i]);
        }
      }
      const auto wanted = all[static_cast<std::size_t>(comm.rank())].wide->parameters();
      const auto got = mixed.parameters();
      // Sums over ranks in another order may round a 16-bit weight the other way, once.
      const double tolerance = comm.size() == 1 ? 1e-6 : 5e-3;
      for (std::size_t i = 0; i < got.size(); ++i) require_close(got[i], wanted[i], tolerance);
    }
    mixed.refresh();
    for (const auto& item : mixed.named_parameters())
      require_equal(item.value().scalar_type(), at::kFloat);
  };

  mlp net = make_mlp(1, at::kFloat);
  SGD sgd(net->parameters(), 0.5);
  auto mixed = amp::initialize(net, sgd, opt_level::O2, {.type = type});
  optim::adapt_with_combine averaging(std::move(sgd), mixed, comm,
                                      topology::fully_connected(comm.size()),
                                      {.num_steps_per_communication = 2});
  check(averaging, mixed, false);

  all = replicas();
  mlp second = make_mlp(1, at::kFloat);
  SGD other(second->parameters(), 0.5);
  auto again = amp::initialize(second, other, opt_level::O2, {.type = type});
  optim::gradient_allreduce reducing(std::move(other), again, comm,
                                     {.backward_passes_per_step = 2});
  check(reducing, again, true);
  const at::Tensor flat = flatten(again);
  require_same(broadcast(comm, flat, 0), flat);
}

}  // namespace

RANKS_TEST("with O2 masters travel and are stepped, and the model follows them",
           "[amp][initialize]") {
  for (const auto type : {at::kBFloat16, at::kHalf}) step_masters(comm, type);
}

RANKS_TEST("with O3 narrow parameters travel and are stepped, each result rounded once",
           "[amp][initialize]") {
  const int n = comm.size();
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    // By hand, all ranks: the sums are those of the narrow values in float32.
    const auto narrow = [&](int seed) {
      mlp net = make_mlp(seed, at::kFloat);
      net->to(type);
      return net;
    };
    const auto learn = [&](mlp& net, int rank) {
      loss_of(net->forward(input(rank).to(type)).to(at::kFloat), 1).backward();
    };
    const auto wide = [](const at::Tensor& x) { return x.detach().to(at::kFloat); };
    const auto train = [&](auto& optimizer, auto& mixed) {
      const auto before = comm.statistics().bytes_sent;
      loss_of(optimizer.forward(mixed, input(comm.rank())), 1).backward();
      optimizer.step();
      for (const auto& each : mixed.parameters()) require_equal(each.scalar_type(), type);
      return comm.statistics().bytes_sent - before;
    };
    {
      mlp net = make_mlp(comm.rank(), at::kFloat);
      SGD sgd(net->parameters(), 0.5);
      auto mixed = amp::initialize(net, sgd, opt_level::O3, {.type = type});
      optim::adapt_with_combine optimizer(std::move(sgd), mixed, comm);
      const auto sent = train(optimizer, mixed);
      constexpr std::int64_t narrow_bytes = 192 + 64 + 512 + 64 + 64 + 4;  // each begins at 64 n
      require_equal(sent, n == 1 ? 0 : narrow_bytes);
      mlp own = narrow(comm.rank()), source = narrow((comm.rank() + n - 1) % n);
      learn(own, comm.rank());
      for (std::size_t i = 0; i < own->parameters().size(); ++i) {
        const at::Tensor x = own->parameters()[i];
        const at::Tensor mean = (0.5 * wide(x) + 0.5 * wide(source->parameters()[i])).to(type);
        require_same(mixed.parameters()[i], (wide(mean) - 0.5 * wide(x.grad())).to(type));
      }
    }
    mlp net = make_mlp(1, at::kFloat);
    SGD sgd(net->parameters(), 0.5);
    auto mixed = amp::initialize(net, sgd, opt_level::O3, {.type = type});
    optim::gradient_allreduce optimizer(std::move(sgd), mixed, comm);
    train(optimizer, mixed);
    mlp own = narrow(1);
    std::vector<at::Tensor> means;
    for (const auto& each : own->parameters()) means.push_back(torch::zeros_like(wide(each)));
    for (int rank = 0; rank < n; ++rank) {
      own->zero_grad();
      learn(own, rank);
      for (std::size_t i = 0; i < means.size(); ++i)
        means[i] += wide(own->parameters()[i].grad()) / n;
    }
    // A sum in another order may round a gradient the other way, and with it a weight below 1.
    const double tolerance = n == 1 ? 0 : type == at::kHalf ? 0x1p-11 : 0x1p-8;
    for (std::size_t i = 0; i < means.size(); ++i) {
      const at::Tensor mean = means[i].to(type);
      const at::Tensor wanted = (wide(own->parameters()[i]) - 0.5 * wide(mean)).to(type);
      require_close(wide(mixed.parameters()[i]), wide(wanted), tolerance);
    }
    require_same(broadcast(comm, flatten(mixed), 0), flatten(mixed));
  }
}

RANKS_TEST("distributed_data_parallel takes what initialize returns", "[amp][initialize]") {
  mlp model = make_mlp(1, at::kFloat);
  SGD sgd(model->parameters(), 0.5);
  auto mixed = amp::initialize(model, sgd, opt_level::O2);
  nn::distributed_data_parallel net(mixed, comm);
  amp::grad_scaler scaler;
  for (int step = 0; step < 4; ++step) {
    const at::Tensor before = flatten(mixed);
    const bool overflow = step == 2;  // on one rank, from where it gets to all
    sgd.zero_grad();
    const at::Tensor loss = loss_of(net.forward(input(10 * step + comm.rank())), step);
    scaler.scale(overflow && comm.rank() == 0 ? loss * std::nanf("") : loss).backward();
    require_equal(scaler.step(sgd), !overflow);
    scaler.update();
    require_equal(scaler.get_scale(), step < 2 ? 65536.0 : 32768.0);
    require_equal(torch::equal(before, flatten(mixed)), overflow);
    const at::Tensor after = flatten(mixed);
    require_same(broadcast(comm, after, 0), after);
  }
}
