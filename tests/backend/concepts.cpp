// SPDX-License-Identifier: Apache-2.0

#include <bluefog/backend.hpp>
#include <bluefog/thread.hpp>

#include "support.hpp"

using namespace bluefog;

namespace {

struct whole_operation {
  bool ready() { return true; }
  void abandon() noexcept {}
  std::vector<int> waiting_for() const { return {}; }
};
struct operation_that_only_blocks {
  void wait() {}
};
struct operation_whose_abandon_may_throw : whole_operation {
  void abandon() {}
};
struct operation_that_cannot_move : whole_operation {
  operation_that_cannot_move() = default;
  operation_that_cannot_move(const operation_that_cannot_move&) = delete;
};

struct whole_exchange {
  void send(const_buffer, int) {}
  void receive(mutable_buffer, int) {}
  whole_operation submit() && { return {}; }
};
struct exchange_without_receive {
  void send(const_buffer, int) {}
  whole_operation submit() && { return {}; }
};

struct whole_backend {
  using operation_type = whole_operation;
  static constexpr std::string_view name = "whole";
  static constexpr memory_space space = memory_space::host;
  whole_backend() = default;
  whole_backend(whole_backend&&) = default;
  whole_backend& operator=(whole_backend&&) = default;
  int rank() const noexcept { return 0; }
  int size() const noexcept { return 1; }
  int machine() const noexcept { return 0; }
  bool any_thread() const noexcept { return true; }
  whole_exchange exchange(message_tag) { return {}; }
  whole_backend subset(std::span<const int>, std::uint64_t) { return {}; }
};
struct backend_whose_subset_is_another_type : whole_backend {
  int subset(std::span<const int>, std::uint64_t) { return 0; }
};
struct backend_without_exchange : whole_backend {
  backend_without_exchange subset(std::span<const int>, std::uint64_t) { return {}; }
  void exchange(message_tag) = delete;
};
struct backend_whose_rank_may_throw : whole_backend {
  backend_whose_rank_may_throw subset(std::span<const int>, std::uint64_t) { return {}; }
  int rank() const { return 0; }
};
struct backend_that_copies {
  using operation_type = whole_operation;
  [[maybe_unused]] static constexpr std::string_view name = "copies";
  [[maybe_unused]] static constexpr memory_space space = memory_space::host;
  int rank() const noexcept { return 0; }
  int size() const noexcept { return 1; }
  int machine() const noexcept { return 0; }
  bool any_thread() const noexcept { return true; }
  whole_exchange exchange(message_tag) { return {}; }
  backend_that_copies subset(std::span<const int>, std::uint64_t) { return {}; }
};
struct backend_with_broadcast : whole_backend {
  backend_with_broadcast subset(std::span<const int>, std::uint64_t) { return {}; }
  whole_operation broadcast(mutable_buffer, int) { return {}; }
};
struct backend_with_allreduce : whole_backend {
  backend_with_allreduce subset(std::span<const int>, std::uint64_t) { return {}; }
  bool reduces(reduce_op, dtype) const noexcept { return true; }
  whole_operation allreduce(const_buffer, mutable_buffer, reduce_op) { return {}; }
};
struct backend_that_does_not_say_what_it_reduces : whole_backend {
  backend_that_does_not_say_what_it_reduces subset(std::span<const int>, std::uint64_t) {
    return {};
  }
  whole_operation allreduce(const_buffer, mutable_buffer, reduce_op) { return {}; }
};
struct backend_with_allgather : whole_backend {
  backend_with_allgather subset(std::span<const int>, std::uint64_t) { return {}; }
  whole_operation allgather(const_buffer, mutable_buffer, std::span<const std::int64_t>) {
    return {};
  }
};
struct backend_with_allgather_of_equal_parts : whole_backend {
  backend_with_allgather_of_equal_parts subset(std::span<const int>, std::uint64_t) { return {}; }
  whole_operation allgather(const_buffer, mutable_buffer) { return {}; }
};

}  // namespace

TEST_CASE("concepts accept what has everything", "[backend][concepts]") {
  STATIC_REQUIRE(pending_operation<whole_operation>);
  STATIC_REQUIRE(exchange_of<whole_exchange, whole_operation>);
  STATIC_REQUIRE(backend<whole_backend>);
  STATIC_REQUIRE(backend<thread_backend>);
  STATIC_REQUIRE(letter_backend<thread_backend>);
  STATIC_REQUIRE(broadcasting_backend<backend_with_broadcast>);
  STATIC_REQUIRE(allreducing_backend<backend_with_allreduce>);
  STATIC_REQUIRE(gathering_backend<backend_with_allgather>);
}

TEST_CASE("concepts refuse what lacks something", "[backend][concepts]") {
  STATIC_REQUIRE_FALSE(pending_operation<operation_that_only_blocks>);
  STATIC_REQUIRE_FALSE(pending_operation<operation_whose_abandon_may_throw>);
  STATIC_REQUIRE_FALSE(pending_operation<operation_that_cannot_move>);
  STATIC_REQUIRE_FALSE(exchange_of<exchange_without_receive, whole_operation>);
  STATIC_REQUIRE_FALSE(exchange_of<whole_exchange, threads::operation>);
  STATIC_REQUIRE_FALSE(backend<int>);
  STATIC_REQUIRE_FALSE(backend<backend_without_exchange>);
  STATIC_REQUIRE_FALSE(backend<backend_whose_subset_is_another_type>);
  STATIC_REQUIRE_FALSE(backend<backend_whose_rank_may_throw>);
  STATIC_REQUIRE_FALSE(backend<backend_that_copies>);
}

TEST_CASE("a capability is not claimed by having another", "[backend][concepts]") {
  STATIC_REQUIRE_FALSE(broadcasting_backend<whole_backend>);
  STATIC_REQUIRE_FALSE(allreducing_backend<backend_with_broadcast>);
  STATIC_REQUIRE_FALSE(allreducing_backend<backend_that_does_not_say_what_it_reduces>);
  STATIC_REQUIRE_FALSE(gathering_backend<thread_backend>);
  STATIC_REQUIRE_FALSE(gathering_backend<backend_with_allreduce>);
  STATIC_REQUIRE_FALSE(gathering_backend<backend_with_allgather_of_equal_parts>);
  STATIC_REQUIRE_FALSE(letter_backend<whole_backend>);
}

TEST_CASE("a request can be moved but not copied, overwritten or made of a reference",
          "[backend][concepts]") {
  STATIC_REQUIRE(std::is_nothrow_move_constructible_v<request<int>>);
  STATIC_REQUIRE_FALSE(std::is_copy_constructible_v<request<int>>);
  STATIC_REQUIRE_FALSE(std::is_move_assignable_v<request<void>>);
  STATIC_REQUIRE_FALSE(std::is_default_constructible_v<request<void>>);
}

TEST_CASE("weights of a neighborhood cannot be half given", "[backend][concepts]") {
  // A side is a list of edges, each a rank with its weight: numbers alone are no neighborhood.
  STATIC_REQUIRE_FALSE(std::is_convertible_v<double, neighborhood>);
  STATIC_REQUIRE_FALSE(std::is_constructible_v<edge, std::string>);
  STATIC_REQUIRE(neighborhood{.self_weight = 0.5}.sources.size() == 0);
}
