// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <bluefog/core/error.hpp>
#include <bluefog/tensor/arena.hpp>

namespace torch::optim {
class LBFGS;  // only its name is needed, to refuse it
}

namespace bluefog::optim {

/// A torch module, a module holder (what `TORCH_MODULE` makes) or a pointer to a module.
template <class T>
concept module_like = std::derived_from<T, torch::nn::Module> || requires(T& model) {
  requires std::derived_from<std::remove_cvref_t<decltype(*model)>, torch::nn::Module>;
};

/// A torch optimizer that takes its step from gradients that are there.
template <class T>
concept steppable = std::derived_from<T, torch::optim::Optimizer> && std::move_constructible<T>;

/// \return the module behind a module, holder or pointer.
template <module_like Model>
[[nodiscard]] const torch::nn::Module& module_of(const Model& model) {
  if constexpr (std::derived_from<Model, torch::nn::Module>)
    return model;
  else
    return *model;
}

/// Calls the model's forward.
template <module_like Model, class... Inputs>
decltype(auto) call_forward(Model& model, Inputs&&... inputs) {
  if constexpr (std::derived_from<Model, torch::nn::Module>)
    return model.forward(std::forward<Inputs>(inputs)...);
  else
    return model->forward(std::forward<Inputs>(inputs)...);
}

namespace detail {

/// Refuses optimizers that evaluate the loss several times per step.
template <class Inner>
constexpr void refuse_line_search() {
  static_assert(!std::is_base_of_v<torch::optim::LBFGS, Inner>,
                "LBFGS evaluates the loss several times within a step, between which ranks would "
                "have to communicate; take an optimizer that steps once, e.g. torch::optim::SGD");
}

/// Runs a closure that evaluates the loss, once, with gradients recorded.
/// \return its loss; undefined if there is no closure.
[[nodiscard]] inline at::Tensor evaluate(const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return {};
  const c10::AutoGradMode grad(true);
  return closure();
}

/// Tells tensors that come again: tied weights are listed twice, by modules and so by optimizers.
class seen_tensors {
 public:
  /// \return whether it is asked of `tensor` for the first time.
  bool add(const at::Tensor& tensor) { return seen_.insert(tensor.unsafeGetTensorImpl()).second; }

 private:
  std::unordered_set<const void*> seen_;
};

/// \return the parameters of each group, those that have not come before.
[[nodiscard]] inline std::vector<std::vector<at::Tensor>> each_once(
    const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::vector<std::vector<at::Tensor>> result(groups.size());
  seen_tensors seen;
  for (std::size_t group = 0; group < groups.size(); ++group)
    for (const at::Tensor& each : groups[group].params())
      if (seen.add(each)) result[group].push_back(each);
  return result;
}

/// The parameters of a module with their names.
[[nodiscard]] inline std::vector<named_tensor> parameters_of(const torch::nn::Module& module) {
  std::vector<named_tensor> result;
  for (const auto& item : module.named_parameters()) result.push_back({item.key(), item.value()});
  return result;
}

/// The parameters of all groups, each once, with the names that are known.
[[nodiscard]] inline std::vector<named_tensor> named_parameters(
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const std::vector<named_tensor>& known) {
  std::vector<named_tensor> result;
  seen_tensors seen;
  for (std::size_t group = 0; group < groups.size(); ++group)
    for (std::size_t i = 0; i < groups[group].params().size(); ++i) {
      const at::Tensor& tensor = groups[group].params()[i];
      if (!seen.add(tensor)) continue;
      const auto same = [&](const at::Tensor& other) { return other.is_same(tensor); };
      const auto found = std::ranges::find_if(known, same, &named_tensor::tensor);
      result.push_back(
          {found != known.end() ? found->name : concat("group ", group, " parameter ", i), tensor});
    }
  return result;
}

/// Parameters by number, with names.
template <class T>
concept parameter_list = requires(const T& list, std::size_t index) {
  { list.size() } -> std::same_as<std::size_t>;
  { list.name(index) } -> std::convertible_to<std::string>;
  { list.tensor(index) } -> std::same_as<const at::Tensor&>;
};

/// \return whether `holds(tensor)` for each parameter, up to the first for which it does not.
template <class Holds>
bool all_parameters(const std::vector<torch::optim::OptimizerParamGroup>& groups, Holds holds) {
  for (const auto& group : groups)
    if (!std::ranges::all_of(group.params(), std::ref(holds))) return false;
  return true;
}
template <parameter_list List, class Holds>
bool all_parameters(const List& list, Holds holds) {
  for (std::size_t i = 0; i < list.size(); ++i)
    if (!holds(list.tensor(i))) return false;
  return true;
}

/// Which parameters there are, and which of them learn: for noticing a change.
using parameter_signature = std::vector<std::pair<const void*, bool>>;

/// \param parameters  a list, or an optimizer's groups.
template <class Parameters>
[[nodiscard]] parameter_signature signature(const Parameters& parameters) {
  parameter_signature result;
  all_parameters(parameters, [&](const at::Tensor& each) {
    result.emplace_back(each.unsafeGetTensorImpl(), each.requires_grad());
    return true;
  });
  return result;
}

/// \return whether `known` is the signature of `parameters`: asked several times per step.
template <class Parameters>
[[nodiscard]] bool has_signature(const Parameters& parameters, const parameter_signature& known) {
  auto next = known.begin();
  return all_parameters(parameters,
                        [&](const at::Tensor& each) {
                          return next != known.end() && next->first == each.unsafeGetTensorImpl() &&
                                 next++->second == each.requires_grad();
                        }) &&
         next == known.end();
}

}  // namespace detail
}  // namespace bluefog::optim
