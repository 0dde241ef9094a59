// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <mpi.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/mpi/check.hpp>
#include <bluefog/mpi/native.hpp>
#include <bluefog/mpi/operation.hpp>
#include <bluefog/mpi/strays.hpp>

namespace bluefog::mpi {

/// Collects sends and receives and starts them together.
///
/// A message of `limit` bytes or more travels as several, since MPI counts in int. The last of them
/// is shorter than `limit`, so that sender and receiver notice if they disagree about the length.
class exchange {
 public:
  exchange(MPI_Comm group, tag_space tags, message_tag tag, std::shared_ptr<strays> unexpected,
           std::int64_t limit) noexcept
      : group_(group), tags_(tags), tag_(tag), unexpected_(std::move(unexpected)), limit_(limit) {}

  void send(const_buffer in, int peer) {
    for_each_message(in.bytes(), [&](std::size_t offset, int length) {
      parts_.push_back({.source = in.data + offset, .bytes = length, .peer = peer});
    });
  }

  void receive(mutable_buffer out, int peer) {
    for_each_message(out.bytes(), [&](std::size_t offset, int length) {
      parts_.push_back(
          {.target = out.data + offset, .bytes = length, .peer = peer, .awaited = true});
    });
  }

  [[nodiscard]] operation submit() && {
    const int tag = tags_.tag(tag_);
    operation started(std::move(parts_), std::move(unexpected_), tag_, group_, tag);
    started.start([&](std::span<part> parts) {
      for (part& each : parts)
        if (!each.awaited)
          check(MPI_Isend(each.source, each.bytes, MPI_BYTE, each.peer, tag, group_, &each.request),
                "MPI_Isend");
    });
    return started;
  }

 private:
  template <class Visit>
  void for_each_message(std::size_t total, Visit visit) {
    if (parts_.empty()) parts_.reserve(4);
    const auto limit = static_cast<std::size_t>(limit_);
    std::size_t offset = 0;
    for (; total - offset >= limit; offset += limit) visit(offset, static_cast<int>(limit));
    visit(offset, static_cast<int>(total - offset));
  }

  MPI_Comm group_;  // borrowed from the backend
  tag_space tags_;
  message_tag tag_;
  std::shared_ptr<strays> unexpected_;
  std::int64_t limit_;
  std::vector<part> parts_;
};

static_assert(exchange_of<exchange, operation>);

}  // namespace bluefog::mpi
