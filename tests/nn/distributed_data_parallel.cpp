// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <bluefog/collective/barrier.hpp>
#include <bluefog/core/logger.hpp>
#include <bluefog/nn/distributed_data_parallel.hpp>
#include <bluefog/optim/adapt_with_combine.hpp>
#include <bluefog/tensor/allgather.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/tensor/broadcast.hpp>

#include "optim/support.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;
using nn::buffer_sync;
using nn::distributed_data_parallel;
using torch::optim::SGD;
using torch::optim::SGDOptions;

/// Parameters of `count` elements each, registered by name in the given order.
struct bag : torch::nn::Module {
  explicit bag(const std::vector<std::string>& names, std::int64_t count = 1) {
    for (const auto& name : names) register_parameter(name, torch::zeros({count}, at::kDouble));
  }
  at::Tensor operator[](const std::string& name) { return parameters_[name]; }
  /// Uses the parameters one after the other: the last one's gradient is ready first.
  at::Tensor forward(const std::vector<std::string>& order) {
    at::Tensor y = torch::ones({1}, at::kDouble);
    for (const auto& name : order) y = torch::tanh(y + (*this)[name]);
    return y.sum();
  }
};

/// A convolution, a batch norm and a linear layer.
struct normed_impl : torch::nn::Module {
  explicit normed_impl(at::ScalarType type = at::kDouble, std::int64_t channels = 3) {
    first = register_module("first", torch::nn::Linear(4, channels));
    norm = register_module("norm", torch::nn::BatchNorm1d(channels));
    last = register_module("last", torch::nn::Linear(channels, 2));
    to(type);  // which converts counters too
    norm->num_batches_tracked.set_data(torch::zeros({}, at::kLong));
    fill(*this, 1);
  }
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(norm(first(x)))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE_IMPL(normed, normed_impl);

/// Requires x to be equal on all ranks, bit for bit.
template <class Comm>
void require_equal_on_ranks(Comm& comm, const at::Tensor& x,
                            std::source_location where = std::source_location::current()) {
  require_same(x, broadcast(comm, x.detach().clone(), 0), where);
}

at::Tensor flat_buffers(const torch::nn::Module& module) {
  std::vector<at::Tensor> parts;
  for (const auto& each : module.buffers()) parts.push_back(each.to(at::kDouble).reshape(-1));
  return torch::cat(parts);
}

double mean_of_ranks(int ranks, double first, double step) {
  return first + step * (ranks - 1) / 2;
}

}  // namespace

RANKS_TEST("n ranks with a batch each learn what one with all of it does", "[nn][ddp][exact]") {
  const int n = comm.size();
  torch::nn::Linear model(4, 3), alone(4, 3);
  fill(*model, comm.rank());  // as if everybody had another seed
  fill(*alone, 0);
  distributed_data_parallel net(model, comm);
  SGD optimizer(model->parameters(), SGDOptions(0.1).momentum(0.9));
  SGD plain(alone->parameters(), SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 5; ++step) {
    const auto x = values({4 * n, 4}, step, at::kFloat);
    const auto y = values({4 * n, 3}, step + 50, at::kFloat);
    optimizer.zero_grad(step % 2 == 0);  // also with gradients that stay in their bucket
    torch::mse_loss(net.forward(x.narrow(0, 4 * comm.rank(), 4)), y.narrow(0, 4 * comm.rank(), 4))
        .backward();
    optimizer.step();
    plain.zero_grad();
    torch::mse_loss(alone->forward(x), y).backward();
    plain.step();
    require_close(flatten(*model), flatten(*alone), 1e-6);
    require_equal_on_ranks(comm, flatten(*model));
  }
}

RANKS_TEST("J backwards within no_sync and one outside are one with J times the batch",
           "[nn][ddp][exact]") {
  const int n = comm.size();
  mlp model = make_mlp(0), alone = make_mlp(0);
  distributed_data_parallel net(model, comm, {.bucket_bytes = 300});
  SGD optimizer(model->parameters(), 0.1), plain(alone->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    const auto x = values({12 * n, 5}, step), y = values({12 * n, 2}, step + 50);
    const auto backward = [&](int part) {
      const std::int64_t begin = 12 * comm.rank() + 4 * part;
      const auto loss = torch::mse_loss(net.forward(x.narrow(0, begin, 4)), y.narrow(0, begin, 4));
      (loss / 3).backward();
    };
    optimizer.zero_grad();
    const auto before = comm.statistics().bytes_sent;
    {
      auto guard = net.no_sync();
      backward(0);
      backward(1);
    }
    require_equal(comm.statistics().bytes_sent, before);
    backward(2);
    optimizer.step();
    plain.zero_grad();
    torch::mse_loss(alone->forward(x), y).backward();
    plain.step();
    require_close(flatten(*model), flatten(*alone), 1e-12);
  }
}

RANKS_TEST("wrapping gives every rank the parameters and buffers of rank 0", "[nn][ddp][start]") {
  normed model;
  fill(*model, comm.rank());
  {
    const torch::NoGradGuard no_grad;
    model->norm->running_mean.fill_(comm.rank() + 0.5);
    model->norm->running_var.fill_(comm.rank() + 2.5);
    model->norm->num_batches_tracked.fill_(7 + comm.rank());
  }
  const distributed_data_parallel net(model, comm);
  normed root;
  fill(*root, 0);
  require_same_parameters(*model, *root);
  require_same(flat_buffers(*model),
               torch::tensor({0.5, 0.5, 0.5, 2.5, 2.5, 2.5, 7.0}, at::kDouble));
}

RANKS_TEST("modules that differ are refused on every rank, by the first difference",
           "[nn][ddp][refusal]") {
  if (comm.size() == 1) return;
  const int last = comm.size() - 1;
  const bool odd = comm.rank() == last;
  const auto refused = [&](auto& model) {
    return require_throws_soon<mismatch_error>([&] { distributed_data_parallel(model, comm); });
  };
  const std::string where = "on rank " + std::to_string(last);
  {
    bag model(odd ? std::vector<std::string>{"a", "b"} : std::vector<std::string>{"a", "b", "c"});
    require_contains(refused(model), "rank 0 has 3 parameters and rank " + std::to_string(last) +
                                         " has 2; the first that one lacks is \"c\"");
  }
  {
    bag model({"a", odd ? "x" : "b"});
    const auto text = refused(model);
    require_contains(text, "parameter 1 is \"b\"");
    require_contains(text, "\"x\"");
    require_contains(text, where);
  }
  {
    bag model({"a"}, odd ? 3 : 2);
    require_contains(refused(model), "Double [2]");
    require_contains(refused(model), "Double [3]");
  }
  {
    bag model({"a"});
    if (odd) model.to(at::kFloat);
    require_contains(refused(model), "\"a\" Float [1]");
  }
  {
    bag model({"a", "b"});
    if (odd) model["b"].requires_grad_(false);
    require_contains(refused(model), "\"b\" Double [1] strides [1] without gradient " + where);
  }
  {
    normed model;
    if (odd) model->norm->running_var.set_data(torch::ones({3}, at::kFloat));
    require_contains(refused(model), "\"buffer norm.running_var\" Float [3]");
  }
  bag model({"a"});
  require_throws<usage_error>([&] { distributed_data_parallel(model, comm, {.bucket_bytes = 0}); });
}

RANKS_TEST("buckets follow the order of rank 0's first backward", "[nn][ddp][buckets]") {
  const std::vector<std::string> registered{"a", "b", "c", "d", "e", "f", "g", "h"};
  const std::vector<std::string> root{"c", "h", "a", "e", "b", "g", "d", "f"};
  bag model(registered);
  distributed_data_parallel net(model, comm, {.bucket_bytes = 32});  // four each
  const auto spread = [&](const std::vector<std::string>& names) {
    std::vector<std::ptrdiff_t> places;
    const auto* first = model[names.front()].grad().template const_data_ptr<double>();
    for (const auto& name : names)
      places.push_back(model[name].grad().template const_data_ptr<double>() - first);
    return places;
  };
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    net.forward(comm.rank() == 0 ? root : registered).backward();
    // What is used last is ready first.
    const auto order = step == 0 ? std::vector<std::string>{"h", "g", "f", "e"}
                                 : std::vector<std::string>{"f", "d", "g", "b"};
    require_equal(spread(order), std::vector<std::ptrdiff_t>{0, 1, 2, 3});
  }
}

RANKS_TEST("the first bucket is on its way while gradients are still being computed",
           "[nn][ddp][buckets]") {
  bag model({"a", "b", "c", "d", "e", "f", "g", "h"});
  distributed_data_parallel net(model, comm, {.bucket_bytes = 32});
  const auto before = comm.statistics().operations;
  decltype(comm.statistics().operations) during = before;
  const auto start = torch::ones({1}, at::kDouble).requires_grad_();
  auto y = start * 1.0;
  y.register_hook([&](const at::Tensor&) { during = comm.statistics().operations; });
  for (const auto& name : {"a", "b", "c", "d", "e", "f", "g", "h"})
    y = torch::tanh(y + model[name]);
  y.sum().backward();
  require_equal(during - before, decltype(during){1});
  require(comm.statistics().operations > during, "the last bucket leaves at the end");
}

RANKS_TEST("the first bucket is small, the others take 25 MiB", "[nn][ddp][buckets]") {
  const std::int64_t count = 600 << 7;  // 600 KiB each
  bag model({"a", "b", "c", "d"}, count);
  distributed_data_parallel net(model, comm);
  std::int64_t operations = 0;
  for (int step = 0; step < 2; ++step) {
    model.zero_grad();
    const auto before = comm.statistics().operations;
    (model["a"].sum() + model["b"].sum() + model["c"].sum() + model["d"].sum()).backward();
    operations = comm.statistics().operations - before;
  }
  require_equal(operations, std::int64_t{2});  // d, and the rest
}

RANKS_TEST("parameters of two types that alternate share the buckets of each type",
           "[nn][ddp][buckets]") {
  const std::vector<std::string> names{"a", "b", "c", "d", "e", "f", "g", "h"};
  bag model(names);
  for (const auto& name : {"a", "c", "e", "g"}) model[name].set_data(torch::zeros({1}, at::kFloat));
  // Ready as h, g, ..., a: 16 bytes are h and f, then d and b, and in the end g, e, c and a.
  distributed_data_parallel net(model, comm, {.bucket_bytes = 16});
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    const auto before = comm.statistics().operations;
    decltype(comm.statistics().operations) during = before;
    auto y = torch::tanh(torch::full({1}, 0.5, at::kDouble) + model["a"]);
    y.register_hook([&](const at::Tensor&) { during = comm.statistics().operations; });
    for (std::size_t i = 1; i < names.size(); ++i) y = torch::tanh(y + model[names[i]]);
    (y * (comm.rank() + 1)).sum().backward();
    require_equal(during - before, decltype(during){2});  // the doubles
    if (step > 0) require_equal(comm.statistics().operations - before, decltype(during){3});
    double slope = mean_of_ranks(comm.size(), 1, 1), value = 0.5;
    std::vector<double> slopes;
    for (std::size_t i = 0; i < names.size(); ++i) {
      value = std::tanh(value);
      slopes.push_back(1 - value * value);
    }
    for (std::size_t i = names.size(); i-- > 0;) {
      slope *= slopes[i];
      require_near(model[names[i]].grad().template item<double>(), slope, 1e-6);
    }
  }
}

RANKS_TEST("gradients lie in their bucket until they are cleared", "[nn][ddp][buckets]") {
  const int n = comm.size();
  bag model({"a", "b"}, 5);
  distributed_data_parallel net(model, comm);
  const double* where = nullptr;
  for (int step = 0; step < 3; ++step) {
    (model["a"].sum() * (1.0 + comm.rank()) + model["b"].sum()).backward();
    const auto* a = model["a"].grad().template const_data_ptr<double>();
    const auto* b = model["b"].grad().template const_data_ptr<double>();
    require_equal(a - b, std::ptrdiff_t{5});  // the later parameter comes first
    if (where != nullptr) require_equal(a, where);
    where = a;
    require_close(model["a"].grad(), torch::full({5}, mean_of_ranks(n, 1, 1), at::kDouble), 1e-14);
    if (step == 0) {
      model.zero_grad();
      require(!model["a"].grad().defined());
    } else {
      model.zero_grad(/*set_to_none=*/false);
    }
  }
}

RANKS_TEST("within no_sync gradients add up, and the next backward reduces the sum",
           "[nn][ddp][no_sync]") {
  const int n = comm.size();
  bag model({"a"});
  distributed_data_parallel net(model, comm);
  const auto backward = [&](double gradient) { (model["a"] * gradient).sum().backward(); };
  const auto gradient = [&] { return model["a"].grad().template item<double>(); };
  for (int round = 0; round < 2; ++round) {
    {
      auto guard = net.no_sync();
      auto inner = net.no_sync();
      backward(1 + comm.rank());
      require_equal(gradient(), 1.0 + comm.rank());
    }
    backward(3 + 2 * comm.rank());
    // Local sums 4, 7, 10, ...: on two ranks 5.5.
    require_near(gradient(), mean_of_ranks(n, 4, 3), 1e-14);
    if (n == 2) require_equal(gradient(), 5.5);
    model.zero_grad(round == 0);
  }
  {  // a backward on top of averaged gradients adds its own average
    backward(comm.rank());
    backward(10 * comm.rank());
    require_near(gradient(), mean_of_ranks(n, 0, 11), 1e-13);
    model.zero_grad();
  }
  {  // only the backward has to be inside, and a series may end without one outside
    auto loss = (model["a"] * (2.0 * comm.rank())).sum();
    {
      const auto guard = net.no_sync();
      loss.backward();
    }
    net.synchronize();
    require_near(gradient(), mean_of_ranks(n, 0, 2), 1e-14);
    net.synchronize();  // nothing left to do
    require_near(gradient(), mean_of_ranks(n, 0, 2), 1e-14);
  }
}

RANKS_TEST("parameters that some or all ranks do not use", "[nn][ddp][unused]") {
  const int n = comm.size();
  bag model({"a", "b", "c"}, 40);
  distributed_data_parallel net(model, comm, {.bucket_bytes = 64});
  for (int step = 0; step < 3; ++step) {
    model.zero_grad();
    auto loss = model["b"].sum();
    if (comm.rank() == 0) loss = loss + 6 * model["a"].sum();
    loss.backward();
    require_close(model["a"].grad(), torch::full({40}, 6.0 / n, at::kDouble), 1e-14);
    require_close(model["b"].grad(), torch::ones({40}, at::kDouble), 1e-14);
    require(!model["c"].grad().defined(), "a gradient out of nothing");
  }
  // A rank whose loss reaches nothing says so.
  model.zero_grad();
  static_cast<void>(net.forward(std::vector<std::string>{"a"}));
  if (comm.rank() == 0)
    (n * model["b"].sum()).backward();
  else
    net.synchronize();
  require_close(model["b"].grad(), torch::ones({40}, at::kDouble), 1e-14);
}

RANKS_TEST("parameters that no rank uses are named at level debug, whenever they are others",
           "[nn][ddp][unused]") {
  static const log_level usual = logger::level();  // one for all ranks that are threads
  logger::level(log_level::debug);
  barrier(comm);
  captured_log log;
  bag model({"a", "b", "c"});
  distributed_data_parallel net(model, comm, {.bucket_bytes = 8});
  const auto backward = [&](const std::vector<std::string>& used) {
    model.zero_grad();
    net.forward(used).backward();
  };
  const std::string silent = "distributed_data_parallel: no rank uses ";
  backward({"a", comm.rank() == 0 ? "b" : "a"});
  backward({"a", comm.rank() == comm.size() - 1 ? "b" : "a"});
  require_equal(log.count(silent), 1);
  require_equal(log.count(silent + "\"c\""), 1);
  backward({"b"});
  require_equal(log.count(silent), 2);
  require_equal(log.count(silent + "\"a\", \"c\""), 1);
  backward({"a", "b", "c"});
  require_equal(log.count(silent), 2);
  backward({"b"});
  require_equal(log.count(silent), 3);
  barrier(comm);
  logger::level(usual);
}

RANKS_TEST("a parameter used twice is reduced once, after its last use", "[nn][ddp][shared]") {
  const int n = comm.size();
  torch::nn::Linear tied(3, 3);
  tied->to(at::kDouble);
  fill(*tied, 1);
  torch::nn::Sequential model(tied, torch::nn::Tanh(), tied);
  distributed_data_parallel net(model, comm);
  const auto x = values({2 * n, 3}, 5);
  const auto before = comm.statistics().bytes_sent;
  net.forward(x.narrow(0, 2 * comm.rank(), 2)).square().mean().backward();
  const double elements = 9 + 3 + 2 + 1;  // two flags, and one for notices
  require_near(static_cast<double>(comm.statistics().bytes_sent - before),
               2.0 * (n - 1) / n * elements * 8, 17);
  const auto own = tied->weight.grad().clone();
  tied->zero_grad();
  const auto expected =
      torch::autograd::grad({model->forward(x).square().mean()}, {tied->weight}).front();
  require_close(own, expected, 1e-14);
}

RANKS_TEST("batch norm goes forward twice, then backward", "[nn][ddp][buffers]") {
  const int n = comm.size();
  normed model, alone;
  distributed_data_parallel net(model, comm);
  SGD optimizer(model->parameters(), 0.1), plain(alone->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    const auto data = [&](int rank, int part) {
      return values({6, 4}, 10 * step + 2 * rank + part);
    };
    const auto loss = [](const at::Tensor& a, const at::Tensor& b) {
      return (a * b).mean() + a.square().mean();
    };
    optimizer.zero_grad();
    const auto one = net.forward(data(comm.rank(), 0));
    const auto two = net.forward(data(comm.rank(), 1));
    loss(one, two).backward();
    optimizer.step();
    plain.zero_grad();
    for (int rank = 0; rank < n; ++rank)
      (loss(alone->forward(data(rank, 0)), alone->forward(data(rank, 1))) / n).backward();
    plain.step();
    require_close(flatten(*model), flatten(*alone), 1e-12);
  }
}

RANKS_TEST("buffers follow rank 0, are averaged, or stay alone", "[nn][ddp][buffers]") {
  const int n = comm.size();
  for (const auto& [policy, counter] :
       {std::pair(buffer_sync::broadcast, at::kLong), std::pair(buffer_sync::average, at::kLong),
        std::pair(buffer_sync::off, at::kLong),
        // as `Module::to` leaves it
        std::pair(buffer_sync::broadcast, at::kDouble),
        std::pair(buffer_sync::average, at::kDouble)}) {
    normed model;
    model->norm->num_batches_tracked.set_data(torch::zeros({}, counter));
    distributed_data_parallel net(model, comm, {.buffers = policy});
    {
      const torch::NoGradGuard no_grad;
      model->norm->options.momentum(0);  // the forward itself leaves the statistics alone
      model->norm->running_mean.fill_(comm.rank());
      model->norm->num_batches_tracked.fill_(10 * comm.rank());
    }
    const auto version = model->norm->running_mean._version();
    {  // neither evaluation nor a forward without gradients is collective
      model->eval();
      if (comm.rank() == 0) static_cast<void>(net.forward(values({6, 4}, 1)));
      model->train();
      const torch::NoGradGuard no_grad;
      if (comm.rank() == 0) static_cast<void>(net.forward(values({6, 4}, 1)));
      require_equal(model->norm->running_mean[0].template item<double>(), comm.rank());
    }
    net.forward(values({6, 4}, comm.rank())).sum().backward();
    const double wanted = policy == buffer_sync::broadcast ? 0
                          : policy == buffer_sync::average ? mean_of_ranks(n, 0, 1)
                                                           : comm.rank();
    require_near(model->norm->running_mean[0].template item<double>(), wanted, 1e-14);
    const auto batches = model->norm->num_batches_tracked.template item<std::int64_t>();
    require_equal(batches / 10, std::int64_t{comm.rank()});
    require_equal(model->norm->running_mean._version(), version);
  }
}

RANKS_TEST("a module saves the same with and without the wrapper", "[nn][ddp][saving]") {
  normed model, alone;
  SGD optimizer(model->parameters(), 0.1), plain(alone->parameters(), 0.1);
  distributed_data_parallel net(model, comm);
  require(saved(model) == saved(alone), "byte for byte, when wrapped");
  const auto x = values({6, 4}, 1);  // of every rank, so that their mean is its own
  net.forward(x).sum().backward();
  alone->forward(x).sum().backward();
  for (std::size_t i = 0; i < alone->parameters().size(); ++i) {
    require_close(model->parameters()[i].grad(), alone->parameters()[i].grad(), 1e-14);
    alone->parameters()[i].grad().copy_(model->parameters()[i].grad());
  }
  optimizer.step();
  plain.step();
  require(saved(model) == saved(alone), "byte for byte, after a step");
  normed loaded;
  fill(*loaded, 9);
  restore(saved(model), loaded);
  require_same_parameters(*loaded, *alone);
  require_close(flat_buffers(*loaded), flat_buffers(*alone), 1e-14);
}

RANKS_TEST("a reloaded module goes on", "[nn][ddp][saving]") {
  const int n = comm.size();
  mlp model = make_mlp(0), other = make_mlp(3);
  distributed_data_parallel net(model, comm);
  restore(saved(other), model);
  const auto loss = [](mlp& m, int rank) {
    return loss_of(m->forward(values({4, 5}, rank)), rank);
  };
  static_cast<void>(net.forward(values({4, 5}, 0)));
  loss(model, comm.rank()).backward();
  at::Tensor sum = torch::zeros({}, at::kDouble);
  for (int rank = 0; rank < n; ++rank) sum = sum + loss(other, rank) / n;
  sum.backward();
  require_close(model->first->weight.grad(), other->first->weight.grad(), 1e-14);
}

namespace {

template <class Comm>
void freeze(Comm& comm, std::int64_t bucket_bytes) {
  const int n = comm.size();
  bag model({"a", "b", "c"});
  distributed_data_parallel net(model, comm, {.bucket_bytes = bucket_bytes});
  const auto backward = [&] {
    model.zero_grad();
    (model["a"] * (1.0 + comm.rank()) + model["b"] + model["c"]).sum().backward();
    require_near(model["a"].grad().template item<double>(), mean_of_ranks(n, 1, 1), 1e-14);
  };
  backward();
  model["b"].requires_grad_(false);
  backward();
  require(!model["b"].grad().defined(), "a frozen parameter has learnt");
  model["b"].requires_grad_(true);
  backward();
  require_equal(model["b"].grad().template item<double>(), 1.0);
  if (n == 1) return;
  const int odd = n - 1;
  if (comm.rank() == odd) model["b"].requires_grad_(false);
  const auto text = require_throws_soon<mismatch_error>(backward);
  require_contains(text, "distributed_data_parallel: ranks differ");
  require_contains(text, "\"b\" Double [1] strides [1] on rank 0");
  require_contains(text, "without gradient on rank " + std::to_string(odd));
  model["b"].requires_grad_(false);  // now all agree
  backward();
  if (comm.rank() == odd) model["b"].requires_grad_(true);  // and the other way round
  require_contains(require_throws_soon<mismatch_error>(backward), "parameter 1 is \"b\"");
  model["b"].requires_grad_(false);
  backward();
}

}  // namespace

RANKS_TEST("parameters frozen on all ranks rest, on one rank only are an error on all",
           "[nn][ddp][frozen]") {
  for (const std::int64_t bytes : {25 << 20, 8}) freeze(comm, bytes);  // one bucket, or three
}

RANKS_TEST("a backward that fails on all ranks is made anew, one on some ranks is an error on all",
           "[nn][ddp][failure]") {
  const int n = comm.size();
  bag model({"a", "b", "c"});
  distributed_data_parallel net(model, comm, {.bucket_bytes = 8});  // a bucket each, c's first
  const auto backward = [&](bool fails) {
    auto y = model["a"] * (1.0 + comm.rank());
    if (fails)
      y.register_hook([](const at::Tensor&) { throw std::runtime_error("it has failed"); });
    (y + model["b"] * 2.0 * comm.rank() + model["c"] * 3.0).sum().backward();
  };
  const auto check = [&] {
    backward(false);
    const std::vector wanted{mean_of_ranks(n, 1, 1), mean_of_ranks(n, 0, 2), 3.0};
    for (std::size_t i = 0; i < wanted.size(); ++i)
      require_near(model.parameters()[i].grad().template item<double>(), wanted[i], 1e-14);
  };
  check();
  for (const bool in_place : {false, true}) {
    model.zero_grad(!in_place);
    const auto fail = [&] {
      require_throws<std::runtime_error>([&] { backward(true); });
      if (in_place) {  // where results lie, nothing can be cleared
        model.zero_grad(false);
        const auto text = require_throws<usage_error>([&] { backward(false); });
        require_contains(text, "distributed_data_parallel: a backward has failed");
        require_contains(text, "zero_grad(true)");
      }
      model.zero_grad();
    };
    fail();
    check();
    if (n == 1) continue;
    model.zero_grad(!in_place);
    const int odd = in_place ? 0 : n - 1;
    if (comm.rank() == odd) fail();
    const auto text = require_throws<usage_error>([&] { backward(false); });
    require_contains(text, "distributed_data_parallel: rank " + std::to_string(odd));
    model.zero_grad();
    check();
  }
}

namespace {

/// The last rank breaks its promise.
template <class Comm>
void break_promise(Comm& comm) {
  const int last = comm.size() - 1;
  bag model({"a", "b"});
  distributed_data_parallel net(model, comm, {.static_graph = true});
  (model["a"] + model["b"]).sum().backward();
  (model["a"] + model["b"]).sum().backward();
  const auto broken = [&] {
    (comm.rank() == last ? model["a"] : model["a"] + model["b"]).sum().backward();
  };
  if (!comm.checks()) return broken();
  const auto text = require_throws<usage_error>(broken);
  require_contains(text, "static_graph");
  require_contains(text, "on rank " + std::to_string(last) + " parameter \"b\"");
}

}  // namespace

TEST_CASE("a promise of a static graph is checked in check mode (threads)", "[nn][ddp][thread]") {
  for (const bool check : {true, false})
    on_threads([](auto& comm) { break_promise(comm); }, {.check = check});
}
#ifdef BLUEFOG_TEST_MPI
TEST_CASE("a promise of a static graph is checked in check mode (MPI)", "[nn][ddp][mpi]") {
  for (const bool check : {true, false})
    on_mpi([](auto& comm) { break_promise(comm); }, {.check = check});
}
#endif

RANKS_TEST("gradients travel compressed, sparse ones as dense ones or not at all",
           "[nn][ddp][compression]") {
  const int n = comm.size();
  {
    bag model({"a"}, 4);
    distributed_data_parallel net(model, comm, {.compression = optim::compression::fp16});
    (model["a"] * 30000.0).sum().backward();
    require_close(model["a"].grad(), torch::full({4}, 30000.0, at::kDouble), 16);
  }
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(6, 2).sparse(true));
  table->to(at::kDouble);
  const auto loss = [&] { return table->forward(torch::tensor({comm.rank() % 6, 0})).sum(); };
  {
    distributed_data_parallel net(table, comm);
    require_contains(require_throws<usage_error>([&] { loss().backward(); }),
                     "distributed_data_parallel: the gradient of parameter \"weight\" is sparse");
  }
  table->zero_grad();
  distributed_data_parallel net(table, comm, {.sparse_as_dense = true});
  loss().backward();
  auto expected = torch::zeros({6, 2}, at::kDouble);
  for (int rank = 0; rank < n; ++rank)
    for (const int row : {rank % 6, 0}) expected[row] += torch::ones({2}, at::kDouble) / n;
  require_close(table->weight.grad(), expected, 1e-14);
}

RANKS_TEST("two groups of ranks train two modules", "[nn][ddp][groups]") {
  auto half = comm.split(comm.rank() % 2);
  bag model({"a"});
  distributed_data_parallel net(model, half);
  (model["a"] * comm.rank()).sum().backward();
  double sum = 0;
  for (int rank = comm.rank() % 2; rank < comm.size(); rank += 2) sum += rank;
  require_near(model["a"].grad().template item<double>(), sum / half.size(), 1e-14);
}

RANKS_TEST("an averaging optimizer steps with the gradients of all ranks, or refuses",
           "[nn][distributed_data_parallel]") {
  using optim::start;
  const double mean = (comm.size() + 1) / 2.0;
  for (const auto when : {start::after_step, start::after_forward, start::at_step}) {
    bag module({"w"});
    distributed_data_parallel net(module, comm);
    optim::adapt_with_combine optimizer(SGD(module.parameters(), SGDOptions(0.5)), module, comm,
                                        {.start = when});
    for (int step = 1; step <= 3; ++step) {
      optimizer.zero_grad();
      (module["w"].sum() * (comm.rank() + 1)).backward();
      optimizer.step();
      require_near(module["w"].template item<double>(), -0.5 * mean * step, 1e-12);
    }
  }
  bag module({"w"});
  optim::adapt_with_combine optimizer(SGD(module.parameters(), SGDOptions(0.5)), module, comm,
                                      {.start = start::inside_backward});
  const auto learn = [&] {
    optimizer.zero_grad();
    module["w"].sum().backward();
    optimizer.step();
  };
  learn();
  {
    distributed_data_parallel net(module, comm);
    require_contains(require_throws<usage_error>(learn), "take another start");
    require_near(module["w"].template item<double>(), -0.5, 1e-12);
  }
}

RANKS_TEST("what cannot travel, or not be written, is refused by name", "[nn][ddp][refusal]") {
  struct carrier : torch::nn::Module {
    explicit carrier(const at::Tensor& more) {
      register_parameter("w", torch::zeros({2}, at::kDouble));
      register_buffer("more", more);
    }
  };
  for (const at::Tensor& more :
       {torch::ones({2}, at::kComplexFloat), torch::ones({1, 4}).expand({3, 4})}) {
    carrier model(more);
    const auto text =
        require_throws<usage_error>([&] { distributed_data_parallel net(model, comm); });
    require_contains(text, "distributed_data_parallel: \"buffer more\": ");
    require_contains(text, more.is_complex() ? "ComplexFloat" : "clone() it first");
  }
}
