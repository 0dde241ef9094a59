// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace bluefog_test::gpu {

/// What one check found: empty if nothing is wrong.
struct finding {
  std::string check;
  std::string problem;
};

}  // namespace bluefog_test::gpu
