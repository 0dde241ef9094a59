// SPDX-License-Identifier: Apache-2.0
// Where the optimizers end: closed forms, linear solves, and one rank with all the data.
#include <array>
#include <cmath>
#include <vector>

#include <torch/torch.h>

#include <bluefog/optim/adapt_then_combine.hpp>
#include <bluefog/optim/adapt_with_combine.hpp>
#include <bluefog/optim/gradient_allreduce.hpp>
#include <bluefog/thread.hpp>
#include <bluefog/topology.hpp>

#include "support.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;

constexpr int rank_count = 8;
using vector = std::array<double, rank_count>;
using matrix = std::array<vector, rank_count>;

double curvature(int rank) {
  return 1 + static_cast<double>(rank) / rank_count;
}

/// f_i(x) = h_i (x - c_i)^2 / 2 with h_i = 1 + i/n, c_i = i.
struct scalar_quadratic : torch::nn::Module {
  explicit scalar_quadratic(int rank) : rank_(rank) {
    x = register_parameter("x", torch::zeros({1}, at::kDouble));
  }
  at::Tensor forward() { return (x - rank_).square().sum() * (curvature(rank_) / 2); }
  at::Tensor x;

 private:
  int rank_;
};

/// The minimizer of the sum of all f_i.
double minimizer() {
  double above = 0, below = 0;
  for (int i = 0; i < rank_count; ++i) above += curvature(i) * i, below += curvature(i);
  return above / below;
}

double mean_square_distance(const vector& x) {
  double sum = 0;
  for (const double each : x) sum += (each - minimizer()) * (each - minimizer());
  return sum / rank_count;
}
double distance_of_mean(const vector& x) {
  double sum = 0;
  for (const double each : x) sum += each;
  return std::abs(sum / rank_count - minimizer());
}

/// Solves a x = b by elimination with pivots.
vector solve(matrix a, vector b) {
  for (std::size_t k = 0; k < rank_count; ++k) {
    std::size_t pivot = k;
    for (std::size_t i = k; i < rank_count; ++i)
      if (std::abs(a[i][k]) > std::abs(a[pivot][k])) pivot = i;
    std::swap(a[k], a[pivot]);
    std::swap(b[k], b[pivot]);
    for (std::size_t i = k + 1; i < rank_count; ++i) {
      const double factor = a[i][k] / a[k][k];
      for (std::size_t j = k; j < rank_count; ++j) a[i][j] -= factor * a[k][j];
      b[i] -= factor * b[k];
    }
  }
  vector x{};
  for (std::size_t k = rank_count; k-- > 0;) {
    double rest = b[k];
    for (std::size_t j = k + 1; j < rank_count; ++j) rest -= a[k][j] * x[j];
    x[k] = rest / a[k][k];
  }
  return x;
}

/// m[i][j]: what rank i takes of rank j in ring and static exponential graph of 8 ranks.
matrix ring_matrix() {
  matrix m{};
  for (std::size_t i = 0; i < rank_count; ++i)
    m[i][i] = m[i][(i + 1) % 8] = m[i][(i + 7) % 8] = 1. / 3;
  return m;
}
matrix exponential_matrix() {
  matrix m{};
  for (std::size_t i = 0; i < rank_count; ++i)
    m[i][i] = m[i][(i + 7) % 8] = m[i][(i + 6) % 8] = m[i][(i + 4) % 8] = 1. / 4;
  return m;
}

/// (I - W + mu H) x = mu H c, or (I - W + mu W H) x = mu W H c.
vector fixed_point(const matrix& w, double mu, bool adapt_first) {
  matrix a{};
  vector b{};
  for (std::size_t i = 0; i < rank_count; ++i)
    for (std::size_t j = 0; j < rank_count; ++j) {
      const double mixed = adapt_first ? w[i][j] : (i == j ? 1.0 : 0.0);
      const double h = curvature(static_cast<int>(j));
      a[i][j] = (i == j ? 1.0 : 0.0) - w[i][j] + mu * mixed * h;
      b[i] += mu * mixed * h * static_cast<double>(j);
    }
  return solve(a, b);
}

struct combine_first {
  template <class Topology>
  static auto wrap(torch::optim::SGD sgd, scalar_quadratic& model,
                   communicator<thread_backend>& comm, Topology topology) {
    return optim::adapt_with_combine(std::move(sgd), model, comm, std::move(topology));
  }
};
struct adapt_first {
  template <class Topology>
  static auto wrap(torch::optim::SGD sgd, scalar_quadratic& model,
                   communicator<thread_backend>& comm, Topology topology) {
    return optim::adapt_then_combine(std::move(sgd), model, comm, std::move(topology));
  }
};

/// Runs plain SGD under a wrapper. \return the ranks' x after each of the last three steps.
template <class Kind, class Topology>
std::array<vector, 3> run(const Topology& topology, double mu, int steps) {
  std::array<vector, 3> last{};
  run_threads(rank_count, [&](communicator<thread_backend>& comm) {
    scalar_quadratic model(comm.rank());
    auto optimizer = Kind::wrap(torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(mu)),
                                model, comm, topology);
    for (int k = 0; k < steps; ++k) {
      optimizer.zero_grad();
      optimizer.forward(model).backward();
      optimizer.step();
      last[static_cast<std::size_t>(k % 3)][static_cast<std::size_t>(comm.rank())] =
          model.x.template item<double>();
    }
  });
  return last;
}

struct expected {
  double combine_first;  // mean square distances
  double adapt_first;
};

template <class Topology>
void check_fixed_points(const Topology& topology, const matrix& weights, double mu,
                        expected distances) {
  const int steps = static_cast<int>(36 / mu);  // (1 - mu)^steps is below 1e-15
  const auto combined = run<combine_first>(topology, mu, steps)[0];
  CHECK(std::abs(mean_square_distance(combined) - distances.combine_first) < 1e-10);
  const auto adapted = run<adapt_first>(topology, mu, steps)[0];
  CHECK(std::abs(mean_square_distance(adapted) - distances.adapt_first) < 1e-10);
  const auto combined_exactly = fixed_point(weights, mu, false);
  const auto adapted_exactly = fixed_point(weights, mu, true);
  CHECK(std::abs(distance_of_mean(combined) - distance_of_mean(combined_exactly)) < 1e-10);
  for (std::size_t i = 0; i < rank_count; ++i) {
    CHECK(std::abs(combined[i] - combined_exactly[i]) < 1e-10);
    CHECK(std::abs(adapted[i] - adapted_exactly[i]) < 1e-10);
  }
}

}  // namespace

TEST_CASE("on quadratics over a ring both averaging optimizers end at their fixed points",
          "[optim][exact][thread]") {
  check_fixed_points(topology::ring(rank_count), ring_matrix(), 0.1,
                     {6.517391302799e-1, 4.737816509650e-1});
  check_fixed_points(topology::ring(rank_count), ring_matrix(), 0.05,
                     {2.577329141385e-1, 1.780510930826e-1});
}

TEST_CASE("the mean over a ring misses the minimizer by what theory says",
          "[optim][exact][thread]") {
  CHECK(std::abs(distance_of_mean(run<adapt_first>(topology::ring(rank_count), 0.1, 360)[0]) -
                 1.106036292190e-1) < 1e-10);
  CHECK(std::abs(distance_of_mean(run<adapt_first>(topology::ring(rank_count), 0.05, 720)[0]) -
                 6.744245965442e-2) < 1e-10);
}

TEST_CASE("on quadratics over the exponential graph both end at their fixed points",
          "[optim][exact][thread]") {
  check_fixed_points(topology::exponential(rank_count), exponential_matrix(), 0.1,
                     {1.018947167730e-1, 2.413420214829e-2});
  CHECK(
      std::abs(distance_of_mean(run<adapt_first>(topology::exponential(rank_count), 0.1, 360)[0]) -
               1.071886062775e-3) < 1e-10);
}

TEST_CASE("with one peer per step the fixed point has the period of the schedule",
          "[optim][exact][thread]") {
  const auto periods = run<adapt_first>(topology::one_peer_exponential(rank_count), 0.1, 360);
  CHECK(std::abs(mean_square_distance(periods[0]) - 9.220506069207e-2) < 1e-10);
  CHECK(std::abs(mean_square_distance(periods[1]) - 1.174099511992e-1) < 1e-10);
  CHECK(std::abs(mean_square_distance(periods[2]) - 3.342817784304e-2) < 1e-10);
}

RANKS_TEST("without learning, one period of one-peer averaging gives the mean, bit for bit",
           "[optim][exact]") {
  const int n = comm.size();
  if ((n & (n - 1)) != 0) return;  // exact for powers of two alone
  const auto value_of = [](const at::Tensor& like, int rank) {
    return torch::floor(values(like.sizes(), 70 + rank) * 1000).to(like.scalar_type());
  };
  for (const auto type : {at::kFloat, at::kDouble}) {
    mlp net;
    net->to(type);
    const torch::NoGradGuard no_grad;
    for (auto& each : net->parameters()) each.copy_(value_of(each, comm.rank()));
    optim::adapt_with_combine optimizer(torch::optim::SGD(net->parameters(), 0.0), net, comm);
    const int period = static_cast<int>(std::lround(std::log2(n)));
    for (int k = 0; k < period; ++k) {
      for (auto& each : net->parameters()) each.mutable_grad() = torch::zeros_like(each);
      optimizer.step();
    }
    for (const auto& each : net->parameters()) {
      at::Tensor sum = torch::zeros_like(each);
      for (int rank = 0; rank < n; ++rank) sum += value_of(each, rank);
      require_same(each, sum / n);
    }
  }
}

RANKS_TEST("gradient_allreduce with n ranks is one rank with all their data", "[optim][exact]") {
  const auto batch = [](int rank, int step) { return values({6, 5}, 100 * step + rank); };
  const auto target = [](int rank, int step) { return values({6, 2}, 100 * step + rank + 50); };
  mlp net = make_mlp(1), alone = make_mlp(1);
  const auto options = torch::optim::SGDOptions(0.2).momentum(0.9).weight_decay(1e-3);
  optim::gradient_allreduce optimizer(torch::optim::SGD(net->parameters(), options), net, comm,
                                      {.bucket_bytes = 512});
  torch::optim::SGD reference(alone->parameters(), options);
  for (int step = 0; step < 10; ++step) {
    optimizer.zero_grad();
    torch::mse_loss(optimizer.forward(net, batch(comm.rank(), step)), target(comm.rank(), step))
        .backward();
    optimizer.step();

    std::vector<at::Tensor> inputs, targets;
    for (int rank = 0; rank < comm.size(); ++rank) {
      inputs.push_back(batch(rank, step));
      targets.push_back(target(rank, step));
    }
    reference.zero_grad();
    torch::mse_loss(alone->forward(torch::cat(inputs)), torch::cat(targets)).backward();
    reference.step();
    require_close(flatten(*net), flatten(*alone), 1e-12);
  }
}

TEST_CASE("averaging after H local steps is an outer loop of its own", "[optim][exact][thread]") {
  // Fixed point of H = 5 local steps and an average over 4 ranks: sum (1-q_i) c_i / sum (1-q_i).
  const int n = 4, every = 5;
  const double mu = 0.1;
  std::array<double, 4> ends{};
  run_threads(n, [&](communicator<thread_backend>& comm) {
    auto x = torch::zeros({1}, at::TensorOptions(at::kDouble).requires_grad(true));
    const double h = 1 + static_cast<double>(comm.rank()) / n;
    const torch::nn::Module nameless;
    optim::adapt_then_combine optimizer(
        torch::optim::SGD({x}, mu), nameless, comm,
        {.backward_passes_per_step = every, .communication = optim::communication_type::allreduce});
    for (int k = 0; k < 60 * every; ++k) {
      optimizer.zero_grad();
      ((x - comm.rank()).square().sum() * (h / 2)).backward();
      optimizer.step();
    }
    ends[static_cast<std::size_t>(comm.rank())] = x.item<double>();
  });
  for (const double each : ends) CHECK(std::abs(each - 1.66760616048777) < 1e-10);
}
