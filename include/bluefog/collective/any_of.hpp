// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/collective/allreduce.hpp>
#include <bluefog/collective/arguments.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/reduce_op.hpp>

namespace bluefog {

/// Lets every rank know whether a condition holds on any of them, e.g. that one has run out of
/// batches or met a value that is not finite.
///
/// Collective: every rank must call it, in the same order as its other operations.
///
/// \param flag  this rank's condition.
/// \return whether `flag` is true on at least one rank; the same on all.
/// \throws timeout_error, transport_error, mismatch_error, peer_error.
/// \note An allreduce of one byte. Where `amp::grad_scaler` lets ranks leave out a step together,
///       it asks the optimizer for the highest of their numbers in place of this: one message then
///       tells both what this step and what local steps before it have met, and while it waits the
///       optimizer hears of ranks that differ in what they average.
template <backend Backend>
[[nodiscard]] bool any_of(communicator<Backend>& comm, bool flag,
                          const call_options& options = {}) {
  std::array<std::uint8_t, 1> any{static_cast<std::uint8_t>(flag ? 1 : 0)};
  const mutable_buffer value = as_mutable_buffer(any);
  comm.run(detail::describe(comm, "any_of", options, ""), [&](auto context) {
    return detail::allreduce_task(context, value, value, reduce_op::max, scope::all, nullptr);
  });
  return any.front() != 0;
}

}  // namespace bluefog
