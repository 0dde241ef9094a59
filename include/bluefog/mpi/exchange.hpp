// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <mpi.h>

#include <bluefog/backend/concepts.hpp>
#include <bluefog/core/buffer.hpp>
#include <bluefog/mpi/check.hpp>
#include <bluefog/mpi/library.hpp>
#include <bluefog/mpi/native.hpp>
#include <bluefog/mpi/operation.hpp>
#include <bluefog/mpi/strays.hpp>

namespace bluefog::mpi {

/// Collects sends and receives and starts them together, receives first.
///
/// A message longer than `limit` bytes travels as several, since MPI counts in int.
class exchange {
 public:
  exchange(MPI_Comm group, tag_space tags, message_tag tag, std::shared_ptr<strays> unexpected,
           std::int64_t limit) noexcept
      : group_(group), tags_(tags), tag_(tag), unexpected_(std::move(unexpected)), limit_(limit) {}

  void send(const_buffer in, int peer) { sends_.push_back({in, peer}); }
  void receive(mutable_buffer out, int peer) { receives_.push_back({out, peer}); }

  [[nodiscard]] operation submit() && {
    std::vector<part> parts;
    parts.reserve(receives_.size() + sends_.size());
    const int tag = tags_.tag(tag_);
    const auto lock = library::serialize();
    for (const auto& [out, peer] : receives_)
      for_each_piece(static_cast<std::int64_t>(out.bytes()), limit_, [&](auto offset, auto length) {
        const int bytes = static_cast<int>(length);
        auto& piece = parts.emplace_back(part{MPI_REQUEST_NULL, peer, bytes, true});
        check(MPI_Irecv(out.data + offset, bytes, MPI_BYTE, peer, tag, group_, &piece.request),
              "MPI_Irecv");
      });
    for (const auto& [in, peer] : sends_)
      for_each_piece(static_cast<std::int64_t>(in.bytes()), limit_, [&](auto offset, auto length) {
        auto& piece = parts.emplace_back(part{MPI_REQUEST_NULL, peer, 0, false});
        check(MPI_Isend(in.data + offset, static_cast<int>(length), MPI_BYTE, peer, tag, group_,
                        &piece.request),
              "MPI_Isend");
      });
    return {std::move(parts), tag_, std::move(unexpected_)};
  }

 private:
  template <class Buffer>
  struct message {
    Buffer buffer;
    int peer;
  };

  MPI_Comm group_;  // borrowed from the backend
  tag_space tags_;
  message_tag tag_;
  std::shared_ptr<strays> unexpected_;
  std::int64_t limit_;
  std::vector<message<const_buffer>> sends_;
  std::vector<message<mutable_buffer>> receives_;
};

static_assert(exchange_of<exchange, operation>);

}  // namespace bluefog::mpi
