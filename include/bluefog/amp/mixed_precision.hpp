// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/serialize/archive.h>

#include <bluefog/amp/autocast_guard.hpp>
#include <bluefog/amp/master_parameter.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/parameters.hpp>

namespace bluefog::amp {

/// How much of a model computes in 16 bits: apex's levels.
enum class opt_level : std::uint8_t {
  O0,  ///< nothing
  O1,  ///< what is safe: the forward runs under an `autocast_guard`
  O2,  ///< the model but its batch norms; what is optimized are float32 masters of its parameters
  O3   ///< everything, what is optimized as well
};

/// \return whether a module normalizes over the batch, which 16 bits are too few for.
[[nodiscard]] inline bool is_batch_norm(const torch::nn::Module& module) {
  return dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module) != nullptr ||
         dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module) != nullptr;
}

/// Options of `initialize`.
struct initialize_options {
  /// The 16-bit type; if none is given, float16 for a model on a GPU and bfloat16 on a CPU.
  std::optional<at::ScalarType> type = std::nullopt;
  /// Which modules `opt_level::O2` leaves as they are.
  std::function<bool(const torch::nn::Module&)> keep = is_batch_norm;
};

/// A model as it is optimized and saved, in front of the model as it computes.
///
/// Its parameters have the model's names, and their original dtype except with `opt_level::O3`.
/// They are what the optimizer takes, what travels and what `torch::save` writes, which a model
/// that was never initialized can load. With `opt_level::O2` the model's own parameters follow them
/// at each forward. Floating buffers of what is narrowed have no masters: they are saved narrow,
/// and whoever loads them gets them so. Train, evaluate and load through this one; afterwards leave
/// the model itself alone.
///
/// \tparam Model  a module, whose object it borrows, or a module holder, of which it keeps a copy.
template <optim::module_like Model>
class mixed_precision : public torch::nn::Module {
 public:
  /// Narrows `model` as the level says. See `initialize`. \throws usage_error if it has masters.
  mixed_precision(Model& model, opt_level level, const initialize_options& options = {})
      : model_(model), level_(level), keep_(options.keep), device_(device_of(inner())) {
    type_ = options.type.value_or(device_ == at::kCPU ? at::kBFloat16 : at::kHalf);
    expects(type_ == at::kHalf || type_ == at::kBFloat16,
            "initialize: the 16-bit type is float16 or bfloat16, got ", type_);
    expects(std::ranges::none_of(inner().parameters(), &detail::master_parameter::has_master),
            "initialize: the model is initialized already, and its parameters follow the masters "
            "that the first optimizer has; give one optimizer all parameters, in groups that have "
            "options of their own");
    const c10::AutoGradMode no_graph(false);
    mirror(inner(), *this);
    keep_ = nullptr;
    torch::nn::Module::train(inner().is_training());
  }

  /// The model's forward at this level. Tensors that go in are narrowed where the model is narrow;
  /// a tensor that comes out is in float32, but with `opt_level::O0`.
  template <class... Inputs>
  auto forward(Inputs&&... inputs) {
    refresh();
    if (level_ == opt_level::O0)
      return optim::call_forward(model(), std::forward<Inputs>(inputs)...);
    if (level_ == opt_level::O1) {
      const autocast_guard guard(device_, type_);
      return widened(optim::call_forward(model(), std::forward<Inputs>(inputs)...));
    }
    return widened(optim::call_forward(model(), narrowed(std::forward<Inputs>(inputs))...));
  }

  /// Gives the model the values of the parameters: done by `forward`, needed before the model is
  /// used by itself.
  void refresh() {
    for (auto& each : masters_) each.refresh();
  }

  /// Of the model as well.
  void train(bool on = true) override {
    torch::nn::Module::train(on);
    inner().train(on);
  }

  [[nodiscard]] opt_level level() const noexcept { return level_; }
  /// \return what is optimized in place of the model's parameter `tensor`: perhaps itself.
  [[nodiscard]] const at::Tensor& master_of(const at::Tensor& tensor) const {
    for (const auto& each : masters_)
      if (each.narrow().is_same(tensor)) return each.master();
    return tensor;
  }

  /// For `torch::save` and `torch::load`.
  friend torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                     const mixed_precision& net) {
    net.save(archive);
    return archive;
  }
  friend torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                    mixed_precision& net) {
    net.load(archive);
    return archive;
  }

 private:
  static constexpr bool borrows = std::derived_from<Model, torch::nn::Module>;

  [[nodiscard]] Model& model() noexcept { return model_; }
  [[nodiscard]] torch::nn::Module& inner() {
    if constexpr (borrows)
      return model();
    else
      return *model();
  }

  [[nodiscard]] static at::DeviceType device_of(const torch::nn::Module& module) {
    const auto parameters = module.parameters();
    return parameters.empty() ? at::kCPU : parameters.front().device().type();
  }

  // Gives `to` the parameters, buffers and children of `from`, and narrows those of `from`.
  void mirror(torch::nn::Module& from, torch::nn::Module& to) {
    const bool narrows = level_ == opt_level::O3 || (level_ == opt_level::O2 && !keep_(from));
    for (const auto& item : from.named_parameters(/*recurse=*/false)) {
      const at::Tensor chosen = narrows ? narrow(item.value()) : master_of(item.value());
      to.register_parameter(item.key(), chosen, chosen.requires_grad());
    }
    for (const auto& item : from.named_buffers(/*recurse=*/false)) {
      if (narrows && item.value().is_floating_point())
        at::Tensor(item.value()).set_data(item.value().to(type_));
      to.register_buffer(item.key(), item.value());
    }
    for (const auto& item : from.named_children())
      mirror(*item.value(), *to.register_module(item.key(), std::make_shared<torch::nn::Module>()));
  }

  [[nodiscard]] at::Tensor narrow(const at::Tensor& parameter) {
    const at::Tensor known = master_of(parameter);
    if (!known.is_same(parameter) || !parameter.is_floating_point()) return known;
    if (level_ == opt_level::O3) {
      if (parameter.scalar_type() != type_) at::Tensor(parameter).set_data(parameter.to(type_));
      return parameter;
    }
    return masters_.emplace_back(parameter, type_).master();
  }

  template <class Input>
  [[nodiscard]] decltype(auto) narrowed(Input&& input) const {
    if constexpr (std::same_as<std::remove_cvref_t<Input>, at::Tensor>)
      return input.is_floating_point() ? input.to(type_) : at::Tensor(input);
    else
      return std::forward<Input>(input);
  }
  template <class Output>
  [[nodiscard]] static Output widened(Output output) {
    if constexpr (std::same_as<Output, at::Tensor>)
      return output.scalar_type() == at::kHalf || output.scalar_type() == at::kBFloat16
                 ? output.to(at::kFloat)
                 : output;
    else
      return output;
  }

  std::conditional_t<borrows, std::reference_wrapper<Model>, Model> model_;
  opt_level level_;
  std::function<bool(const torch::nn::Module&)> keep_;
  at::DeviceType device_;
  at::ScalarType type_ = at::kBFloat16;
  std::vector<detail::master_parameter> masters_;
};

}  // namespace bluefog::amp
