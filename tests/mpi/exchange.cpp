// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <mpi.h>

#include <bluefog/core/buffer.hpp>
#include <bluefog/core/error.hpp>
#include <bluefog/mpi.hpp>
#include <bluefog/mpi/exchange.hpp>

#include "mpi/support.hpp"
#include "support/catch.hpp"

using bluefog::as_buffer;
using bluefog::as_mutable_buffer;
using bluefog::channel;
using bluefog::message_tag;
using bluefog::mpi_backend;
using bluefog_test::ContainsSubstring;
using bluefog_test::finish;
using bluefog_test::pattern;

namespace {

message_tag numbered(std::uint64_t number) {
  return {channel::group, number, number};
}

/// Sends `sent` bytes to the next rank and receives `expected` bytes from the one before.
std::vector<std::byte> around(mpi_backend& ranks, std::size_t sent, std::size_t expected,
                              std::uint64_t number, bool receive_first = true) {
  const int next = (ranks.rank() + 1) % ranks.size();
  const int previous = (ranks.rank() + ranks.size() - 1) % ranks.size();
  const auto outgoing = pattern(sent, ranks.rank());
  std::vector<std::byte> incoming(expected);
  const bluefog::const_buffer out{outgoing.data(), static_cast<std::int64_t>(sent),
                                  bluefog::dtype::uint8};
  const bluefog::mutable_buffer in{incoming.data(), static_cast<std::int64_t>(expected),
                                   bluefog::dtype::uint8};
  auto exchange = ranks.exchange(numbered(number));
  if (receive_first) exchange.receive(in, previous);
  exchange.send(out, next);
  if (!receive_first) exchange.receive(in, previous);
  auto operation = std::move(exchange).submit();
  finish(operation);
  return incoming;
}

}  // namespace

TEST_CASE("messages of any length arrive whole, in pieces where they are long", "[mpi][exchange]") {
  mpi_backend ranks(MPI_COMM_WORLD, 1000);
  if (ranks.size() == 1) return;
  const int previous = (ranks.rank() + ranks.size() - 1) % ranks.size();
  std::uint64_t number = 0;
  for (const std::size_t bytes :
       {0UL, 1UL, 999UL, 1000UL, 1001UL, 1999UL, 2000UL, 2500UL, 123456UL})
    CHECK(around(ranks, bytes, bytes, number++) == pattern(bytes, previous));
}

TEST_CASE("a message of another length is a mismatch that names the sender and the lengths",
          "[mpi][exchange]") {
  // The limit cuts messages into pieces, so that every way in which their ends can miss occurs.
  mpi_backend ranks(MPI_COMM_WORLD, 1000);
  if (ranks.size() == 1) return;
  const int previous = (ranks.rank() + ranks.size() - 1) % ranks.size();
  std::uint64_t number = 0;
  for (const std::size_t sent : {0UL, 8UL, 1000UL, 1500UL, 2000UL, 2500UL})
    for (const std::size_t expected : {0UL, 8UL, 1000UL, 1500UL, 2000UL, 2500UL}) {
      if (sent == expected) continue;
      INFO(sent << " bytes sent, " << expected << " expected");
      std::string text;
      try {
        around(ranks, sent, expected, number);
      } catch (const bluefog::mismatch_error& problem) {
        text = problem.what();
      }
      CHECK_THAT(text, ContainsSubstring("rank " + std::to_string(previous) + " sent "));
      CHECK_THAT(text, ContainsSubstring("this rank expects"));
      CHECK(bluefog::mpi::library::operations_in_flight() == 0);
      MPI_Barrier(MPI_COMM_WORLD);  // what is left over lies here before the next one begins
      number += 2;
      // Left-over pieces are dropped without a word, and the next operation is right.
      CHECK(around(ranks, 64, 64, number++) == pattern(64, previous));
    }
}

TEST_CASE("sends and receives may be listed in any order on any rank", "[mpi][exchange]") {
  mpi_backend ranks;
  if (ranks.size() == 1) return;
  const int previous = (ranks.rank() + ranks.size() - 1) % ranks.size();
  std::uint64_t number = 0;
  for (const std::size_t bytes : {std::size_t{8}, std::size_t{1} << 20})  // eager and not
    for (int order = 0; order < 1 << ranks.size(); ++order)
      CHECK(around(ranks, bytes, bytes, number++, (order >> ranks.rank() & 1) != 0) ==
            pattern(bytes, previous));
}

TEST_CASE("messages with everybody may be listed in any order", "[mpi][exchange]") {
  mpi_backend ranks;
  const int size = ranks.size();
  std::uint64_t number = 0;
  std::vector<int> order;  // place -> peer for a receive, size + peer for a send
  for (int i = 0; i < 2 * size; ++i) order.push_back(i);
  for (int turn = 0; turn < 24; ++turn) {
    // Every rank its own order.
    for (int i = 0; i <= ranks.rank(); ++i) std::ranges::next_permutation(order);
    std::rotate(order.begin(), order.begin() + turn % (2 * size), order.end());
    const auto own = pattern(100000, ranks.rank());
    std::vector<std::vector<std::byte>> all(static_cast<std::size_t>(size),
                                            std::vector<std::byte>(own.size()));
    const auto length = static_cast<std::int64_t>(own.size());
    auto exchange = ranks.exchange(numbered(number++));
    for (const int what : order) {
      const int peer = what % size;
      if (peer == ranks.rank()) continue;
      if (what < size)
        exchange.receive(
            {all[static_cast<std::size_t>(peer)].data(), length, bluefog::dtype::uint8}, peer);
      else
        exchange.send({own.data(), length, bluefog::dtype::uint8}, peer);
    }
    auto operation = std::move(exchange).submit();
    finish(operation);
    for (int peer = 0; peer < size; ++peer)
      if (peer != ranks.rank())
        CHECK(all[static_cast<std::size_t>(peer)] == pattern(own.size(), peer));
  }
}

TEST_CASE("an exchange that cannot start fails once nothing is in flight", "[mpi][exchange]") {
  mpi_backend ranks;
  std::vector<double> values(1000, 1.0);
  std::vector<double> kept = values;
  auto exchange = ranks.exchange(numbered(0));
  exchange.receive(as_mutable_buffer(values), (ranks.rank() + 1) % ranks.size());  // never comes
  exchange.send(as_buffer(kept), ranks.size());  // there is no such rank
  auto operation = std::move(exchange).submit();
  CHECK_THROWS_AS(finish(operation), bluefog::transport_error);
  CHECK(bluefog::mpi::library::operations_in_flight() == 0);
  CHECK(values == kept);
  CHECK(operation.ready());
}

TEST_CASE("an abandoned receive lets go of its memory, and what comes late is dropped",
          "[mpi][exchange]") {
  mpi_backend ranks;
  if (ranks.size() == 1) return;
  const int next = (ranks.rank() + 1) % ranks.size();
  const int previous = (ranks.rank() + ranks.size() - 1) % ranks.size();
  std::vector<float> values(10, 0.0F);
  const std::vector<float> own(10, 1.0F);
  auto exchange = ranks.exchange(numbered(0));
  exchange.receive(as_mutable_buffer(values), previous);
  auto operation = std::move(exchange).submit();
  CHECK_FALSE(operation.ready());
  CHECK(operation.waiting_for() == std::vector<int>{previous});
  operation.abandon();
  CHECK_NOTHROW(finish(operation));
  MPI_Barrier(MPI_COMM_WORLD);

  auto late = ranks.exchange(numbered(0));
  late.send(as_buffer(own), next);
  auto sending = std::move(late).submit();
  finish(sending);
  MPI_Barrier(MPI_COMM_WORLD);
  for (std::uint64_t number = 1; number < 4; ++number)
    CHECK(around(ranks, 10, 10, number) == pattern(10, previous));
  CHECK(values == std::vector<float>(10, 0.0F));
}

TEST_CASE("a message of an operation that is over is a mismatch where it is found",
          "[mpi][exchange]") {
  mpi_backend ranks;
  if (ranks.size() == 1) return;
  const int next = (ranks.rank() + 1) % ranks.size();
  const int previous = (ranks.rank() + ranks.size() - 1) % ranks.size();
  const std::vector<float> own(10, 1.0F);
  auto exchange = ranks.exchange(numbered(7));
  exchange.send(as_buffer(own), next);
  auto operation = std::move(exchange).submit();
  finish(operation);
  MPI_Barrier(MPI_COMM_WORLD);
  std::string text;
  for (std::uint64_t number = 8; number < 30 && text.empty(); ++number) {
    auto empty = ranks.exchange(numbered(number)).submit();
    try {
      finish(empty);
    } catch (const bluefog::mismatch_error& problem) {
      text = problem.what();
    }
  }
  CHECK(text == "rank " + std::to_string(previous) +
                    " sent a message of operation 7 that this rank does not receive");
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST_CASE("ten thousand exchanges leave nothing behind", "[mpi][exchange]") {
  mpi_backend ranks;
  const auto rounds = [&](std::uint64_t from, std::uint64_t to) {
    for (std::uint64_t number = from; number < to; ++number) {
      double mine = 1, theirs = 0;
      auto exchange = ranks.exchange(numbered(number));
      for (int peer = 0; peer < ranks.size(); ++peer) {
        if (peer == ranks.rank()) continue;
        if (peer == (ranks.rank() + 1) % ranks.size())
          exchange.send({reinterpret_cast<std::byte*>(&mine), 1, bluefog::dtype::float64}, peer);
        if (peer == (ranks.rank() + ranks.size() - 1) % ranks.size())
          exchange.receive({reinterpret_cast<std::byte*>(&theirs), 1, bluefog::dtype::float64},
                           peer);
      }
      auto operation = std::move(exchange).submit();
      finish(operation);
    }
  };
  rounds(0, 2000);
  const long before = bluefog_test::resident_kilobytes();
  rounds(2000, 12000);
  CHECK(bluefog::mpi::library::operations_in_flight() == 0);
  const long grown = bluefog_test::resident_kilobytes() - before;
  CHECK((grown < 2000 || !bluefog_test::freed_memory_leaves));  // 0.2 KiB each would be seen
}
