// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
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
  expects_fitting(operation, comm, in, out);
  expects(is_floating(in.type), operation, ": weights need a floating type, got ", in.type);
  expects(comm.is_homogeneous(), operation,
          ": every machine needs the same number of consecutive ranks, but ", comm.layout());
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

/// \return a message with `means` in the types of `wire`: weighted first, and rounded after that.
/// \param temporaries  keeps what must stay until the message is sent.
template <backend Backend>
[[nodiscard]] const std::byte* message_of(const operation_context<Backend>& context,
                                          const std::vector<held_buffer>& means,
                                          const packed_layout& wire, double weight,
                                          std::vector<held_buffer>& temporaries) {
  const const_buffer first = means.front().values;
  if (means.size() == 1 && weight == 1.0 && wire.segments[0].type == first.type) return first.data;
  const auto bytes = static_cast<std::int64_t>(wire.bytes);
  temporaries.push_back(temporary(context, bytes, dtype::uint8, first.data));
  std::byte* const message = temporaries.back().values.data;
  for (std::size_t i = 0; i < means.size(); ++i) {
    const auto& [offset, count, type] = wire.segments[i];
    const mutable_buffer place{message + offset, count, type};
    const mutable_buffer mean = means[i].values;
    if (type == mean.type) {
      context.compute().scaled_copy(place, mean, weight);
      continue;
    }
    const_buffer weighted = mean;
    if (weight != 1.0) {
      const auto& copy = temporaries.emplace_back(temporary(context, count, mean.type, mean.data));
      context.compute().scaled_copy(copy.values, mean, weight);
      weighted = copy.values;
    }
    context.compute().convert(place, weighted);
  }
  return message;
}

/// Mixes this rank's slices with the same slices of other machines, in one message per machine.
///
/// \param means  of this machine, at least one; become the result.
/// \param wire   the types that travel, rounded to where they are not those of `means`.
template <backend Backend>
task mix_between_machines(operation_context<Backend> context, const std::vector<held_buffer>& means,
                          packed_layout wire, neighborhood links) {
  std::vector<held_buffer> temporaries;
  auto exchange = context.exchange();
  for (const edge& destination : links.destinations)
    exchange.send(
        as_bytes(message_of(context, means, wire, destination.weight, temporaries), wire.bytes),
        destination.rank);
  arrivals arrived;
  for (const edge& source : links.sources) {
    arrived.push_back(context.scratch(wire.bytes, means.front().values.data));
    exchange.receive(as_bytes(arrived.back().data(), wire.bytes), source.rank);
  }
  auto transfer = std::move(exchange).submit();
  co_await transfer;

  for (std::size_t i = 0; i < means.size(); ++i) {
    const auto& [offset, count, type] = wire.segments[i];
    const mutable_buffer mean = means[i].values;
    std::vector<kernel::weighted_input> inputs;
    for (std::size_t k = 0; k < arrived.size(); ++k) {
      const_buffer slice{arrived[k].data() + offset, count, type};
      if (type != mean.type)
        slice = temporaries.emplace_back(converted(context, slice, mean.type)).values;
      inputs.push_back({links.sources[k].weight, slice.data});
    }
    context.compute().mix(mean, links.self_weight, mean, inputs);
  }
}

/// Completes `whole`, in which every rank of the machine has its own slice.
template <backend Backend>
task share_slices(operation_context<Backend> context, mutable_buffer whole) {
  const auto& members = context.layout().members(context.layout().machine_rank());
  const auto parts = static_cast<std::int64_t>(members.size());
  const auto self = std::int64_t{context.layout().local_rank()};
  auto exchange = context.exchange(traffic_kind::part);
  for (std::int64_t i = 0; i < parts; ++i) {
    if (i == self) continue;
    const int peer = members[static_cast<std::size_t>(i)];
    exchange.receive(part_of(whole, i, parts), peer);
    exchange.send(part_of(whole, self, parts), peer);
  }
  auto transfer = std::move(exchange).submit();
  co_await transfer;
}

/// One of several arrays to average; `out` may be `in`.
struct averaged_array {
  const_buffer in;
  mutable_buffer out;
};

/// Averages arrays inside machines, mixes them between machines, slice by slice: local rank l of
/// every machine works on slice l of each array.
///
/// \param links  between ranks of one local number, see `links_between_machines`.
/// \param owner  of the memory, as in `reduce_among`.
template <backend Backend>
task hierarchical_task(operation_context<Backend> context, std::vector<averaged_array> arrays,
                       neighborhood links,
                       [[maybe_unused]] std::shared_ptr<const void> owner = nullptr) {
  if (arrays.empty()) co_return;
  const auto parts = std::int64_t{context.layout().local_size()};
  const auto self = std::int64_t{context.layout().local_rank()};
  std::vector<held_buffer> means;
  packed_layout wire;
  for (const auto& [in, out] : arrays) {
    if (parts > 1) context.count_collective(allreduce_bytes(in.bytes(), parts));
    const auto count = part_of(in, self, parts).count;
    const auto computed = is_half(in.type) ? dtype::float32 : in.type;
    means.push_back(temporary(context, count, computed, in.data));
    wire.add(count, in.type);
    auto averaging = machine_mean(context, in, means.back().values);
    co_await std::move(averaging);
  }
  auto mixing = mix_between_machines(context, means, wire, std::move(links));
  co_await std::move(mixing);

  // What may be an input stays as it is until everything has arrived.
  std::vector<held_buffer> results;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const const_buffer in = arrays[i].in;
    results.push_back(temporary(context, in.count, in.type, in.data));
    const mutable_buffer whole = results.back().values;
    const mutable_buffer own = part_of(whole, self, parts);
    if (own.type == means[i].values.type)
      context.compute().copy(means[i].values, own);
    else
      context.compute().convert(own, means[i].values);
    auto sharing = share_slices(context, whole);
    co_await std::move(sharing);
  }
  for (std::size_t i = 0; i < arrays.size(); ++i)
    context.compute().copy(results[i].values, arrays[i].out);
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
  auto call =
      detail::of_graph(comm, links, detail::check_hierarchical(comm, source, target, own, options));
  comm.run(std::move(call), [&](auto context) {
    return detail::hierarchical_task(context, {{source, target}}, own);
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
  auto call =
      detail::of_graph(comm, links, detail::check_hierarchical(comm, source, target, own, options));
  return {comm.driver(), comm.start(std::move(call), [&](auto context) {
            return detail::hierarchical_task(context, {{source, target}}, own);
          })};
}

}  // namespace bluefog
