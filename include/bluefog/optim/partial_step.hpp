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
/// options, stay in place.
class partial_step {
 public:
  using groups = std::vector<torch::optim::OptimizerParamGroup>;
  using parameters = std::vector<std::vector<at::Tensor>>;  // per group

  /// In its scope the optimizer has one part of its parameters.
  class [[nodiscard]] selection {
   public:
    selection(groups& all, parameters& part) : groups_(all), part_(part) { swap(); }
    selection(const selection&) = delete;
    selection& operator=(const selection&) = delete;
    ~selection() { swap(); }

   private:
    void swap() noexcept {
      for (std::size_t group = 0; group < part_.size(); ++group)
        groups_[group].params().swap(part_[group]);
    }

    groups& groups_;
    parameters& part_;
  };

  /// \param ranges  the parts, runs of the arena; what lies in none of them is one more part.
  partial_step(const groups& all, const parameter_arena& arena,
               const std::vector<parameter_arena::range>& ranges)
      : parts_(ranges.size() + 1, parameters(all.size())) {
    for (std::size_t group = 0; group < all.size(); ++group)
      for (const at::Tensor& tensor : all[group].params())
        parts_[part_of(tensor, arena, ranges)][group].push_back(tensor);
  }

  /// \param all  the groups that the parts were made from, wherever they are by now.
  selection select(groups& all, std::size_t index) { return {all, parts_[index]}; }

  /// \return the number of the range that holds `tensor`, `ranges.size()` if none does.
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

 private:
  std::vector<parameters> parts_;
};

}  // namespace bluefog::optim::detail
