// SPDX-License-Identifier: Apache-2.0

#include <type_traits>
#include <utility>
#include <vector>

#include <bluefog/core/unique_handle.hpp>

#include "support/catch.hpp"

namespace {

std::vector<int> closed;

struct number_traits {
  using value_type = int;
  static int null() noexcept { return -1; }
  static void close(int handle) noexcept { closed.push_back(handle); }
};
struct traits_without_close {
  using value_type = int;
  static int null() noexcept { return -1; }
};
using handle = bluefog::unique_handle<number_traits>;

}  // namespace

TEST_CASE("a handle is closed once, by its last owner", "[core][unique_handle]") {
  closed.clear();
  {
    handle a(1);
    handle b(std::move(a));
    CHECK_FALSE(a);
    CHECK(b.get() == 1);
    handle c;
    c = std::move(b);
    CHECK(closed.empty());
    c = handle(2);
    CHECK(closed == std::vector<int>{1});
    auto& same = c;
    c = std::move(same);
    CHECK(c.get() == 2);
    handle d(3);
    CHECK(d.release() == 3);
    handle e(4), f(5);
    e.swap(f);
    CHECK((e.get() == 5 && f.get() == 4));
  }
  CHECK(closed == std::vector<int>{1, 4, 5, 2});
}

TEST_CASE("a null handle is never closed", "[core][unique_handle]") {
  closed.clear();
  {
    const handle a, b(-1);
    CHECK_FALSE(a);
  }
  CHECK(closed.empty());
}

TEST_CASE("handles move and do not copy", "[core][unique_handle]") {
  STATIC_REQUIRE(std::is_nothrow_move_constructible_v<handle>);
  STATIC_REQUIRE(std::is_nothrow_move_assignable_v<handle>);
  STATIC_REQUIRE_FALSE(std::is_copy_constructible_v<handle>);
  STATIC_REQUIRE_FALSE(std::is_convertible_v<int, handle>);
  STATIC_REQUIRE_FALSE(bluefog::handle_traits<traits_without_close>);
}
