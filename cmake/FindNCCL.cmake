# SPDX-License-Identifier: Apache-2.0
#[[
FindNCCL
--------

Finds NCCL and what the library needs of the CUDA toolkit beside it, and makes the imported target
``NCCL::nccl``: NCCL, the CUDA runtime and NVRTC. Needs neither a GPU nor a CUDA compiler.

NCCL's own package configuration is taken where there is one; else the header and the library are
looked for in ``NCCL_ROOT`` or ``NCCL_HOME`` (CMake variable or environment), which may be a Python
wheel's ``nvidia/nccl``, in the toolkit, and where CMake looks anyway. The version is read from
``nccl.h``. The toolkit is CMake's ``CUDAToolkit`` (hint: ``CUDAToolkit_ROOT``).

Sets ``NCCL_FOUND``, ``NCCL_VERSION``, ``NCCL_INCLUDE_DIR``, ``NCCL_LIBRARY``, and, where something is
missing, ``NCCL_REASON``: one sentence that names it.
#]]

set(NCCL_REASON "")
set(_nccl_version "${NCCL_FIND_VERSION}")  # the inner search below may set these anew
set(_nccl_required "${NCCL_FIND_REQUIRED}")

find_package(CUDAToolkit 12.8 QUIET)
if(NOT CUDAToolkit_FOUND)
  set(NCCL_REASON "no CUDA toolkit of version 12.8 or later was found (CUDAToolkit_ROOT names its folder)")
elseif(NOT TARGET CUDA::cudart OR NOT TARGET CUDA::nvrtc)
  set(NCCL_REASON "the CUDA toolkit in ${CUDAToolkit_LIBRARY_ROOT} lacks its runtime or NVRTC")
endif()

if(NOT TARGET NCCL::nccl)
  find_package(NCCL CONFIG QUIET)
  if(NOT TARGET NCCL::nccl)
    set(_nccl_places ${NCCL_ROOT} ${NCCL_HOME} $ENV{NCCL_ROOT} $ENV{NCCL_HOME})
    find_path(NCCL_INCLUDE_DIR nccl.h
      HINTS ${_nccl_places} ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
    find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 NAMES_PER_DIR  # the latter is all that a wheel has
      HINTS ${_nccl_places} ${CUDAToolkit_LIBRARY_DIR} PATH_SUFFIXES lib lib64)
    mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)
  endif()
endif()

if(TARGET NCCL::nccl AND NOT NCCL_INCLUDE_DIR)
  get_target_property(_nccl_includes NCCL::nccl INTERFACE_INCLUDE_DIRECTORIES)
  find_path(NCCL_INCLUDE_DIR nccl.h PATHS ${_nccl_includes} NO_DEFAULT_PATH)
endif()
if(NOT NCCL_REASON AND NOT NCCL_INCLUDE_DIR)
  set(NCCL_REASON "nccl.h was not found (NCCL_ROOT names the folder that NCCL is in)")
elseif(NOT NCCL_REASON AND NOT TARGET NCCL::nccl AND NOT NCCL_LIBRARY)
  set(NCCL_REASON "libnccl was not found (NCCL_ROOT names the folder that NCCL is in)")
endif()

set(NCCL_VERSION "")
if(NCCL_INCLUDE_DIR)
  file(STRINGS "${NCCL_INCLUDE_DIR}/nccl.h" _nccl_lines REGEX "#define NCCL_(MAJOR|MINOR|PATCH) +[0-9]+")
  foreach(part IN ITEMS MAJOR MINOR PATCH)
    if("${_nccl_lines}" MATCHES "NCCL_${part} +([0-9]+)")
      list(APPEND _nccl_numbers "${CMAKE_MATCH_1}")
    endif()
  endforeach()
  list(JOIN _nccl_numbers "." NCCL_VERSION)
  unset(_nccl_numbers)
endif()
if(NOT NCCL_REASON AND _nccl_version AND NCCL_VERSION VERSION_LESS _nccl_version)
  set(NCCL_REASON "NCCL ${NCCL_VERSION} in ${NCCL_INCLUDE_DIR} is older than ${_nccl_version}")
endif()

if(NCCL_REASON)
  set(NCCL_FOUND FALSE)
  if(_nccl_required)
    message(FATAL_ERROR "FindNCCL: ${NCCL_REASON}.")
  endif()
else()
  set(NCCL_FOUND TRUE)
  if(NOT TARGET NCCL::nccl)
    add_library(NCCL::nccl UNKNOWN IMPORTED)
    set_target_properties(NCCL::nccl PROPERTIES
      IMPORTED_LOCATION "${NCCL_LIBRARY}"
      INTERFACE_INCLUDE_DIRECTORIES "${NCCL_INCLUDE_DIR}")
  endif()
  get_target_property(_nccl_links NCCL::nccl INTERFACE_LINK_LIBRARIES)
  if(NOT "CUDA::nvrtc" IN_LIST _nccl_links)
    set_property(TARGET NCCL::nccl APPEND PROPERTY INTERFACE_LINK_LIBRARIES CUDA::cudart CUDA::nvrtc)
    # Where CUDA 13 has what nccl.h includes in the end, <nv/target>; older CMakes do not look there.
    foreach(folder IN LISTS CUDAToolkit_INCLUDE_DIRS)
      if(IS_DIRECTORY "${folder}/cccl")
        set_property(TARGET NCCL::nccl APPEND PROPERTY INTERFACE_INCLUDE_DIRECTORIES "${folder}/cccl")
      endif()
    endforeach()
  endif()
endif()
