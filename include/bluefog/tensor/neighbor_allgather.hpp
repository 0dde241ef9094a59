// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/core/scratch.hpp>
#include <bluefog/neighbor/allgather.hpp>
#include <bluefog/neighbor/links.hpp>
#include <bluefog/tensor/arguments.hpp>
#include <bluefog/tensor/call.hpp>
#include <bluefog/tensor/carry.hpp>
#include <bluefog/tensor/device.hpp>
#include <bluefog/tensor/gathered.hpp>
#include <bluefog/tensor/gradient.hpp>
#include <bluefog/tensor/neighbor_allreduce.hpp>
#include <bluefog/tensor/parcel.hpp>
#include <bluefog/topology/exponential.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog {

template <backend Backend, neighbor_links Links = neighborhood>
[[nodiscard]] at::Tensor neighbor_allgather(communicator<Backend>& comm, const at::Tensor& x,
                                            const Links& links, const call_options& options = {});

namespace detail {

/// Sends every destination a slice of its own, and sums what the sources send; without any, `out`
/// stays as it is.
///
/// \param lengths  of the slices of `in`, in elements, in the order of `links.destinations`.
template <backend Backend>
task scatter_sum_task(operation_context<Backend> context, const_buffer in,
                      std::vector<std::int64_t> lengths, mutable_buffer out, neighborhood links) {
  auto exchange = context.exchange();
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] > 0) exchange.send(in.slice(begin, lengths[i]), links.destinations[i].rank);
    begin += lengths[i];
  }
  std::vector<scratch_pool::block> arrived;
  std::vector<const_buffer> inputs;
  for (const edge& source : links.sources) {
    const auto& memory = arrived.emplace_back(context.scratch(out.bytes(), out.data));
    const mutable_buffer slot{memory.data(), out.count, out.type};
    if (out.count > 0) exchange.receive(slot, source.rank);
    inputs.push_back(slot);
  }
  auto transfer = std::move(exchange).submit();
  co_await transfer;
  if (!inputs.empty()) context.compute().reduce(reduce_op::sum, out, inputs);
}

/// The transposed exchange of a `neighbor_allgather`: gives every source its slice of `gradient`
/// back. \return the sum of what the destinations give back, of the given sizes.
///
/// \param links  of the `neighbor_allgather`; `rows`: of the slice of each of its sources.
template <backend Backend>
[[nodiscard]] at::Tensor give_back(communicator<Backend>& comm, const at::Tensor& gradient,
                                   const neighborhood& links, const std::vector<std::int64_t>& rows,
                                   const std::vector<std::int64_t>& sizes) {
  constexpr std::string_view operation = "neighbor_allgather";
  call_description description = describe(comm, operation, {}, " backward");
  description.links = transposed(links);
  const std::int64_t row_elements = gather_shape_of(gradient).row_elements();
  std::vector<std::int64_t> lengths;
  for (const auto each : rows) lengths.push_back(each * row_elements);

  const bool alone = links.destinations.empty();  // nobody gives anything back
  at::Tensor sum;
  {
    const c10::AutoGradMode no_graph(false);
    const auto kind = gradient.options().requires_grad(false);
    sum = alone ? at::zeros(sizes, kind) : at::empty(sizes, kind);
  }
  if (needs_gradient(only(gradient)))  // the derivative of the transposed exchange is the exchange
    make_adjoint(operation, only(gradient), [&comm, links](std::vector<at::Tensor> gradients) {
      return std::vector<at::Tensor>{neighbor_allgather(comm, gradients.front(), links)};
    })->add_result(sum);
  name_caller_stream(comm, only(gradient));
  comm.run(std::move(description), [&](operation_context<Backend> context) {
    std::vector<parcel> parcels;
    constexpr std::span<const at::Tensor> none;
    parcels.emplace_back(context, only(gradient), none);
    parcels.emplace_back(context, none, alone ? none : only(sum));
    std::vector<task> works;
    works.push_back(
        scatter_sum_task(context, parcels[0].in(), lengths, parcels[1].out(), transposed(links)));
    return carry(context, std::move(works), std::move(parcels));
  });
  return sum;
}

template <backend Backend, neighbor_links Links, class Issue>
void issue_neighbor_allgather(communicator<Backend>& comm, const at::Tensor& x, const Links& links,
                              const call_options& options, const std::shared_ptr<at::Tensor>& place,
                              Issue issue) {
  constexpr std::string_view operation = "neighbor_allgather";
  const neighborhood own = links_of(operation, comm, links);
  const auto result = std::make_shared<gathered>(operation, x);
  auto description = check_neighbor_gather(comm, result->outline(), result->shape(), own, options);
  if (comm.checks() && result->gradient()) description.agreement += " with gradient";
  result->differentiate(operation, [&comm, own, rows = result->rows(),
                                    sizes = x.sizes().vec()](std::vector<at::Tensor> gradients) {
    return std::vector<at::Tensor>{give_back(comm, gradients.front(), own, *rows, sizes)};
  });
  prepare(comm, only(x));
  issue(std::move(description), [&](operation_context<Backend> context) {
    parcel values(context, only(x), {});
    task work = neighbor_allgather_task(context, values.in(), result->shape(), own,
                                        room_in(context, result));
    return then_take(context, std::move(work), std::move(values), result, place);
  });
}

}  // namespace detail

/// Concatenates a tensor of neighbours along the first dimension, without one's own.
///
/// The order is that of `links.sources`, ascending for a graph; weights play no part. The first
/// dimension may differ from rank to rank. Collective: every rank must call it, in the same order
/// as its other operations. The gradient is the transposed exchange: every rank gets its slices
/// back from its destinations, and their sum.
///
/// \param x      as in `allgather`.
/// \param links  a `neighborhood`, or a graph of `comm.size()` ranks (`exponential` if left out).
/// \return the concatenation, contiguous (channels-last if x is); no rows if there are no sources.
/// \throws usage_error if the tensor's type, layout or device is not supported, or ranks or the
///         graph's size are wrong; nothing was sent.
/// \throws mismatch_error if types or sizes do not fit; timeout_error, transport_error, peer_error.
/// \note backward() communicates too, see `allreduce`.
template <backend Backend, neighbor_links Links>
[[nodiscard]] at::Tensor neighbor_allgather(communicator<Backend>& comm, const at::Tensor& x,
                                            const Links& links, const call_options& options) {
  const auto place = std::make_shared<at::Tensor>();
  detail::issue_neighbor_allgather(
      comm, x, links, options, place,
      [&](auto description, auto make) { comm.run(std::move(description), std::move(make)); });
  return std::move(*place);
}

/// Concatenates over the static exponential graph.
template <backend Backend>
[[nodiscard]] at::Tensor neighbor_allgather(communicator<Backend>& comm, const at::Tensor& x) {
  return neighbor_allgather(comm, x, topology::exponential(comm.size()));
}

/// Starts a `neighbor_allgather`. The values of `x` must not change before the request is over.
template <backend Backend, neighbor_links Links = neighborhood>
request<at::Tensor> neighbor_allgather_nonblocking(communicator<Backend>& comm, const at::Tensor& x,
                                                   const Links& links,
                                                   const call_options& options = {}) {
  const auto place = std::make_shared<at::Tensor>();
  std::shared_ptr<job> started;
  detail::issue_neighbor_allgather(comm, x, links, options, place,
                                   [&](auto description, auto make) {
                                     started = comm.start(std::move(description), std::move(make));
                                   });
  return {comm.driver(), std::move(started), place};
}

/// Starts concatenating over the static exponential graph.
template <backend Backend>
request<at::Tensor> neighbor_allgather_nonblocking(communicator<Backend>& comm,
                                                   const at::Tensor& x) {
  return neighbor_allgather_nonblocking(comm, x, topology::exponential(comm.size()));
}

}  // namespace bluefog
