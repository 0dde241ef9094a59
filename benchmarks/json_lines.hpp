// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdio>
#include <string>

/// Lines of JSON that wait until it is known what all of them end with.
class json_lines {
 public:
  /// Adds a line that lacks its last value and brace, given as to printf.
  template <class... Values>
  void add(const char* format, Values... values) {
    std::array<char, 500> line{};
    std::snprintf(line.data(), line.size(), format, values...);
    lines_ += line.data();
    lines_ += '\n';
  }

  /// Prints each with `last` and a brace.
  void print(const std::string& last) const {
    for (const char each : lines_)
      each == '\n' ? std::printf("%s}\n", last.c_str()) : std::putchar(each);
  }

 private:
  std::string lines_;
};
