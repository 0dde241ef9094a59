// SPDX-License-Identifier: Apache-2.0

#include <string>
#include <type_traits>

#include <bluefog/core/error.hpp>

#include "support/catch.hpp"

using namespace bluefog;

TEST_CASE("every error of the library is one of its base, and a runtime error", "[core][error]") {
  STATIC_REQUIRE(std::is_base_of_v<std::runtime_error, error>);
  STATIC_REQUIRE(std::is_base_of_v<error, usage_error>);
  STATIC_REQUIRE(std::is_base_of_v<error, mismatch_error>);
  STATIC_REQUIRE(std::is_base_of_v<error, timeout_error>);
  STATIC_REQUIRE(std::is_base_of_v<error, peer_error>);
  STATIC_REQUIRE(std::is_base_of_v<error, transport_error>);
  CHECK(transport_error("text", 15).code() == 15);
}

TEST_CASE("a broken rule is thrown with its values", "[core][error]") {
  expects(true, "not this");
  try {
    expects(false, "broadcast: root must be below ", 4, ", got ", -1);
    FAIL("nothing was thrown");
  } catch (const usage_error& problem) {
    CHECK(std::string(problem.what()) == "broadcast: root must be below 4, got -1");
  }
  CHECK_THROWS_AS(expects<peer_error>(false, "gone"), peer_error);
}

TEST_CASE("only what a stream takes can be part of a text", "[core][error]") {
  struct unprintable {};
  STATIC_REQUIRE(printable<int>);
  STATIC_REQUIRE(printable<std::string>);
  STATIC_REQUIRE_FALSE(printable<unprintable>);
  CHECK(concat("rank ", 3, " of ", 8L, '!') == "rank 3 of 8!");
}
