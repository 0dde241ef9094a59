// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <bluefog/backend/compute.hpp>
#include <bluefog/communicator.hpp>
#include <bluefog/nccl.hpp>

namespace bluefog_test::gpu {

/// One device whose rank takes itself for two: what it sends comes back to it. Instead of messages
/// there are copies within the device's memory, on the stream that messages would be given to, and
/// as long as the messages, `times` times over: to see what a schedule hides, without a second
/// device.
class mirror_backend : public bluefog::nccl_backend {
 public:
  /// How often each copy is made; 0: a network that takes no time.
  inline static int times = 1;

  mirror_backend()
      : mirror_backend(bluefog::nccl_backend(bluefog::nccl::meeting{
            .rank = 0, .size = 1, .words = std::make_shared<bluefog::nccl::local_board>()})) {}

  [[nodiscard]] int size() const noexcept { return 2; }

  class exchange_type {
   public:
    explicit exchange_type(mirror_backend& on) : on_(&on) {}
    void send(bluefog::const_buffer in, int) { out_.push_back(in); }
    void receive(bluefog::mutable_buffer out, int) { in_.push_back(out); }
    [[nodiscard]] bluefog::nccl::operation submit() && {
      for (std::size_t i = 0; i < std::min(in_.size(), out_.size()); ++i)
        on_->move(out_[i], in_[i]);
      return {};
    }

   private:
    mirror_backend* on_;
    std::vector<bluefog::const_buffer> out_;
    std::vector<bluefog::mutable_buffer> in_;
  };
  [[nodiscard]] exchange_type exchange(bluefog::message_tag, bool = false) {
    return exchange_type(*this);
  }
  [[nodiscard]] bluefog::nccl::operation allreduce(bluefog::const_buffer in,
                                                   bluefog::mutable_buffer out,
                                                   bluefog::reduce_op) {
    move(in, out);
    return {};
  }
  [[nodiscard]] bluefog::nccl::operation broadcast(bluefog::mutable_buffer, int) { return {}; }
  void post(int, std::uint64_t) noexcept {}
  [[nodiscard]] std::optional<bluefog::letter> collect() noexcept { return std::nullopt; }

  [[nodiscard]] mirror_backend subset(std::span<const int>, std::uint64_t serial) {
    return mirror_backend(bluefog::nccl_backend::subset(std::array{0}, serial));
  }

 private:
  explicit mirror_backend(bluefog::nccl_backend own) : nccl_backend(std::move(own)) {}

  void move(bluefog::const_buffer in, bluefog::mutable_buffer out) {
    const std::size_t bytes = std::min(in.bytes(), out.bytes());
    if (!on_device(out.data)) {
      std::memmove(out.data, in.data, bytes);
      return;
    }
    if (!place_.data() || bytes > held_) {
      place_ = scratch(bytes);
      held_ = bytes;
    }
    give([&] {
      for (int i = 0; i < times; ++i)  // not onto itself, which would cost nothing
        bluefog::nccl::check(
            cudaMemcpyAsync(place_.data(), in.data, bytes, cudaMemcpyDeviceToDevice, stream()),
            "cudaMemcpyAsync");
    });
    if (in.data != out.data) copy(in, out);
  }

  bluefog::scratch_pool::block place_;
  std::size_t held_ = 0;
};

static_assert(bluefog::device_backend<mirror_backend>);
static_assert(bluefog::allreducing_backend<mirror_backend>);

}  // namespace bluefog_test::gpu
