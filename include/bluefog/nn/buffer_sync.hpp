// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/optim/module_buffers.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/tensor/arena.hpp>
#include <bluefog/tensor/broadcast.hpp>

namespace bluefog::nn {

/// What happens before a forward to floating buffers, e.g. the running statistics of batch norm.
/// Those of other types stay as they are, and so does batch norm's count of batches.
enum class buffer_sync : std::uint8_t {
  broadcast,  ///< they become those of rank 0
  average,    ///< they are averaged over ranks
  off         ///< every rank keeps its own
};

namespace detail {

/// Keeps a module's floating buffers alike on all ranks.
class buffer_synchronizer {
 public:
  buffer_synchronizer(const torch::nn::Module& module, buffer_sync policy)
      : buffers_(module), policy_(policy) {}

  /// Collective. \param writes  whether this rank's buffers may change now.
  template <backend Backend>
  void equalize(communicator<Backend>& comm, bool writes) const {
    if (policy_ == buffer_sync::off || comm.size() == 1 || buffers_.list().empty()) return;
    const c10::AutoGradMode no_graph(false);
    std::vector<at::Tensor> own;
    for (const named_tensor& each : buffers_.list()) own.push_back(each.tensor);
    const std::span<const at::Tensor> all(own);
    const auto result = policy_ == buffer_sync::average ? allreduce(comm, all, reduce_op::average)
                                                        : broadcast(comm, all, 0);
    if (!writes) return;
    // Through data(), which has a version of its own: autograd need not know.
    for (std::size_t i = 0; i < own.size(); ++i) own[i].data().copy_(result[i]);
  }

 private:
  optim::detail::module_buffers buffers_;
  buffer_sync policy_;
};

}  // namespace detail
}  // namespace bluefog::nn
