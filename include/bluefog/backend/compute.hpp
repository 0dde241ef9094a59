// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstring>
#include <exception>
#include <span>
#include <type_traits>
#include <utility>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/core/kernels.hpp>
#include <bluefog/core/reduce_op.hpp>
#include <bluefog/core/scratch.hpp>

namespace bluefog {

/// A backend that also moves the memory of a device, and computes there.
///
/// Semantic requirements: messages are matched in the order in which ranks submit them, whatever
/// their tags. Everything that is done with device memory happens in the order of the calls, after
/// what the program had given the device before it called the operation: `called()` marks that
/// moment, `follow` puts later work behind it. An exchange of device memory alone may be ready
/// before it is over, unless it says `for_host`; `finished()` gives an operation that is complete
/// once all work so far is.
/// `scratch` gives temporary device memory, used in that same order. Others work on device memory
/// in that order by way of `give(work)`, which calls `work()`: that gives something to `stream()`;
/// `synchronize()` waits for all work so far. What is done `for_caller` is done among the program's
/// own work, on the stream that `caller_stream` names.
template <class B>
concept device_backend =
    backend<B> && std::is_pointer_v<typename B::stream_type> &&
    requires(B& transport, const B& view, typename B::stream_type stream, void (*work)(),
             const void* data, std::size_t bytes, mutable_buffer out, const_buffer in,
             double weight, std::span<const kernel::weighted_input> weighted,
             std::span<const const_buffer> inputs, reduce_op op, int divisor, message_tag tag,
             bool for_host, bool for_caller) {
      { transport.exchange(tag, for_host) } -> exchange_of<typename B::operation_type>;
      { view.device() } noexcept -> std::same_as<int>;
      { view.stream() } noexcept -> std::same_as<typename B::stream_type>;
      { view.on_device(data) } -> std::same_as<bool>;
      { transport.caller_stream(stream) } -> std::same_as<void>;
      { transport.give(work) } -> std::same_as<void>;
      { transport.synchronize() } -> std::same_as<void>;
      { transport.scratch(bytes) } -> std::same_as<scratch_pool::block>;
      { transport.called() } -> std::movable;
      { transport.follow(transport.called()) } -> std::same_as<void>;
      { transport.finished() } -> std::same_as<typename B::operation_type>;
      { transport.mix(out, weight, in, weighted, for_caller) } -> std::same_as<void>;
      { transport.reduce(op, out, inputs) } -> std::same_as<void>;
      { transport.convert(out, in) } -> std::same_as<void>;
      { transport.divide(out, divisor) } -> std::same_as<void>;
      { transport.copy(in, out, for_caller) } -> std::same_as<void>;
    };

/// The kernels of `bluefog::kernel`, done where the values are. Borrows the backend.
///
/// On the host they are over when they return; on a device they follow each other and the messages.
template <backend Backend>
class computation {
 public:
  /// \param for_caller  on a device, whether to mix and copy among the program's own work.
  explicit computation(Backend& transport, bool for_caller = false) noexcept
      : transport_(&transport), for_caller_(for_caller) {}

  void mix(mutable_buffer out, double self_weight, const_buffer self,
           std::span<const kernel::weighted_input> inputs) const {
    if constexpr (device_backend<Backend>)
      if (transport_->on_device(out.data))
        return transport_->mix(out, self_weight, self, inputs, for_caller_);
    kernel::mix(out, self_weight, self, inputs);
  }

  void scaled_copy(mutable_buffer out, const_buffer in, double factor) const {
    if constexpr (device_backend<Backend>)
      if (transport_->on_device(out.data)) return transport_->mix(out, factor, in, {}, for_caller_);
    kernel::scaled_copy(out, in, factor);
  }

  void reduce(reduce_op op, mutable_buffer out, std::span<const const_buffer> inputs) const {
    if constexpr (device_backend<Backend>)
      if (transport_->on_device(out.data)) return transport_->reduce(op, out, inputs);
    kernel::reduce(op, out, inputs);
  }

  void convert(mutable_buffer out, const_buffer in) const {
    if constexpr (device_backend<Backend>)
      if (transport_->on_device(out.data)) return transport_->convert(out, in);
    kernel::convert(out, in);
  }

  /// Divides float32 or float64 values, so that an average is the sum divided by n on every
  /// backend, bit for bit: multiplying by 1/n is not.
  void divide(mutable_buffer values, int divisor) const {
    if constexpr (device_backend<Backend>)
      if (transport_->on_device(values.data)) return transport_->divide(values, divisor);
    const auto each = [&]<class T>(T* first) {
      for (std::int64_t i = 0; i < values.count; ++i) first[i] /= static_cast<T>(divisor);
    };
    if (values.type == dtype::float32)
      each(reinterpret_cast<float*>(values.data));
    else
      each(reinterpret_cast<double*>(values.data));
  }

  /// Copies `in` to `out`, which are the same, overlap on the host only, or are disjoint.
  void copy(const_buffer in, mutable_buffer out) const {
    if (in.data == out.data || in.count == 0) return;
    if constexpr (device_backend<Backend>)
      if (transport_->on_device(out.data) || transport_->on_device(in.data))
        return transport_->copy(in, out, for_caller_);
    std::memmove(out.data, in.data, in.bytes());
  }

 private:
  Backend* transport_;
  bool for_caller_;
};

}  // namespace bluefog
