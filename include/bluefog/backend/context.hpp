// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <utility>

#include <bluefog/backend/agreed_calls.hpp>
#include <bluefog/backend/compute.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/backend/options.hpp>
#include <bluefog/backend/state.hpp>
#include <bluefog/core/scratch.hpp>

namespace bluefog {

/// How an exchange is counted.
enum class traffic_kind : std::uint8_t {
  payload,  ///< what the caller asked to be sent
  part,     ///< a step of an operation that is counted as a whole, by `count_collective`
  control,  ///< what the library says to itself
};

/// An exchange that counts what is sent when it is submitted.
template <backend Backend>
class counted_exchange {
 public:
  counted_exchange(Backend& transport, message_tag tag, traffic& counters, traffic_kind kind)
      : native_(begin(transport, tag, kind)), counters_(&counters), kind_(kind) {}

  void send(const_buffer in, int peer) {
    native_.send(in, peer);
    bytes_ += static_cast<std::int64_t>(in.bytes());
    ++messages_;
  }
  void receive(mutable_buffer out, int peer) { native_.receive(out, peer); }

  [[nodiscard]] typename Backend::operation_type submit() && {
    if (kind_ == traffic_kind::payload)
      counters_->count(bytes_, messages_);
    else if (kind_ == traffic_kind::control)
      counters_->count_control(bytes_, messages_);
    return std::move(native_).submit();
  }

 private:
  using native_type = decltype(std::declval<Backend&>().exchange(message_tag{}));

  // What the library says to itself, the host reads.
  [[nodiscard]] static native_type begin(Backend& transport, message_tag tag, traffic_kind kind) {
    if constexpr (device_backend<Backend>)
      return transport.exchange(tag, kind == traffic_kind::control);
    else
      return transport.exchange(tag);
  }

  native_type native_;
  traffic* counters_;
  traffic_kind kind_;
  std::int64_t bytes_ = 0;
  std::int64_t messages_ = 0;
};

/// What the algorithm of one operation works with. Cheap to copy; borrows the communicator's state.
template <backend Backend>
class operation_context {
 public:
  operation_context(communicator_state<Backend>& state, channel kind, std::uint64_t number) noexcept
      : state_(&state), channel_(kind), number_(number) {}

  [[nodiscard]] int rank() const noexcept { return state_->transport().rank(); }
  [[nodiscard]] int size() const noexcept { return state_->transport().size(); }
  [[nodiscard]] Backend& transport() const noexcept { return state_->transport(); }
  [[nodiscard]] const machine_layout& layout() const noexcept { return state_->layout(); }
  [[nodiscard]] const communicator_options& options() const noexcept { return state_->options(); }
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  /// \return whether all ranks take part, in one order; else it is between two.
  [[nodiscard]] bool collective() const noexcept { return channel_ == channel::group; }

  /// \return what check mode has found equal on all ranks before.
  [[nodiscard]] agreed_calls& agreed() const noexcept { return state_->agreed(); }

  /// \return messages of this operation, to be filled and submitted.
  [[nodiscard]] counted_exchange<Backend> exchange(
      traffic_kind kind = traffic_kind::payload) const {
    const auto oldest = channel_ == channel::group ? state_->oldest(number_) : std::uint64_t{0};
    return {transport(), message_tag{channel_, number_, oldest}, state_->counters(), kind};
  }

  /// \return temporary memory of at least `bytes` bytes, where `near` lies: on the device or the
  ///         host.
  [[nodiscard]] scratch_pool::block scratch(std::size_t bytes, const void* near) const {
    if constexpr (device_backend<Backend>)
      if (transport().on_device(near)) return transport().scratch(bytes);
    return state_->scratch().acquire(bytes);
  }

  /// \return the kernels, which work where the values are.
  [[nodiscard]] computation<Backend> compute() const noexcept {
    return computation<Backend>(transport());
  }

  /// Counts an operation of all ranks as one message of `bytes` bytes.
  void count_collective(std::int64_t bytes) const noexcept {
    if (size() > 1) state_->counters().count(bytes, 1);
  }

 private:
  communicator_state<Backend>* state_;
  channel channel_;
  std::uint64_t number_;
};

}  // namespace bluefog
