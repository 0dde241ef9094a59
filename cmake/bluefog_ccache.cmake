# SPDX-License-Identifier: Apache-2.0
#
# Compiles through ccache where it is installed, unless the caller chose a launcher.

find_program(BLUEFOG_CCACHE ccache DOC "Compiler cache; set it to OFF to compile without")
if(BLUEFOG_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  # What ccache needs to know before it caches what is compiled with a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER
    "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros "${BLUEFOG_CCACHE}")
endif()
