# SPDX-License-Identifier: Apache-2.0
#
# bluefog_warnings: the flags of this project's own code. Linked PRIVATE to tests, examples and
# benchmarks, never to what users link.

set(BLUEFOG_WARNING_FLAGS -Wall -Wextra -Wpedantic -Wshadow -Wconversion)
add_library(bluefog_warnings INTERFACE)
target_compile_options(bluefog_warnings INTERFACE
  ${BLUEFOG_WARNING_FLAGS}
  # False alarms of g++ 12 about `"text" + std::string()` (GCC bug 105651).
  $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>
  # The second level names the member that a type lacks.
  $<$<CXX_COMPILER_ID:GNU>:-fconcepts-diagnostics-depth=3>)
