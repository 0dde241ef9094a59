// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/buffer.hpp>

namespace bluefog_test {

/// What one rank has handed to its transport.
class outbox {
 public:
  struct message {
    const std::byte* begin;
    std::size_t bytes;
    int peer;
  };

  /// Has `look` called with every message just before it is sent, on the rank's own thread. To be
  /// set before the rank has a communicator.
  void watch(std::function<void(const message&)> look) { look_ = std::move(look); }
  [[nodiscard]] bool watched() const noexcept { return look_ != nullptr; }

  void add(const std::vector<message>& messages) {
    if (look_)
      for (const message& each : messages) look_(each);
    const std::scoped_lock lock(mutex_);
    messages_.insert(messages_.end(), messages.begin(), messages.end());
  }
  /// \return what came since the last call.
  [[nodiscard]] std::vector<message> take() {
    const std::scoped_lock lock(mutex_);
    return std::exchange(messages_, {});
  }

 private:
  std::function<void(const message&)> look_;
  std::mutex mutex_;
  std::vector<message> messages_;
};

template <bluefog::backend Inner>
class recording_exchange {
 public:
  recording_exchange(Inner& transport, bluefog::message_tag tag, outbox& sent)
      : inner_(transport.exchange(tag)), sent_(&sent) {}

  void send(bluefog::const_buffer in, int peer) {
    messages_.push_back({in.data, in.bytes(), peer});
    inner_.send(in, peer);
  }
  void receive(bluefog::mutable_buffer out, int peer) { inner_.receive(out, peer); }
  [[nodiscard]] typename Inner::operation_type submit() && {
    sent_->add(messages_);
    return std::move(inner_).submit();
  }

 private:
  decltype(std::declval<Inner&>().exchange(bluefog::message_tag{})) inner_;
  outbox* sent_;
  std::vector<outbox::message> messages_;
};

/// Notes where each message lies that is sent, when it is submitted.
template <bluefog::backend Inner>
class recording_backend {
 public:
  using operation_type = typename Inner::operation_type;
  static constexpr std::string_view name = Inner::name;
  static constexpr bluefog::memory_space space = Inner::space;

  recording_backend(Inner transport, outbox& sent) : inner_(std::move(transport)), sent_(&sent) {}

  [[nodiscard]] int rank() const noexcept { return inner_.rank(); }
  [[nodiscard]] int size() const noexcept { return inner_.size(); }
  [[nodiscard]] int machine() const noexcept { return inner_.machine(); }
  // Without a communication thread the one that starts an operation sends.
  [[nodiscard]] bool any_thread() const noexcept {
    return inner_.any_thread() && !sent_->watched();
  }
  [[nodiscard]] recording_exchange<Inner> exchange(bluefog::message_tag tag) {
    return {inner_, tag, *sent_};
  }
  [[nodiscard]] recording_backend subset(std::span<const int> members, std::uint64_t serial) {
    return {inner_.subset(members, serial), *sent_};
  }
  void post(int peer, std::uint64_t number)
    requires bluefog::letter_backend<Inner>
  {
    inner_.post(peer, number);
  }
  [[nodiscard]] std::optional<bluefog::letter> collect()
    requires bluefog::letter_backend<Inner>
  {
    return inner_.collect();
  }

 private:
  Inner inner_;
  outbox* sent_;
};

}  // namespace bluefog_test
