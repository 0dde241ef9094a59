// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/collective/allreduce.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/tensor/call.hpp>
#include <bluefog/tensor/carry.hpp>
#include <bluefog/tensor/parcel.hpp>

namespace bluefog {

template <backend Backend>
[[nodiscard]] std::vector<at::Tensor> allreduce(communicator<Backend>& comm,
                                                std::span<const at::Tensor> tensors,
                                                reduce_op op = reduce_op::average,
                                                const allreduce_options& options = {});

namespace detail {

template <backend Backend>
[[nodiscard]] auto allreduce_call(communicator<Backend>& comm, std::span<const at::Tensor> in,
                                  reduce_op op, const allreduce_options& options, placement where) {
  const tensor_arguments tensors("allreduce", in, where);
  call_description description;
  for (const const_buffer& values : outlines(tensors.in))
    description = check_allreduce(comm, values, values, op, options);
  expects(!tensors.gradient || op == reduce_op::average || op == reduce_op::sum, "allreduce: ", op,
          " has no gradient, and the tensor requires one; detach() it");
  describe_tensors(comm, description, tensors, " ", op,
                   options.scope == scope::machine ? " within machines" : "");
  tensors.differentiate("allreduce", [&comm, op, participants = options.scope](auto gradients) {
    return allreduce(comm, std::span<const at::Tensor>(gradients), op, {.scope = participants});
  });
  return tensor_call{
      std::move(description), tensors.out,
      [tensors, op, participants = options.scope](operation_context<Backend> context) {
        auto parcels = parcels_by_type(context, tensors.in, tensors.out);
        std::vector<task> works;
        for (const parcel& each : parcels)
          works.push_back(allreduce_task(context, each.in(), each.out(), op, participants));
        return carry(context, std::move(works), std::move(parcels));
      }};
}

}  // namespace detail

/// Combines a tensor of all ranks, elementwise.
///
/// \f[ y = \mathrm{op}_{r=0}^{n-1} x_r \f]
/// Collective: every rank must call it, in the same order as its other operations. Differentiable
/// for average and sum, whose gradients are the average and the sum of the ranks' gradients.
///
/// \param x        dense, of any strides; the same type and shape on every rank, and a gradient
///                 required on all or none.
/// \param op       average needs a floating type.
/// \param options  e.g. `{.name = "loss"}`, `{.scope = scope::machine}`; see `allreduce_options`.
/// \return y, laid out like x.
/// \throws usage_error if the tensor's type, layout or device is not supported, integers are to be
///         averaged, or min, max or product are to be differentiated; nothing was sent.
/// \throws timeout_error, transport_error, mismatch_error, peer_error.
/// \note Sends 2(n-1)/n times the tensor. A contiguous tensor travels without a copy if it is on
///       the CPU, or on the transport's device; others are copied first, see `parcel`. backward()
///       communicates too: every rank must call it, on the same graph, while the communicator lives
///       and has not been moved.
template <backend Backend>
[[nodiscard]] at::Tensor allreduce(communicator<Backend>& comm, const at::Tensor& x,
                                   reduce_op op = reduce_op::average,
                                   const allreduce_options& options = {}) {
  return detail::run_single(
      comm, detail::allreduce_call(comm, detail::only(x), op, options, detail::placement::apart));
}

/// Starts an `allreduce`. The values of `x` must not change before the request is over.
template <backend Backend>
request<at::Tensor> allreduce_nonblocking(communicator<Backend>& comm, const at::Tensor& x,
                                          reduce_op op = reduce_op::average,
                                          const allreduce_options& options = {}) {
  return detail::start_single(
      comm, detail::allreduce_call(comm, detail::only(x), op, options, detail::placement::apart));
}

/// Combines a tensor of all ranks in place. \return x.
/// \throws usage_error also if elements of `x` share memory, or it requires a gradient and
///         grad mode is on. After any other error the values of `x` are unspecified.
template <backend Backend>
at::Tensor allreduce_(communicator<Backend>& comm, const at::Tensor& x,
                      reduce_op op = reduce_op::average, const allreduce_options& options = {}) {
  return detail::run_single(comm, detail::allreduce_call(comm, detail::only(x), op, options,
                                                         detail::placement::in_place));
}

/// Starts an `allreduce_`. `x` must be left alone until the request is over.
template <backend Backend>
request<at::Tensor> allreduce_nonblocking_(communicator<Backend>& comm, const at::Tensor& x,
                                           reduce_op op = reduce_op::average,
                                           const allreduce_options& options = {}) {
  return detail::start_single(comm, detail::allreduce_call(comm, detail::only(x), op, options,
                                                           detail::placement::in_place));
}

/// Combines many tensors in one operation: one message per element type, however many tensors.
/// \param tensors  of types and shapes that are the same on every rank.
/// \return the results, in the order of `tensors`.
template <backend Backend>
[[nodiscard]] std::vector<at::Tensor> allreduce(communicator<Backend>& comm,
                                                std::span<const at::Tensor> tensors, reduce_op op,
                                                const allreduce_options& options) {
  return detail::run(comm,
                     detail::allreduce_call(comm, tensors, op, options, detail::placement::apart));
}

/// Starts an `allreduce` of many tensors.
template <backend Backend>
request<std::vector<at::Tensor>> allreduce_nonblocking(communicator<Backend>& comm,
                                                       std::span<const at::Tensor> tensors,
                                                       reduce_op op = reduce_op::average,
                                                       const allreduce_options& options = {}) {
  return detail::start(
      comm, detail::allreduce_call(comm, tensors, op, options, detail::placement::apart));
}

/// Combines many tensors in place. \return the tensors.
template <backend Backend>
std::vector<at::Tensor> allreduce_(communicator<Backend>& comm, std::span<const at::Tensor> tensors,
                                   reduce_op op = reduce_op::average,
                                   const allreduce_options& options = {}) {
  return detail::run(
      comm, detail::allreduce_call(comm, tensors, op, options, detail::placement::in_place));
}

/// Starts an `allreduce_` of many tensors.
template <backend Backend>
request<std::vector<at::Tensor>> allreduce_nonblocking_(communicator<Backend>& comm,
                                                        std::span<const at::Tensor> tensors,
                                                        reduce_op op = reduce_op::average,
                                                        const allreduce_options& options = {}) {
  return detail::start(
      comm, detail::allreduce_call(comm, tensors, op, options, detail::placement::in_place));
}

}  // namespace bluefog
