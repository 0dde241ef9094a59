// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/collective/allgather.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/tensor/allreduce.hpp>
#include <bluefog/tensor/arguments.hpp>
#include <bluefog/tensor/call.hpp>
#include <bluefog/tensor/gathered.hpp>
#include <bluefog/tensor/parcel.hpp>

namespace bluefog {

namespace detail {

/// Tells autograd that the gradient is the sum of the slices that belong to this rank.
template <backend Backend>
void differentiate_allgather(communicator<Backend>& comm, const std::shared_ptr<gathered>& result,
                             const at::Tensor& x) {
  const auto rows_of_all = result->rows();
  result->differentiate("allgather", [&comm, rows_of_all,
                                      sizes = x.sizes().vec()](std::vector<at::Tensor> gradients) {
    const std::vector<std::int64_t>& rows = *rows_of_all;
    const auto before = rows.begin() + comm.rank();
    const at::Tensor sum = allreduce(comm, gradients.front(), reduce_op::sum);
    const auto begin = std::reduce(rows.begin(), before, std::int64_t{0});
    return std::vector<at::Tensor>{sum.narrow(0, begin, *before).reshape(sizes)};
  });
}

template <backend Backend, class Issue>
void issue_allgather(communicator<Backend>& comm, const at::Tensor& x, const call_options& options,
                     const std::shared_ptr<at::Tensor>& place, Issue issue) {
  const auto result = std::make_shared<gathered>("allgather", x);
  auto description =
      describe_gather(comm, "allgather", result->outline(), result->shape(), options);
  if (comm.checks() && result->gradient()) description.agreement += " with gradient";
  differentiate_allgather(comm, result, x);
  prepare(comm, only(x));
  issue(std::move(description), [&](operation_context<Backend> context) {
    parcel values(context, only(x), {});
    task work = allgather_task(context, values.in(), result->shape(), room_in(context, result));
    return then_take(context, std::move(work), std::move(values), result, place);
  });
}

}  // namespace detail

/// Concatenates a tensor of all ranks along the first dimension, in rank order.
///
/// The first dimension may differ from rank to rank. Collective: every rank must call it, in the
/// same order as its other operations. The gradient is the sum over all ranks of the slices that
/// belong to this one.
///
/// \param x  dense, of any strides; the same type, number of dimensions and size but in the first
///           on every rank; a tensor without dimensions counts as one row; a gradient required on
///           all ranks or none.
/// \return the concatenation, contiguous (channels-last if x is).
/// \throws usage_error if the tensor's type, layout or device is not supported; nothing was sent.
/// \throws mismatch_error on every rank, before data travels, if types or sizes do not fit;
///         timeout_error, transport_error, peer_error.
/// \note Sends (n-1) times the tensor; backward() sends 2(n-1)/n times the concatenation, see
///       `allreduce`.
template <backend Backend>
[[nodiscard]] at::Tensor allgather(communicator<Backend>& comm, const at::Tensor& x,
                                   const call_options& options = {}) {
  const auto place = std::make_shared<at::Tensor>();
  detail::issue_allgather(comm, x, options, place, [&](auto description, auto make) {
    comm.run(std::move(description), std::move(make));
  });
  return std::move(*place);
}

/// Starts an `allgather`. The values of `x` must not change before the request is over.
template <backend Backend>
request<at::Tensor> allgather_nonblocking(communicator<Backend>& comm, const at::Tensor& x,
                                          const call_options& options = {}) {
  const auto place = std::make_shared<at::Tensor>();
  std::shared_ptr<job> started;
  detail::issue_allgather(comm, x, options, place, [&](auto description, auto make) {
    started = comm.start(std::move(description), std::move(make));
  });
  return {comm.driver(), std::move(started), place};
}

}  // namespace bluefog
