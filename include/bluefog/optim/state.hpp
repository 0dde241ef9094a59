// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/collective/arguments.hpp>
#include <bluefog/collective/broadcast_object.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/communicating_optimizer.hpp>

namespace bluefog {

namespace detail {

[[nodiscard]] inline std::vector<std::byte> bytes_of_state(
    const torch::optim::Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  std::vector<std::byte> bytes;
  archive.save_to([&](const void* data, std::size_t size) {
    const auto* begin = static_cast<const std::byte*>(data);
    bytes.insert(bytes.end(), begin, begin + size);
    return size;
  });
  return bytes;
}

/// \return the device that all of an optimizer's parameters are on, if there is such a one: the
///         root's may have another number.
[[nodiscard]] inline std::optional<at::Device> place_of(const torch::optim::Optimizer& optimizer) {
  std::optional<at::Device> place;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& each : group.params()) {
      if (place && *place != each.device()) return std::nullopt;
      place = each.device();
    }
  return place;
}

inline void load_state(torch::optim::Optimizer& optimizer, const std::vector<std::byte>& bytes) {
  auto before = std::exchange(optimizer.state(), {});
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  for (const auto& group : optimizer.param_groups()) options.push_back(group.options().clone());
  try {
    torch::serialize::InputArchive archive;
    archive.load_from(reinterpret_cast<const char*>(bytes.data()), bytes.size(),
                      place_of(optimizer));
    optimizer.load(archive);
  } catch (const std::exception& problem) {
    optimizer.state() = std::move(before);
    for (std::size_t i = 0; i < options.size(); ++i)
      optimizer.param_groups()[i].set_options(std::move(options[i]));
    throw mismatch_error(
        concat("broadcast_optimizer_state: what the root sent does not fit this "
               "rank's optimizer: ",
               problem.what()));
  }
}

}  // namespace detail

/// Overwrites an optimizer's options and state with those of the root.
///
/// Goes through libtorch's serialization: every option (the learning rate of every group, momenta)
/// and all state (step counts, momentum buffers) are exact; state that the root does not have is
/// gone afterwards. Collective: every rank must call it, in the same order as its other operations.
/// Where it is a wrapper, the root loads its state as well, so that none has anything on its way;
/// what a method without bias remembers, whose sum over ranks has to be zero, begins anew.
///
/// \param optimizer  of one kind, over parameters of the same shapes in the same groups, on every
///                   rank.
/// \param root       whose state; the same on every rank.
/// \throws usage_error if there is no such rank; nothing was sent.
/// \throws mismatch_error on a rank whose optimizer the root's state does not fit, which keeps its
///         options and state; peer_error if the root's cannot be written, where the root throws
///         what kept it from that; timeout_error, transport_error.
/// \note Costs a serialization on the root and two broadcasts: of the length and of the bytes.
template <backend Backend>
void broadcast_optimizer_state(communicator<Backend>& comm, torch::optim::Optimizer& optimizer,
                               int root, const call_options& options = {}) {
  constexpr std::string_view operation = "broadcast_optimizer_state";
  detail::expects_rank(operation, comm, root, "root");
  if (comm.size() == 1) return;
  const c10::AutoGradMode no_graph(false);
  const auto bytes = std::make_shared<detail::object_bytes>();
  std::exception_ptr failure;
  if (comm.rank() == root) try {
      *bytes = detail::bytes_of_state(optimizer);
    } catch (...) {
      failure = std::current_exception();
    }
  comm.run(detail::describe(comm, operation, options, " from rank ", root),
           [&](auto context) { return detail::broadcast_bytes_task(context, bytes, root); });
  if (failure) std::rethrow_exception(failure);
  expects<peer_error>(bytes->has_value(), operation, ": rank ", root,
                      " could not write its optimizer's state");
  detail::load_state(optimizer, **bytes);
  if (auto* const wrapper = dynamic_cast<optim::communicating_optimizer*>(&optimizer))
    wrapper->state_replaced();
}

}  // namespace bluefog
