// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fstream>
#include <string>

/// \return the first line of a file, empty if there is none.
inline std::string first_line_of(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}
