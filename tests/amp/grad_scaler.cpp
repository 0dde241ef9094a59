// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/amp.hpp>
#include <bluefog/collective/broadcast_object.hpp>
#include <bluefog/optim.hpp>
#include <bluefog/optim/gradient_tracking.hpp>
#include <bluefog/topology/fully_connected.hpp>

#include "optim/support.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;
using amp::grad_scaler;
using torch::optim::SGD;

/// f(w) = |w - x|^2 / 2, so the gradient is w - x.
struct distance_impl : torch::nn::Module {
  distance_impl() { w = register_parameter("w", torch::zeros({3}, at::kDouble)); }
  at::Tensor forward(const at::Tensor& x) { return (w - x).square().sum() / 2; }
  at::Tensor w;
};
TORCH_MODULE_IMPL(distance, distance_impl);

at::Tensor target(int rank, int pass) {
  return values({3}, 10 * pass + rank);
}

enum class method { reduce, combine_first, adapt_first };
constexpr double rate = 0.25;

/// What all ranks together ought to hold, computed from the definitions.
struct crowd {
  method how;
  std::vector<at::Tensor> w;

  crowd(method kind, int ranks) : how(kind) {
    for (int rank = 0; rank < ranks; ++rank) w.push_back(torch::zeros({3}, at::kDouble));
  }
  [[nodiscard]] at::Tensor gradient(int rank, int pass) const {
    return w[static_cast<std::size_t>(rank)] - target(rank, pass);
  }
  [[nodiscard]] std::vector<at::Tensor> gradients(int pass) const {
    std::vector<at::Tensor> all;
    for (std::size_t rank = 0; rank < w.size(); ++rank)
      all.push_back(gradient(static_cast<int>(rank), pass));
    return all;
  }
  void mix() {
    const at::Tensor mean = torch::stack(w).mean(0);
    for (auto& each : w) each = mean.clone();
  }
  /// \param skipped  by rank.
  void adapt(const std::vector<at::Tensor>& g, const std::vector<bool>& skipped) {
    for (std::size_t rank = 0; rank < w.size(); ++rank)
      if (!skipped[rank]) w[rank] = w[rank] - rate * g[rank];
  }
  /// A step that communicates, left out by all ranks or by none.
  void step(std::vector<at::Tensor> g, bool skipped) {
    if (how == method::reduce) {
      const at::Tensor mean = torch::stack(g).mean(0);
      for (auto& each : g) each = mean;
    }
    if (how == method::combine_first) mix();
    adapt(g, std::vector<bool>(w.size(), skipped));
    if (how == method::adapt_first) mix();
  }
};

/// Calls `act(optimizer, net, how)` for each wrapper around plain SGD, which communicates after
/// `passes` passes and averages with everybody.
template <class Comm, class Act>
void with_each_wrapper(Comm& comm, int passes, const Act& act) {
  const topology::fully_connected everybody(comm.size());
  {
    distance net;
    optim::gradient_allreduce optimizer(SGD(net->parameters(), rate), net, comm,
                                        {.backward_passes_per_step = passes});
    act(optimizer, net, method::reduce);
  }
  {
    distance net;
    optim::adapt_with_combine optimizer(SGD(net->parameters(), rate), net, comm, everybody,
                                        {.num_steps_per_communication = passes});
    act(optimizer, net, method::combine_first);
  }
  {
    distance net;
    optim::adapt_then_combine optimizer(SGD(net->parameters(), rate), net, comm, everybody,
                                        {.backward_passes_per_step = passes});
    act(optimizer, net, method::adapt_first);
  }
}

constexpr double infinity = std::numeric_limits<double>::infinity();

template <class Optimizer>
void backward(Optimizer& optimizer, distance& net, grad_scaler& scaler, int rank, int pass,
              bool overflow) {
  const at::Tensor loss = optimizer.forward(net, target(rank, pass));
  scaler.scale(overflow ? loss * infinity : loss).backward();
}

struct table_row {
  bool overflow;
  double scale;
  std::int64_t tracker;
};

// What torch.amp.GradScaler(device="cpu", init_scale=65536., growth_factor=2., backoff_factor=.5,
// growth_interval=3) of PyTorch 2.11 had after each update().
const std::vector<table_row> powers_of_two = {
    {false, 65536, 1},  {false, 65536, 2},  {false, 131072, 0}, {false, 131072, 1},
    {true, 65536, 0},   {false, 65536, 1},  {false, 65536, 2},  {true, 32768, 0},
    {false, 32768, 1},  {false, 32768, 2},  {false, 65536, 0},  {false, 65536, 1},
    {false, 65536, 2},  {true, 32768, 0},   {true, 16384, 0},   {false, 16384, 1},
    {false, 16384, 2},  {false, 32768, 0},  {false, 32768, 1},  {false, 32768, 2},
    {false, 65536, 0},  {false, 65536, 1},  {false, 65536, 2},  {false, 131072, 0},
    {false, 131072, 1}, {false, 131072, 2}, {true, 65536, 0},   {false, 65536, 1},
    {false, 65536, 2},  {false, 131072, 0}};

// The same with init_scale=1000., growth_factor=1.7, backoff_factor=.3, growth_interval=2.
const std::vector<table_row> odd_factors = {{false, 1000, 1},
                                            {false, 1700, 0},
                                            {false, 1700, 1},
                                            {false, 2890, 0},
                                            {true, 867, 0},
                                            {false, 867, 1},
                                            {false, 1473.9000244140625, 0},
                                            {true, 442.1700134277344, 0},
                                            {false, 442.1700134277344, 1},
                                            {false, 751.6890258789062, 0},
                                            {false, 751.6890258789062, 1},
                                            {false, 1277.871337890625, 0},
                                            {false, 1277.871337890625, 1},
                                            {true, 383.36138916015625, 0},
                                            {true, 115.00841522216797, 0},
                                            {false, 115.00841522216797, 1},
                                            {false, 195.51431274414062, 0},
                                            {false, 195.51431274414062, 1},
                                            {false, 332.37432861328125, 0},
                                            {false, 332.37432861328125, 1},
                                            {false, 565.036376953125, 0},
                                            {false, 565.036376953125, 1},
                                            {false, 960.5618286132812, 0},
                                            {false, 960.5618286132812, 1}};

const amp::grad_scaler_options every_third{.growth_interval = 3};

}  // namespace

TEST_CASE("grad_scaler has the scales and trackers of Python's", "[amp][grad_scaler]") {
  const auto follow = [](const std::vector<table_row>& table,
                         const amp::grad_scaler_options& options) {
    at::Tensor w = torch::ones({2}, at::requires_grad());
    SGD optimizer({w}, 0.0);
    grad_scaler scaler(options);
    for (const auto& row : table) {
      optimizer.zero_grad();
      scaler.scale((w * (row.overflow ? infinity : 1)).sum()).backward();
      CHECK(scaler.step(optimizer) == !row.overflow);
      scaler.update();
      CHECK(scaler.get_scale() == row.scale);
      CHECK(scaler.get_growth_tracker() == row.tracker);
    }
  };
  follow(powers_of_two, every_third);
  follow(odd_factors,
         {.init_scale = 1000, .growth_factor = 1.7, .backoff_factor = 0.3, .growth_interval = 2});
}

TEST_CASE("a scale does not grow out of float32", "[amp][grad_scaler]") {
  at::Tensor w = torch::ones({2}, at::requires_grad());
  SGD optimizer({w}, 0.0);
  grad_scaler scaler({.init_scale = std::ldexp(1, 126), .growth_interval = 1});
  for (int step = 0; step < 3; ++step) {
    static_cast<void>(scaler.scale(w.sum()));
    w.mutable_grad() = torch::ones({2});
    scaler.step(optimizer);
    scaler.update();
    CHECK(scaler.get_scale() == std::ldexp(1, 127));
    CHECK(scaler.get_growth_tracker() == 0);
  }
}

TEST_CASE("what is called in the wrong order is refused", "[amp][grad_scaler]") {
  at::Tensor w = torch::ones({2}, at::requires_grad());
  SGD optimizer({w}, 0.5);
  grad_scaler scaler;
  CHECK_THROWS_AS(scaler.step(optimizer), usage_error);
  CHECK_THROWS_AS(scaler.unscale_(optimizer), usage_error);
  CHECK_THROWS_AS(scaler.update(), usage_error);
  scaler.scale(w.sum()).backward();
  CHECK_THROWS_AS(scaler.update(), usage_error);
  CHECK_THROWS_AS(amp::clip_grad_norm_(optimizer, scaler, 1), usage_error);
  scaler.unscale_(optimizer);
  CHECK(w.grad().equal(torch::ones({2})));
  CHECK_THROWS_AS(scaler.unscale_(optimizer), usage_error);
  CHECK(w.grad().equal(torch::ones({2})));
  CHECK(amp::clip_grad_norm_(optimizer, scaler, 1) == Approx(std::sqrt(2)));
  CHECK(scaler.step(optimizer));
  CHECK_THROWS_AS(scaler.step(optimizer), usage_error);
  CHECK_THROWS_AS(scaler.unscale_(optimizer), usage_error);
  CHECK_THROWS_AS(amp::clip_grad_norm_(optimizer, scaler, 1), usage_error);
  scaler.update();
  CHECK_THROWS_AS(scaler.update(), usage_error);
  scaler.update(1024);
  CHECK(scaler.get_scale() == 1024);
  CHECK(scaler.get_growth_tracker() == 1);

  CHECK_THROWS_AS(grad_scaler({.growth_factor = 1}), usage_error);
  CHECK_THROWS_AS(grad_scaler({.backoff_factor = 1}), usage_error);
  constexpr double beyond_float = 1e300, below_float = 1e-60;
  for (const double scale : {0.0, -1.0, infinity, beyond_float, below_float}) {
    CHECK_THROWS_AS(grad_scaler({.init_scale = scale}), usage_error);
    CHECK_THROWS_AS(scaler.update(scale), usage_error);
    auto state = scaler.state_dict();
    state.scale = scale;
    CHECK_THROWS_AS(scaler.load_state_dict(state), usage_error);
  }
  CHECK(scaler.get_scale() == 1024);
}

TEST_CASE("outputs in 16 bits are scaled in float32, where they do not overflow",
          "[amp][grad_scaler]") {
  for (const auto type : {at::kHalf, at::kBFloat16})
    for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{}, {3}}) {
      const at::Tensor w = torch::full(shape, 4, type).set_requires_grad(true);
      grad_scaler scaler;
      const at::Tensor scaled = scaler.scale(w);
      CHECK(scaled.scalar_type() == at::kFloat);
      CHECK(scaled.equal(torch::full(shape, 4 * 65536.0)));
    }
}

RANKS_TEST("a wrapper may move between unscale_ and step", "[amp][grad_scaler]") {
  at::Tensor w = torch::zeros({2}, at::kDouble).set_requires_grad(true);
  torch::nn::Module none;
  grad_scaler scaler;
  optim::gradient_allreduce before(SGD({w}, 0.5), none, comm);
  scaler.scale(w.sum()).backward();
  scaler.unscale_(before);
  auto after = std::move(before);
  require(scaler.unscaled(after));
  require(scaler.step(after));
  require_same(w.detach(), torch::full({2}, -0.5, at::kDouble));
}

TEST_CASE("one update serves several optimizers, of which one has overflowed",
          "[amp][grad_scaler]") {
  at::Tensor a = torch::ones({2}, at::requires_grad());
  at::Tensor b = torch::ones({2}, at::requires_grad());
  SGD first({a}, 0.5), second({b}, 0.5);
  grad_scaler scaler(every_third);
  const auto losses = scaler.scale(std::vector<at::Tensor>{a.sum(), (b * infinity).sum()});
  torch::autograd::backward(losses, {});
  CHECK(scaler.step(first));
  CHECK_FALSE(scaler.step(second));
  scaler.update();
  CHECK(a.detach().equal(torch::full({2}, 0.5)));
  CHECK(b.detach().equal(torch::ones({2})));
  CHECK(scaler.get_scale() == 32768);
}

TEST_CASE("gradients are unscaled in one pass, whatever their dtypes and layouts",
          "[amp][grad_scaler]") {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    at::Tensor plain = torch::ones({5}).to(type) * 8;
    at::Tensor turned = (torch::ones({3, 4}).to(type) * 4).t();
    at::Tensor sparse = torch::sparse_coo_tensor(torch::zeros({1, 2}, at::kLong),
                                                 torch::full({2}, 2.0).to(type), {4});
    CHECK(amp::unscale_and_check({plain, turned, torch::empty({0}).to(type), sparse}, 0.5));
    CHECK(plain.equal(torch::full({5}, 4).to(type)));
    CHECK(turned.equal(torch::full({4, 3}, 2).to(type)));
    CHECK(sparse._values().equal(torch::ones({2}).to(type)));
    for (const double bad : {infinity, -infinity, std::nan("")}) {
      at::Tensor broken = torch::ones({1000}).to(type);
      broken[997] = bad;
      CHECK_FALSE(amp::unscale_and_check({plain, broken}, 1));
    }
  }
  CHECK(amp::unscale_and_check({}, 1));
  at::Tensor half = torch::ones({2}, at::TensorOptions(at::kHalf).requires_grad(true));
  SGD optimizer({half}, 0.5);
  grad_scaler scaler;
  scaler.scale(half.sum()).backward();
  CHECK_THROWS_AS(scaler.step(optimizer), usage_error);
}

TEST_CASE("a scaler saves and loads its state", "[amp][grad_scaler]") {
  const amp::grad_scaler_state state{1234.5, 1.7, 0.3, 7, 5};
  grad_scaler scaler;
  scaler.load_state_dict(state);
  CHECK(scaler.state_dict() == state);
  std::stringstream stream;
  torch::save(scaler, stream);
  grad_scaler other;
  torch::load(other, stream);
  CHECK(other.state_dict() == state);
  CHECK(other.get_scale() == 1234.5);

  torch::serialize::OutputArchive older;  // which does not know of overflows
  for (const auto* const key : {"scale", "growth_factor", "growth_interval", "growth_tracker"})
    older.write(key, torch::full({}, 2.0), /*is_buffer=*/true);
  older.write("backoff_factor", torch::full({}, 0.25), /*is_buffer=*/true);
  std::stringstream file;
  older.save_to(file);
  torch::load(other, file);
  CHECK(other.state_dict() == amp::grad_scaler_state{2, 2, 0.25, 2, 2, false});
}

TEST_CASE("a parameter that is listed twice is unscaled once, and counts once in the norm",
          "[amp][grad_scaler][clipping]") {
  at::Tensor tied = torch::zeros({1}, at::requires_grad());
  at::Tensor other = torch::zeros({1}, at::requires_grad());
  SGD optimizer({tied, other, tied}, 0.5);
  grad_scaler scaler({.init_scale = 8});
  scaler.scale((3 * tied + 4 * other).sum()).backward();
  scaler.unscale_(optimizer);
  CHECK(tied.grad().item<double>() == 3);
  CHECK(other.grad().item<double>() == 4);
  CHECK(amp::clip_grad_norm_(optimizer, scaler, 1) == Approx(5));
  CHECK(tied.grad().item<double>() == Approx(0.6));
  CHECK(other.grad().item<double>() == Approx(0.8));
}

TEST_CASE("scale_loss unscales after the last backward", "[amp][scale_loss]") {
  at::Tensor w = torch::ones({2}, at::requires_grad());
  SGD optimizer({w}, 0.5);
  grad_scaler scaler({.init_scale = 8});
  const auto run = [](const at::Tensor& scaled) { scaled.backward(); };
  amp::scale_loss(w.sum(), optimizer, scaler, {.unscale = amp::unscale::later}, run);
  CHECK(w.grad().equal(torch::full({2}, 8)));
  amp::scale_loss(w.sum() * 2, optimizer, scaler, run);
  CHECK(w.grad().equal(torch::full({2}, 3)));
  CHECK_THROWS_AS(amp::scale_loss(w.sum(), optimizer, scaler, run), usage_error);
}

RANKS_TEST("an overflow on one rank is left out by all ranks, which still communicate",
           "[amp][grad_scaler]") {
  with_each_wrapper(comm, 1, [&](auto& optimizer, distance& net, method how) {
    grad_scaler scaler(every_third);
    crowd all(how, comm.size());
    int pass = 0;
    for (const auto& row : powers_of_two) {
      optimizer.zero_grad();
      backward(optimizer, net, scaler, comm.rank(), pass,
               row.overflow && comm.rank() == pass % comm.size());
      require_equal(scaler.step(optimizer), !row.overflow);
      scaler.update();
      require_equal(scaler.get_scale(), row.scale);
      require_equal(scaler.get_growth_tracker(), row.tracker);
      all.step(all.gradients(pass), row.overflow);
      require_close(net->w, all.w[static_cast<std::size_t>(comm.rank())], 1e-12);
      require_equal(optimizer.passes_since_communication(), 0);
      ++pass;
    }
  });
}

RANKS_TEST("training with a scale is bit for bit training without", "[amp][grad_scaler]") {
  with_each_wrapper(comm, 2, [&](auto& optimizer, distance& net, method how) {
    const auto train = [&](auto& stepped, distance& model, grad_scaler& scaler) {
      for (int step = 0; step < 4; ++step) {
        stepped.zero_grad();
        backward(stepped, model, scaler, comm.rank(), 2 * step, false);
        backward(stepped, model, scaler, comm.rank(), 2 * step + 1, false);
        if (step % 2 == 0) scaler.unscale_(stepped);
        if (step == 2) amp::clip_grad_norm_(stepped, scaler, 0.5);
        require_equal(scaler.step(stepped), true);
        scaler.update();
      }
    };
    grad_scaler scaler({.growth_interval = 2});
    train(optimizer, net, scaler);
    require_equal(scaler.get_scale(), 4 * 65536.0);
    const at::Tensor scaled = net->w.detach().clone();
    grad_scaler off({.enabled = false});
    require_equal(off.get_scale(), 1.0);
    with_each_wrapper(comm, 2, [&](auto& plain, distance& model, method other) {
      if (other != how) return;
      train(plain, model, off);
      require_same(scaled, model->w);
    });
  });
}

RANKS_TEST("an infinity in the first of two passes drops the window, and the next is right",
           "[amp][grad_scaler]") {
  with_each_wrapper(comm, 2, [&](auto& optimizer, distance& net, method how) {
    grad_scaler scaler;
    crowd all(how, comm.size());
    for (int window = 0; window < 3; ++window) {
      optimizer.zero_grad();
      for (const int pass : {2 * window, 2 * window + 1})
        backward(optimizer, net, scaler, comm.rank(), pass,
                 pass == 2 && comm.rank() == comm.size() - 1);
      require_equal(scaler.step(optimizer), window != 1);
      scaler.update();
      require_equal(scaler.get_scale(), window < 1 ? 65536.0 : 32768.0);
      auto g = all.gradients(2 * window);
      const auto more = all.gradients(2 * window + 1);
      const double divisor = how == method::reduce ? 2 : 1;  // one batch of two
      for (std::size_t rank = 0; rank < g.size(); ++rank)
        g[rank] = (g[rank] + more[rank]) / divisor;
      all.step(std::move(g), window == 1);
      require_close(net->w, all.w[static_cast<std::size_t>(comm.rank())], 1e-12);
    }
  });
}

RANKS_TEST("in local steps each rank decides for itself, and the scale is one all the same",
           "[amp][grad_scaler]") {
  if (comm.size() == 1) return;  // there every step decides
  with_each_wrapper(comm, 3, [&](auto& optimizer, distance& net, method how) {
    grad_scaler scaler(every_third);
    crowd all(how, comm.size());
    const auto ranks = static_cast<std::size_t>(comm.size());
    double expected = 65536;
    for (int pass = 0; pass < 15; ++pass) {
      // Window 1: rank 0 overflows in a local step. Window 2: the last rank does in the last step.
      const bool local = pass % 3 != 2;
      const auto overflows = [&](std::size_t rank) {
        return (pass == 3 && rank == 0) || (pass == 8 && rank == ranks - 1);
      };
      optimizer.zero_grad();
      const auto bytes = comm.statistics().bytes_sent;
      backward(optimizer, net, scaler, comm.rank(), pass,
               overflows(static_cast<std::size_t>(comm.rank())));
      const bool stepped = scaler.step(optimizer);
      if (local) require_equal(comm.statistics().bytes_sent, bytes);
      scaler.update();
      if (pass == 5 || pass == 8) expected /= 2;
      require_equal(scaler.get_scale(), expected);

      std::vector<bool> skipped(ranks);
      for (std::size_t rank = 0; rank < ranks; ++rank)
        skipped[rank] = local ? overflows(rank) : pass == 8;
      require_equal(stepped, !skipped[static_cast<std::size_t>(comm.rank())]);
      const auto g = all.gradients(pass);
      if (!local && how == method::combine_first) all.mix();
      all.adapt(g, skipped);
      if (!local && how != method::combine_first)
        all.mix();  // reduce: parameters, after local steps
      require_close(net->w, all.w[static_cast<std::size_t>(comm.rank())], 1e-12);
    }
    require_equal(scaler.get_growth_tracker(), std::int64_t{2});  // windows 3 and 4
  });
}

RANKS_TEST("what agreement costs: nothing where gradients are reduced, else one small number",
           "[amp][grad_scaler]") {
  with_each_wrapper(comm, 1, [&](auto& optimizer, distance& net, method how) {
    const auto bytes_of_step = [&](grad_scaler& scaler) {
      optimizer.zero_grad();
      const auto before = comm.statistics().bytes_sent;
      backward(optimizer, net, scaler, comm.rank(), 0, false);
      scaler.step(optimizer);
      scaler.update();
      return comm.statistics().bytes_sent - before;
    };
    grad_scaler off({.enabled = false}), on, alone({.agreement = amp::agreement::local});
    const auto plain = bytes_of_step(off);
    bytes_of_step(on);  // compares the scales, once
    if (how == method::reduce)
      require_equal(bytes_of_step(on), plain);
    else
      require(bytes_of_step(on) - plain <= 8);  // 2(n-1)/n of four bytes
    require_equal(bytes_of_step(alone), plain);
  });
}

RANKS_TEST("with agreement::local a rank that overflows leaves its step out alone",
           "[amp][grad_scaler]") {
  with_each_wrapper(comm, 1, [&](auto& optimizer, distance& net, method how) {
    grad_scaler scaler({.agreement = amp::agreement::local});
    crowd all(how, comm.size());
    const bool everybody = how == method::reduce;  // the reduced gradients are those of all ranks
    for (int pass = 0; pass < 3; ++pass) {
      optimizer.zero_grad();
      backward(optimizer, net, scaler, comm.rank(), pass, pass == 1 && comm.rank() == 0);
      scaler.step(optimizer);
      scaler.update();
      const auto g = all.gradients(pass);
      if (everybody) {
        all.step(g, pass == 1);
      } else {
        std::vector<bool> skipped(all.w.size());
        skipped[0] = pass == 1;
        if (how == method::combine_first) all.mix();
        all.adapt(g, skipped);
        if (how == method::adapt_first) all.mix();
      }
      require_close(net->w, all.w[static_cast<std::size_t>(comm.rank())], 1e-12);
    }
    require_equal(scaler.get_scale(), everybody || comm.rank() == 0 ? 32768.0 : 65536.0);
  });
}

RANKS_TEST("ranks with different scales learn of it, all of them, before anything is stepped",
           "[amp][grad_scaler]") {
  if (comm.size() == 1) return;
  with_each_wrapper(comm, 1, [&](auto& optimizer, distance& net, method) {
    grad_scaler scaler({.init_scale = comm.rank() == comm.size() - 1 ? 1024.0 : 65536.0});
    backward(optimizer, net, scaler, comm.rank(), 0, false);
    const auto text = require_throws<mismatch_error>([&] { scaler.step(optimizer); });
    require_contains(text, "1024");
    require_contains(text, "65536");
    require_same(net->w.detach(), torch::zeros({3}, at::kDouble));
  });
  with_each_wrapper(comm, 1, [&](auto& optimizer, distance& net, method) {
    grad_scaler scaler;
    backward(optimizer, net, scaler, comm.rank(), 0, false);
    scaler.step(optimizer);
    scaler.update();
    scaler.load_state_dict({.scale = comm.rank() == 0 ? 2.0 : 4.0});
    optimizer.zero_grad();
    backward(optimizer, net, scaler, comm.rank(), 1, false);
    require_throws<mismatch_error>([&] { scaler.step(optimizer); });
  });
}

RANKS_TEST("ranks with different options learn of it by name, with both values",
           "[amp][grad_scaler]") {
  if (comm.size() == 1) return;
  struct difference {
    amp::grad_scaler_options odd;
    std::string_view text;
  };
  const std::string where = concat(" on rank ", comm.size() - 1);
  for (const difference& each : {
           difference{{.init_scale = 1024}, "the scale is 65536 on rank 0 and 1024"},
           difference{{.growth_factor = 1.5}, "growth_factor is 2 on rank 0 and 1.5"},
           difference{{.backoff_factor = 0.25}, "backoff_factor is 0.5 on rank 0 and 0.25"},
           difference{{.growth_interval = 7}, "growth_interval is 2000 on rank 0 and 7"},
           difference{{.enabled = false}, "enabled is 1 on rank 0 and 0"},
           difference{{.agreement = amp::agreement::local}, "agreement is 0 on rank 0 and 1"},
       })
    with_each_wrapper(comm, 1, [&](auto& optimizer, distance& net, method how) {
      if (how == method::reduce && each.odd.agreement == amp::agreement::local)
        return;  // no matter
      grad_scaler scaler(comm.rank() == comm.size() - 1 ? each.odd : amp::grad_scaler_options());
      backward(optimizer, net, scaler, comm.rank(), 0, false);
      const auto text = require_throws<mismatch_error>([&] { scaler.step(optimizer); });
      require_contains(text, concat("grad_scaler: ranks differ: ", each.text, where));
      require_same(net->w.detach(), torch::zeros({3}, at::kDouble));
    });
}

RANKS_TEST("gradients are clipped after they are reduced and unscaled", "[amp][clipping]") {
  // The mean over n ranks of (3, 0), (0, 4) and zeros has norm 5 / n.
  torch::nn::Linear net(torch::nn::LinearOptions(2, 1).bias(false));
  fill(*net, 1);
  optim::gradient_allreduce reducing(SGD(net->parameters(), 1), net, comm);
  torch::optim::Optimizer& optimizer = reducing;  // found to communicate all the same
  const at::Tensor before = net->weight.detach().clone();
  const at::Tensor x = comm.rank() == 0   ? torch::tensor({3.0F, 0.0F})
                       : comm.rank() == 1 ? torch::tensor({0.0F, 4.0F})
                                          : torch::zeros({2});
  grad_scaler scaler;
  captured_log log;
  scaler.scale(net(x).sum()).backward();
  require_throws<usage_error>([&] { amp::clip_grad_norm_(optimizer, scaler, 0.1); });
  scaler.unscale_(optimizer);
  const double norm = amp::clip_grad_norm_(optimizer, scaler, 0.1);
  scaler.step(optimizer);
  scaler.update();
  require_near(norm, comm.size() == 1 ? 3 : 5.0 / comm.size(), 1e-6);
  const at::Tensor direction =
      comm.size() == 1 ? torch::tensor({{0.1F, 0.0F}}) : torch::tensor({{0.06F, 0.08F}});
  require_close(before - net->weight.detach(), direction, 1e-6);
  require_equal(log.count("skip_synchronize"), 0);
}

RANKS_TEST("scale_loss leaves the gradients of all ranks, of the optimizer that it is given",
           "[amp][scale_loss]") {
  distance a, b;
  optim::gradient_allreduce first(SGD(a->parameters(), rate), a, comm,
                                  {.backward_passes_per_step = 2});
  optim::gradient_allreduce second(SGD(b->parameters(), rate), b, comm);
  grad_scaler scaler;
  const auto run = [](const at::Tensor& scaled) { scaled.backward(); };
  amp::scale_loss(a(target(comm.rank(), 1)), first, scaler, {.unscale = amp::unscale::later}, run);
  amp::scale_loss(a(target(comm.rank(), 2)), first, scaler, run);
  amp::scale_loss(b(target(comm.rank(), 3)), second, scaler, {.unscale = amp::unscale::later}, run);
  at::Tensor mean = torch::zeros({3}, at::kDouble);  // the gradient at 0, of one batch of two
  for (int rank = 0; rank < comm.size(); ++rank)
    for (const int pass : {1, 2}) mean -= target(rank, pass) / 2.0 / comm.size();
  require_close(a->w.grad(), mean, 1e-12);
  require(scaler.unscaled(first) && !scaler.unscaled(second), "the other one is not touched");
  require(scaler.step(first) && scaler.step(second));
  scaler.update();
  require_close(a->w, -rate * mean, 1e-12);
}

RANKS_TEST("two optimizers that communicate share a scaler", "[amp][grad_scaler]") {
  distance a, b;
  optim::gradient_allreduce first(SGD(a->parameters(), rate), a, comm);
  optim::adapt_with_combine second(SGD(b->parameters(), rate), b, comm,
                                   topology::fully_connected(comm.size()),
                                   {.num_steps_per_communication = 2});
  grad_scaler scaler(every_third);
  const auto step = [&](int pass, bool overflow) {
    first.zero_grad();
    second.zero_grad();
    backward(first, a, scaler, comm.rank(), pass, false);
    backward(second, b, scaler, comm.rank(), pass, overflow);
    const bool stepped = scaler.step(first);
    scaler.step(second);
    scaler.update();
    return stepped;
  };
  // The second's first step is local: what is found there counts when it communicates next.
  require_equal(step(0, comm.size() > 1 && comm.rank() == 0), true);
  require_equal(scaler.get_growth_tracker(), std::int64_t{1});
  require_equal(step(1, false), true);
  require_equal(scaler.get_scale(), comm.size() == 1 ? 65536.0 : 32768.0);
}

RANKS_TEST("a run that is saved and resumed goes on bit for bit", "[amp][grad_scaler]") {
  const auto train = [&](auto& optimizer, distance& net, grad_scaler& scaler, int begin, int end) {
    for (int pass = begin; pass < end; ++pass) {
      optimizer.zero_grad();
      backward(optimizer, net, scaler, comm.rank(), pass, pass == 2 && comm.rank() == 0);
      scaler.step(optimizer);
      scaler.update();
    }
  };
  const auto wrap = [&](distance& net, double lr) {
    return optim::adapt_then_combine(torch::optim::Adam(net->parameters(), lr), net, comm);
  };
  distance net, again;
  auto optimizer = wrap(net, rate);
  grad_scaler scaler(every_third), resumed;
  train(optimizer, net, scaler, 0, 5);
  std::stringstream model, state, scale;
  torch::save(net, model);
  torch::save(optimizer, state);
  torch::save(scaler, scale);
  train(optimizer, net, scaler, 5, 10);

  auto other = wrap(again, 1);
  torch::load(again, model);
  torch::load(other, state);
  torch::load(resumed, scale);
  train(other, again, resumed, 5, 10);
  require_same(again->w, net->w);
  require(resumed.state_dict() == scaler.state_dict(), "the scaler's state is not the same");
}

RANKS_TEST("an overflow that no other rank knows of yet is saved, too", "[amp][grad_scaler]") {
  if (comm.size() == 1) return;  // there every step decides
  distance net;
  optim::adapt_with_combine optimizer(SGD(net->parameters(), rate), net, comm,
                                      {.num_steps_per_communication = 2});
  grad_scaler scaler(every_third), resumed;
  backward(optimizer, net, scaler, comm.rank(), 0, comm.rank() == 0);
  require_equal(scaler.step(optimizer), comm.rank() != 0);  // local
  scaler.update();
  require_equal(scaler.state_dict().overflowed, comm.rank() == 0);
  restore(saved(scaler), resumed);
  optimizer.zero_grad();
  backward(optimizer, net, resumed, comm.rank(), 1, false);
  require(resumed.step(optimizer), "nothing overflowed in this step");
  resumed.update();
  require_equal(resumed.get_scale(), 32768.0);
}

RANKS_TEST("a method that corrects with sums over ranks stands still while one has overflowed",
           "[amp][grad_scaler]") {
  const auto train = [&](grad_scaler& scaler, bool overflow) {
    distance net;
    optim::gradient_tracking optimizer(SGD(net->parameters(), rate), net, comm,
                                       topology::fully_connected(comm.size()));
    for (int pass = 0; pass < 4; ++pass) {
      const bool broken = pass == 2 && overflow;
      if (pass == 2 && !overflow) continue;
      optimizer.zero_grad();
      backward(optimizer, net, scaler, comm.rank(), pass, broken && comm.rank() == 0);
      require_equal(scaler.step(optimizer), !broken);
      scaler.update();
    }
    return net->w.detach();
  };
  grad_scaler disturbed, calm, alone({.agreement = amp::agreement::local});
  const at::Tensor reached = train(disturbed, true);
  require_same(reached, train(calm, false));
  require_same(reached, train(alone, true));
  require_equal(disturbed.get_scale(), 32768.0);
}

RANKS_TEST("ranks that have joined take over the scale of the last", "[amp][grad_scaler]") {
  distance net;
  optim::gradient_allreduce optimizer(SGD(net->parameters(), rate), net, comm);
  grad_scaler scaler({.growth_interval = 1});
  const auto step = [&](int pass) {
    optimizer.zero_grad();
    backward(optimizer, net, scaler, comm.rank(), pass, false);
    scaler.step(optimizer);
    scaler.update();
  };
  const auto epoch = [&] {
    for (int pass = 0; pass <= comm.rank(); ++pass) step(pass);
    return optimizer.join();
  };
  const int last = epoch();
  require_equal(last, comm.size() - 1);
  scaler.load_state_dict(broadcast_object(comm, scaler.state_dict(), last));
  require_equal(scaler.get_scale(), std::ldexp(65536, comm.size()));
  epoch();
  if (comm.size() > 1) {  // the scale is not that of the last
    backward(optimizer, net, scaler, comm.rank(), 0, false);
    require_throws<mismatch_error>([&] { scaler.step(optimizer); });
  }
}

RANKS_TEST("a rank without any batch keeps none of the others from scaling", "[amp][grad_scaler]") {
  distance net;
  optim::gradient_allreduce optimizer(SGD(net->parameters(), rate), net, comm);
  grad_scaler scaler({.growth_interval = 1});
  const auto step = [&] {
    optimizer.zero_grad();
    backward(optimizer, net, scaler, comm.rank(), 0, false);
    scaler.step(optimizer);
    scaler.update();
  };
  for (int epoch = 1; epoch <= 2; ++epoch) {
    if (comm.rank() > 0) step();
    const int last = optimizer.join();
    require_equal(last, comm.size() - 1);
    scaler.load_state_dict(broadcast_object(comm, scaler.state_dict(), last));
    require_equal(scaler.get_scale(), comm.size() > 1 ? std::ldexp(65536, epoch) : 65536);
  }
  if (comm.rank() == 0 && comm.size() > 1) {  // compared as soon as all are there
    auto state = scaler.state_dict();
    state.scale = 1;
    scaler.load_state_dict(state);
  }
  if (comm.size() > 1) require_throws<mismatch_error>(step);
}
