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

# Headers that begin with the same half a minute of libtorch share it precompiled, each still the only one
# of this project in its program: those that include it anyway, so that nothing of it can be missing.
if(BLUEFOG_WITH_TORCH AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  _bluefog_add_precompiled(bluefog_test_module <torch/nn/module.h>)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/reaches.py ${PROJECT_SOURCE_DIR}/include torch/nn/module.h
    OUTPUT_VARIABLE _bluefog_headers COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX REPLACE "\n" ";" _bluefog_headers "${_bluefog_headers}")
  list(TRANSFORM _bluefog_headers REPLACE "(.+)"
    "${PROJECT_BINARY_DIR}/bluefog_torch_verify_interface_header_sets/\\1.cxx")
  set_source_files_properties(${_bluefog_headers} DIRECTORY ${PROJECT_SOURCE_DIR} PROPERTIES COMPILE_OPTIONS
    "-include;${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/bluefog_test_module.dir/cmake_pch.hxx;-fpch-preprocess")
endif()

# A program of its own for each public header, with this project's warnings.
if(NOT BLUEFOG_SANITIZER STREQUAL thread)
  add_test(NAME hygiene.headers_compile_alone
    COMMAND ${CMAKE_COMMAND} --build ${PROJECT_BINARY_DIR} --target all_verify_interface_header_sets)
  set_tests_properties(hygiene.headers_compile_alone PROPERTIES LABELS hygiene TIMEOUT 1800 PROCESSORS 2)
endif()
