// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <ranges>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/backend/check.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/collective/arguments.hpp>
#include <bluefog/collective/gathering.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog {

namespace detail {

/// Makes room for a concatenation, once the rows of every contribution are known.
template <class T>
concept gather_allocator =
    std::move_constructible<T> && std::invocable<T&, std::span<const std::int64_t>> &&
    std::same_as<std::invoke_result_t<T&, std::span<const std::int64_t>>, mutable_buffer>;

template <backend Backend>
[[nodiscard]] call_description describe_gather(const communicator<Backend>& comm,
                                               std::string_view operation, const_buffer in,
                                               const gather_shape& shape,
                                               const call_options& options) {
  std::string trailing;
  for (const auto dimension : shape.trailing) trailing += concat(", ", dimension);
  return describe(comm, operation, options, " ", in.type, " [any", trailing, "]");
}

/// Concatenates the arrays of all ranks in rank order.
///
/// What each rank gives is told first; if it does not fit, every rank throws the same
/// `mismatch_error` before data travels.
///
/// \param in        this rank's rows; `shape` says how many of what dimensions.
/// \param allocate  called once, inside the task: `mutable_buffer(std::span<const std::int64_t>)`
///                  gets the rows of every rank, gives room for all of them.
template <backend Backend, gather_allocator Allocate>
task allgather_task(operation_context<Backend> context, const_buffer in, gather_shape shape,
                    Allocate allocate) {
  const int self = context.rank();
  std::vector<int> ranks(static_cast<std::size_t>(context.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<gather_header> headers(ranks.size());
  headers[static_cast<std::size_t>(self)] = gather_header(shape, in.type);
  if constexpr (gathering_backend<Backend>) co_await order::hold;
  std::function<gather_header(int)> own = [&](int) {
    return headers[static_cast<std::size_t>(self)];
  };
  auto telling = exchange_with(context, ranks, &headers, own);
  co_await std::move(telling);
  for (const int rank : ranks) {
    const auto& theirs = headers[static_cast<std::size_t>(rank)];
    if (const auto text = gather_problem(theirs, rank, headers, ranks); !text.empty())
      throw mismatch_error("allgather: " + text);
  }

  context.count_collective((context.size() - 1) * static_cast<std::int64_t>(in.bytes()));
  auto rows = rows_of(headers);
  const mutable_buffer out = allocate(std::span<const std::int64_t>(rows));
  for (auto& each : rows) each *= shape.row_elements();  // from here on counts of elements
  if constexpr (gathering_backend<Backend>) {
    auto gathered = context.transport().allgather(in, out, std::span<const std::int64_t>(rows));
    co_await order::release;
    co_await gathered;
  } else {
    auto exchange = context.exchange(traffic_kind::part);
    std::int64_t offset = 0;
    for (const int rank : ranks) {
      const auto count = rows[static_cast<std::size_t>(rank)];
      const mutable_buffer slot = out.slice(offset, count);
      offset += count;
      if (rank == self) {
        context.compute().copy(in, slot);
        continue;
      }
      if (count > 0) exchange.receive(slot, rank);
      if (in.count > 0) exchange.send(in, rank);
    }
    auto transfer = std::move(exchange).submit();
    co_await transfer;
  }
}

/// Room that the caller has made.
[[nodiscard]] inline auto in_place(mutable_buffer out) {
  return [out](std::span<const std::int64_t>) { return out; };
}

/// Room in a vector that is made when it is known how much is needed.
template <element T>
[[nodiscard]] auto in_vector(std::shared_ptr<std::vector<T>> result) {
  return [result = std::move(result)](std::span<const std::int64_t> rows) {
    result->resize(
        static_cast<std::size_t>(std::reduce(rows.begin(), rows.end(), std::int64_t{0})));
    return as_mutable_buffer(*result);
  };
}

/// Elements that a vector holds in one piece of memory: all but bool.
template <class Range>
concept gatherable =
    contiguous_elements<Range> && writable_elements<std::vector<std::ranges::range_value_t<Range>>>;

/// The same, for operations that go on after the call.
template <class Range>
concept lasting_gatherable = gatherable<Range> && std::ranges::borrowed_range<Range>;

}  // namespace detail

/// Concatenates the values of all ranks, in rank order; ranks may have different numbers of them.
///
/// Collective: every rank must call it, in the same order as its other operations.
///
/// \param in   elements of one type on every rank.
/// \param out  as many elements as all ranks have together; `in` may be its own part.
/// \throws usage_error if the types of `in` and `out` differ; nothing was sent.
/// \throws mismatch_error on every rank, before data travels, if one rank's `out` has another
///         length; timeout_error, transport_error, peer_error.
/// \note Sends (n-1) times the input, after a round of n-1 short messages with the lengths.
template <backend Backend, contiguous_elements In, writable_elements Out>
void allgather(communicator<Backend>& comm, const In& in, Out&& out,
               const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  detail::expects_same_type("allgather", source, target);
  const auto shape = detail::gather_shape::flat(source, target.count);
  comm.run(detail::describe_gather(comm, "allgather", source, shape, options), [&](auto context) {
    return detail::allgather_task(context, source, shape, detail::in_place(target));
  });
}

/// Starts an `allgather`. `in` and `out` must outlive the request.
template <backend Backend, lasting_elements In, lasting_writable_elements Out>
request<void> allgather_nonblocking(communicator<Backend>& comm, In&& in, Out&& out,
                                    const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto target = as_mutable_buffer(out);
  detail::expects_same_type("allgather", source, target);
  const auto shape = detail::gather_shape::flat(source, target.count);
  return {comm.driver(),
          comm.start(detail::describe_gather(comm, "allgather", source, shape, options),
                     [&](auto context) {
                       return detail::allgather_task(context, source, shape,
                                                     detail::in_place(target));
                     })};
}

/// Starts to concatenate the values of all ranks in a new vector. `in` must outlive the request.
template <backend Backend, detail::lasting_gatherable In>
[[nodiscard]] auto allgather_nonblocking(communicator<Backend>& comm, In&& in,
                                         const call_options& options = {}) {
  using values = std::vector<std::ranges::range_value_t<In>>;
  const auto source = as_buffer(in);
  const auto shape = detail::gather_shape::flat(source);
  auto result = std::make_shared<values>();
  auto started = comm.start(
      detail::describe_gather(comm, "allgather", source, shape, options), [&](auto context) {
        return detail::allgather_task(context, source, shape, detail::in_vector(result));
      });
  return request<values>(comm.driver(), std::move(started), std::move(result));
}

/// \return the values of all ranks, in rank order.
template <backend Backend, detail::gatherable In>
[[nodiscard]] auto allgather(communicator<Backend>& comm, const In& in,
                             const call_options& options = {}) {
  const auto source = as_buffer(in);
  const auto shape = detail::gather_shape::flat(source);
  auto result = std::make_shared<std::vector<std::ranges::range_value_t<In>>>();
  comm.run(detail::describe_gather(comm, "allgather", source, shape, options), [&](auto context) {
    return detail::allgather_task(context, source, shape, detail::in_vector(result));
  });
  return std::move(*result);
}

}  // namespace bluefog
