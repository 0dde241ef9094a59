// SPDX-License-Identifier: Apache-2.0
#pragma once

// Catch2 3 splits its header, 2 (Debian 12) does not; this is the one file that knows.
#if __has_include(<catch2/catch_test_macros.hpp>)
#include <catch2/catch_approx.hpp>
#include <catch2/catch_session.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <catch2/generators/catch_generators_range.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>
using Catch::Approx;
namespace bluefog_test {
using Catch::Matchers::ContainsSubstring;
}
#else
#include <catch2/catch.hpp>
namespace bluefog_test {
/// The matcher that Catch2 3 calls `ContainsSubstring`.
inline auto ContainsSubstring(const std::string& text) {
  return Catch::Matchers::Contains(text);
}
}  // namespace bluefog_test
#endif
