// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <bluefog/tensor/arena.hpp>

namespace torch::optim {
class SGD;
class Adam;
class AdamW;
class RMSprop;
class Adagrad;
}  // namespace torch::optim

namespace bluefog::optim::detail {

/// torch's optimizers whose step treats each parameter by itself: stepping them part by part is
/// stepping them whole.
template <class Inner>
concept steps_parameters_apart =
    std::same_as<Inner, torch::optim::SGD> || std::same_as<Inner, torch::optim::Adam> ||
    std::same_as<Inner, torch::optim::AdamW> || std::same_as<Inner, torch::optim::RMSprop> ||
    std::same_as<Inner, torch::optim::Adagrad>;

/// Makes an optimizer's `step()` see one part of its parameters at a time. The groups, and so their
/// options, stay in place; their parameters are put back on destruction.
class partial_step {
 public:
  using groups = std::vector<torch::optim::OptimizerParamGroup>;

  /// \param all     borrowed.
  /// \param ranges  the parts, runs of the arena; what lies in none of them is one more part.
  partial_step(groups& all, const parameter_arena& arena,
               const std::vector<parameter_arena::range>& ranges)
      : groups_(all), parts_(ranges.size() + 1, part(all.size())) {
    for (std::size_t group = 0; group < all.size(); ++group) {
      for (const at::Tensor& tensor : all[group].params())
        parts_[part_of(tensor, arena, ranges)][group].push_back(tensor);
      whole_.push_back(std::move(all[group].params()));
    }
  }
  partial_step(const partial_step&) = delete;
  partial_step& operator=(const partial_step&) = delete;
  ~partial_step() {
    for (std::size_t group = 0; group < groups_.size(); ++group)
      groups_[group].params() = std::move(whole_[group]);
  }

  /// From now on the optimizer has the parameters of part `index`.
  void select(std::size_t index) {
    for (std::size_t group = 0; group < groups_.size(); ++group)
      groups_[group].params() = std::move(parts_[index][group]);
  }

 private:
  using part = std::vector<std::vector<at::Tensor>>;  // per group

  [[nodiscard]] static std::size_t part_of(const at::Tensor& tensor, const parameter_arena& arena,
                                           const std::vector<parameter_arena::range>& ranges) {
    const std::size_t index = arena.index_of(tensor);
    if (index == arena.size()) return ranges.size();
    const auto place = arena.range_of(index);
    const auto holds = [&](const parameter_arena::range& it) {
      return it.block == place.block && it.begin <= place.begin &&
             place.begin < it.begin + it.count;
    };
    return static_cast<std::size_t>(std::ranges::find_if(ranges, holds) - ranges.begin());
  }

  groups& groups_;
  std::vector<part> parts_;
  std::vector<std::vector<at::Tensor>> whole_;
};

}  // namespace bluefog::optim::detail
