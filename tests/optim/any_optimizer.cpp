// SPDX-License-Identifier: Apache-2.0
// The wrappers step whatever optimizer they are given.
#include <memory>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/optim/adapt_then_combine.hpp>
#include <bluefog/optim/adapt_with_combine.hpp>
#include <bluefog/optim/gradient_allreduce.hpp>

#include "simulation.hpp"

namespace {

using namespace bluefog;
using namespace bluefog_test;

/// Somebody's own optimizer: steps of one length in the direction of the gradient's signs, with a
/// count of its steps.
class sign_descent : public torch::optim::Optimizer {
 public:
  sign_descent(std::vector<at::Tensor> parameters, double rate)
      : Optimizer(std::move(parameters), std::make_unique<torch::optim::SGDOptions>(rate)) {}

  at::Tensor step(LossClosure closure = nullptr) override {
    const torch::NoGradGuard no_grad;
    at::Tensor loss;
    if (closure) loss = closure();
    ++steps;
    for (auto& group : param_groups())
      for (auto& each : group.params())
        if (each.grad().defined())
          each.sub_(each.grad().sign() * group.options().get_lr() / static_cast<double>(steps));
    return loss;
  }

  int steps = 0;
};

/// The same optimizer as a type of its own, which the wrapper steps once, whole.
template <class Optimizer>
struct whole : Optimizer {
  using Optimizer::Optimizer;
};

struct case_sgd {
  using type = torch::optim::SGD;
  static auto options() {
    return torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(1e-2);
  }
};
struct case_adam {
  using type = torch::optim::Adam;
  static auto options() { return torch::optim::AdamOptions(0.02).weight_decay(1e-2).amsgrad(true); }
};
struct case_adamw {
  using type = torch::optim::AdamW;
  static auto options() { return torch::optim::AdamWOptions(0.02).weight_decay(1e-2); }
};
struct case_rmsprop {
  using type = torch::optim::RMSprop;
  static auto options() {
    return torch::optim::RMSpropOptions(0.01).momentum(0.5).centered(true).weight_decay(1e-2);
  }
};
struct case_adagrad {
  using type = torch::optim::Adagrad;
  static auto options() { return torch::optim::AdagradOptions(0.05).lr_decay(0.1); }
};
struct case_own {
  using type = sign_descent;
  static double options() { return 0.05; }
};

/// A wrapper on every rank and the same without it, side by side.
template <class Case, class Comm, class Wrap>
void compare_with_simulation(Comm& comm, sequence what, const Wrap& wrap) {
  using inner = typename Case::type;
  simulation all(comm.size(), [](mlp& net) {
    return std::make_unique<inner>(net->parameters(), Case::options());
  });
  mlp net = make_mlp(comm.rank());
  auto optimizer = wrap(inner(net->parameters(), Case::options()), net);
  for (int step = 0; step < 6; ++step) {
    all.step(what, loss_in_step(step));
    optimizer.zero_grad();
    loss_in_step(step)(net, comm.rank()).backward();
    optimizer.step();
    if (comm.size() == 1)
      require_same_parameters(*net, *all.net(0));
    else
      require_close(flatten(*net), flatten(*all.net(comm.rank())), 1e-9);
  }
}

template <class Case, class Comm>
void compare_both(Comm& comm) {
  compare_with_simulation<Case>(comm, sequence::combine_first, [&](auto inner, mlp& net) {
    return optim::adapt_with_combine(std::move(inner), net, comm);
  });
  compare_with_simulation<Case>(comm, sequence::adapt_first, [&](auto inner, mlp& net) {
    return optim::adapt_then_combine(std::move(inner), net, comm, {.bucket_bytes = 300});
  });
}

template <class Inner, class Case, class Comm>
at::Tensor trained(Comm& comm, std::int64_t bucket_bytes) {
  mlp net = make_mlp(comm.rank());
  optim::adapt_then_combine optimizer(Inner(net->parameters(), Case::options()), net, comm,
                                      {.bucket_bytes = bucket_bytes});
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    loss_in_step(step)(net, comm.rank()).backward();
    optimizer.step();
  }
  return flatten(*net);
}

template <class Case, class Comm>
void compare_with_whole(Comm& comm) {
  using inner = typename Case::type;
  const auto expected = trained<whole<inner>, Case>(comm, 25 << 20);
  require_same(trained<inner, Case>(comm, 1), expected);
  require_same(trained<inner, Case>(comm, 700), expected);
  require_same(trained<inner, Case>(comm, 25 << 20), expected);
}

template <class Case, class Comm>
void compare_with_mean_gradient(Comm& comm) {
  using inner = typename Case::type;
  mlp net = make_mlp(0), alone = make_mlp(0);
  optim::gradient_allreduce optimizer(inner(net->parameters(), Case::options()), net, comm);
  inner reference(alone->parameters(), Case::options());
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    loss_in_step(step)(net, comm.rank()).backward();
    optimizer.step();
    reference.zero_grad();
    at::Tensor sum = torch::zeros({}, at::kDouble);
    for (int rank = 0; rank < comm.size(); ++rank) sum = sum + loss_in_step(step)(alone, rank);
    (sum / comm.size()).backward();
    reference.step();
    require_close(flatten(*net), flatten(*alone), 1e-9);
  }
}

}  // namespace

RANKS_TEST("SGD with momentum under both averaging optimizers does what it does alone, averaged",
           "[optim][any]") {
  compare_both<case_sgd>(comm);
}
RANKS_TEST("an optimizer of one's own is stepped whole", "[optim][any]") {
  compare_both<case_own>(comm);
}

TEMPLATE_TEST_CASE("the other optimizers of torch do what they do alone, averaged (threads)",
                   "[optim][any][thread]", case_adam, case_adamw, case_rmsprop, case_adagrad) {
  for (const int ranks : {1, 3, 4})
    run_threads(ranks, [](communicator<thread_backend>& comm) { compare_both<TestType>(comm); });
}

TEMPLATE_TEST_CASE("a step bucket by bucket is the whole step bit for bit (threads)",
                   "[optim][any][thread]", case_sgd, case_adam, case_adamw, case_rmsprop,
                   case_adagrad) {
  run_threads(4, [](communicator<thread_backend>& comm) { compare_with_whole<TestType>(comm); });
}

TEMPLATE_TEST_CASE("gradient_allreduce steps any optimizer with the mean gradient (threads)",
                   "[optim][any][thread]", case_sgd, case_adam, case_adamw, case_rmsprop,
                   case_adagrad, case_own) {
  for (const int ranks : {1, 3})
    run_threads(ranks, [](communicator<thread_backend>& comm) {
      compare_with_mean_gradient<TestType>(comm);
    });
}

#ifdef BLUEFOG_TEST_MPI
TEMPLATE_TEST_CASE("the other optimizers of torch do what they do alone, averaged (MPI)",
                   "[optim][any][mpi]", case_adam, case_adamw, case_rmsprop, case_adagrad) {
  on_mpi([](auto& comm) { compare_both<TestType>(comm); });
}

TEMPLATE_TEST_CASE("a step bucket by bucket is the whole step bit for bit (MPI)",
                   "[optim][any][mpi]", case_sgd, case_adam, case_adamw, case_rmsprop,
                   case_adagrad) {
  on_mpi([](auto& comm) { compare_with_whole<TestType>(comm); });
}

TEMPLATE_TEST_CASE("gradient_allreduce steps any optimizer with the mean gradient (MPI)",
                   "[optim][any][mpi]", case_sgd, case_adam, case_adamw, case_rmsprop, case_adagrad,
                   case_own) {
  on_mpi([](auto& comm) { compare_with_mean_gradient<TestType>(comm); });
}
#endif
