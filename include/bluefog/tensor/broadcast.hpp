// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/collective/broadcast.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/tensor/call.hpp>
#include <bluefog/tensor/carry.hpp>
#include <bluefog/tensor/parcel.hpp>

namespace bluefog {

namespace detail {

/// What a broadcast's gradients become: their sum at the root, zeros elsewhere.
template <backend Backend>
[[nodiscard]] std::vector<at::Tensor> sum_at(communicator<Backend>& comm, int root,
                                             std::vector<at::Tensor> gradients) {
  auto sums = allreduce(comm, std::span<const at::Tensor>(gradients), reduce_op::sum);
  // Zeros that still depend on the sum: a second derivative is an operation of all ranks again.
  if (comm.rank() == root) return sums;
  for (at::Tensor& each : sums)
    each = each.masked_fill(at::ones({}, each.options().dtype(c10::kBool)), 0);
  return sums;
}

template <backend Backend>
[[nodiscard]] auto broadcast_call(communicator<Backend>& comm, std::span<const at::Tensor> in,
                                  int root, const call_options& options, placement where) {
  const tensor_arguments tensors("broadcast", in, where);
  call_description description;
  for (const const_buffer& values : outlines(tensors.in))
    description = check_broadcast(comm, values, values, root, options);
  describe_tensors(comm, description, tensors, " from rank ", root);
  tensors.differentiate("broadcast", [&comm, root](std::vector<at::Tensor> gradients) {
    return sum_at(comm, root, std::move(gradients));
  });
  return tensor_call{std::move(description), tensors.out,
                     [tensors, root](operation_context<Backend> context) {
                       parcel values(context, tensors.in, tensors.out);
                       const std::size_t bytes = values.layout().bytes;
                       task work = broadcast_task(context, as_bytes(values.input(), bytes),
                                                  as_bytes(values.output(), bytes), root);
                       return carry(context, std::move(work), std::move(values));
                     }};
}

}  // namespace detail

/// Gives every rank the tensor of one.
///
/// Collective: every rank must call it, in the same order as its other operations. The gradient is
/// the sum of all ranks' gradients at the root and zero elsewhere.
///
/// \param x     dense, of any strides; the same type and shape on every rank, its values are
///              read on the root only; a gradient required on all ranks or none.
/// \param root  whose values; the same on every rank.
/// \return the root's values, laid out like x.
/// \throws usage_error if the tensor's type, layout or device is not supported or there is no such
///         rank; nothing was sent.
/// \throws timeout_error, transport_error, mismatch_error, peer_error.
/// \note Sends (n-1)/n times the tensor. backward() communicates too, see `allreduce`.
template <backend Backend>
[[nodiscard]] at::Tensor broadcast(communicator<Backend>& comm, const at::Tensor& x, int root,
                                   const call_options& options = {}) {
  return detail::run_single(
      comm, detail::broadcast_call(comm, detail::only(x), root, options, detail::placement::apart));
}

/// Starts a `broadcast`. The values of `x` must not change before the request is over.
template <backend Backend>
request<at::Tensor> broadcast_nonblocking(communicator<Backend>& comm, const at::Tensor& x,
                                          int root, const call_options& options = {}) {
  return detail::start_single(
      comm, detail::broadcast_call(comm, detail::only(x), root, options, detail::placement::apart));
}

/// Overwrites a tensor with that of the root. \return x.
/// \throws usage_error also if elements of `x` share memory, or it requires a gradient and
///         grad mode is on. After any other error the values of `x` are unspecified.
template <backend Backend>
at::Tensor broadcast_(communicator<Backend>& comm, const at::Tensor& x, int root,
                      const call_options& options = {}) {
  return detail::run_single(comm, detail::broadcast_call(comm, detail::only(x), root, options,
                                                         detail::placement::in_place));
}

/// Starts a `broadcast_`. `x` must be left alone until the request is over.
template <backend Backend>
request<at::Tensor> broadcast_nonblocking_(communicator<Backend>& comm, const at::Tensor& x,
                                           int root, const call_options& options = {}) {
  return detail::start_single(comm, detail::broadcast_call(comm, detail::only(x), root, options,
                                                           detail::placement::in_place));
}

/// Gives every rank many tensors of one, in one message. \return them, in the order of `tensors`.
template <backend Backend>
[[nodiscard]] std::vector<at::Tensor> broadcast(communicator<Backend>& comm,
                                                std::span<const at::Tensor> tensors, int root,
                                                const call_options& options = {}) {
  return detail::run(
      comm, detail::broadcast_call(comm, tensors, root, options, detail::placement::apart));
}

/// Starts a `broadcast` of many tensors.
template <backend Backend>
request<std::vector<at::Tensor>> broadcast_nonblocking(communicator<Backend>& comm,
                                                       std::span<const at::Tensor> tensors,
                                                       int root, const call_options& options = {}) {
  return detail::start(
      comm, detail::broadcast_call(comm, tensors, root, options, detail::placement::apart));
}

/// Overwrites many tensors with those of the root. \return the tensors.
template <backend Backend>
std::vector<at::Tensor> broadcast_(communicator<Backend>& comm, std::span<const at::Tensor> tensors,
                                   int root, const call_options& options = {}) {
  return detail::run(
      comm, detail::broadcast_call(comm, tensors, root, options, detail::placement::in_place));
}

/// Starts a `broadcast_` of many tensors.
template <backend Backend>
request<std::vector<at::Tensor>> broadcast_nonblocking_(communicator<Backend>& comm,
                                                        std::span<const at::Tensor> tensors,
                                                        int root,
                                                        const call_options& options = {}) {
  return detail::start(
      comm, detail::broadcast_call(comm, tensors, root, options, detail::placement::in_place));
}

}  // namespace bluefog
