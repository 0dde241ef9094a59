// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/thread/fabric.hpp>
#include <bluefog/thread/operation.hpp>

namespace bluefog::threads {

/// Collects the messages of one operation.
class exchange {
 public:
  exchange(std::shared_ptr<fabric> group, int rank, message_tag tag) noexcept
      : fabric_(std::move(group)), rank_(rank), tag_(tag) {}

  void send(const_buffer in, int peer) {
    // The fabric only reads a sender's memory; one type serves both halves.
    sends_.push_back(half(const_cast<std::byte*>(in.data), in.bytes(), peer));
  }
  void receive(mutable_buffer out, int peer) {
    receives_.push_back(half(out.data, out.bytes(), peer));
  }

  [[nodiscard]] operation submit() && {
    return {std::move(fabric_), rank_, tag_, std::move(receives_), std::move(sends_)};
  }

 private:
  [[nodiscard]] half_pointer half(std::byte* data, std::size_t bytes, int peer) const {
    auto message = std::make_shared<half_message>();
    message->data = data;
    message->bytes = bytes;
    message->tag = tag_;
    message->peer = peer;
    return message;
  }

  std::shared_ptr<fabric> fabric_;
  int rank_;
  message_tag tag_;
  std::vector<half_pointer> receives_;
  std::vector<half_pointer> sends_;
};

static_assert(exchange_of<exchange, operation>);

}  // namespace bluefog::threads
