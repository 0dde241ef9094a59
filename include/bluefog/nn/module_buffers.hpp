// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/tensor/broadcast.hpp>

namespace bluefog::nn {

/// What happens before a forward to floating buffers, e.g. the running statistics of batch norm.
/// Those of other types, such as counters, stay as they are.
enum class buffer_sync : std::uint8_t {
  broadcast,  ///< they become those of rank 0
  average,    ///< they are averaged over ranks
  off         ///< every rank keeps its own
};

namespace detail {

/// Keeps a module's floating buffers alike on all ranks.
class module_buffers {
 public:
  module_buffers(std::vector<at::Tensor> buffers, buffer_sync policy)
      : buffers_(std::move(buffers)), policy_(policy) {}

  /// Collective. \param writes  whether this rank's buffers may change now.
  template <backend Backend>
  void equalize(communicator<Backend>& comm, bool writes) const {
    if (policy_ == buffer_sync::off || comm.size() == 1) return;
    const c10::AutoGradMode no_graph(false);
    std::vector<at::Tensor> own;
    for (const at::Tensor& each : buffers_)
      if (each.is_floating_point()) own.push_back(each);
    if (own.empty()) return;
    const std::span<const at::Tensor> all(own);
    const auto result = policy_ == buffer_sync::average ? allreduce(comm, all, reduce_op::average)
                                                        : broadcast(comm, all, 0);
    if (!writes) return;
    // Through data(), which has a version of its own: autograd need not know.
    for (std::size_t i = 0; i < own.size(); ++i) own[i].data().copy_(result[i]);
  }

 private:
  std::vector<at::Tensor> buffers_;
  buffer_sync policy_;
};

}  // namespace detail
}  // namespace bluefog::nn
