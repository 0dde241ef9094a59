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

# Headers that begin with the same ten seconds or more of libtorch share them precompiled, each still the
# only one of this project in its program: those that include it anyway, so that nothing of it can be
# missing. What is named first holds what comes later.
if(BLUEFOG_WITH_TORCH AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(_bluefog_others "")
  foreach(shared IN ITEMS torch/nn/module.h torch/serialize/archive.h torch/csrc/autograd/variable.h)
    string(MAKE_C_IDENTIFIER "bluefog_test_${shared}" target)
    _bluefog_add_precompiled(${target} <${shared}>)
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_LIST_DIR}/reaches.py ${PROJECT_SOURCE_DIR}/include ${shared}
      OUTPUT_VARIABLE _bluefog_headers COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCHALL "[^\n]+" _bluefog_headers "${_bluefog_headers}")
    list(REMOVE_ITEM _bluefog_headers "" ${_bluefog_others})
    list(APPEND _bluefog_others ${_bluefog_headers})
    list(TRANSFORM _bluefog_headers REPLACE "(.+)"
      "${PROJECT_BINARY_DIR}/bluefog_torch_verify_interface_header_sets/\\1.cxx")
    set_source_files_properties(${_bluefog_headers} DIRECTORY ${PROJECT_SOURCE_DIR} PROPERTIES COMPILE_OPTIONS
      "-include;${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${target}.dir/cmake_pch.hxx;-fpch-preprocess")
  endforeach()
endif()

# A program of its own for each public header, with this project's warnings.
if(NOT BLUEFOG_SANITIZER STREQUAL thread)
  add_test(NAME hygiene.headers_compile_alone
    COMMAND ${CMAKE_COMMAND} --build ${PROJECT_BINARY_DIR} --target all_verify_interface_header_sets)
  set_tests_properties(hygiene.headers_compile_alone PROPERTIES LABELS hygiene TIMEOUT 1800 PROCESSORS 2)
endif()
