// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace bluefog {

/// The version of this library, by semantic versioning; equal to the version of the CMake package.
inline constexpr int version_major = 0;
inline constexpr int version_minor = 1;
inline constexpr int version_patch = 0;

/// The same as text.
inline constexpr std::string_view version = "0.1.0";

}  // namespace bluefog
