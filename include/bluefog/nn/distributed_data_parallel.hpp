// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/nn/buffer_sync.hpp>
#include <bluefog/nn/gradient_synchronizer.hpp>
#include <bluefog/optim/agreement.hpp>
#include <bluefog/optim/gradient_exchange.hpp>
#include <bluefog/optim/options.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/tensor/arena.hpp>
#include <bluefog/tensor/parameters.hpp>

namespace bluefog::nn {

/// Options of `distributed_data_parallel`; the same on every rank.
struct distributed_data_parallel_options {
  buffer_sync buffers = buffer_sync::broadcast;
  std::int64_t bucket_bytes = 25 << 20;  ///< gradients travel in messages of about this size
  optim::compression compression = optim::compression::none;
  bool sparse_as_dense = false;  ///< else a sparse gradient is an error
  /// A promise that every backward uses the same parameters; breaking it is an error in check
  /// mode.
  bool static_graph = false;
};

/// Trains one module on all ranks: each backward leaves the mean of all ranks' gradients in
/// `.grad()`, so that n ranks with a batch each learn what one with all their data would.
///
///     bluefog::nn::distributed_data_parallel net(model, comm);
///     torch::optim::SGD optimizer(model->parameters(), 0.1);
///     optimizer.zero_grad();
///     torch::cross_entropy_loss(net.forward(x), y).backward();
///     optimizer.step();
///
/// The module stays the user's, who steps, saves and clips as without it. Gradients are packed
/// into buckets, in the order in which they became ready on rank 0 in the first backward, each of
/// which is reduced beside the rest of the backward; at its end all are done. A gradient then
/// lies in its bucket, until it is cleared. Parameters that a backward does not use count as zero
/// there; used on no rank, they keep an undefined gradient. Parameters may be frozen and
/// unfrozen, on all ranks alike; on some only, the next backward is a mismatch_error on every
/// rank that names it.
///
/// Construction and every backward outside `no_sync()` are collective, and so is, for a module
/// with floating buffers, every forward in training mode outside of it. An error of the reduction
/// is thrown by `backward()`.
///
/// \tparam Module   a torch module, a module holder or a pointer to a module.
/// \see Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training",
///      PVLDB 13(12), 2020.
template <optim::module_like Module, backend Backend>
class distributed_data_parallel {
 public:
  /// While one exists, backwards add to the gradients of this rank alone.
  class [[nodiscard]] no_sync_guard {
   public:
    explicit no_sync_guard(std::shared_ptr<detail::gradient_synchronizer<Backend>> paused)
        : paused_(std::move(paused)) {
      paused_->pause();
    }
    no_sync_guard(no_sync_guard&&) noexcept = default;
    no_sync_guard(const no_sync_guard&) = delete;
    no_sync_guard& operator=(const no_sync_guard&) = delete;
    no_sync_guard& operator=(no_sync_guard&&) = delete;
    ~no_sync_guard() {
      if (paused_) paused_->resume();
    }

   private:
    std::shared_ptr<detail::gradient_synchronizer<Backend>> paused_;
  };

  /// Makes parameters and buffers those of rank 0. Collective.
  /// \param model  borrowed; must outlive the wrapper.
  /// \param comm   used here only: the wrapper makes communicators of its own from it.
  /// \throws usage_error if an option is wrong or a tensor cannot travel; mismatch_error, on
  ///         every rank, that names the first difference, if parameters or buffers differ in
  ///         number, name, type, shape or in whether they learn.
  distributed_data_parallel(Module& model, communicator<Backend>& comm,
                            const distributed_data_parallel_options& options = {})
      : model_(&model),
        gradients_(std::make_shared<detail::gradient_synchronizer<Backend>>(comm, packing(options),
                                                                            options.static_graph)),
        buffers_(optim::module_of(model), options.buffers) {
    const torch::nn::Module& module = optim::module_of(model);
    std::vector<named_tensor> parameters = listed(module.named_parameters(), "");
    const std::vector<named_tensor> buffers = listed(module.named_buffers(), "buffer ");
    std::vector<at::Tensor> tensors;
    for (const auto& each : buffers) tensors.push_back(each.tensor);
    for (const auto& each : parameters) tensors.push_back(each.tensor);
    gradients_->adopt(std::move(parameters));
    optim::detail::expect_equal_parameters(name, gradients_->comm(),
                                           optim::detail::named_list{buffers});
    optim::detail::expect_travelling(name, optim::detail::named_list{buffers}, /*frozen_too=*/true);
    broadcast_parameters(gradients_->comm(), std::span<const at::Tensor>(tensors), 0);
  }

  /// Calls the module's forward and returns what it returns.
  ///
  /// In training mode and with gradients, outside `no_sync()`, floating buffers are made alike
  /// first. A second forward before the backward leaves them be, since the graph may have saved
  /// them; the rank still takes part.
  template <class... Inputs>
  decltype(auto) forward(Inputs&&... inputs) {
    if (c10::GradMode::is_enabled()) {
      const bool trains = module().is_training();
      const bool writes = gradients_->forward_began(trains);
      if (trains && !gradients_->paused()) buffers_.equalize(gradients_->comm(), writes);
    }
    return optim::call_forward(*model_, std::forward<Inputs>(inputs)...);
  }

  /// `{ auto guard = net.no_sync(); loss.backward(); }` adds to this rank's gradients. The next
  /// backward outside, or `synchronize()`, reduces the sum.
  no_sync_guard no_sync() { return no_sync_guard(gradients_); }

  /// Reduces gradients as they are, if no backward has since the last forward: to end a series of
  /// backwards within `no_sync()`, or on a rank whose loss reached no parameter, while the others
  /// are in their backward. Collective.
  void synchronize() { gradients_->synchronize(); }

  /// \return the user's module.
  [[nodiscard]] const torch::nn::Module& module() const { return optim::module_of(*model_); }

 private:
  static constexpr std::string_view name = "distributed_data_parallel";

  [[nodiscard]] static optim::detail::bucket_options packing(
      const distributed_data_parallel_options& options) {
    optim::detail::expects_bucket(name, options.bucket_bytes);
    return {.owner = name,
            .compression = options.compression,
            .bytes = options.bucket_bytes,
            .sparse_as_dense = options.sparse_as_dense,
            .in_place = true};
  }

  // Once per tensor: a weight may be shared.
  template <class Items>
  [[nodiscard]] static std::vector<named_tensor> listed(const Items& items,
                                                        const std::string& prefix) {
    std::vector<named_tensor> list;
    optim::detail::seen_tensors seen;
    for (const auto& item : items)
      if (item.value().defined() && seen.add(item.value()))
        list.push_back({prefix + item.key(), item.value()});
    return list;
  }

  Module* model_;
  std::shared_ptr<detail::gradient_synchronizer<Backend>> gradients_;
  detail::buffer_synchronizer buffers_;
};

}  // namespace bluefog::nn
