# SPDX-License-Identifier: Apache-2.0
#
# Tests of the NCCL backend that need no GPU.
#
# nccl.libraries is linked with the real libraries: what happens without a device, and that NVRTC takes
# the kernels. nccl is linked with a stand-in for them, see support/nccl_stand_in: the backend's own
# code, and the shared tests of operations over it, with ranks that are threads. nccl.tensors is that
# too, for tensors in host memory, and for CUDA tensors on the stand-in's devices, which libtorch's CPU
# build is made to take for CUDA's. nccl.mpi has ranks that are MPI's. Real devices are left to gpu.sh.

set(_bluefog_test_directory "${PROJECT_SOURCE_DIR}/tests")

add_executable(test_nccl_libraries ${_bluefog_test_directory}/nccl/libraries/libraries.cpp)
target_link_libraries(test_nccl_libraries PRIVATE bluefog::nccl bluefog_test_main bluefog_warnings)
_bluefog_timeout(_bluefog_seconds 120)
add_test(NAME nccl.libraries COMMAND test_nccl_libraries ${BLUEFOG_CATCH_ARGUMENTS})
set_tests_properties(nccl.libraries PROPERTIES
  LABELS nccl TIMEOUT ${_bluefog_seconds} ENVIRONMENT "${BLUEFOG_SANITIZER_ENVIRONMENT}")

# The kernels' CUDA source without what makes it a C++ string.
set(_bluefog_kernels "${PROJECT_SOURCE_DIR}/include/bluefog/nccl/kernel_source.hpp")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${_bluefog_kernels}")
file(READ "${_bluefog_kernels}" _bluefog_text)
string(REGEX REPLACE "^.*R\"cuda\\(" "" _bluefog_text "${_bluefog_text}")
string(REGEX REPLACE "\\)cuda\".*$" "" _bluefog_text "${_bluefog_text}")
file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/generated/kernel_source.inc" CONTENT "${_bluefog_text}" @ONLY)

file(GLOB _bluefog_stand_in CONFIGURE_DEPENDS "${_bluefog_test_directory}/support/nccl_stand_in/*.cpp")
add_library(bluefog_nccl_stand_in OBJECT ${_bluefog_stand_in})
# The real libraries' headers, and nothing else of them.
target_include_directories(bluefog_nccl_stand_in SYSTEM PUBLIC ${NCCL_INCLUDE_DIR} ${CUDAToolkit_INCLUDE_DIRS})
target_include_directories(bluefog_nccl_stand_in PRIVATE "${CMAKE_CURRENT_BINARY_DIR}/generated")
target_include_directories(bluefog_nccl_stand_in PUBLIC "${_bluefog_test_directory}")
target_link_libraries(bluefog_nccl_stand_in PUBLIC bluefog::core PRIVATE bluefog_warnings)
target_compile_definitions(bluefog_nccl_stand_in PUBLIC BLUEFOG_TEST_NCCL=1)
# CUDA C++ reads arrays as packs of sixteen bytes, and has other warnings.
set_source_files_properties("${_bluefog_test_directory}/support/nccl_stand_in/kernels.cpp" PROPERTIES
  COMPILE_OPTIONS "-fno-strict-aliasing;-w")

# _bluefog_add_stand_in_test(<name> <executable> <source>...)
function(_bluefog_add_stand_in_test name executable)
  add_executable(${executable} ${ARGN})
  target_link_libraries(${executable} PRIVATE bluefog_nccl_stand_in bluefog_test_main bluefog_warnings)
  target_compile_options(${executable} PRIVATE $<$<CONFIG:Release>:-O1>)
  _bluefog_compile_together(${executable})
  _bluefog_timeout(seconds 240)
  # NCCL matches messages by their order alone, that of pairs included, and does not know how long
  # they are; nccl/errors.cpp says what happens instead.
  add_test(NAME ${name} COMMAND ${executable} "[nccl]~[unordered]~[stray]" ${BLUEFOG_CATCH_ARGUMENTS})
  set_tests_properties(${name} PROPERTIES LABELS nccl PROCESSORS 2 TIMEOUT ${seconds}
    ENVIRONMENT "${BLUEFOG_SANITIZER_ENVIRONMENT};OMP_NUM_THREADS=1")
endfunction()

file(GLOB _bluefog_own CONFIGURE_DEPENDS "${_bluefog_test_directory}/nccl/*.cpp")
# The shared tests in one kind of build: elsewhere their compilation would cost more than they usually find,
# the more as nccl/operations.cpp has every operation in all of them; -DBLUEFOG_TEST_NCCL_WHOLE=ON has them
# there too. Left out are backend/check, backend/concepts and backend/faults, which have no test of ranks over
# any transport; collective/chunking, about MPI's counts; and neighbor/folding, which adds up on the host what
# arrives, as no backend of devices does.
set(_bluefog_shared "")
option(BLUEFOG_TEST_NCCL_WHOLE "All shared tests over the stand-in for NCCL, in builds with sanitizers or clang too" OFF)
if(BLUEFOG_TEST_NCCL_WHOLE OR (BLUEFOG_SANITIZER STREQUAL "" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU"))
  set(_bluefog_shared backend/engine backend/layout
    collective/allgather collective/allreduce collective/any_of collective/barrier
    collective/broadcast collective/broadcast_object collective/check_mode collective/requests
    neighbor/allgather neighbor/allreduce neighbor/hierarchical_allreduce neighbor/inference
    neighbor/pair_gossip neighbor/refusals)
elseif(BLUEFOG_SANITIZER STREQUAL "thread")
  set(_bluefog_shared neighbor/allreduce)
endif()
list(TRANSFORM _bluefog_shared REPLACE "(.+)" "${_bluefog_test_directory}/\\1.cpp")
_bluefog_add_stand_in_test(nccl test_nccl ${_bluefog_own} ${_bluefog_shared})

# Ranks of MPI that become ranks of NCCL: what they agree on, over the stand-in. With libtorch also their
# CUDA tensors, on its devices.
if(BLUEFOG_WITH_MPI AND BLUEFOG_SANITIZER STREQUAL "")
  add_executable(test_nccl_mpi ${_bluefog_test_directory}/nccl/mpi/meeting.cpp)
  target_link_libraries(test_nccl_mpi PRIVATE bluefog_nccl_stand_in bluefog::mpi bluefog_test_mpi_main
    bluefog_warnings)
  target_compile_options(test_nccl_mpi PRIVATE $<$<CONFIG:Release>:-O1>)
  _bluefog_compile_together(test_nccl_mpi)
  if(BLUEFOG_WITH_TORCH)
    target_sources(test_nccl_mpi PRIVATE ${_bluefog_test_directory}/nccl/mpi/tensors.cpp)
    target_link_libraries(test_nccl_mpi PRIVATE bluefog::torch)
    _bluefog_precompile(test_nccl_mpi)
  endif()
  block()
    set(arg_LABELS nccl)
    set(arg_TIMEOUT 240)
    _bluefog_register_ranks(nccl.mpi.2ranks nccl_mpi 2 "")
  endblock()
  set_tests_properties(nccl.mpi.2ranks PROPERTIES ENVIRONMENT_MODIFICATION "LOCAL_RANK=unset:")
endif()

# The script for a real device: that it says what it would do, and that its verdict is right. No build
# changes that.
if(NOT BLUEFOG_SANITIZER)
  add_test(NAME gpu.dry_run COMMAND "${_bluefog_test_directory}/gpu.sh" --dry-run)
  set_tests_properties(gpu.dry_run PROPERTIES LABELS nccl TIMEOUT 30 PASS_REGULAR_EXPRESSION
    "build +the.*\nbuild_tensors .*\nkernels .*\nunscale .*\naverage .*\nschedule .*\noperations .*\ntensors .*\noptimizers .*\ndigits ")
  add_test(NAME gpu.verdict COMMAND "${_bluefog_test_directory}/gpu/verdict.sh")
  set_tests_properties(gpu.verdict PROPERTIES LABELS nccl TIMEOUT 60)
  # Its program without tensors, which without a device says which one is missing, as of its rank.
  if(_bluefog_shared)
    add_executable(bluefog_gpu ${_bluefog_test_directory}/gpu/program/main.cpp)
    target_include_directories(bluefog_gpu PRIVATE ${_bluefog_test_directory})
    target_link_libraries(bluefog_gpu PRIVATE bluefog::nccl bluefog_warnings)
    target_compile_options(bluefog_gpu PRIVATE -O0)
    add_test(NAME gpu.program COMMAND bluefog_gpu operations "${CMAKE_CURRENT_BINARY_DIR}/gpu_meeting" 0 1)
    set_tests_properties(gpu.program PROPERTIES LABELS nccl TIMEOUT 60 PASS_REGULAR_EXPRESSION
      "fail operations: rank 0: nccl_backend: no CUDA device is visible|\npass barrier\n")
  endif()
endif()

if(BLUEFOG_WITH_TORCH)
  file(GLOB _bluefog_own CONFIGURE_DEPENDS "${_bluefog_test_directory}/nccl/tensors/*.cpp")
  set(_bluefog_shared "")
  if(BLUEFOG_SANITIZER STREQUAL "")
    set(_bluefog_shared tensor/autograd tensor/operations tensor/parameters)
  endif()
  list(TRANSFORM _bluefog_shared REPLACE "(.+)" "${_bluefog_test_directory}/\\1.cpp")
  _bluefog_add_stand_in_test(nccl.tensors test_nccl_tensors ${_bluefog_own} ${_bluefog_shared})
  target_link_libraries(test_nccl_tensors PRIVATE bluefog::torch)
  _bluefog_precompile(test_nccl_tensors)
endif()
