// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>

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
/// \note An allreduce of one byte.
template <backend Backend>
[[nodiscard]] bool any_of(communicator<Backend>& comm, bool flag,
                          const call_options& options = {}) {
  const auto any = std::make_shared<std::uint8_t>(static_cast<std::uint8_t>(flag ? 1 : 0));
  const mutable_buffer value = as_mutable_buffer(std::span(any.get(), 1));
  comm.run(detail::describe(comm, "any_of", options, ""), [&](auto context) {
    return detail::allreduce_task(context, value, value, reduce_op::max, scope::all, any);
  });
  return *any != 0;
}

}  // namespace bluefog
