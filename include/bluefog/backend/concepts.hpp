// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <bluefog/backend/message.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/reduce_op.hpp>

namespace bluefog {

/// A started native operation, which borrows its buffers until it is complete.
///
/// Semantic requirements: a default-constructed operation is complete. `ready()` makes progress,
/// never blocks, and throws a `transport_error`, `mismatch_error` or `peer_error` only once nothing
/// touches the buffers any more. `abandon()` asks the transport to let go of the buffers; after it,
/// `ready()` turns true as soon as it has. `waiting_for()` lists, ascending, the ranks whose part
/// is still missing, or of some of whom it is; empty if the transport does not know. Destroying a
/// complete operation never blocks. A transport that may fail and still not let go of the buffers
/// has a `failure()` as well, which then says why and is null otherwise: the operation is given up
/// for that reason, before its time is over. One that knows what `ready()` is going to throw while
/// the rest is still under way may have a `cause()`, which is then reported in place of a time-out.
template <class T>
concept pending_operation =
    std::default_initializable<T> && std::movable<T> && requires(T& operation, const T& view) {
      { operation.ready() } -> std::same_as<bool>;
      { operation.abandon() } noexcept -> std::same_as<void>;
      { view.waiting_for() } -> std::same_as<std::vector<int>>;
    };

/// Sends and receives that are submitted together, so that none waits for another.
///
/// Semantic requirements: nothing starts before `submit()`; an exchange that is destroyed without
/// it never happened. Messages between two ranks that carry equal tags match in the order of their
/// `send` and `receive` calls. A message of another length than its receive makes the operation
/// fail with a `mismatch_error` that names the sender and both lengths. Sending to oneself is not
/// required to work.
template <class T, class Operation>
concept exchange_of = requires(T& exchange, const_buffer in, mutable_buffer out, int peer) {
  { exchange.send(in, peer) } -> std::same_as<void>;
  { exchange.receive(out, peer) } -> std::same_as<void>;
  { std::move(exchange).submit() } -> std::same_as<Operation>;
};

/// What a transport must provide to carry a `communicator`.
///
/// Semantic requirements: every operation returns at once and borrows its buffers, which lie in
/// `B::space` or in host memory, until it is complete. Ranks with equal `machine()` share memory;
/// the number itself means nothing. `any_thread()` tells whether a thread other than the caller's
/// may make progress; calls that overlap in time on one backend are then allowed. `subset(members,
/// serial)` is called by exactly the ranks in `members`, with equal arguments, and gives a backend
/// in which `members[i]` has rank i; `serial` tells successive subsets apart.
template <class B>
concept backend =
    std::movable<B> && !std::copyable<B> && pending_operation<typename B::operation_type> &&
    requires(B& transport, const B& view, message_tag tag, std::span<const int> members,
             std::uint64_t serial) {
      { B::name } -> std::convertible_to<std::string_view>;
      { B::space } -> std::convertible_to<memory_space>;
      { view.rank() } noexcept -> std::same_as<int>;
      { view.size() } noexcept -> std::same_as<int>;
      { view.machine() } noexcept -> std::same_as<int>;
      { view.any_thread() } noexcept -> std::same_as<bool>;
      { transport.exchange(tag) } -> exchange_of<typename B::operation_type>;
      { transport.subset(members, serial) } -> std::same_as<B>;
    };

/// A backend with a native allreduce. (A native barrier has no concept: `barrier` goes by messages,
/// so that it has a time-out and can name who is missing.)
///
/// Semantic requirements: called by every rank in the same order; `in` and `out` are the same
/// memory or disjoint. `reduces(op, type)` tells which combinations the transport has; `average`
/// and 16-bit floats are made from the others where it does not.
template <class B>
concept allreducing_backend = backend<B> && requires(B& transport, const B& view, const_buffer in,
                                                     mutable_buffer out, reduce_op op, dtype type) {
  { view.reduces(op, type) } noexcept -> std::same_as<bool>;
  { transport.allreduce(in, out, op) } -> std::same_as<typename B::operation_type>;
};

/// A backend with a native broadcast: `values` is read on `root` and written elsewhere.
template <class B>
concept broadcasting_backend =
    backend<B> && requires(B& transport, mutable_buffer values, int root) {
      { transport.broadcast(values, root) } -> std::same_as<typename B::operation_type>;
    };

/// A backend with a native allgather of unequal parts.
///
/// Semantic requirements: `counts[r]` elements of rank r, the same list on every rank, land in
/// `out` in rank order. The list is borrowed until the operation is complete.
template <class B>
concept gathering_backend =
    backend<B> && requires(B& transport, const_buffer in, mutable_buffer out,
                           std::span<const std::int64_t> counts) {
      { transport.allgather(in, out, counts) } -> std::same_as<typename B::operation_type>;
    };

/// A short message beside all operations.
struct letter {
  int sender = 0;
  std::uint64_t number = 0;
};

/// A backend that carries letters, by which waiting ranks find out who is missing.
///
/// Semantic requirements: `post` neither blocks nor fails because the receiver is busy; `collect`
/// returns the next letter that has arrived, if any. Letters never mix with operations.
template <class B>
concept letter_backend = backend<B> && requires(B& transport, int peer, std::uint64_t number) {
  { transport.post(peer, number) } -> std::same_as<void>;
  { transport.collect() } -> std::same_as<std::optional<letter>>;
};

}  // namespace bluefog
