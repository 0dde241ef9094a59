// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <bluefog/backend/context.hpp>
#include <bluefog/backend/task.hpp>
#include <bluefog/core/buffer.hpp>

namespace bluefog {

/// Concatenates `own`, which has the same length on every rank, in rank order into `all`.
///
/// Control traffic.
/// \param all  gets size() times as many elements; the task keeps it.
template <backend Backend, element T>
task gather_equal(operation_context<Backend> context, std::vector<T> own,
                  std::shared_ptr<std::vector<T>> all) {
  const std::size_t length = own.size();
  all->resize(length * static_cast<std::size_t>(context.size()));
  const auto part = [&](int rank) {
    return as_mutable_buffer(*all).slice(
        static_cast<std::int64_t>(static_cast<std::size_t>(rank) * length),
        static_cast<std::int64_t>(length));
  };
  auto exchange = context.exchange(traffic_kind::control);
  for (int peer = 0; peer < context.size(); ++peer) {
    if (peer == context.rank()) continue;
    exchange.receive(part(peer), peer);
    exchange.send(as_buffer(own), peer);
  }
  std::ranges::copy(own, all->begin() + static_cast<std::ptrdiff_t>(
                                            static_cast<std::size_t>(context.rank()) * length));
  auto transfer = std::move(exchange).submit();
  co_await transfer;
}

}  // namespace bluefog
