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

# _bluefog_share_precompiled(<library> <header>...)
#
# Lets the public headers that include all of these anyway, so that nothing of them can be missing, have
# them precompiled where each is compiled alone. A header shares once: whoever comes first has it.
set(_bluefog_sharing "")
function(_bluefog_share_precompiled library)
  list(JOIN ARGN " " target)
  string(MAKE_C_IDENTIFIER "bluefog_test_${target}" target)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -B ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/reaches.py ${PROJECT_SOURCE_DIR}/include ${ARGN}
    OUTPUT_VARIABLE headers COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+" headers "${headers}")
  list(REMOVE_ITEM headers "" ${_bluefog_sharing})
  set(_bluefog_sharing ${_bluefog_sharing} ${headers} PARENT_SCOPE)

  list(TRANSFORM ARGN REPLACE "(.+)" "<\\1>")
  _bluefog_add_precompiled(${target} ${library} ${ARGN})
  set(precompiled "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${target}.dir/cmake_pch.hxx")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(file "${precompiled}.gch")
    set(options -include "${precompiled}" -fpch-preprocess)
  else()
    set(file "${precompiled}.pch")
    set(options -Xclang -include-pch -Xclang "${file}")
  endif()
  set(components core mpi nccl torch)
  if(library STREQUAL "bluefog::torch")
    set(components torch)  # without libtorch bluefog.hpp leaves its headers out
  endif()
  foreach(component IN LISTS components)
    list(TRANSFORM headers REPLACE "(.+)"
      "${PROJECT_BINARY_DIR}/bluefog_${component}_verify_interface_header_sets/\\1.cxx" OUTPUT_VARIABLE files)
    set_source_files_properties(${files} DIRECTORY ${PROJECT_SOURCE_DIR} PROPERTIES
      COMPILE_OPTIONS "${options}" OBJECT_DEPENDS "${file}")
  endforeach()
endfunction()

# A program of its own for each public header, with this project's warnings.
if(NOT BLUEFOG_SANITIZER STREQUAL thread)
  if(BLUEFOG_WITH_TORCH)
    _bluefog_share_precompiled(bluefog::torch torch/nn/module.h bluefog/communicator.hpp)
    _bluefog_share_precompiled(bluefog::torch torch/csrc/autograd/variable.h bluefog/communicator.hpp)
    _bluefog_share_precompiled(bluefog::torch torch/serialize/archive.h)
  endif()
  _bluefog_share_precompiled(bluefog::core bluefog/communicator.hpp)
  _bluefog_share_precompiled(bluefog::core bluefog/backend/context.hpp)
  add_test(NAME hygiene.headers_compile_alone
    COMMAND ${CMAKE_COMMAND} --build ${PROJECT_BINARY_DIR} --target all_verify_interface_header_sets)
  set_tests_properties(hygiene.headers_compile_alone PROPERTIES LABELS hygiene TIMEOUT 1800 PROCESSORS 2)
endif()
