// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <torch/nn/module.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/tensor/arena.hpp>

namespace bluefog::optim::detail {

/// The floating buffers of a module, e.g. the running statistics of batch norm. They are few and
/// forwards write to them, so they travel as copies.
class module_buffers {
 public:
  module_buffers() = default;
  explicit module_buffers(const torch::nn::Module& module) {
    seen_tensors seen;
    for (const auto& item : module.named_buffers()) {
      const at::Tensor& each = item.value();
      // libtorch's `Module::to` makes even batch norm's count of batches floating.
      if (item.key().ends_with("num_batches_tracked")) continue;
      if (each.defined() && each.is_floating_point() && each.numel() > 0 && seen.add(each))
        buffers_.push_back({item.key(), each});
    }
  }

  [[nodiscard]] const std::vector<named_tensor>& list() const noexcept { return buffers_; }

  /// \return a copy of what they hold, one flat tensor per type and device.
  [[nodiscard]] std::vector<at::Tensor> pack() const {
    std::vector<at::Tensor> flats;
    for (const auto& members : kinds()) {
      std::int64_t count = 0;
      for (const at::Tensor& each : members) count += each.numel();
      flats.push_back(at::empty({count}, members.front().options().requires_grad(false)));
      for_parts(flats.back(), members,
                [](const at::Tensor& part, const at::Tensor& own) { part.copy_(own); });
    }
    return flats;
  }
  /// Overwrites them with what `pack` has made.
  void unpack(const std::vector<at::Tensor>& flats) const {
    for (std::size_t i = 0; const auto& members : kinds())
      for_parts(flats[i++], members,
                [](const at::Tensor& part, const at::Tensor& own) { own.copy_(part); });
  }

 private:
  using tensors = std::vector<at::Tensor>;

  [[nodiscard]] std::vector<tensors> kinds() const {
    std::vector<tensors> found;
    for (const auto& [name, each] : buffers_) {
      const auto alike = [&](const tensors& it) {
        return it.front().dtype() == each.dtype() && it.front().device() == each.device();
      };
      const auto place = std::ranges::find_if(found, alike);
      (place != found.end() ? *place : found.emplace_back()).push_back(each);
    }
    return found;
  }

  template <class Act>
  static void for_parts(const at::Tensor& flat, const tensors& all, Act act) {
    for (std::int64_t begin = 0; const at::Tensor& each : all) {
      act(flat.narrow(0, begin, each.numel()).view(each.sizes()), each);
      begin += each.numel();
    }
  }

  std::vector<named_tensor> buffers_;
};

/// Makes buffers the mean of those of `partners` ranks. Collective over all ranks.
/// \param takes_part  whether this rank is one of them.
template <backend Backend>
void average_buffers(communicator<Backend>& comm, const module_buffers& buffers, bool takes_part,
                     int partners) {
  if (buffers.list().empty() || partners == 0) return;
  const c10::AutoGradMode no_grad(false);
  const auto flats = buffers.pack();
  if (!takes_part)
    for (const at::Tensor& each : flats) each.zero_();
  allreduce_(comm, std::span<const at::Tensor>(flats));
  if (partners != comm.size())
    for (const at::Tensor& each : flats) each.mul_(static_cast<double>(comm.size()) / partners);
  buffers.unpack(flats);
}

}  // namespace bluefog::optim::detail
