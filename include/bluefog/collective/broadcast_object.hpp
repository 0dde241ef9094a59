// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <typeinfo>
#include <utility>
#include <vector>

#include <bluefog/backend/check.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/request.hpp>
#include <bluefog/collective/arguments.hpp>
#include <bluefog/collective/broadcast_values.hpp>
#include <bluefog/collective/object_bytes.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>

namespace bluefog {

namespace detail {

/// What travels; nothing where the root could not write its object.
using object_bytes = std::optional<std::vector<std::byte>>;

/// \param bytes  on the root the object, elsewhere anything: becomes what the root's is.
template <backend Backend>
task broadcast_bytes_task(operation_context<Backend> context, std::shared_ptr<object_bytes> bytes,
                          int root) {
  if (context.size() == 1) co_return;
  if constexpr (broadcasting_backend<Backend>) co_await order::hold;
  std::int64_t length = *bytes ? static_cast<std::int64_t>((*bytes)->size()) : -1;
  auto size = broadcast_values(context, bytes_of(length), root, traffic_kind::control);
  co_await std::move(size);
  if (length < 0) {
    bytes->reset();
    co_return;
  }
  if (context.rank() != root) bytes->emplace(static_cast<std::size_t>(length));
  context.count_collective(broadcast_bytes((*bytes)->size(), context.size()));
  const mutable_buffer values{(*bytes)->data(), length, dtype::uint8};
  auto content = broadcast_values(context, values, root, traffic_kind::part);
  co_await std::move(content);
}

/// \param value  on the root the object, elsewhere overwritten once the root's has arrived.
template <backend Backend, broadcastable_object T>
task broadcast_object_task(operation_context<Backend> context, std::shared_ptr<T> value, int root) {
  const auto bytes = std::make_shared<object_bytes>();
  std::exception_ptr failure;  // the others wait all the same
  if (context.rank() == root) try {
      std::vector<std::byte> written;
      object_format<T>::write(*value, written);
      *bytes = std::move(written);
    } catch (...) {
      failure = std::current_exception();
    }
  auto sent = broadcast_bytes_task(context, bytes, root);
  co_await std::move(sent);
  if (failure) std::rethrow_exception(failure);
  if (context.rank() == root) co_return;
  expects<peer_error>(bytes->has_value(), "broadcast_object: rank ", root,
                      " could not write its object");
  std::span<const std::byte> left(**bytes);
  *value = object_format<T>::read(left);
  expects<mismatch_error>(left.empty(), "broadcast_object: the root sent ", left.size(),
                          " bytes too many");
}

template <backend Backend, broadcastable_object T>
[[nodiscard]] call_description check_broadcast_object(const communicator<Backend>& comm, int root,
                                                      const call_options& options) {
  expects_rank("broadcast_object", comm, root, "root");
  return describe(comm, "broadcast_object", options, " of type ", typeid(T).name(), " from rank ",
                  root);
}

}  // namespace detail

/// Gives every rank the object of one: a configuration, a vocabulary, a file's content.
///
///     const auto config = broadcast_object(comm, comm.rank() == 0 ? read() : settings{}, 0);
///
/// Collective: every rank must call it, in the same order as its other operations, on machines that
/// store numbers in one way.
///
/// \param value  read on the root only; the same type on every rank.
/// \param root   whose object; the same on every rank.
/// \return the root's object.
/// \throws usage_error if there is no such rank; nothing was sent.
/// \throws mismatch_error if the root's bytes are no such object; peer_error if the root could not
///         write it, where the root throws what kept it from that; timeout_error, transport_error.
/// \note Costs two broadcasts: of the length and of the bytes.
template <backend Backend, broadcastable_object T>
[[nodiscard]] T broadcast_object(communicator<Backend>& comm, const T& value, int root,
                                 const call_options& options = {}) {
  auto call = detail::check_broadcast_object<Backend, T>(comm, root, options);
  const auto result = std::make_shared<T>(value);
  comm.run(std::move(call),
           [&](auto context) { return detail::broadcast_object_task(context, result, root); });
  return std::move(*result);
}

/// Starts a `broadcast_object`. `value` is copied.
template <backend Backend, broadcastable_object T>
request<T> broadcast_object_nonblocking(communicator<Backend>& comm, const T& value, int root,
                                        const call_options& options = {}) {
  auto call = detail::check_broadcast_object<Backend, T>(comm, root, options);
  auto result = std::make_shared<T>(value);
  auto started = comm.start(std::move(call), [&](auto context) {
    return detail::broadcast_object_task(context, result, root);
  });
  return {comm.driver(), std::move(started), std::move(result)};
}

}  // namespace bluefog
