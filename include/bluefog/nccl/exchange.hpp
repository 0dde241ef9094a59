// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <nccl.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/nccl/check.hpp>
#include <bluefog/nccl/connection.hpp>
#include <bluefog/nccl/operation.hpp>
#include <bluefog/nccl/staging.hpp>

namespace bluefog::nccl {

/// Collects sends and receives and gives them to NCCL as one group.
///
/// Each message may lie in the host's memory or the device's. An empty message travels as one byte,
/// since NCCL has none.
class exchange {
 public:
  /// \param wanted  when the operation is complete, if all memory is the device's.
  exchange(std::shared_ptr<connection> on, operation::end wanted) noexcept
      : connection_(std::move(on)), wanted_(wanted) {}

  void send(const_buffer in, int peer) {
    const bool direct = in.count > 0 && connection_->on_device(in.data);
    messages_.push_back({.direct = direct ? const_cast<std::byte*>(in.data) : nullptr,  // only read
                         .staged = direct ? 0 : host_.outgoing(in),
                         .bytes = in.bytes(),
                         .peer = peer,
                         .receives = false});
  }

  void receive(mutable_buffer out, int peer) {
    const bool direct = out.count > 0 && connection_->on_device(out.data);
    messages_.push_back({.direct = direct ? out.data : nullptr,
                         .staged = direct ? 0 : host_.incoming(out),
                         .bytes = out.bytes(),
                         .peer = peer,
                         .receives = true});
  }

  [[nodiscard]] operation submit() && {
    if (messages_.empty()) return {};
    std::vector<int> peers;
    for (const message& each : messages_) peers.push_back(each.peer);
    std::ranges::sort(peers);
    peers.erase(std::ranges::unique(peers).begin(), peers.end());
    operation started(connection_, wanted_, std::move(peers));
    started.start(std::move(host_), [this](staging& host) { give(host); });
    return started;
  }

 private:
  struct message {
    std::byte* direct;
    staging::place staged;
    std::size_t bytes;
    int peer;
    bool receives;
  };

  void give(const staging& host) const {
    const auto group = connection_->group();
    const auto stream = connection_->stream();
    check(ncclGroupStart(), "ncclGroupStart");
    try {
      for (const message& each : messages_) {
        std::byte* memory = each.direct != nullptr ? each.direct : host.at(each.staged);
        const auto bytes = std::max<std::size_t>(1, each.bytes);
        if (each.receives)
          check(ncclRecv(memory, bytes, ncclUint8, each.peer, group, stream), "ncclRecv", group);
        else
          check(ncclSend(memory, bytes, ncclUint8, each.peer, group, stream), "ncclSend", group);
      }
    } catch (...) {
      static_cast<void>(ncclGroupEnd());  // an open group would swallow all that follows
      throw;
    }
    check(ncclGroupEnd(), "ncclGroupEnd", group);
  }

  std::shared_ptr<connection> connection_;
  operation::end wanted_;
  staging host_;
  std::vector<message> messages_;
};

static_assert(exchange_of<exchange, operation>);

}  // namespace bluefog::nccl
