// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include <cuda_runtime_api.h>

#include <bluefog/core/buffer.hpp>
#include <bluefog/core/scratch.hpp>
#include <bluefog/nccl/check.hpp>
#include <bluefog/nccl/connection.hpp>

namespace bluefog::nccl {

/// Host memory that an operation moves, by way of pinned host memory and the device's.
///
/// All that leaves lies in one piece and is copied at once, and so is all that arrives.
class staging {
 public:
  /// Where a piece of host memory is on the device while it travels.
  using place = std::size_t;

  /// What `in` holds when the operation starts is on the device.
  [[nodiscard]] place outgoing(const_buffer in) {
    pieces_.push_back({in.data, nullptr, grow(out_bytes_, in.bytes()), in.bytes(), false});
    return pieces_.size() - 1;
  }
  /// What is on the device when the operation is over is in `out`.
  [[nodiscard]] place incoming(mutable_buffer out) {
    pieces_.push_back({nullptr, out.data, grow(in_bytes_, out.bytes()), out.bytes(), true});
    return pieces_.size() - 1;
  }

  [[nodiscard]] bool empty() const noexcept { return pieces_.empty(); }

  void acquire(connection& by) {
    const std::size_t bytes = out_bytes_ + in_bytes_;
    if (bytes == 0) return;
    device_ = by.device_memory().acquire(bytes);
    pinned_ = by.pinned_memory().acquire(bytes);
  }

  void to_device(connection& by) {
    if (out_bytes_ == 0) return;
    for (const piece& each : pieces_)
      if (!each.arrives && each.bytes > 0)
        std::memcpy(pinned_.data() + each.offset, each.source, each.bytes);
    check(cudaMemcpyAsync(device_.data(), pinned_.data(), out_bytes_, cudaMemcpyHostToDevice,
                          by.stream()),
          "cudaMemcpyAsync");
  }

  void from_device(connection& by) {
    if (in_bytes_ == 0) return;
    check(cudaMemcpyAsync(pinned_.data() + out_bytes_, device_.data() + out_bytes_, in_bytes_,
                          cudaMemcpyDeviceToHost, by.stream()),
          "cudaMemcpyAsync");
  }

  /// Writes what has arrived to where it belongs.
  void hand_over() {
    for (const piece& each : pieces_)
      if (each.arrives && each.bytes > 0)
        std::memcpy(each.target, pinned_.data() + out_bytes_ + each.offset, each.bytes);
  }

  void release() noexcept {
    pieces_.clear();
    device_ = {};
    pinned_ = {};
  }

  /// \return the device memory of a piece, once acquired.
  [[nodiscard]] std::byte* at(place of) const {
    const piece& it = pieces_[of];
    return device_.data() + it.offset + (it.arrives ? out_bytes_ : 0);
  }

 private:
  struct piece {
    const std::byte* source;
    std::byte* target;
    std::size_t offset;
    std::size_t bytes;
    bool arrives;
  };

  // Every piece gets at least one byte: an empty message travels too.
  [[nodiscard]] static std::size_t grow(std::size_t& total, std::size_t bytes) {
    constexpr std::size_t unit = 256;
    const std::size_t offset = total;
    total += (bytes / unit + 1) * unit;
    return offset;
  }

  std::vector<piece> pieces_;
  std::size_t out_bytes_ = 0;
  std::size_t in_bytes_ = 0;
  scratch_pool::block device_;
  scratch_pool::block pinned_;
};

}  // namespace bluefog::nccl
