// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/thread/backend.hpp>

namespace bluefog_test {

/// Threads with a broadcast and an allgather of their own, each one exchange.
///
/// As over MPI, these carry no tag: calls of different ranks belong together by their order alone.
class native_thread_backend {
 public:
  using operation_type = bluefog::thread_backend::operation_type;
  static constexpr std::string_view name = "native threads";
  static constexpr bluefog::memory_space space = bluefog::memory_space::host;

  explicit native_thread_backend(bluefog::thread_backend inner)
      : inner_(std::move(inner)), apart_(twin_of(inner_)) {}

  [[nodiscard]] int rank() const noexcept { return inner_.rank(); }
  [[nodiscard]] int size() const noexcept { return inner_.size(); }
  [[nodiscard]] int machine() const noexcept { return inner_.machine(); }
  [[nodiscard]] bool any_thread() const noexcept { return inner_.any_thread(); }
  [[nodiscard]] auto exchange(bluefog::message_tag tag) { return inner_.exchange(tag); }
  [[nodiscard]] native_thread_backend subset(std::span<const int> members, std::uint64_t serial) {
    return native_thread_backend(inner_.subset(members, serial));
  }

  /// \return how many collectives of its own this rank has started.
  [[nodiscard]] std::uint64_t calls() const noexcept { return calls_; }

  [[nodiscard]] operation_type broadcast(bluefog::mutable_buffer values, int root) {
    auto messages = next();
    if (rank() != root) {
      messages.receive(values, root);
    } else {
      for (int peer = 0; peer < size(); ++peer)
        if (peer != root) messages.send(values, peer);
    }
    return std::move(messages).submit();
  }

  [[nodiscard]] operation_type allgather(bluefog::const_buffer in, bluefog::mutable_buffer out,
                                         std::span<const std::int64_t> counts) {
    auto messages = next();
    std::int64_t offset = 0;
    for (int peer = 0; peer < size(); ++peer) {
      const auto count = counts[static_cast<std::size_t>(peer)];
      const auto slot = out.slice(offset, count);
      offset += count;
      if (peer == rank()) {
        if (slot.data != in.data && count > 0) std::memcpy(slot.data, in.data, in.bytes());
      } else {
        messages.receive(slot, peer);
        messages.send(in, peer);
      }
    }
    return std::move(messages).submit();
  }

 private:
  [[nodiscard]] static bluefog::thread_backend twin_of(bluefog::thread_backend& transport) {
    std::vector<int> all(static_cast<std::size_t>(transport.size()));
    std::iota(all.begin(), all.end(), 0);
    return transport.subset(all, ~std::uint64_t{0});
  }

  [[nodiscard]] bluefog::threads::exchange next() {
    return apart_.exchange({bluefog::channel::group, calls_++, 0});
  }

  bluefog::thread_backend inner_;
  bluefog::thread_backend apart_;  // whose messages never mix with those of operations
  std::uint64_t calls_ = 0;
};

static_assert(bluefog::gathering_backend<native_thread_backend>);
static_assert(bluefog::broadcasting_backend<native_thread_backend>);
static_assert(!bluefog::allreducing_backend<native_thread_backend>);

}  // namespace bluefog_test
