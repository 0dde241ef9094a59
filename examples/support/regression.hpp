// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <random>
#include <string>

#include <torch/torch.h>

#include <bluefog/communicator.hpp>
#include <bluefog/tensor.hpp>

namespace example {

/// One rank's loss: over 20 samples of 5 numbers, drawn around a truth of its own.
class regression : public torch::nn::Module {
 public:
  /// \param task  "linear_regression" or "logistic_regression".
  regression(const std::string& task, std::uint64_t seed)
      : logistic_(task == "logistic_regression") {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    const auto draw = [&](std::int64_t rows, std::int64_t columns) {
      auto result = torch::empty({rows, columns}, at::kDouble);
      for (std::int64_t i = 0; i < result.numel(); ++i) result.view(-1)[i] = normal(random);
      return result;
    };
    inputs_ = draw(20, 5);
    targets_ = inputs_.matmul(draw(5, 1)) + 0.1 * draw(20, 1);
    if (logistic_) targets_ = targets_.sign();
    w_ = register_parameter("w", torch::zeros({5, 1}, at::kDouble));
  }

  /// \return the mean loss over this rank's samples.
  at::Tensor forward() {
    const at::Tensor answers = inputs_.matmul(w_);
    if (!logistic_) return (answers - targets_).square().mean() / 2;
    return torch::softplus(-targets_ * answers).mean() + regularity / 2 * w_.square().sum();
  }

  /// \return gradient and second derivatives at w, side by side: 5 x 6.
  [[nodiscard]] at::Tensor derivatives(const at::Tensor& w) const {
    const auto count = static_cast<double>(inputs_.size(0));
    const at::Tensor answers = inputs_.matmul(w), transposed = inputs_.t() / count;
    if (!logistic_)
      return torch::cat({transposed.matmul(answers - targets_), transposed.matmul(inputs_)}, 1);
    const at::Tensor wrong = torch::sigmoid(-targets_ * answers);
    return torch::cat({regularity * w - transposed.matmul(targets_ * wrong),
                       regularity * torch::eye(5, at::kDouble) +
                           transposed.matmul(wrong * (1 - wrong) * inputs_)},
                      1);
  }

  [[nodiscard]] at::Tensor w() const { return w_.detach(); }

 private:
  static constexpr double regularity = 0.1;

  bool logistic_;
  at::Tensor inputs_, targets_, w_;
};

/// Newton's method on the mean of all ranks' losses.
template <bluefog::backend Backend>
at::Tensor minimizer(bluefog::communicator<Backend>& comm, const regression& model) {
  at::Tensor w = model.w().clone();
  for (int k = 0; k < 30; ++k) {
    const at::Tensor mean = bluefog::allreduce(comm, model.derivatives(w));
    w -= torch::linalg_solve(mean.narrow(1, 1, 5), mean.narrow(1, 0, 1));
  }
  return w;
}

}  // namespace example
