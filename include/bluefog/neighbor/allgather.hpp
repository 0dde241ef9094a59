// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <ranges>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <bluefog/backend/check.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/collective/allgather.hpp>
#include <bluefog/collective/arguments.hpp>
#include <bluefog/collective/gathering.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/scratch.hpp>
#include <bluefog/neighbor/links.hpp>
#include <bluefog/neighbor/mixing.hpp>
#include <bluefog/topology/exponential.hpp>
#include <bluefog/topology/neighborhood.hpp>

namespace bluefog {

namespace detail {

template <backend Backend>
[[nodiscard]] call_description check_neighbor_gather(const communicator<Backend>& comm,
                                                     const_buffer in, const gather_shape& shape,
                                                     const neighborhood& links,
                                                     const call_options& options) {
  validate("neighbor_allgather", links, comm.rank(), comm.size());
  auto call = describe_gather(comm, "neighbor_allgather", in, shape, options);
  call.links = links;
  return call;
}

[[nodiscard]] inline bool overlap(const_buffer a, const_buffer b) noexcept {
  const std::less<> before;
  return a.count > 0 && b.count > 0 && before(a.data, b.data + b.bytes()) &&
         before(b.data, a.data + a.bytes());
}

/// Sends `in` to the destinations and concatenates what the sources send, in their order.
///
/// Sizes travel first. What a source sends is received even if it does not fit, so that the sender
/// is not held up; then this rank throws a `mismatch_error`, and `allocate` is not called.
///
/// \param allocate  as in `allgather_task`, with the rows of every source.
template <backend Backend, gather_allocator Allocate>
task neighbor_allgather_task(operation_context<Backend> context, const_buffer in,
                             gather_shape shape, neighborhood links, Allocate allocate) {
  gather_header own(shape, in.type);
  std::vector<int> sources;
  for (const edge& source : links.sources) sources.push_back(source.rank);
  std::vector<gather_header> headers(sources.size());
  auto telling = context.exchange(traffic_kind::control);
  for (std::size_t i = 0; i < sources.size(); ++i)
    telling.receive(bytes_of(headers[i]), sources[i]);
  for (const edge& destination : links.destinations) telling.send(bytes_of(own), destination.rank);
  auto told = std::move(telling).submit();
  co_await told;

  const auto problem = gather_problem(own, context.rank(), headers, sources);
  const auto rows = rows_of(headers);
  std::vector<std::size_t> lengths;
  std::size_t bytes = 0;
  for (const gather_header& each : headers) bytes += lengths.emplace_back(each.bytes());
  mutable_buffer out;
  if (problem.empty()) out = allocate(std::span<const std::int64_t>(rows));
  const bool aside = !problem.empty() || overlap(in, out);  // `in` stays until it has been sent
  const auto memory = context.scratch(aside ? bytes : 0, in.data);

  auto exchange = context.exchange();
  std::byte* slot = aside ? memory.data() : out.data;
  for (std::size_t i = 0; i < sources.size(); ++i) {
    if (lengths[i] > 0) exchange.receive(as_bytes(slot, lengths[i]), sources[i]);
    slot += lengths[i];
  }
  if (in.count > 0)
    for (const edge& destination : links.destinations) exchange.send(in, destination.rank);
  auto transfer = std::move(exchange).submit();
  co_await transfer;
  if (!problem.empty()) throw mismatch_error("neighbor_allgather: " + problem);
  if (aside) context.compute().copy({memory.data(), out.count, out.type}, out);
}

}  // namespace detail

/// Concatenates the values of neighbours, without one's own; ranks may have different numbers.
///
/// The order is that of `links.sources`, ascending for a graph. Collective: every rank must call
/// it, in the same order as its other operations; a rank with nothing to send or receive passes
/// empty sides. Weights play no part.
///
/// \param in     elements of one type on every rank.
/// \param out    as many elements as the sources have together; may be `in`.
/// \param links  a `neighborhood`, or a graph of `comm.size()` ranks.
/// \throws usage_error if types, ranks or the graph's size are wrong; nothing was sent.
/// \throws mismatch_error if the sources have another number of elements, on the rank that has no
///         room for it; timeout_error, transport_error, peer_error. `in` is then unchanged.
/// \note Sends the input to each destination, after a short message with its length.
template <backend Backend, contiguous_elements In, writable_elements Out,
          neighbor_links Links = neighborhood>
void neighbor_allgather(communicator<Backend>& comm, const In& in, Out&& out, const Links& links,
                        const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  detail::expects_same_type("neighbor_allgather", source, target);
  const auto shape = detail::gather_shape::flat(source, target.count);
  const neighborhood own = detail::links_of("neighbor_allgather", comm, links);
  comm.run(detail::check_neighbor_gather(comm, source, shape, own, options), [&](auto context) {
    return detail::neighbor_allgather_task(context, source, shape, own, detail::in_place(target));
  });
}

/// Concatenates over the static exponential graph.
template <backend Backend, contiguous_elements In, writable_elements Out>
void neighbor_allgather(communicator<Backend>& comm, const In& in, Out&& out) {
  neighbor_allgather(comm, in, out, topology::exponential(comm.size()));
}

/// Starts a `neighbor_allgather`. `in` and `out` must outlive the request.
template <backend Backend, lasting_elements In, lasting_writable_elements Out,
          neighbor_links Links = neighborhood>
request<void> neighbor_allgather_nonblocking(communicator<Backend>& comm, In&& in, Out&& out,
                                             const Links& links, const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  detail::expects_same_type("neighbor_allgather", source, target);
  const auto shape = detail::gather_shape::flat(source, target.count);
  const neighborhood own = detail::links_of("neighbor_allgather", comm, links);
  return {comm.driver(),
          comm.start(detail::check_neighbor_gather(comm, source, shape, own, options),
                     [&](auto context) {
                       return detail::neighbor_allgather_task(context, source, shape, own,
                                                              detail::in_place(target));
                     })};
}

/// Starts concatenating over the static exponential graph.
template <backend Backend, lasting_elements In, lasting_writable_elements Out>
request<void> neighbor_allgather_nonblocking(communicator<Backend>& comm, In&& in, Out&& out) {
  return neighbor_allgather_nonblocking(comm, in, out, topology::exponential(comm.size()));
}

/// Starts to concatenate the values of neighbours in a new vector. `in` must outlive the request.
template <backend Backend, detail::lasting_gatherable In, neighbor_links Links = neighborhood>
[[nodiscard]] auto neighbor_allgather_nonblocking(communicator<Backend>& comm, In&& in,
                                                  const Links& links,
                                                  const call_options& options = {}) {
  using values = std::vector<std::ranges::range_value_t<In>>;
  const auto source = as_buffer(in);
  const auto shape = detail::gather_shape::flat(source);
  const neighborhood own = detail::links_of("neighbor_allgather", comm, links);
  auto result = std::make_shared<values>();
  auto started = comm.start(detail::check_neighbor_gather(comm, source, shape, own, options),
                            [&](auto context) {
                              return detail::neighbor_allgather_task(context, source, shape, own,
                                                                     detail::in_vector(result));
                            });
  return request<values>(comm.driver(), std::move(started), std::move(result));
}

/// Starts to concatenate over the static exponential graph in a new vector.
template <backend Backend, detail::lasting_gatherable In>
[[nodiscard]] auto neighbor_allgather_nonblocking(communicator<Backend>& comm, In&& in) {
  return neighbor_allgather_nonblocking(comm, in, topology::exponential(comm.size()));
}

/// \return the values of the sources, one after the other.
template <backend Backend, detail::gatherable In, neighbor_links Links = neighborhood>
[[nodiscard]] auto neighbor_allgather(communicator<Backend>& comm, const In& in, const Links& links,
                                      const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto shape = detail::gather_shape::flat(source);
  const neighborhood own = detail::links_of("neighbor_allgather", comm, links);
  auto result = std::make_shared<std::vector<std::ranges::range_value_t<In>>>();
  comm.run(detail::check_neighbor_gather(comm, source, shape, own, options), [&](auto context) {
    return detail::neighbor_allgather_task(context, source, shape, own, detail::in_vector(result));
  });
  return std::move(*result);
}

/// \return the values of the sources in the static exponential graph, one after the other.
template <backend Backend, detail::gatherable In>
[[nodiscard]] auto neighbor_allgather(communicator<Backend>& comm, const In& in) {
  return neighbor_allgather(comm, in, topology::exponential(comm.size()));
}

}  // namespace bluefog
