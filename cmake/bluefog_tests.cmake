# SPDX-License-Identifier: Apache-2.0
#
# Functions that add this project's tests.

find_package(Catch2 QUIET)
if(NOT Catch2_FOUND)
  message(FATAL_ERROR "bluefog: the tests need Catch2; install it with `apt-get install catch2`, or build "
    "without them with -DBLUEFOG_BUILD_TESTS=OFF.")
endif()

if(Catch2_VERSION VERSION_LESS 3)
  set(BLUEFOG_CATCH Catch2::Catch2)
  set(BLUEFOG_CATCH_ARGUMENTS --use-colour no)
else()
  set(BLUEFOG_CATCH Catch2::Catch2)
  set(BLUEFOG_CATCH_ARGUMENTS --colour-mode none)
endif()
# The same order on all ranks, and a name pattern that fits nothing is a failure.
list(APPEND BLUEFOG_CATCH_ARGUMENTS --order decl --warn NoTests)

# bluefog_test_main: main() of a test of one process; bluefog_test_mpi_main: of one rank under mpirun.
# They hold Catch2's runner, which is long to compile and not what is tested.
function(_bluefog_add_main target source)
  add_library(${target} STATIC ${CMAKE_CURRENT_SOURCE_DIR}/support/${source})
  target_link_libraries(${target} PUBLIC ${BLUEFOG_CATCH} ${ARGN} PRIVATE bluefog_warnings)
  target_compile_features(${target} PUBLIC cxx_std_20)
  target_include_directories(${target} PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
  target_compile_options(${target} PRIVATE -O1)
  if(CMAKE_CXX_FLAGS MATCHES "fsanitize=")
    target_compile_options(${target} PRIVATE -fno-sanitize=all)
  endif()
endfunction()
_bluefog_add_main(bluefog_test_main main.cpp)
if(BLUEFOG_WITH_MPI)
  _bluefog_add_main(bluefog_test_mpi_main mpi_main.cpp bluefog::mpi)
endif()

if(CMAKE_CXX_FLAGS MATCHES "fsanitize=[a-z,]*address")
  set(BLUEFOG_SANITIZER address)
  set(BLUEFOG_TIMEOUT_FACTOR 4)
elseif(CMAKE_CXX_FLAGS MATCHES "fsanitize=[a-z,]*thread")
  set(BLUEFOG_SANITIZER thread)
  set(BLUEFOG_TIMEOUT_FACTOR 8)
else()
  set(BLUEFOG_SANITIZER "")
  set(BLUEFOG_TIMEOUT_FACTOR 1)
endif()
if(BLUEFOG_SANITIZER)
  add_compile_definitions(BLUEFOG_TEST_SANITIZED=1)
endif()

# Sets <variable> to <seconds> scaled to how slow this kind of build is.
function(_bluefog_timeout variable seconds)
  math(EXPR scaled "${seconds} * ${BLUEFOG_TIMEOUT_FACTOR}")
  set(${variable} ${scaled} PARENT_SCOPE)
endfunction()

# Adds the executable test_<layer> of tests/<layer>/*.cpp. Sets <variable> to FALSE if there are none.
function(_bluefog_test_executable variable layer target main labels)
  file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/${layer}/*.cpp")
  if(NOT sources)
    set(${variable} FALSE PARENT_SCOPE)
    return()
  endif()
  add_executable(test_${layer} ${sources})
  target_link_libraries(test_${layer} PRIVATE bluefog::${target} ${main} bluefog_warnings)
  # What tests cost is their compilation; benchmarks are optimized as users do it.
  target_compile_options(test_${layer} PRIVATE $<$<CONFIG:Release>:-O1>)
  _bluefog_compile_together(test_${layer})
  if(main STREQUAL "bluefog_test_mpi_main")
    target_compile_definitions(test_${layer} PRIVATE BLUEFOG_TEST_MPI=1)
  endif()
  if(BLUEFOG_SANITIZER STREQUAL address)
    target_sources(test_${layer} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/support/keep_libraries.cpp)
    target_link_options(test_${layer} PRIVATE -rdynamic)
  endif()
  if(torch IN_LIST labels)
    _bluefog_precompile(test_${layer})
  endif()
  set(${variable} TRUE PARENT_SCOPE)
endfunction()

# Lets the compiler see the files of a test together: most of what each costs are templates that the
# others instantiate as well. -DCMAKE_UNITY_BUILD=OFF compiles one at a time, which is quicker for whoever
# changes one again and again.
function(_bluefog_compile_together target)
  if(NOT DEFINED CMAKE_UNITY_BUILD)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Means headers, and takes what is included for one.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()

# Lets the tests and examples that use torch share one precompiled <torch/torch.h>, which costs more than they do. It
# belongs to a target that defines nothing but what libtorch needs: whoever defines more can use it, too.
function(_bluefog_precompile target)
  if(NOT TARGET bluefog_test_torch)
    _bluefog_add_precompiled(bluefog_test_torch bluefog::torch <torch/torch.h> <support/catch.hpp>)
    target_link_libraries(bluefog_test_torch PRIVATE ${BLUEFOG_CATCH})
    target_include_directories(bluefog_test_torch PRIVATE "${PROJECT_SOURCE_DIR}/tests")
    target_compile_options(bluefog_test_torch PRIVATE $<$<CONFIG:Release>:-O1>)
  endif()
  target_precompile_headers(${target} REUSE_FROM bluefog_test_torch)
  _bluefog_preprocess_precompiled(${target})
endfunction()

# Adds <target>, which has nothing but these headers, found by <library>, precompiled.
function(_bluefog_add_precompiled target library)
  file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/generated/${target}.cpp" CONTENT "")
  add_library(${target} OBJECT "${CMAKE_CURRENT_BINARY_DIR}/generated/${target}.cpp")
  target_link_libraries(${target} PRIVATE ${library} bluefog_warnings)
  target_precompile_headers(${target} PRIVATE ${ARGN})
  _bluefog_preprocess_precompiled(${target})
endfunction()

function(_bluefog_preprocess_precompiled target)  # for ccache
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -fpch-preprocess)
  endif()
endfunction()

# bluefog_add_test(<layer> <component> [LABELS <label>...] [TIMEOUT <seconds>] [ONE_PROCESSOR])
#
# Builds tests/<layer>/*.cpp against bluefog::<component> as test_<layer>, and registers it as one test
# of one process, <layer>. ONE_PROCESSOR: another test may run beside it.
function(bluefog_add_test layer component)
  cmake_parse_arguments(PARSE_ARGV 2 arg "ONE_PROCESSOR" "TIMEOUT" "LABELS")
  _bluefog_test_executable(exists ${layer} ${component} bluefog_test_main "${arg_LABELS}")
  if(exists)
    _bluefog_register_alone(${layer} "${arg_LABELS}" "${arg_TIMEOUT}")
    if(arg_ONE_PROCESSOR)
      set_tests_properties(${layer} PROPERTIES PROCESSORS 1)
    endif()
  endif()
endfunction()

function(_bluefog_register_alone layer labels timeout)
  if(NOT timeout)
    set(timeout 120)
  endif()
  _bluefog_timeout(timeout ${timeout})
  add_test(NAME ${layer} COMMAND test_${layer} "~[mpi]" ${BLUEFOG_CATCH_ARGUMENTS})
  set_tests_properties(${layer} PROPERTIES
    LABELS "${layer};${labels}"
    PROCESSORS 2
    TIMEOUT ${timeout}  # a deadlock is a failure, not a hung build
    ENVIRONMENT "${BLUEFOG_LAUNCH_ENVIRONMENT};${BLUEFOG_SANITIZER_ENVIRONMENT}")
endfunction()

# bluefog_add_mpi_test(<layer> <component> RANKS <n>... [LABELS <label>...] [TIMEOUT <seconds>]
#                      [TRANSPORTS tcp] [THREAD_LEVELS single|funneled|serialized...] [COPYING] [ALSO_ALONE])
#
# Builds tests/<layer>/*.cpp against bluefog::<component> once, as test_<layer>, and registers it once
# per rank count, as <layer>.<n>ranks. TRANSPORTS adds runs with 2 and 3 ranks over that transport alone
# (Open MPI only), THREAD_LEVELS runs with 2 ranks in which MPI was initialised at that lower level,
# COPYING one with 2 ranks that read nothing from each other's memory, as README has it for containers (Open
# MPI only), ALSO_ALONE a run of one process without a launcher.
function(bluefog_add_mpi_test layer component)
  cmake_parse_arguments(PARSE_ARGV 2 arg "ALSO_ALONE;COPYING" "TIMEOUT" "RANKS;LABELS;TRANSPORTS;THREAD_LEVELS")
  _bluefog_test_executable(exists ${layer} ${component} bluefog_test_mpi_main "${arg_LABELS}")
  if(NOT exists)
    return()
  endif()
  if(arg_ALSO_ALONE)
    _bluefog_register_alone(${layer} "${arg_LABELS}" "${arg_TIMEOUT}")
  endif()
  foreach(ranks IN LISTS arg_RANKS)
    if(BLUEFOG_SANITIZER AND ranks GREATER 4)
      continue()  # slow, and more of the same
    endif()
    _bluefog_register_ranks(${layer}.${ranks}ranks ${layer} ${ranks} "")
  endforeach()
  foreach(level IN LISTS arg_THREAD_LEVELS)
    _bluefog_register_ranks(${layer}.2ranks.${level} ${layer} 2 "BLUEFOG_TEST_THREAD_LEVEL=${level}")
  endforeach()
  if(BLUEFOG_MPI_FLAVOUR STREQUAL "Open MPI")
    if(arg_COPYING)
      _bluefog_register_ranks(${layer}.2ranks.copying ${layer} 2 "OMPI_MCA_btl_vader_single_copy_mechanism=none")
    endif()
    foreach(transport IN LISTS arg_TRANSPORTS)
      foreach(ranks IN ITEMS 2 3)
        _bluefog_register_ranks(${layer}.${ranks}ranks.${transport} ${layer} ${ranks}
          "OMPI_MCA_pml=ob1;OMPI_MCA_btl=${transport},self;OMPI_MCA_btl_tcp_if_include=lo")
      endforeach()
    endforeach()
  endif()
endfunction()

# Uses arg_LABELS and arg_TIMEOUT of its caller.
function(_bluefog_register_ranks test layer ranks environment)
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  _bluefog_timeout(timeout ${arg_TIMEOUT})
  math(EXPR patience "${timeout} - 10")
  bluefog_launch_command(launch ${ranks})
  add_test(NAME ${test}
    COMMAND ${launch} $<TARGET_FILE:test_${layer}> ${MPIEXEC_POSTFLAGS} "~[thread]" ${BLUEFOG_CATCH_ARGUMENTS})
  set_tests_properties(${test} PROPERTIES
    LABELS "mpi;${layer};${arg_LABELS}"
    PROCESSORS ${ranks}
    TIMEOUT ${timeout}
    # The ranks give up a little earlier, and say in which test.
    ENVIRONMENT "${BLUEFOG_MPI_ENVIRONMENT};BLUEFOG_TEST_PATIENCE=${patience};${environment}")
endfunction()
