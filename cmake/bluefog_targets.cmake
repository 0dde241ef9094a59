# SPDX-License-Identifier: Apache-2.0
#
# How the library's targets are made, found and installed.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(BLUEFOG_PACKAGE_DIR "${CMAKE_INSTALL_DATADIR}/cmake/bluefog")
set(BLUEFOG_COMPONENTS "")

# bluefog_add_component(<name>)
#
# Adds the INTERFACE target bluefog::<name> and notes it in BLUEFOG_COMPONENTS.
macro(bluefog_add_component name)
  add_library(bluefog_${name} INTERFACE)
  add_library(bluefog::${name} ALIAS bluefog_${name})
  set_target_properties(bluefog_${name} PROPERTIES
    EXPORT_NAME ${name}
    VERIFY_INTERFACE_HEADER_SETS ${BLUEFOG_BUILD_TESTS})
  target_compile_features(bluefog_${name} INTERFACE cxx_std_20)
  list(APPEND BLUEFOG_COMPONENTS ${name})
endmacro()

# bluefog_find_mpi()
#
# Finds MPI (hints: MPI_HOME, MPI_CXX_COMPILER) or says how to get it.
macro(bluefog_find_mpi)
  find_package(MPI 3.1 COMPONENTS CXX GLOBAL)
  if(NOT MPI_CXX_FOUND)
    message(FATAL_ERROR
      "bluefog: no MPI found; install one with `apt-get install libopenmpi-dev openmpi-bin`, name one "
      "with -DMPI_HOME=<prefix>, or build without it with -DBLUEFOG_WITH_MPI=OFF.")
  endif()
endmacro()

# bluefog_find_nccl()
#
# Finds NCCL and what it needs as BLUEFOG_WITH_NCCL says, and sets BLUEFOG_HAS_NCCL.
macro(bluefog_find_nccl)
  set(BLUEFOG_HAS_NCCL FALSE)
  if(BLUEFOG_WITH_NCCL)  # AUTO is true
    set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL TRUE)  # those of the toolkit too, for projects around this one
    find_package(NCCL 2.18 MODULE QUIET)
    unset(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)
    set(BLUEFOG_HAS_NCCL ${NCCL_FOUND})
    if(NCCL_FOUND)
      message(STATUS "bluefog: the NCCL backend is on, with NCCL ${NCCL_VERSION}")
    elseif(BLUEFOG_WITH_NCCL STREQUAL "AUTO")
      message(STATUS "bluefog: the NCCL backend is off: ${NCCL_REASON}")
    else()
      message(FATAL_ERROR "bluefog: ${NCCL_REASON}; install CUDA's toolkit and NCCL, or build without them with "
        "-DBLUEFOG_WITH_NCCL=OFF.")
    endif()
  endif()
endmacro()

# bluefog_install()
#
# Installs the headers, one export per component, and the package's config files.
function(bluefog_install)
  foreach(component IN LISTS BLUEFOG_COMPONENTS)
    install(TARGETS bluefog_${component} EXPORT bluefog-${component} FILE_SET HEADERS)
    install(EXPORT bluefog-${component} NAMESPACE bluefog:: DESTINATION "${BLUEFOG_PACKAGE_DIR}")
  endforeach()

  configure_package_config_file(
    "${PROJECT_SOURCE_DIR}/cmake/bluefogConfig.cmake.in" "${PROJECT_BINARY_DIR}/bluefogConfig.cmake"
    INSTALL_DESTINATION "${BLUEFOG_PACKAGE_DIR}")
  write_basic_package_version_file("${PROJECT_BINARY_DIR}/bluefogConfigVersion.cmake"
    COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
  install(FILES
    "${PROJECT_BINARY_DIR}/bluefogConfig.cmake"
    "${PROJECT_BINARY_DIR}/bluefogConfigVersion.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake"
    "${PROJECT_SOURCE_DIR}/cmake/Findbluefog_torch.cmake"
    DESTINATION "${BLUEFOG_PACKAGE_DIR}")
  install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
endfunction()
