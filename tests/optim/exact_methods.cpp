// SPDX-License-Identifier: Apache-2.0
// Methods without bias, or with a momentum of their own: against their recursions, written down a
// second time with the matrices of all ranks, and against where they have to end.
#include <chrono>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/optim/adapt_then_combine.hpp>
#include <bluefog/optim/adapt_with_combine.hpp>
#include <bluefog/optim/decentlam.hpp>
#include <bluefog/optim/exact_diffusion.hpp>
#include <bluefog/optim/extra.hpp>
#include <bluefog/optim/gradient_tracking.hpp>
#include <bluefog/optim/quasi_global_momentum.hpp>
#include <bluefog/optim/state.hpp>
#include <bluefog/tensor.hpp>
#include <bluefog/thread.hpp>
#include <bluefog/topology.hpp>

#include "support.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;

constexpr std::int64_t extent = 7;  // of all parameters together

/// f_i(x) = sum over d of h_i[d] (x[d] - c_i[d])^2 / 2: rows of `h` and `c` are ranks.
struct quadratics {
  at::Tensor h, c;

  static quadratics of(int ranks) {
    return {1 + values({ranks, extent}, 3) / 2, 3 * values({ranks, extent}, 4)};
  }
  [[nodiscard]] at::Tensor gradient(const at::Tensor& x) const { return h * (x - c); }
  [[nodiscard]] at::Tensor minimizer() const { return (h * c).sum(0) / h.sum(0); }
};

/// One rank's part of it, over two parameters with a frozen one between them.
struct quadratic : torch::nn::Module {
  quadratic(const quadratics& all, int rank, const at::Tensor& start)
      : h(all.h[rank]), c(all.c[rank]) {
    const auto begin = start.clone();
    a = register_parameter("a", begin.slice(0, 0, 6).reshape({2, 3}).clone());
    frozen = register_parameter("frozen", torch::ones({5}, at::kDouble), false);
    b = register_parameter("b", begin.slice(0, 6, 7).clone());
  }
  [[nodiscard]] at::Tensor whole() const { return torch::cat({a.reshape(-1), b}); }
  at::Tensor forward() { return (h * (whole() - c).square()).sum() / 2; }
  [[nodiscard]] at::Tensor now() const { return whole().detach().clone(); }

  at::Tensor h, c, a, frozen, b;
};

/// The same with a parameter that the module, and so an optimizer, lists twice.
struct tied_quadratic : quadratic {
  tied_quadratic(const quadratics& all, int rank, const at::Tensor& start)
      : quadratic(all, rank, start) {
    register_parameter("again", a);
  }
};

at::Tensor starts(int ranks) {
  return values({ranks, extent}, 9);
}

/// m[i][j]: what rank i takes of rank j.
template <topology::graph Graph>
at::Tensor matrix_of(const Graph& graph) {
  auto m = torch::zeros({graph.size(), graph.size()}, at::kDouble);
  for (int i = 0; i < graph.size(); ++i)
    for (int j = 0; j < graph.size(); ++j) m[i][j] = graph.weight(j, i);
  return m;
}

using matrices = std::function<at::Tensor(int round)>;
template <topology::graph Graph>
matrices matrices_of(const Graph& graph) {
  return [m = matrix_of(graph)](int) { return m; };
}
template <topology::schedule Schedule>
matrices matrices_of(const Schedule& schedule) {
  return [schedule](int round) { return matrix_of(schedule.round(round)); };
}

constexpr double step_size = 0.1, beta = 0.6;

/// A method twice: the wrapper, and its recursion as papers write it. `advance` takes x of all
/// ranks from step k to k + 1.
struct tracking {
  static constexpr double momentum = 0;
  template <class... Arguments>
  static auto wrap(Arguments&&... arguments) {
    return optim::gradient_tracking(std::forward<Arguments>(arguments)...);
  }
  void advance(at::Tensor& x, const matrices& w, int k, const quadratics& f) {
    if (k == 0) y = f.gradient(x);
    const auto next = w(k).matmul(x - step_size * y);
    y = w(k).matmul(y + f.gradient(next) - f.gradient(x));
    x = next;
  }
  at::Tensor y;
};

struct diffusion {
  static constexpr double momentum = 0;
  template <class... Arguments>
  static auto wrap(Arguments&&... arguments) {
    return optim::exact_diffusion(std::forward<Arguments>(arguments)...);
  }
  void advance(at::Tensor& x, const matrices& w, int k, const quadratics& f) {
    const auto psi = x - step_size * f.gradient(x);
    const auto phi = k == 0 ? psi : psi + x - psi_before;
    x = (phi + w(k).matmul(phi)) / 2;
    psi_before = psi;
  }
  at::Tensor psi_before;
};

struct d2 {
  static constexpr double momentum = 0;
  template <class Sgd, class Model, class Comm, class Topology>
  static auto wrap(Sgd sgd, Model& model, Comm& comm, Topology topology) {
    return optim::exact_diffusion(std::move(sgd), model, comm, std::move(topology),
                                  {.weights = optim::mixing_weights::plain});
  }
  void advance(at::Tensor& x, const matrices& w, int k, const quadratics& f) {
    const auto next =
        k == 0 ? w(k).matmul(x - step_size * f.gradient(x))
               : w(k).matmul(2 * x - before - step_size * (f.gradient(x) - f.gradient(before)));
    before = std::exchange(x, next);
  }
  at::Tensor before;
};

struct extra_recursion {
  static constexpr double momentum = 0;
  template <class... Arguments>
  static auto wrap(Arguments&&... arguments) {
    return optim::extra(std::forward<Arguments>(arguments)...);
  }
  void advance(at::Tensor& x, const matrices& w, int k, const quadratics& f) {
    const auto next = k == 0 ? w(k).matmul(x) - step_size * f.gradient(x)
                             : x + w(k).matmul(x) - (before + w(k).matmul(before)) / 2 -
                                   step_size * (f.gradient(x) - f.gradient(before));
    before = std::exchange(x, next);
  }
  at::Tensor before;
};

struct large_batch_momentum {
  static constexpr double momentum = beta;
  template <class... Arguments>
  static auto wrap(Arguments&&... arguments) {
    return optim::decentlam(std::forward<Arguments>(arguments)...);
  }
  void advance(at::Tensor& x, const matrices& w, int k, const quadratics& f) {
    const auto gradient = (x - w(k).matmul(x - step_size * f.gradient(x))) / step_size;
    m = k == 0 ? gradient : beta * m + gradient;
    x = x - step_size * m;
  }
  at::Tensor m;
};

struct quasi_global {
  static constexpr double momentum = beta;
  template <class... Arguments>
  static auto wrap(Arguments&&... arguments) {
    return optim::quasi_global_momentum(std::forward<Arguments>(arguments)...);
  }
  void advance(at::Tensor& x, const matrices& w, int k, const quadratics& f) {
    if (k == 0) m = torch::zeros_like(x);
    const auto next = w(k).matmul(x - step_size * (f.gradient(x) + beta * m));
    m = beta * m + (1 - beta) * (x - next) / step_size;
    x = next;
  }
  at::Tensor m;
};

torch::optim::SGD sgd_over(const torch::nn::Module& model, double momentum,
                           double rate = step_size) {
  return torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(rate).momentum(momentum));
}

template <class Optimizer, class Model>
void take_step(Optimizer& optimizer, Model& model) {
  optimizer.zero_grad();
  optimizer.forward(model).backward();
  optimizer.step();
}

template <class Method, class Model = quadratic, class Comm, class Topology>
void follow(Comm& comm, const Topology& topology, int steps = 15) {
  const auto all = quadratics::of(comm.size());
  const auto weights = matrices_of(topology);
  at::Tensor x = starts(comm.size());
  Model model(all, comm.rank(), x[comm.rank()]);
  auto optimizer = Method::wrap(sgd_over(model, Method::momentum), model, comm, topology);
  Method recursion;
  for (int k = 0; k < steps; ++k) {
    take_step(optimizer, model);
    recursion.advance(x, weights, k, all);
    require_close(model.now(), x[comm.rank()], 1e-11);
  }
  require_equal(optimizer.round(), steps);
  require_same(model.frozen.detach(), torch::ones({5}, at::kDouble));
}

template <class Comm>
double largest(Comm& comm, const at::Tensor& mine) {
  return allreduce(comm, mine.abs().max(), reduce_op::max).template item<double>();
}

/// The scalar quadratics of the literature's tables: h_i = 1 + i/n, c_i = i, from 0.
struct scalar : torch::nn::Module {
  scalar(int rank, int ranks) : h(1 + static_cast<double>(rank) / ranks), c(rank) {
    x = register_parameter("x", torch::zeros({1}, at::kDouble));
  }
  at::Tensor forward() { return (x - c).square().sum() * (h / 2); }
  at::Tensor x;
  double h, c;
};
double scalar_minimizer(int ranks) {
  double above = 0, below = 0;
  for (int i = 0; i < ranks; ++i) {
    const double h = 1 + static_cast<double>(i) / ranks;
    above += h * i, below += h;
  }
  return above / below;
}

/// \return after how many steps all ranks are within 1e-10 of the minimizer, of at most 350.
template <class Method, class Topology>
int steps_to_minimizer(const Topology& topology, double rate) {
  int result = 0;
  run_threads(topology.size(), [&](auto& comm) {
    scalar model(comm.rank(), comm.size());
    auto optimizer = Method::wrap(sgd_over(model, 0, rate), model, comm, topology);
    auto distances = torch::zeros({350}, at::kDouble);
    for (int k = 0; k < 350; ++k) {
      take_step(optimizer, model);
      distances[k] = model.x.detach()[0] - scalar_minimizer(comm.size());
    }
    const auto furthest = allreduce(comm, distances.abs(), reduce_op::max);
    if (comm.rank() != 0) return;
    while (result < 350 && furthest[result].template item<double>() >= 1e-10) ++result;
    ++result;  // the first step made entry 0
  });
  return result;
}

/// \return the mean square distance from the minimizer after many steps.
template <class Wrap, class Topology>
double mean_square_distance(const Topology& topology, Wrap wrap, double momentum,
                            double rate = step_size) {
  double result = 0;
  run_threads(topology.size(), [&](auto& comm) {
    scalar model(comm.rank(), comm.size());
    auto optimizer = wrap(sgd_over(model, momentum, rate), model, comm);
    for (int k = 0; k * rate < 60; ++k) take_step(optimizer, model);
    const auto distance = (model.x.detach() - scalar_minimizer(comm.size())).square();
    const auto mean = allreduce(comm, distance);
    if (comm.rank() == 0) result = mean.template item<double>();
  });
  return result;
}

template <template <class, class, class> class Method, class Topology>
concept takes = requires { typename Method<torch::optim::SGD, thread_backend, Topology>; };

/// Calls `use` with what wraps an optimizer in each method that averages once per step.
template <class Comm, class Graph, class Use>
void with_one_averaging(Comm& comm, const Graph& graph, const Use& use) {
  use([&](auto sgd, auto& model) {
    return optim::exact_diffusion(std::move(sgd), model, comm, graph);
  });
  use([&](auto sgd, auto& model) { return optim::extra(std::move(sgd), model, comm, graph); });
  use([&](auto sgd, auto& model) { return optim::decentlam(std::move(sgd), model, comm, graph); });
  use([&](auto sgd, auto& model) {
    return optim::quasi_global_momentum(std::move(sgd), model, comm, graph);
  });
}

/// Calls `use` with what wraps an optimizer in each method without bias: tracking with one peer per
/// step, the others over a ring.
template <class Comm, class Use>
void with_methods_without_bias(Comm& comm, const Use& use) {
  const topology::ring ring(comm.size());
  use([&](auto sgd, auto& model) { return optim::gradient_tracking(std::move(sgd), model, comm); });
  use([&](auto sgd, auto& model) {
    return optim::exact_diffusion(std::move(sgd), model, comm, ring);
  });
  use([&](auto sgd, auto& model) { return optim::extra(std::move(sgd), model, comm, ring); });
}

}  // namespace

RANKS_TEST("over symmetric graphs every method follows its recursion", "[optim][exact_methods]") {
  const auto on = [&](const auto& graph) {
    follow<tracking>(comm, graph);
    follow<diffusion>(comm, graph);
    follow<extra_recursion>(comm, graph);
    follow<large_batch_momentum>(comm, graph);
    follow<quasi_global>(comm, graph);
  };
  on(topology::ring(comm.size()));
  on(topology::mesh_grid_2d(comm.size()));
  on(topology::star(comm.size()));
  on(topology::fully_connected(comm.size()));
  follow<d2>(comm, topology::star(comm.size()));
  follow<d2>(comm, topology::fully_connected(comm.size()));
}

RANKS_TEST("tracking and quasi-global momentum take directed graphs and schedules",
           "[optim][exact_methods]") {
  const auto on = [&](const auto& topology) {
    follow<tracking>(comm, topology);
    follow<quasi_global>(comm, topology);
  };
  on(topology::exponential(comm.size()));
  on(topology::ring(comm.size(), topology::ring_style::right));
  on(topology::one_peer_exponential(comm.size()));
}

RANKS_TEST("what is listed twice is stepped once, where steps are taken with other gradients",
           "[optim][exact_methods]") {
  const topology::ring ring(comm.size());
  follow<large_batch_momentum, tied_quadratic>(comm, ring);
  follow<quasi_global, tied_quadratic>(comm, ring);
  follow<tracking, tied_quadratic>(comm, ring);
}

RANKS_TEST("methods without bias end at the minimizer, averaging alone does not",
           "[optim][exact_methods]") {
  const auto all = quadratics::of(comm.size());
  const auto distance = [&](auto wrap) {
    quadratic model(all, comm.rank(), starts(comm.size())[comm.rank()]);
    auto optimizer = wrap(sgd_over(model, 0.5), model);
    for (int k = 0; k < 300; ++k) take_step(optimizer, model);
    return largest(comm, model.now() - all.minimizer());
  };
  with_methods_without_bias(comm, [&](auto wrap) { require_near(distance(wrap), 0, 1e-10); });
  const topology::ring ring(comm.size());
  const auto biased = distance([&](auto sgd, auto& model) {
    return optim::adapt_with_combine(std::move(sgd), model, comm, ring);
  });
  require(comm.size() == 1 || biased > 1e-3, "averaging alone is exact");
}

TEST_CASE("steps to the minimizer are those of the literature's recursions",
          "[optim][exact_methods][thread]") {
  CHECK(steps_to_minimizer<diffusion>(topology::ring(8), 0.1) == 181);
  CHECK(steps_to_minimizer<tracking>(topology::ring(8), 0.1) == 217);
  CHECK(steps_to_minimizer<extra_recursion>(topology::ring(8), 0.1) == 172);
  CHECK(steps_to_minimizer<diffusion>(topology::ring(8), 0.05) == 327);
  CHECK(steps_to_minimizer<tracking>(topology::ring(8), 0.05) == 327);
  CHECK(steps_to_minimizer<extra_recursion>(topology::ring(8), 0.05) == 327);
  CHECK(steps_to_minimizer<tracking>(topology::exponential(8), 0.1) == 158);
  CHECK(steps_to_minimizer<tracking>(topology::one_peer_exponential(16), 0.05) == 330);
}

TEST_CASE("with momentum, decentlam and quasi-global momentum have the bias of plain diffusion",
          "[optim][exact_methods][thread]") {
  const topology::ring ring(8);
  const auto ends_at = [&](auto wrap, double momentum) {
    return mean_square_distance(ring, wrap, momentum);
  };
  const auto lam = [&](auto sgd, auto& model, auto& comm) {
    return optim::decentlam(std::move(sgd), model, comm, ring);
  };
  const auto quasi = [&](auto sgd, auto& model, auto& comm) {
    return optim::quasi_global_momentum(std::move(sgd), model, comm, ring);
  };
  const auto plain = [&](auto sgd, auto& model, auto& comm) {
    return optim::adapt_then_combine(std::move(sgd), model, comm, ring);
  };
  CHECK(std::abs(ends_at(lam, 0.9) - 4.737816509650e-1) < 1e-10);
  CHECK(std::abs(ends_at(quasi, 0.9) - 4.737816509650e-1) < 1e-10);
  CHECK(std::abs(ends_at(plain, 0) - 4.737816509650e-1) < 1e-10);
  CHECK(std::abs(ends_at(plain, 0.9) - 2.769559149152) < 1e-10);

  const double slowly = 0.05;
  CHECK(std::abs(mean_square_distance(ring, lam, 0.9, slowly) - 1.780510930826e-1) < 1e-10);
  CHECK(std::abs(mean_square_distance(ring, quasi, 0.9, slowly) - 1.780510930826e-1) < 1e-10);
  CHECK(std::abs(mean_square_distance(ring, plain, 0.9, slowly) - 1.990172270108) < 1e-10);

  const topology::exponential directed(8);
  const auto quasi_directed = [&](auto sgd, auto& model, auto& comm) {
    return optim::quasi_global_momentum(std::move(sgd), model, comm, directed);
  };
  const auto plain_directed = [&](auto sgd, auto& model, auto& comm) {
    return optim::adapt_then_combine(std::move(sgd), model, comm, directed);
  };
  CHECK(std::abs(mean_square_distance(directed, quasi_directed, 0.9) - 2.413420214829e-2) < 1e-10);
  CHECK(std::abs(mean_square_distance(directed, plain_directed, 0.9) - 1.388194417978) < 1e-10);
}

RANKS_TEST("corrections sum to zero, and trackers have the mean of the gradients",
           "[optim][exact_methods]") {
  const auto all = quadratics::of(comm.size());
  const auto balanced = [&](auto wrap) {
    quadratic model(all, comm.rank(), starts(comm.size())[comm.rank()]);
    auto optimizer = wrap(sgd_over(model, 0), model);
    for (int k = 0; k < 6; ++k) {
      take_step(optimizer, model);
      const auto sum = allreduce(comm, optimizer.correction(model.a), reduce_op::sum);
      require_near(sum.abs().max().template item<double>(), 0, 1e-12);
    }
    require(comm.size() == 1 || largest(comm, optimizer.correction(model.b)) > 1e-3);
    const auto text =
        require_throws<usage_error>([&] { return optimizer.correction(model.frozen); });
    require_contains(text, "requires a gradient");
  };
  balanced(
      [&](auto sgd, auto& model) { return optim::gradient_tracking(std::move(sgd), model, comm); });
  balanced([&](auto sgd, auto& model) {
    return optim::exact_diffusion(std::move(sgd), model, comm, topology::star(comm.size()));
  });
  balanced([&](auto sgd, auto& model) {
    return optim::extra(std::move(sgd), model, comm, topology::star(comm.size()));
  });
}

RANKS_TEST("in float32 too, corrections keep their sum of zero, however far parameters are from it",
           "[optim][exact_methods]") {
  const topology::ring ring(comm.size());  // 1/3 is no float: averages are off by some 1e-8
  const auto balanced = [&](auto wrap) {
    auto x = torch::full({1}, 1000.F).set_requires_grad(true);
    const torch::nn::Module nameless;
    auto optimizer = wrap(torch::optim::SGD({x}, step_size), nameless);
    for (int k = 0; k < 500; ++k) {
      optimizer.zero_grad();
      ((x - (1000 + comm.rank())).square().sum() / 2).backward();
      optimizer.step();
    }
    const auto sum = allreduce(comm, optimizer.correction(x), reduce_op::sum);
    require_near(sum.template item<double>(), 0, 1e-4);
    require_near(x.template item<double>(), 1000 + (comm.size() - 1) / 2.0, 2e-3);
  };
  balanced([&](auto sgd, auto& model) {
    return optim::exact_diffusion(std::move(sgd), model, comm, ring);
  });
  balanced([&](auto sgd, auto& model) { return optim::extra(std::move(sgd), model, comm, ring); });
}

RANKS_TEST("gradient tracking feeds any optimizer, and leaves gradients the user's own",
           "[optim][exact_methods]") {
  // What n optimizers of one process do with trackers of matrices.
  const auto all = quadratics::of(comm.size());
  const topology::exponential graph(comm.size());
  const auto w = matrix_of(graph);
  const auto options = torch::optim::AdamOptions(0.05).weight_decay(0.01);
  at::Tensor x = starts(comm.size()), y, before;
  std::vector<at::Tensor> rows;
  std::vector<torch::optim::Adam> adams;
  for (int i = 0; i < comm.size(); ++i) {
    rows.push_back(x[i].clone().set_requires_grad(true));
    adams.emplace_back(std::vector{rows.back()}, options);
  }
  quadratic model(all, comm.rank(), x[comm.rank()]);
  optim::gradient_tracking optimizer(torch::optim::Adam(model.parameters(), options), model, comm,
                                     graph);
  for (int k = 0; k < 15; ++k) {
    take_step(optimizer, model);
    const torch::NoGradGuard no_grad;
    const auto gradient = all.gradient(x);
    require_close(torch::cat({model.a.grad().reshape(-1), model.b.grad()}), gradient[comm.rank()],
                  1e-11);
    y = k == 0 ? gradient : w.matmul(y + gradient - before);
    before = gradient;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i].copy_(x[static_cast<std::int64_t>(i)]);
      rows[i].mutable_grad() = y[static_cast<std::int64_t>(i)].clone();
      adams[i].step();
      x[static_cast<std::int64_t>(i)].copy_(rows[i]);
    }
    x = w.matmul(x);
    require_close(model.now(), x[comm.rank()], 1e-10);
  }
}

RANKS_TEST("a saved method goes on where it was", "[optim][exact_methods]") {
  const auto all = quadratics::of(comm.size());
  const auto check = [&](auto wrap) {
    quadratic model(all, comm.rank(), starts(comm.size())[comm.rank()]);
    auto optimizer = wrap(sgd_over(model, 0.5), model);
    for (int k = 0; k < 5; ++k) take_step(optimizer, model);
    std::stringstream archive, plain;
    torch::save(optimizer, archive);
    quadratic twin(all, comm.rank(), model.now());
    for (int k = 0; k < 5; ++k) take_step(optimizer, model);

    auto resumed = wrap(sgd_over(twin, 0.1, 0.7), twin);
    torch::load(resumed, archive);
    require_equal(resumed.round(), 5);
    for (int k = 0; k < 5; ++k) take_step(resumed, twin);
    require_same(twin.now(), model.now());

    auto alone = sgd_over(twin, 0.5);
    torch::save(alone, plain);
    torch::load(resumed, plain);
    require_equal(resumed.round(), 0);
  };
  with_methods_without_bias(comm, check);
  const topology::ring ring(comm.size());
  check([&](auto sgd, auto& model) { return optim::decentlam(std::move(sgd), model, comm, ring); });
  check([&](auto sgd, auto& model) {
    return optim::quasi_global_momentum(std::move(sgd), model, comm);
  });
}

RANKS_TEST("an archive of other parameters is refused, and nothing of it is loaded",
           "[optim][exact_methods]") {
  const auto all = quadratics::of(comm.size());
  // As many parameters: longer ones, and ones of which the first block alone would fit.
  const auto archive_of = [&](auto wrap, const at::Tensor& x, const at::Tensor& z) {
    torch::nn::Module module;
    const auto first = module.register_parameter("first", x.clone());
    const auto second = module.register_parameter("second", torch::zeros({1}, at::kDouble));
    const auto third = module.register_parameter("third", z.clone());
    auto optimizer = wrap(sgd_over(module, 0.5, 0.7), module);
    (first.sum() + second.sum() + third.sum()).backward();
    optimizer.step();
    return saved(optimizer);
  };
  const auto check = [&](auto wrap) {
    const auto run = [&](bool loads) {
      quadratic model(all, comm.rank(), starts(comm.size())[comm.rank()]);
      auto optimizer = wrap(sgd_over(model, 0.5), model);
      for (int k = 0; k < 5; ++k) take_step(optimizer, model);
      if (loads)
        for (const auto& bytes :
             {archive_of(wrap, torch::zeros({70}, at::kDouble), torch::zeros({5}, at::kDouble)),
              archive_of(wrap, torch::zeros({2, 3}, at::kDouble), torch::zeros({5}, at::kFloat))})
          require_contains(require_throws<usage_error>([&] { restore(bytes, optimizer); }),
                           "numbers of state where the parameters need [9]");
      require_equal(optimizer.round(), 5);
      for (int k = 0; k < 5; ++k) take_step(optimizer, model);
      return model.now();
    };
    require_same(run(true), run(false));
  };
  with_methods_without_bias(comm, check);
}

RANKS_TEST("with another rank's state a method begins anew, and ends at the minimizer all the same",
           "[optim][exact_methods]") {
  const auto all = quadratics::of(comm.size());
  const auto check = [&](auto wrap) {
    quadratic model(all, comm.rank(), starts(comm.size())[comm.rank()]);
    auto optimizer = wrap(sgd_over(model, 0.5), model);
    for (int k = 0; k < 5; ++k) take_step(optimizer, model);
    broadcast_optimizer_state(comm, optimizer, comm.size() - 1);
    require_equal(optimizer.round(), 5);
    require_close(optimizer.correction(model.a), torch::zeros({2, 3}, at::kDouble), 0);
    for (int k = 0; k < 300; ++k) take_step(optimizer, model);
    require_near(largest(comm, model.now() - all.minimizer()), 0, 1e-10);
  };
  with_methods_without_bias(comm, check);
}

RANKS_TEST("parameters may come later, be frozen, or have no gradient", "[optim][exact_methods]") {
  const topology::symmetric_exponential graph(comm.size());
  const auto check = [&](auto wrap) {
    const auto rank = static_cast<double>(comm.rank());
    const auto target = [&] { return torch::full({2}, rank, at::kDouble); };
    const auto mean = (static_cast<double>(comm.size()) - 1) / 2;
    torch::nn::Module module;
    auto first = module.register_parameter("first", torch::zeros({2}, at::kDouble));
    auto unused = module.register_parameter("unused", torch::full({1}, rank, at::kDouble));
    auto later = torch::full({2}, -rank, at::kDouble).set_requires_grad(true);
    auto optimizer = wrap(torch::optim::SGD({first, unused}, 0.4), module);
    const auto steps = [&](int count, bool both) {
      for (int k = 0; k < count; ++k) {
        optimizer.zero_grad();
        optimizer.step([&] {
          auto loss = (first - target()).square().sum() / 2;
          if (both) loss = loss + (later - target()).square().sum() / 2;
          loss.backward();
          return loss;
        });
      }
    };
    steps(10, false);
    optimizer.add_param_group(torch::optim::OptimizerParamGroup({later}));
    steps(150, true);
    require_near(first.detach().sum().template item<double>(), 2 * mean, 1e-9);
    require_near(later.detach().sum().template item<double>(), 2 * mean, 1e-9);
    require_near(unused.detach().template item<double>(), mean, 1e-9);  // averaged all the same
    first.set_requires_grad(false);
    const auto kept = first.detach().clone();
    optimizer.zero_grad();
    (later - target()).square().sum().backward();
    optimizer.step();
    require_same(first.detach(), kept);
  };
  check(
      [&](auto sgd, auto& model) { return optim::gradient_tracking(std::move(sgd), model, comm); });
  check([&](auto sgd, auto& model) {
    return optim::exact_diffusion(std::move(sgd), model, comm, graph);
  });
  check([&](auto sgd, auto& model) { return optim::extra(std::move(sgd), model, comm, graph); });
}

RANKS_TEST("decentlam and quasi-global momentum take weight decay, groups and a schedule of rates",
           "[optim][exact_methods]") {
  // Weight decay is one more quadratic: with it on h and c, or in the options, steps are the same.
  const auto all = quadratics::of(comm.size());
  const double decay = 0.2;
  const quadratics regular{all.h + decay, all.h * all.c / (all.h + decay)};
  const auto check = [&](auto wrap) {
    const auto start = starts(comm.size())[comm.rank()];
    quadratic decaying(all, comm.rank(), start), plain(regular, comm.rank(), start);
    const auto groups = [](quadratic& model, double weight_decay) {
      auto options = torch::optim::SGDOptions(step_size).momentum(beta).weight_decay(weight_decay);
      std::vector<torch::optim::OptimizerParamGroup> result;
      result.emplace_back(std::vector{model.a},
                          std::make_unique<torch::optim::SGDOptions>(options));
      result.emplace_back(std::vector{model.b},
                          std::make_unique<torch::optim::SGDOptions>(options.lr(step_size / 2)));
      return torch::optim::SGD(std::move(result), options);
    };
    auto with = wrap(groups(decaying, decay), decaying);
    auto without = wrap(groups(plain, 0), plain);
    torch::optim::StepLR slower(with, 4, 0.5), equally(without, 4, 0.5);
    for (int k = 0; k < 12; ++k) {
      take_step(with, decaying);
      take_step(without, plain);
      slower.step();
      equally.step();
      require_close(decaying.now(), plain.now(), 1e-11);
    }
    require(with.param_groups()[1].options().get_lr() < step_size / 2, "rates have not changed");
  };
  check([&](auto sgd, auto& model) {
    return optim::decentlam(std::move(sgd), model, comm, topology::ring(comm.size()));
  });
  check([&](auto sgd, auto& model) {
    return optim::quasi_global_momentum(std::move(sgd), model, comm);
  });
}

RANKS_TEST("two backwards before a step are one of the sum, and the step communicates",
           "[optim][exact_methods]") {
  if (comm.size() > 4) return;  // long enough
  const auto all = quadratics::of(comm.size());
  const topology::ring ring(comm.size());
  const auto check = [&](auto wrap) {
    const auto start = starts(comm.size())[comm.rank()];
    quadratic apart(all, comm.rank(), start), summed(all, comm.rank(), start);
    const auto sgd = [](quadratic& model) {
      return torch::optim::SGD(model.parameters(),
                               torch::optim::SGDOptions(step_size / 4).momentum(0));
    };
    auto accumulating = wrap(sgd(apart), apart);
    auto at_once = wrap(sgd(summed), summed);
    for (int k = 0; k < 6; ++k) {
      accumulating.zero_grad();
      const auto sent = comm.statistics().messages_sent;
      for (int pass = 0; pass < 2; ++pass) accumulating.forward(apart).backward();
      require_equal(comm.statistics().messages_sent, sent);
      accumulating.step();
      require((comm.statistics().messages_sent > sent) == (comm.size() > 1), "every step sends");
      at_once.zero_grad();
      (at_once.forward(summed) + at_once.forward(summed)).backward();
      at_once.step();
      require_close(apart.now(), summed.now(), 1e-13);
      require_equal(accumulating.round(), std::int64_t{k + 1});
    }
  };
  check([&](auto sgd, auto& model) {
    return optim::gradient_tracking(std::move(sgd), model, comm, ring);
  });
  with_one_averaging(comm, ring, check);
}

RANKS_TEST("a step costs one averaging of the parameters, that of gradient tracking two",
           "[optim][exact_methods]") {
  const topology::ring ring(comm.size());
  const auto cost = [&](auto wrap) {
    scalar model(comm.rank(), comm.size());
    auto optimizer = wrap(sgd_over(model, 0.5), model);
    take_step(optimizer, model);
    const auto before = comm.statistics();
    take_step(optimizer, model);
    const auto after = comm.statistics();
    return std::pair(after.bytes_sent - before.bytes_sent,
                     after.messages_sent - before.messages_sent);
  };
  const auto plain = cost([&](auto sgd, auto& model) {
    return optim::adapt_then_combine(std::move(sgd), model, comm, ring);
  });
  const auto same = [&](auto wrap, int times = 1) {
    const auto [bytes, messages] = cost(wrap);
    require_equal(bytes, times * plain.first);
    require_equal(messages, times * plain.second);
  };
  with_one_averaging(comm, ring, same);
  same([&](auto sgd,
           auto& model) { return optim::gradient_tracking(std::move(sgd), model, comm, ring); },
       2);
}

TEST_CASE("after a step that failed as ranks communicated there is no other one",
          "[optim][exact_methods][thread]") {
  run_threads(2,
              [](auto& comm) {
                scalar model(comm.rank(), comm.size());
                optim::gradient_tracking optimizer(sgd_over(model, 0), model, comm,
                                                   topology::ring(2));
                if (comm.rank() == 1) return;
                model.forward().backward();
                require_throws<error>([&] { optimizer.step(); });
                require_contains(require_throws<usage_error>([&] { optimizer.step(); }),
                                 "make the wrapper anew");
              },
              {.timeout = std::chrono::milliseconds(500)});
}

TEST_CASE("graphs that break a method are refused with the number and a remedy",
          "[optim][exact_methods][thread]") {
  const auto refusal = [](int ranks, auto wrap) {
    std::string text;
    run_threads(ranks, [&](auto& comm) {
      scalar model(comm.rank(), comm.size());
      const auto said =
          require_throws<usage_error>([&] { wrap(sgd_over(model, 0.9), model, comm); });
      if (comm.rank() == 0) text = said;
    });
    return text;
  };
  const auto refused_d2 = [&](const auto& graph) {
    return refusal(graph.size(), [&](auto sgd, auto& model, auto& comm) {
      optim::exact_diffusion(std::move(sgd), model, comm, graph,
                             {.weights = optim::mixing_weights::plain});
    });
  };
  require_contains(refused_d2(topology::mesh_grid_2d(16)), "above -1/3, got -0.430843");
  require_contains(refused_d2(topology::symmetric_exponential(16)), "got -0.482843");
  require_contains(refused_d2(topology::ring(8)), "got -0.333333");
  require_contains(refused_d2(topology::ring(8)), "mixing_weights::lazy");
  run_threads(9, [](auto& comm) {  // -0.316228: allowed
    scalar model(comm.rank(), comm.size());
    optim::exact_diffusion(sgd_over(model, 0), model, comm, topology::mesh_grid_2d(9),
                           {.weights = optim::mixing_weights::plain});
  });

  const auto directed = refusal(8, [](auto sgd, auto& model, auto& comm) {
    optim::decentlam(std::move(sgd), model, comm, topology::exponential(8));
  });
  require_contains(directed, "must be symmetric, got 0.25 from rank 0 to 1 and 0 back");
  require_contains(directed, "momentum 0.9");
  require_contains(directed, "factor of 1.2375 per step, by the eigenvalue 0.176777 + 0.426777i");
  require_contains(directed, "quasi_global_momentum");
  for (const auto& text : {refusal(8,
                                   [](auto sgd, auto& model, auto& comm) {
                                     optim::exact_diffusion(std::move(sgd), model, comm,
                                                            topology::exponential(8));
                                   }),
                           refusal(8, [](auto sgd, auto& model, auto& comm) {
                             optim::extra(std::move(sgd), model, comm, topology::exponential(8));
                           })}) {
    require_contains(text, "must be symmetric, got 0.25 from rank 0 to 1 and 0 back");
    require_contains(text, "gradient_tracking");
  }

  const topology::adjacency swap({{0, 1}, {1, 0}}), apart({{1, 0}, {0, 1}});
  require_contains(refusal(2, [&](auto sgd, auto& model,
                                  auto& comm) { optim::extra(std::move(sgd), model, comm, swap); }),
                   "above -1, got -1");
  require_contains(
      refusal(2, [&](auto sgd, auto& model,
                     auto& comm) { optim::exact_diffusion(std::move(sgd), model, comm, apart); }),
      "second eigenvalue is below 1, got 1");

  const topology::adjacency uneven({{0.5, 0.5}, {0, 1}}, {.check = topology::stochasticity::row});
  require_contains(refusal(2,
                           [&](auto sgd, auto& model, auto& comm) {
                             optim::gradient_tracking(std::move(sgd), model, comm, uneven);
                           }),
                   "must both sum to 1");
  require_contains(refusal(5,
                           [&](auto sgd, auto& model, auto& comm) {
                             optim::quasi_global_momentum(std::move(sgd), model, comm,
                                                          topology::one_peer(topology::star(5)));
                           }),
                   "in round 0");
  require_contains(refusal(2,
                           [](auto sgd, auto& model, auto& comm) {
                             optim::gradient_tracking(std::move(sgd), model, comm,
                                                      topology::ring(3));
                           }),
                   "the topology has 3 ranks, the communicator has 2");
}

RANKS_TEST("what breaks a method is refused on every rank, and nothing is left behind",
           "[optim][exact_methods]") {
  const int n = comm.size();
  scalar model(comm.rank(), n);
  const auto refused = [&](auto wrap, std::string_view why) {
    require_contains(require_throws<usage_error>([&] { wrap(sgd_over(model, 0.9), model); }), why);
  };
  // m[i][j], all of which sum to 1 over j.
  using rows = std::vector<std::vector<double>>;
  const auto size = static_cast<std::size_t>(n);
  rows apart(size, std::vector<double>(size)), turn = apart;
  for (std::size_t i = 0; i < size; ++i) apart[i][i] = turn[i][(i + 1) % size] = 1;

  const topology::ring larger(n + 1);
  const auto count = concat("the topology has ", n + 1, " ranks, the communicator has ", n);
  const auto with = [&](auto method, const auto& graph) {
    return [&, method](auto sgd, auto& own) { method(std::move(sgd), own, graph); };
  };
  const auto tracks = [&](auto sgd, auto& own, const auto& graph) {
    optim::gradient_tracking(std::move(sgd), own, comm, graph);
  };
  const auto diffuses = [&](auto sgd, auto& own, const auto& graph) {
    optim::exact_diffusion(std::move(sgd), own, comm, graph);
  };
  const auto extrapolates = [&](auto sgd, auto& own, const auto& graph) {
    optim::extra(std::move(sgd), own, comm, graph);
  };
  const auto remembers = [&](auto sgd, auto& own, const auto& graph) {
    optim::decentlam(std::move(sgd), own, comm, graph);
  };
  const auto blends = [&](auto sgd, auto& own, const auto& graph) {
    optim::quasi_global_momentum(std::move(sgd), own, comm, graph);
  };
  refused(with(tracks, larger), count);
  refused(with(diffuses, larger), count);
  refused(with(extrapolates, larger), count);
  refused(with(remembers, larger), count);
  refused(with(blends, larger), count);
  if (n > 1) {
    const topology::adjacency nobody(apart);
    refused(with(diffuses, nobody), "second eigenvalue is below 1, got 1");
    rows uneven = apart;
    uneven[0][0] = uneven[0][1] = 0.5;
    const topology::adjacency row_sums(uneven, {.check = topology::stochasticity::row});
    refused(with(tracks, row_sums), "must both sum to 1");
  }
  if (n == 2) refused(with(extrapolates, topology::adjacency(turn)), "above -1, got -1");
  if (n > 2) {
    const topology::adjacency directed(turn);
    for (const std::string_view text : {"must be symmetric, got", "gradient_tracking"}) {
      refused(with(diffuses, directed), text);
      refused(with(extrapolates, directed), text);
    }
    refused(with(remembers, directed), "quasi_global_momentum");
    refused(with(blends, topology::one_peer(topology::star(n))), "in round 0");
  }
  if (n == 2 || n == 4) {  // eigenvalues 0.25 - 0.75, and 1/3 + 2/3 cos(pi)
    const auto plain = [&](auto sgd, auto& own, const auto& graph) {
      optim::exact_diffusion(std::move(sgd), own, comm, graph,
                             {.weights = optim::mixing_weights::plain});
    };
    if (n == 2)
      refused(with(plain, topology::adjacency({{0.25, 0.75}, {0.75, 0.25}})),
              "above -1/3, got -0.5");
    else
      refused(with(plain, topology::ring(4)), "above -1/3, got -0.333333");
  }
  optim::exact_diffusion works(sgd_over(model, 0), model, comm, topology::ring(n));
  take_step(works, model);
}

TEST_CASE("a method that needs one graph takes no schedule, one that corrects steps only SGD",
          "[optim][exact_methods]") {
  STATIC_REQUIRE(takes<optim::exact_diffusion, topology::ring>);
  STATIC_REQUIRE(takes<optim::gradient_tracking, topology::one_peer_exponential>);
  STATIC_REQUIRE(takes<optim::quasi_global_momentum, topology::one_peer_exponential>);
  STATIC_REQUIRE_FALSE(takes<optim::exact_diffusion, topology::one_peer_exponential>);
  STATIC_REQUIRE_FALSE(takes<optim::extra, topology::one_peer_exponential>);
  STATIC_REQUIRE_FALSE(takes<optim::decentlam, topology::one_peer_exponential>);
  STATIC_REQUIRE(optim::plain_descent<torch::optim::SGD>);
  STATIC_REQUIRE_FALSE(optim::plain_descent<torch::optim::Adam>);
}

RANKS_TEST("momentum of another kind, and a rate of 0, are refused", "[optim][exact_methods]") {
  scalar model(comm.rank(), comm.size());
  const auto sgd = [&](auto options) { return torch::optim::SGD(model.parameters(), options); };
  const auto nesterov = require_throws<usage_error>([&] {
    optim::quasi_global_momentum(
        sgd(torch::optim::SGDOptions(step_size).momentum(beta).nesterov(true)), model, comm);
  });
  require_contains(nesterov, "Nesterov");
  optim::decentlam still(sgd(torch::optim::SGDOptions(0.0)), model, comm,
                         topology::ring(comm.size()));
  const auto rate = require_throws<usage_error>([&] { take_step(still, model); });
  require_contains(rate, "above 0, got 0");
}
