# SPDX-License-Identifier: Apache-2.0
#
# Rules that no compiler checks, and each public header compiled alone.

find_package(Python3 3.7 COMPONENTS Interpreter REQUIRED)

add_test(NAME hygiene
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/check_tree.py
    ${PROJECT_SOURCE_DIR} --version ${PROJECT_VERSION})
set_tests_properties(hygiene PROPERTIES LABELS hygiene TIMEOUT 60)

add_test(NAME hygiene.finds_what_it_looks_for
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/check_tree_test.py)
set_tests_properties(hygiene.finds_what_it_looks_for PROPERTIES LABELS hygiene TIMEOUT 60)

add_test(NAME hygiene.documents
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/check_documents.py ${PROJECT_SOURCE_DIR})
set_tests_properties(hygiene.documents PROPERTIES LABELS hygiene TIMEOUT 60)

# A program of its own for each public header, with this project's warnings.
if(NOT BLUEFOG_SANITIZER STREQUAL thread)
  add_test(NAME hygiene.headers_compile_alone
    COMMAND ${CMAKE_COMMAND} --build ${PROJECT_BINARY_DIR} --target all_verify_interface_header_sets)
  set_tests_properties(hygiene.headers_compile_alone PROPERTIES LABELS hygiene TIMEOUT 1800 PROCESSORS 2)
endif()
