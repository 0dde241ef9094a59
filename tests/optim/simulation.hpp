// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/optim/options.hpp>

#include "support.hpp"

namespace bluefog_test {

enum class sequence { combine_first, adapt_first };

/// Gives every net the mean of all of them.
template <class Net>
void average_over_all(const std::vector<Net>& nets) {
  at::Tensor mean = torch::zeros_like(flatten(*nets[0]));
  for (const auto& each : nets) mean += flatten(*each) / static_cast<double>(nets.size());
  for (const auto& each : nets)
    torch::nn::utils::vector_to_parameters(mean.clone(), each->parameters());
}

/// All ranks in one: plain torch optimizers and one-peer exponential averaging written out.
class simulation {
 public:
  using make_optimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(mlp&)>;
  using make_loss = std::function<at::Tensor(mlp&, int rank)>;

  simulation(int ranks, const make_optimizer& make) {
    for (int rank = 0; rank < ranks; ++rank) {
      nets_.push_back(make_mlp(rank));
      optimizers_.push_back(make(nets_.back()));
    }
  }

  [[nodiscard]] mlp& net(int rank) { return nets_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] torch::optim::Optimizer& optimizer(int rank) {
    return *optimizers_[static_cast<std::size_t>(rank)];
  }

  /// \param over_all  averages over all ranks, outside the rounds of `combine`.
  void step(sequence what, const make_loss& loss, bool over_all = false) {
    for (int rank = 0; rank < size(); ++rank) {
      optimizer(rank).zero_grad();
      loss(net(rank), rank).backward();
    }
    const auto mix = [&] {
      if (over_all)
        average_over_all(nets_);
      else
        combine();
    };
    if (what == sequence::combine_first) mix();
    for (auto& each : optimizers_) each->step();
    if (what == sequence::adapt_first) mix();
  }

  /// x_i <- (x_i + x_{i - 2^k}) / 2, with k the round modulo its period.
  void combine() {
    if (size() == 1) return;
    const torch::NoGradGuard no_grad;
    const int period = static_cast<int>(std::ceil(std::log2(size())));
    const int hop = 1 << (round_++ % period);
    std::vector<std::vector<at::Tensor>> before;
    for (auto& each : nets_) {
      before.emplace_back();
      for (const auto& parameter : each->parameters()) before.back().push_back(parameter.clone());
    }
    for (int rank = 0; rank < size(); ++rank) {
      const auto& source =
          before[static_cast<std::size_t>((rank + size() - hop % size()) % size())];
      auto parameters = net(rank)->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i)
        if (parameters[i].requires_grad())
          parameters[i].copy_(0.5 * before[static_cast<std::size_t>(rank)][i] + 0.5 * source[i]);
    }
  }

 private:
  [[nodiscard]] int size() const { return static_cast<int>(nets_.size()); }

  std::vector<mlp> nets_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  int round_ = 0;
};

/// Rank `rank`'s loss in step `step`.
inline simulation::make_loss loss_in_step(int step) {
  return [step](mlp& net, int rank) {
    const int seed = 31 * step + rank;
    const auto input = values({4, 5}, seed, net->first->weight.scalar_type());
    return loss_of(net->forward(input), seed);
  };
}

constexpr bluefog::optim::start all_starts[] = {
    bluefog::optim::start::after_step, bluefog::optim::start::after_forward,
    bluefog::optim::start::at_step, bluefog::optim::start::inside_backward};

/// Rank `rank`'s step `step` with a wrapper that counts forwards.
template <class Optimizer>
void train_by_forward(Optimizer& optimizer, mlp& net, int rank, int step) {
  optimizer.zero_grad();
  const int seed = 31 * step + rank;
  const auto input = values({4, 5}, seed, net->first->weight.scalar_type());
  loss_of(optimizer.forward(net, input), seed).backward();
  optimizer.step();
}

}  // namespace bluefog_test
