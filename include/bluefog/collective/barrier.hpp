// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/context.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/collective/arguments.hpp>
#include <bluefog/communicator.hpp>

namespace bluefog {

namespace detail {

/// In round k every rank tells the rank 2^k places on that it, and all it has heard of, are here.
/// \see Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", International
///      Journal of Parallel Programming 17(1), 1988.
template <backend Backend>
task barrier_task(operation_context<Backend> context) {
  const int size = context.size();
  for (int step = 1; step < size; step *= 2) {
    auto exchange = context.exchange(traffic_kind::control);
    exchange.receive({}, (context.rank() - step + size) % size);
    exchange.send({}, (context.rank() + step) % size);
    auto transfer = std::move(exchange).submit();
    co_await transfer;
  }
}

}  // namespace detail

/// Returns once every rank has called it.
///
/// Collective, in the same order as the other operations. Says nothing about non-blocking
/// operations issued before: wait for their requests.
///
/// \throws timeout_error that names the ranks that are missing; transport_error, mismatch_error,
///         peer_error.
/// \note Sends log2 n empty messages, which count as control traffic.
template <backend Backend>
void barrier(communicator<Backend>& comm, const call_options& options = {}) {
  comm.run(detail::describe(comm, "barrier", options, ""),
           [](auto context) { return detail::barrier_task(context); });
}

/// Starts a `barrier`: the request is ready once every rank has started it.
template <backend Backend>
request<void> barrier_nonblocking(communicator<Backend>& comm, const call_options& options = {}) {
  return {comm.driver(), comm.start(detail::describe(comm, "barrier", options, ""),
                                    [](auto context) { return detail::barrier_task(context); })};
}

}  // namespace bluefog
