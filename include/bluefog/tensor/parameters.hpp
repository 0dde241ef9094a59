// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <span>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/tensor/broadcast.hpp>

namespace bluefog {

/// Something with parameters and buffers: a `torch::nn::Module`, which this layer does not know.
template <class T>
concept parameter_owner = requires(const T& model) {
  { model.parameters() } -> std::convertible_to<std::vector<at::Tensor>>;
  { model.buffers() } -> std::convertible_to<std::vector<at::Tensor>>;
};

/// A module, or what points to one: a module holder (what `TORCH_MODULE` makes), a smart pointer.
template <class T>
concept module_or_holder = parameter_owner<T> || requires(const T& model) {
  requires parameter_owner<std::remove_cvref_t<decltype(*model)>>;
};

namespace detail {

/// \return the parameters and buffers of `model` that are defined.
template <module_or_holder Model>
[[nodiscard]] std::vector<at::Tensor> tensors_of(const Model& model) {
  if constexpr (parameter_owner<Model>) {
    std::vector<at::Tensor> tensors = model.parameters();
    for (const at::Tensor& buffer : model.buffers()) tensors.push_back(buffer);
    std::erase_if(tensors, [](const at::Tensor& x) { return !x.defined(); });
    return tensors;
  } else {
    return tensors_of(*model);
  }
}

}  // namespace detail

/// Overwrites parameters with those of the root, in one message: how replicas begin alike.
///
/// Collective: every rank must call it, in the same order as its other operations.
///
/// \param parameters  changed in place, also where they require a gradient; types and shapes are
///                    the same on every rank.
/// \param root        whose values; the same on every rank.
/// \throws as `broadcast_`.
template <backend Backend>
void broadcast_parameters(communicator<Backend>& comm, std::span<const at::Tensor> parameters,
                          int root, const call_options& options = {}) {
  const c10::AutoGradMode no_graph(false);
  broadcast_(comm, parameters, root, options);
}

/// Overwrites all parameters and buffers of a model with those of the root.
template <backend Backend, module_or_holder Model>
void broadcast_parameters(communicator<Backend>& comm, const Model& model, int root,
                          const call_options& options = {}) {
  broadcast_parameters(comm, std::span<const at::Tensor>(detail::tensors_of(model)), root, options);
}

/// Averages parameters over all ranks, in one message per floating type.
///
/// Tensors of other types, such as counters, are left as they are on each rank. Collective: every
/// rank must call it, in the same order as its other operations.
///
/// \param parameters  changed in place, also where they require a gradient; types and shapes are
///                    the same on every rank.
/// \throws as `allreduce_`.
template <backend Backend>
void allreduce_parameters(communicator<Backend>& comm, std::span<const at::Tensor> parameters,
                          const allreduce_options& options = {}) {
  const c10::AutoGradMode no_graph(false);
  std::vector<at::Tensor> averaged;
  for (const at::Tensor& x : parameters)
    if (is_floating(detail::expects_tensor("allreduce_parameters", x))) averaged.push_back(x);
  allreduce_(comm, std::span<const at::Tensor>(averaged), reduce_op::average, options);
}

/// Averages all floating parameters and buffers of a model over all ranks.
template <backend Backend, module_or_holder Model>
void allreduce_parameters(communicator<Backend>& comm, const Model& model,
                          const allreduce_options& options = {}) {
  allreduce_parameters(comm, std::span<const at::Tensor>(detail::tensors_of(model)), options);
}

}  // namespace bluefog
