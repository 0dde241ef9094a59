// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/collective/arguments.hpp>
#include <bluefog/collective/reduction.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/kernels.hpp>
#include <bluefog/core/scratch.hpp>
#include <bluefog/neighbor/links.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog {

namespace detail {

/// \return `machines` as this rank sees it: instead of every machine its rank with this rank's
///         local number.
template <backend Backend>
[[nodiscard]] neighborhood links_between_machines(const communicator<Backend>& comm,
                                                  neighborhood machines) {
  for (auto* side : {&machines.sources, &machines.destinations})
    for (edge& each : *side) each.rank = each.rank * comm.local_size() + comm.local_rank();
  return machines;
}

/// \param links  between machines; becomes links between ranks.
template <backend Backend>
[[nodiscard]] call_description check_hierarchical(const communicator<Backend>& comm,
                                                  const_buffer in, const_buffer out,
                                                  neighborhood& links,
                                                  const call_options& options) {
  constexpr auto operation = "hierarchical_neighbor_allreduce";
  expects_same_shape(operation, in, out);
  expects(is_floating(in.type), operation, ": weights need a floating type, got ", in.type);
  expects(comm.is_homogeneous(), operation,
          ": every machine needs the same number of consecutive ranks, but ",
          comm.layout().to_string());
  validate(operation, links, comm.machine_rank(), comm.machine_size());
  links = links_between_machines(comm, std::move(links));
  auto call = describe(comm, operation, options, " ", in.type, " [", in.count, "]");
  call.links = links;
  return call;
}

template <backend Backend, neighbor_links Links>
[[nodiscard]] neighborhood machine_links_of(const communicator<Backend>& comm, const Links& links) {
  return links_of("hierarchical_neighbor_allreduce", links, comm.machine_rank(),
                  comm.machine_size(), "machine layout");
}

/// A buffer, and the temporary memory that it lies in, if it does.
struct held_buffer {
  scratch_pool::block memory;
  mutable_buffer values;
};

template <backend Backend>
[[nodiscard]] held_buffer temporary(const operation_context<Backend>& context, std::int64_t count,
                                    dtype type, const void* near) {
  held_buffer made{context.scratch(static_cast<std::size_t>(count) * size_of(type), near), {}};
  made.values = {made.memory.data(), count, type};
  return made;
}

/// \return a copy of `values` in `type`, rounded if it has to be.
template <backend Backend>
[[nodiscard]] held_buffer converted(const operation_context<Backend>& context, const_buffer values,
                                    dtype type) {
  auto made = temporary(context, values.count, type, values.data);
  context.compute().convert(made.values, values);
  return made;
}

/// This rank's slice of the machine's mean; in float32 for halves, not rounded yet.
template <backend Backend>
task machine_mean(operation_context<Backend> context, const_buffer in, mutable_buffer mean) {
  const auto& members = context.layout().members(context.layout().machine_rank());
  const auto parts = static_cast<std::int64_t>(members.size());
  const auto self = std::int64_t{context.layout().local_rank()};
  std::vector<held_buffer> slices;
  std::vector<const_buffer> inputs(members.size(), part_of(in, self, parts));
  auto exchange = context.exchange(traffic_kind::part);
  for (std::int64_t i = 0; i < parts; ++i) {
    if (i == self) continue;
    const int peer = members[static_cast<std::size_t>(i)];
    slices.push_back(temporary(context, mean.count, in.type, in.data));
    inputs[static_cast<std::size_t>(i)] = slices.back().values;
    exchange.receive(slices.back().values, peer);
    exchange.send(part_of(in, i, parts), peer);
  }
  auto transfer = std::move(exchange).submit();
  co_await transfer;

  std::vector<held_buffer> wide;
  if (mean.type != in.type)
    for (auto& each : inputs) each = wide.emplace_back(converted(context, each, mean.type)).values;
  context.compute().reduce(reduce_op::average, mean, inputs);
}

/// Mixes this rank's slice with the same slice of other machines.
///
/// \param mean   this machine's mean; becomes the result.
/// \param wire   the type that travels, rounded to if it is not that of `mean`.
template <backend Backend>
task mix_between_machines(operation_context<Backend> context, mutable_buffer mean, dtype wire,
                          neighborhood links) {
  const bool rounded = wire != mean.type;
  std::vector<held_buffer> messages;  // weighted first, and rounded after that
  auto exchange = context.exchange();
  for (const edge& destination : links.destinations) {
    const_buffer message = mean;
    if (destination.weight != 1.0) {
      auto weighted = temporary(context, mean.count, mean.type, mean.data);
      context.compute().scaled_copy(weighted.values, mean, destination.weight);
      message = messages.emplace_back(std::move(weighted)).values;
    }
    if (rounded) message = messages.emplace_back(converted(context, message, wire)).values;
    exchange.send(message, destination.rank);
  }
  std::vector<held_buffer> arrived;
  for (const edge& source : links.sources) {
    arrived.push_back(temporary(context, mean.count, wire, mean.data));
    exchange.receive(arrived.back().values, source.rank);
  }
  auto transfer = std::move(exchange).submit();
  co_await transfer;

  std::vector<kernel::weighted_input> inputs;
  for (std::size_t i = 0; i < arrived.size(); ++i) {
    if (rounded) arrived[i] = converted(context, arrived[i].values, mean.type);
    inputs.push_back({links.sources[i].weight, arrived[i].values.data});
  }
  context.compute().mix(mean, links.self_weight, mean, inputs);
}

/// Averages inside machines, mixes between them, slice by slice: local rank l of every machine
/// works on slice l of the values.
///
/// \param links  between ranks of one local number, see `links_between_machines`.
template <backend Backend, class Owner>
task hierarchical_task(operation_context<Backend> context, const_buffer in, mutable_buffer out,
                       neighborhood links, [[maybe_unused]] Owner owner) {
  const auto& members = context.layout().members(context.layout().machine_rank());
  const auto parts = static_cast<std::int64_t>(members.size());
  const auto self = std::int64_t{context.layout().local_rank()};
  if (parts > 1) context.count_collective(allreduce_bytes(in.bytes(), parts));

  const auto computed = is_half(in.type) ? dtype::float32 : in.type;
  const auto slice = temporary(context, part_of(in, self, parts).count, computed, in.data);
  auto averaging = machine_mean(context, in, slice.values);
  co_await std::move(averaging);
  auto mixing = mix_between_machines(context, slice.values, in.type, std::move(links));
  co_await std::move(mixing);

  // `out` may be `in`, which stays as it is until everything has arrived.
  const auto result = temporary(context, in.count, in.type, in.data);
  const mutable_buffer own = part_of(result.values, self, parts);
  if (computed == in.type)
    context.compute().copy(slice.values, own);
  else
    context.compute().convert(own, slice.values);
  auto sharing = context.exchange(traffic_kind::part);
  for (std::int64_t i = 0; i < parts; ++i) {
    if (i == self) continue;
    const int peer = members[static_cast<std::size_t>(i)];
    sharing.receive(part_of(result.values, i, parts), peer);
    sharing.send(own, peer);
  }
  auto shared = std::move(sharing).submit();
  co_await shared;
  context.compute().copy(result.values, out);
}

}  // namespace detail

/// Averages within machines, and mixes the machines' averages with those of neighbour machines.
///
/// With \f$ s_m \f$ the mean over the ranks of machine m, every rank of machine m computes
/// \f[ y_m = w_m s_m + \sum_{k \in \mathrm{sources}_m} a_m[k] \, d_k[m] \, s_k \f]
/// with the weights of `links`, whose ranks are machines. Collective: every rank must call it, in
/// the same order as its other operations, and all ranks of a machine with the same `links`. Bit
/// equal within a machine. 16-bit floats are averaged in float32; what travels between machines is
/// rounded once, and so is the result.
///
/// \param in     equally many elements of one floating type on every rank.
/// \param out    as many elements; may be `in`.
/// \param links  a `neighborhood` of machines, or a graph of `comm.machine_size()` machines.
/// \throws usage_error if types, lengths, machines, weights or the graph's size are wrong, or the
///         machines have different numbers of ranks, or ranks not numbered machine by machine;
///         nothing was sent.
/// \throws timeout_error, transport_error, mismatch_error, peer_error; `in` and `out` are then
///         unchanged.
/// \note With L ranks per machine each rank sends 2(L-1)/L of its input inside the machine, and 1/L
///       of it per destination to another machine.
template <backend Backend, contiguous_elements In, writable_elements Out,
          neighbor_links Links = neighborhood>
void hierarchical_neighbor_allreduce(communicator<Backend>& comm, const In& in, Out&& out,
                                     const Links& links, const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  neighborhood own = detail::machine_links_of(comm, links);
  auto call = detail::check_hierarchical(comm, source, target, own, options);
  comm.run(std::move(call), [&](auto context) {
    return detail::hierarchical_task(context, source, target, own, nullptr);
  });
}

/// Starts a `hierarchical_neighbor_allreduce`. `in` and `out` must outlive the request.
template <backend Backend, lasting_elements In, lasting_writable_elements Out,
          neighbor_links Links = neighborhood>
request<void> hierarchical_neighbor_allreduce_nonblocking(communicator<Backend>& comm, In&& in,
                                                          Out&& out, const Links& links,
                                                          const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  neighborhood own = detail::machine_links_of(comm, links);
  auto call = detail::check_hierarchical(comm, source, target, own, options);
  return {comm.driver(), comm.start(std::move(call), [&](auto context) {
            return detail::hierarchical_task(context, source, target, own, nullptr);
          })};
}

}  // namespace bluefog
