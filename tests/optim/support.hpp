// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <iostream>
#include <source_location>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <bluefog/core/logger.hpp>

#include "support/ranks.hpp"

/// Small models whose parameters and data are functions of a seed: torch's own generator is one per
/// process, so ranks that are threads would share it.
namespace bluefog_test {

/// \return values in [-1, 1] that look random, the same for the same seed.
inline at::Tensor values(at::IntArrayRef shape, int seed, at::ScalarType type = at::kDouble) {
  std::int64_t count = 1;
  for (const auto extent : shape) count *= extent;
  auto flat = torch::arange(count, at::kDouble);
  return torch::sin(flat * 12.9898 + seed * 78.233 + 1).reshape(shape).to(type);
}

/// Sets parameter k of `module` to `values` of `seed` and k, in place, scaled by `scale`.
inline void fill(torch::nn::Module& module, int seed, double scale = 0.3) {
  const torch::NoGradGuard guard;
  int k = 0;
  for (auto& each : module.parameters()) {
    each.copy_(values(each.sizes(), 1000 * seed + k, each.scalar_type()) * scale);
    ++k;
  }
}

/// \return what `torch::save` writes.
template <class Value>
std::string saved(const Value& value) {
  std::ostringstream stream;
  torch::save(value, stream);
  return stream.str();
}
/// Loads what `saved` has returned.
template <class Value>
void restore(const std::string& bytes, Value& value) {
  std::istringstream stream(bytes);
  torch::load(value, stream);
}

/// Three layers without batch norm.
struct mlp_impl : torch::nn::Module {
  explicit mlp_impl(std::int64_t inputs = 5, std::int64_t hidden = 16) {
    first = register_module("first", torch::nn::Linear(inputs, hidden));
    second = register_module("second", torch::nn::Linear(hidden, hidden));
    last = register_module("last", torch::nn::Linear(hidden, 2));
  }
  at::Tensor forward(const at::Tensor& x) {
    return last(torch::tanh(second(torch::tanh(first(x)))));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr};
};
TORCH_MODULE_IMPL(mlp, mlp_impl);

/// \return a net in `type` whose parameters follow from `seed`.
inline mlp make_mlp(int seed, at::ScalarType type = at::kDouble) {
  mlp net;
  net->to(type);
  fill(*net, seed);
  return net;
}

/// \return SGD with momentum over all parameters of `net`, whose state goes with them.
inline torch::optim::SGD sgd_of(mlp& net) {
  return torch::optim::SGD(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
}

/// \return the mean squared distance of the model's answer to `batch` of `seed` from its target.
inline at::Tensor loss_of(const at::Tensor& answer, int seed) {
  return torch::mse_loss(answer, values(answer.sizes(), seed + 500, answer.scalar_type()));
}

inline void require_same(const at::Tensor& got, const at::Tensor& wanted,
                         std::source_location where = std::source_location::current()) {
  if (got.sizes() == wanted.sizes() && torch::equal(got, wanted)) return;
  std::ostringstream text;
  text << "got " << got << "\nwanted " << wanted;
  fail_here(text.str(), where);
}
inline void require_close(const at::Tensor& got, const at::Tensor& wanted, double tolerance,
                          std::source_location where = std::source_location::current()) {
  require_equal(got.sizes() == wanted.sizes(), true, where);
  require_near((got - wanted).abs().max().item<double>(), 0, tolerance, where);
}
inline void require_same_parameters(const torch::nn::Module& got, const torch::nn::Module& wanted,
                                    std::source_location where = std::source_location::current()) {
  const auto a = got.parameters();
  const auto b = wanted.parameters();
  require_equal(a.size(), b.size(), where);
  for (std::size_t i = 0; i < a.size(); ++i) require_same(a[i], b[i], where);
}

/// \return one vector with all parameters, a copy.
inline at::Tensor flatten(const torch::nn::Module& module) {
  const torch::NoGradGuard guard;
  std::vector<at::Tensor> parts;
  for (const auto& each : module.parameters()) parts.push_back(each.detach().reshape(-1));
  return torch::cat(parts).clone();
}

/// Collects what the log says on this thread, so of one rank, instead of printing it.
class captured_log {
 public:
  captured_log() : outer_(std::exchange(current(), this)) {
    [[maybe_unused]] static const auto before = bluefog::logger::sink(&take);
  }
  captured_log(const captured_log&) = delete;
  captured_log& operator=(const captured_log&) = delete;
  ~captured_log() { current() = outer_; }

  /// \return how many messages contain `part`.
  [[nodiscard]] int count(std::string_view part) const {
    int found = 0;
    for (const auto& line : lines_) found += line.find(part) != std::string::npos ? 1 : 0;
    return found;
  }

 private:
  static captured_log*& current() {
    thread_local captured_log* log = nullptr;
    return log;
  }
  static void take(bluefog::log_level /*level*/, std::string_view text) {
    if (current() != nullptr)
      current()->lines_.emplace_back(text);
    else
      std::cerr << text << '\n';
  }

  captured_log* outer_;
  std::vector<std::string> lines_;
};

}  // namespace bluefog_test
