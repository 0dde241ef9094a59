// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/gather.hpp>
#include <bluefog/collective/broadcast_object.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/optim/parameters.hpp>
#include <bluefog/tensor/arena.hpp>
#include <bluefog/tensor/parcel.hpp>

namespace bluefog::optim::detail {

/// Lists parameters like an arena, without moving them.
struct named_list {
  const std::vector<named_tensor>& items;
  [[nodiscard]] std::size_t size() const { return items.size(); }
  [[nodiscard]] const std::string& name(std::size_t i) const { return items[i].name; }
  [[nodiscard]] const at::Tensor& tensor(std::size_t i) const { return items[i].tensor; }
};

/// Parameters, then buffers.
struct arena_and_buffers {
  const parameter_arena& parameters;
  const std::vector<named_tensor>& buffers;
  [[nodiscard]] std::size_t size() const { return parameters.size() + buffers.size(); }
  [[nodiscard]] const std::string& name(std::size_t i) const {
    return i < parameters.size() ? parameters.name(i) : buffers[i - parameters.size()].name;
  }
  [[nodiscard]] const at::Tensor& tensor(std::size_t i) const {
    return i < parameters.size() ? parameters.tensor(i) : buffers[i - parameters.size()].tensor;
  }
};

/// One line per parameter: what has to be equal on every rank.
template <parameter_list List>
[[nodiscard]] std::vector<std::string> describe_parameters(const List& arena) {
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < arena.size(); ++i) {
    const at::Tensor& each = arena.tensor(i);
    lines.push_back(concat("\"", arena.name(i), "\" ", each.scalar_type(), " ", each.sizes(),
                           " strides ", each.strides(),
                           each.requires_grad() ? "" : " without gradient"));
  }
  return lines;
}

/// \return the first difference between two lists as text; empty if there is none.
[[nodiscard]] inline std::string first_difference(const std::vector<std::string>& root,
                                                  const std::vector<std::string>& own, int rank) {
  const std::size_t common = std::min(root.size(), own.size());
  for (std::size_t i = 0; i < common; ++i)
    if (root[i] != own[i])
      return concat("parameter ", i, " is ", root[i], " on rank 0 and ", own[i], " on rank ", rank);
  if (root.size() == own.size()) return {};
  return concat("rank 0 has ", root.size(), " parameters and rank ", rank, " has ", own.size(),
                "; the first that one lacks is ", (root.size() > common ? root : own)[common]);
}

/// \return whether all ranks have the same lines. Collective; control traffic, one number each.
template <backend Backend>
[[nodiscard]] bool same_everywhere(communicator<Backend>& comm,
                                   const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& each : lines) text += each + "\n";
  const auto own = static_cast<std::int64_t>(std::hash<std::string>{}(text));
  const auto all = std::make_shared<std::vector<std::int64_t>>();
  comm.run({.operation = "parameter check"}, [&](auto context) {
    return gather_equal(context, std::vector<std::int64_t>{own}, all);
  });
  return std::ranges::count(*all, own) == comm.size();
}

/// Compares what `describe_parameters` has made on all ranks. Collective.
/// \throws mismatch_error, the same on every rank, that names the first difference.
template <backend Backend>
void expect_equal_lines(std::string_view optimizer, communicator<Backend>& comm,
                        const std::vector<std::string>& own) {
  if (comm.size() == 1 || same_everywhere(comm, own)) return;
  constexpr std::size_t length = 512;
  const auto root = broadcast_object(comm, own, 0);
  std::string verdict = first_difference(root, own, comm.rank());
  verdict.resize(length - 1);
  verdict.resize(length);  // zeros behind the text end it
  const auto all = std::make_shared<std::vector<std::uint8_t>>();
  comm.run({.operation = "parameter check"}, [&](auto context) {
    return gather_equal(context, std::vector<std::uint8_t>(verdict.begin(), verdict.end()), all);
  });
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(comm.size()); ++rank) {
    const std::string text(reinterpret_cast<const char*>(all->data()) + rank * length);
    expects<mismatch_error>(text.empty(), optimizer, ": ranks differ: ", text);
  }
}

/// Compares the parameter lists of all ranks. Collective.
/// \throws mismatch_error, the same on every rank, that names the first difference.
template <backend Backend, parameter_list List>
void expect_equal_parameters(std::string_view optimizer, communicator<Backend>& comm,
                             const List& parameters) {
  if (comm.size() > 1) expect_equal_lines(optimizer, comm, describe_parameters(parameters));
}

/// \param frozen_too  whether those that require no gradient travel as well.
/// \throws usage_error that names the first tensor that cannot travel, or not take a result.
template <parameter_list List>
void expect_travelling(std::string_view optimizer, const List& parameters, bool frozen_too) {
  const c10::AutoGradMode no_graph(false);
  for (std::size_t i = 0; i < parameters.size(); ++i)
    if (frozen_too || parameters.tensor(i).requires_grad())
      bluefog::detail::expects_target(concat(optimizer, ": \"", parameters.name(i), "\""),
                                      parameters.tensor(i));
}

}  // namespace bluefog::optim::detail
