// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

namespace bluefog_test::gpu {

/// What one check found: empty if nothing is wrong.
struct finding {
  std::string check;
  std::string problem;
};

/// Says on stderr which check begins, if BLUEFOG_TEST_PROGRESS asks for that: the last line tells
/// where a program has ended.
inline void begin_check(const std::string& name) {
  static const bool asked = std::getenv("BLUEFOG_TEST_PROGRESS") != nullptr;
  if (asked) std::fprintf(stderr, "-- %s\n", name.c_str());
}

/// Adds what `check()` finds.
template <class Found, class Check>
void add_finding(Found& found, const std::string& name, const Check& check) {
  begin_check(name);
  found.push_back({name, check()});
}

}  // namespace bluefog_test::gpu
