// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <bluefog/backend/compute.hpp>
#include <bluefog/backend/concepts.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/core/error.hpp>

// Streams and events by libtorch's interface for all devices, which CPU builds have too: whoever
// computes on the CPU needs neither CUDA's headers nor its libraries.

namespace bluefog::detail {

/// \return the stream that this thread gives its work on `device` to.
[[nodiscard]] inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// The streams that copies between host and device are given to, so that the program need not wait
/// for them.
enum class crossing : std::uint8_t { to_host, to_device };

/// \return the stream of `device` for copies of one direction, the same for the whole process.
[[nodiscard]] inline c10::Stream side_stream(c10::Device device, crossing direction) {
  static std::mutex mutex;
  static std::map<std::pair<c10::DeviceIndex, crossing>, c10::Stream> known;
  const std::scoped_lock lock(mutex);
  const auto key = std::pair(device.index(), direction);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  const c10::impl::VirtualGuardImpl of(device.type());
  return known.emplace(key, of.getStreamFromGlobalPool(device)).first->second;
}

/// A moment in what a stream has been given, to be awaited: complete once the device has come that
/// far.
class device_moment {
 public:
  device_moment() = default;
  explicit device_moment(const c10::Stream& in) : event_(std::in_place, in.device_type()) {
    event_->record(in);
  }

  /// Puts what `stream` is given from now on behind this moment.
  void precede(const c10::Stream& stream) const {
    if (event_) event_->block(stream);
  }

  [[nodiscard]] bool ready() {
    if (event_ && !event_->query()) return false;
    event_.reset();
    return true;
  }
  void abandon() noexcept { /* a device always comes that far */
  }
  [[nodiscard]] std::vector<int> waiting_for() const { return {}; }

 private:
  std::optional<c10::Event> event_;
};

static_assert(pending_operation<device_moment>);

/// What several threads give to streams of their own, for one piece of memory, made to happen in
/// the order of the calls.
class relay {
 public:
  /// From here on this thread's stream goes on where the last one was left.
  void pass(c10::Device device) {
    if (device.is_cpu()) return;
    const c10::Stream now = current_stream(device);
    if (last_ && *last_ != now) device_moment(*last_).precede(now);
    last_ = now;
  }

 private:
  std::optional<c10::Stream> last_;
};

/// \return the device's own name of a stream, e.g. the `cudaStream_t`.
template <class Stream>
[[nodiscard]] void* native_handle(const Stream& stream) {
  if constexpr (requires { stream.native_handle(); }) {
    return stream.native_handle();
  } else {
    throw usage_error("tensors of a device travel as they are with libtorch 2.11 or newer only");
  }
}

/// \return a transport's stream as libtorch sees it.
template <device_backend Backend>
[[nodiscard]] c10::Stream stream_of(const Backend& transport, c10::Device device) {
  // libtorch numbers a stream that it has not made by the address behind its handle. Its function
  // that does this needs CUDA's headers; so it is done here, and looked whether it was understood.
  void* const handle = transport.stream();
  const c10::Stream stream(c10::Stream::UNSAFE, device,
                           static_cast<c10::StreamId>(reinterpret_cast<std::intptr_t>(handle)));
  expects(native_handle(stream) == handle, "this libtorch numbers foreign streams in another way");
  return stream;
}

/// Tells the transport on which stream this thread works on `device`, if that is the transport's.
/// Before each operation: it may be another stream every time, e.g. in a backward.
template <backend Backend>
void name_caller_stream(communicator<Backend>& comm, c10::Device device) {
  if constexpr (device_backend<Backend>)
    if (device.is_cuda() && device.index() == comm.transport().device())
      comm.transport().caller_stream(
          static_cast<typename Backend::stream_type>(native_handle(current_stream(device))));
}
template <backend Backend>
void name_caller_stream(communicator<Backend>& comm, std::span<const at::Tensor> tensors) {
  for (const at::Tensor& each : tensors)
    if (each.is_cuda()) return name_caller_stream(comm, each.device());
}

}  // namespace bluefog::detail
