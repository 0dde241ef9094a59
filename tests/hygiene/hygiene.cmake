# SPDX-License-Identifier: Apache-2.0
#
# Rules that no compiler checks, and each public header compiled alone.

find_package(Python3 3.7 COMPONENTS Interpreter REQUIRED)

add_test(NAME hygiene
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/check_tree.py
    ${PROJECT_SOURCE_DIR} --version ${PROJECT_VERSION})
set_tests_properties(hygiene PROPERTIES LABELS hygiene TIMEOUT 60)
