// SPDX-License-Identifier: Apache-2.0
// When the averaging optimizers communicate, with whom, and what that costs.
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/optim/adapt_then_combine.hpp>
#include <bluefog/optim/adapt_with_combine.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/topology.hpp>

#include "simulation.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;
using optim::adapt_then_combine;
using optim::adapt_with_combine;
using optim::communication_type;
using torch::optim::SGD;

constexpr std::int64_t one_model = (5 * 16 + 16 + 16 * 16 + 16 + 2 * 16 + 2) * 8;  // bytes

/// Plays a sequence: F a forward with its backward, S a step that has to communicate, s one that
/// must not. A step is followed by zero_grad.
template <class Optimizer, class Comm>
void play(Optimizer& optimizer, mlp& net, Comm& comm, std::string_view sequence, bool by_forward) {
  int seed = 0;
  for (const char each : sequence) {
    if (each == 'F') {
      const auto input = values({4, 5}, ++seed + comm.rank());
      loss_of(by_forward ? optimizer.forward(net, input) : net->forward(input), seed).backward();
    } else if (each == 'S' || each == 's') {
      const auto sent = comm.statistics();
      optimizer.step();
      optimizer.zero_grad();
      if (each == 's') {
        require_equal(comm.statistics().bytes_sent, sent.bytes_sent);
        require_equal(comm.statistics().operations, sent.operations);
        require(optimizer.passes_since_communication() > 0, "a local step keeps the count");
      } else {
        require_equal(optimizer.passes_since_communication(), 0);
      }
    }
  }
}

struct window {
  int passes;
  std::string_view sequence;
  int communications;
  int warnings;
};
constexpr window windows[] = {
    {1, "FSFS", 2, 0},       {2, "FFSFsFS", 2, 0},      {3, "FFFSFFFS", 2, 0},
    {4, "FFFFS", 1, 0},      {3, "FsFsFSFsFsFS", 2, 0}, {3, "FFsFSFsFFS", 2, 0},
    {3, "FFFFSFFFFS", 2, 1}, {3, "FFsFFS", 1, 1},       {3, "FsFsFSFs", 1, 0},
};

}  // namespace

TEST_CASE("windows communicate where they end, and warn once where they are overrun",
          "[optim][counting][thread]") {
  for (const auto& each : windows)
    for (const int kind : {0, 1, 2}) {  // by forwards; by backwards; adapt_then_combine
      INFO(each.sequence << " with J = " << each.passes << ", kind " << kind);
      captured_log log;
      run_threads(3, [&](communicator<thread_backend>& comm) {
        mlp net = make_mlp(comm.rank());
        const auto check = [&](auto& optimizer) {
          const auto before = comm.statistics().bytes_sent;
          play(optimizer, net, comm, each.sequence, kind != 1);
          require_equal(optimizer.round(), std::int64_t{each.communications});
          require_equal(comm.statistics().bytes_sent - before, each.communications * one_model);
        };
        SGD sgd(net->parameters(), 0.1);
        if (kind < 2) {
          adapt_with_combine optimizer(std::move(sgd), net, comm,
                                       {.num_steps_per_communication = each.passes});
          check(optimizer);
        } else {
          adapt_then_combine optimizer(std::move(sgd), net, comm,
                                       {.backward_passes_per_step = each.passes});
          check(optimizer);
        }
      });
      CHECK(log.count(kind == 0 ? "forwards" : "backwards") == 3 * each.warnings);
      CHECK(log.count("") == 3 * each.warnings);
      CHECK(log.count(kind == 2 ? "backward_passes_per_step is " + std::to_string(each.passes)
                                : "num_steps_per_communication is " +
                                      std::to_string(each.passes)) == 3 * each.warnings);
    }
}

RANKS_TEST("a miscount can be an exception", "[optim][counting]") {
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(
      SGD(net->parameters(), 0.1), net, comm,
      {.num_steps_per_communication = 2, .on_miscount = optim::miscount::raise});
  play(optimizer, net, comm, "FF", true);
  const auto text = require_throws<usage_error>([&] { play(optimizer, net, comm, "F", true); });
  require_contains(text, "num_steps_per_communication is 2");
  require_contains(text, "3 forwards");
  optimizer.step();
  require_equal(optimizer.round(), std::int64_t{1});
}

RANKS_TEST("forwards without gradients or in evaluation are not counted", "[optim][counting]") {
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.num_steps_per_communication = 2});
  const auto input = values({4, 5}, 1);
  play(optimizer, net, comm, "F", true);
  {
    const torch::NoGradGuard guard;
    const at::Tensor answer = optimizer.forward(net, input);
    require_same(answer, net->forward(input));
  }
  {
    const c10::InferenceMode guard;
    optimizer.forward(net, input);
  }
  net->eval();
  optimizer.forward(net, input);
  net->train();
  require_equal(optimizer.passes_since_communication(), 1);
  optimizer.forward(*net, input);  // a module instead of its holder
  require_equal(optimizer.passes_since_communication(), 2);
}

RANKS_TEST("adapt_then_combine counts backwards, not forwards", "[optim][counting]") {
  mlp net = make_mlp(comm.rank());
  adapt_then_combine optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.backward_passes_per_step = 2});
  const auto answer = optimizer.forward(net, values({4, 5}, 1));
  loss_of(answer, 1).backward({}, /*retain_graph=*/true);
  require_equal(optimizer.passes_since_communication(), 1);
  loss_of(answer, 2).backward();
  require_equal(optimizer.passes_since_communication(), 2);
  optimizer.step();
  require_equal(optimizer.round(), std::int64_t{1});
}

RANKS_TEST("the accumulated gradient is what adapts", "[optim][counting]") {
  for (const bool combine_first : {true, false}) {
    simulation all(comm.size(),
                   [](mlp& each) { return std::make_unique<SGD>(each->parameters(), 0.1); });
    mlp net = make_mlp(comm.rank());
    const auto three = [](mlp& each, int rank) {
      at::Tensor sum = torch::zeros({}, at::kDouble);
      for (const int step : {1, 2, 3}) sum = sum + loss_in_step(step)(each, rank);
      return sum;
    };
    all.step(combine_first ? sequence::combine_first : sequence::adapt_first, three);
    const auto backwards = [&] {
      for (const int step : {1, 2, 3}) loss_in_step(step)(net, comm.rank()).backward();
    };
    SGD sgd(net->parameters(), 0.1);
    if (combine_first) {
      adapt_with_combine optimizer(std::move(sgd), net, comm, {.num_steps_per_communication = 3});
      backwards();
      optimizer.step();
    } else {
      adapt_then_combine optimizer(std::move(sgd), net, comm, {.backward_passes_per_step = 3});
      backwards();
      optimizer.step();
    }
    require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-12);
  }
}

RANKS_TEST("an epoch that cuts a window resets or flushes it", "[optim][counting]") {
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(SGD(net->parameters(), 0.1), net, comm,
                               topology::fully_connected(comm.size()),
                               {.num_steps_per_communication = 3});
  play(optimizer, net, comm, "FsFs", true);
  require_equal(optimizer.passes_since_communication(), 2);
  optimizer.reset_passes();
  require_equal(optimizer.passes_since_communication(), 0);
  require_equal(optimizer.round(), std::int64_t{0});
  play(optimizer, net, comm, "FsFsFS", true);
  play(optimizer, net, comm, "Fs", true);
  optimizer.flush();
  require_equal(optimizer.round(), std::int64_t{2});
  require_equal(optimizer.passes_since_communication(), 0);
  require_close(allreduce(comm, flatten(*net)), flatten(*net), 1e-12);  // consensus
  optimizer.flush();
  require_equal(optimizer.round(), std::int64_t{3});
}

RANKS_TEST("gradients set by hand make every step count", "[optim][counting]") {
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(SGD(net->parameters(), 0.1), net, comm,
                               {.num_steps_per_communication = 2});
  for (int step = 0; step < 4; ++step) {
    for (auto& each : net->parameters()) each.mutable_grad() = torch::ones_like(each);
    optimizer.step();
  }
  require_equal(optimizer.round(), std::int64_t{2});
}

RANKS_TEST("what communicates can change between steps", "[optim][communication]") {
  const int n = comm.size();
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(SGD(net->parameters(), 0.0), net, comm);
  const auto bytes_of_step = [&] {
    const auto before = comm.statistics().bytes_sent;
    play(optimizer, net, comm, "FS", false);
    return comm.statistics().bytes_sent - before;
  };
  optimizer.communication(communication_type::none);
  require_equal(bytes_of_step(), std::int64_t{0});
  require_same_parameters(*net, *make_mlp(comm.rank()));
  require_equal(optimizer.round(), std::int64_t{0});

  optimizer.communication(communication_type::neighbor_allreduce);
  require_equal(bytes_of_step(), n == 1 ? 0 : one_model);
  require_equal(optimizer.round(), std::int64_t{1});

  optimizer.communication(communication_type::allreduce);
  require(optimizer.communication() == communication_type::allreduce);
  require_near(static_cast<double>(bytes_of_step()), 2.0 * (n - 1) / n * one_model, 8);
  require_equal(optimizer.round(), std::int64_t{1});
  at::Tensor mean = torch::zeros_like(flatten(*net));
  for (int rank = 0; rank < n; ++rank) mean += flatten(*make_mlp(rank)) / n;
  require_close(flatten(*net), mean, 1e-12);
}

TEST_CASE("machines average as one, hierarchically", "[optim][communication][thread]") {
  run_threads(4,
              [](communicator<thread_backend>& comm) {
                mlp net = make_mlp(comm.rank());
                adapt_then_combine optimizer(
                    SGD(net->parameters(), 0.0), net, comm,
                    {.communication = communication_type::hierarchical_neighbor_allreduce});
                play(optimizer, net, comm, "FS", false);  // two machines of two ranks
                at::Tensor mean = torch::zeros_like(flatten(*net));
                for (int rank = 0; rank < 4; ++rank) mean += flatten(*make_mlp(rank)) / 4;
                require_close(flatten(*net), mean, 1e-12);
                require_equal(optimizer.round(), std::int64_t{1});
                const auto text = require_throws<usage_error>(
                    [&] { optimizer.communication(communication_type::neighbor_allreduce); });
                require_contains(text, "2 ranks");
              },
              {.nodes_per_machine = 2});
}

RANKS_TEST("one communication can have other neighbours", "[optim][communication]") {
  const int n = comm.size();
  if (n < 2) return;
  mlp net = make_mlp(comm.rank());
  adapt_with_combine optimizer(SGD(net->parameters(), 0.0), net, comm,
                               topology::ring(n, topology::ring_style::right));
  const int left = (comm.rank() + n - 1) % n, right = (comm.rank() + 1) % n;
  const auto text = require_throws<usage_error>([&] {
    optimizer.next(neighborhood{.sources = {{n, 0.5}}});
  });
  require_contains(text, "adapt_with_combine");
  optimizer.next({.self_weight = 0.75, .sources = {{right, 0.25}}, .destinations = {{left, 1.0}}});
  play(optimizer, net, comm, "FS", true);
  auto expected = 0.75 * flatten(*make_mlp(comm.rank())) + 0.25 * flatten(*make_mlp(right));
  require_close(flatten(*net), expected, 1e-12);
  require_equal(optimizer.round(), std::int64_t{1});  // other ranks may have followed the schedule
  play(optimizer, net, comm, "FS", true);
  const auto of_left = 0.75 * flatten(*make_mlp(left)) + 0.25 * flatten(*make_mlp(comm.rank()));
  require_close(flatten(*net), 0.5 * expected + 0.5 * of_left, 1e-12);
}

RANKS_TEST("wrong options, topologies and parameters are refused", "[optim][refusal]") {
  const int n = comm.size();
  mlp net = make_mlp(0);
  const auto sgd = [&] { return SGD(net->parameters(), 0.1); };
  require_contains(require_throws<usage_error>([&] {
                     adapt_with_combine(sgd(), net, comm, {.num_steps_per_communication = 0});
                   }),
                   "adapt_with_combine: num_steps_per_communication must be at least 1, got 0");
  require_contains(require_throws<usage_error>([&] {
                     adapt_then_combine(sgd(), net, comm, {.backward_passes_per_step = -2});
                   }),
                   "adapt_then_combine: backward_passes_per_step must be at least 1, got -2");
  require_contains(require_throws<usage_error>(
                       [&] { adapt_then_combine(sgd(), net, comm, {.bucket_bytes = 0}); }),
                   "bucket_bytes");
  require_contains(require_throws<usage_error>(
                       [&] { adapt_with_combine(sgd(), net, comm, topology::ring(n + 1)); }),
                   concat("the topology has ", n + 1, " ranks, the communicator has ", n));
  if (n == 1) return;
  const auto refused = [&](mlp& own) {
    return require_throws<mismatch_error>(
        [&] { adapt_with_combine(SGD(own->parameters(), 0.1), own, comm); });
  };
  mlp other(5, comm.rank() == n - 1 ? 17 : 16);
  const auto shapes = refused(other);
  require_contains(shapes, "first.weight");
  require_contains(shapes, "[17, 5]");
  require_contains(shapes, concat("rank ", n - 1));
  mlp types = make_mlp(0);
  if (comm.rank() == 1) types->last->to(at::kFloat);
  require_contains(refused(types), "last.weight");
  mlp frozen = make_mlp(0);
  if (comm.rank() == 0) frozen->second->bias.requires_grad_(false);
  require_contains(refused(frozen), "second.bias");
  const auto fewer = require_throws<mismatch_error>([&] {
    auto all = net->parameters();
    if (comm.rank() == 0) all.pop_back();
    adapt_with_combine(SGD(all, 0.1), net, comm);
  });
  require_contains(fewer, "last.bias");
  adapt_with_combine works(sgd(), net, comm);  // nothing is left behind
  play(works, net, comm, "FS", true);
}
