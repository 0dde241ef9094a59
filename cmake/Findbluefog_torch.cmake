# SPDX-License-Identifier: Apache-2.0
#[[
Findbluefog_torch
-----------------

Finds libtorch and makes the imported target ``bluefog::libtorch`` for programs that compute on the
CPU: ``libtorch_cpu`` and ``libc10``, from a CPU or a CUDA build, with or without a CUDA toolkit.
(The package that libtorch ships looks for a GPU, a toolkit and every CUDA library.)

Makes ``bluefog::libtorch_cuda`` as well, for programs with CUDA tensors: ``libtorch_cuda`` and
``libc10_cuda`` of a CUDA build. ``BLUEFOG_TORCH_CUDA`` says when: ``AUTO``, where all libraries that those
need are there; ``ON``, where this is a CUDA build; ``OFF``, never.

Looked at, in this order; the first that holds libtorch is taken:

1. ``Torch_DIR`` (CMake variable or environment): libtorch's folder, or its ``share/cmake/Torch``;
2. ``Torch_ROOT`` and each of ``CMAKE_PREFIX_PATH`` (variable or environment): a libtorch folder, or a
   Python environment with the wheel in it;
3. ``BLUEFOG_TORCH_PYTHON``, a Python that has the wheel;
4. ``bluefog_torch_HINT``, a list of libtorch folders and Python environments;
5. the ``python3`` on PATH.

Sets ``bluefog_torch_FOUND``, ``bluefog_torch_VERSION``, ``BLUEFOG_TORCH_ROOT`` (the folder), and, where
nothing fits, ``bluefog_torch_REASON``: one sentence with the line that installs what is missing.
#]]

set(BLUEFOG_TORCH_PYTHON "" CACHE FILEPATH "A Python that has the torch wheel installed")
set(BLUEFOG_TORCH_CUDA AUTO CACHE STRING
  "Make bluefog::libtorch_cuda, for CUDA tensors: ON, OFF, or AUTO (where its libraries are there)")
set_property(CACHE BLUEFOG_TORCH_CUDA PROPERTY STRINGS AUTO ON OFF)

# Sets <variable> to the libtorch folder that belongs to <place>, or to nothing.
function(_bluefog_torch_folder variable place)
  file(GLOB wheels "${place}/lib/python3*/site-packages/torch")
  cmake_path(SET parent NORMALIZE "${place}/../../..")
  foreach(folder IN ITEMS "${place}" "${place}/torch" ${wheels} "${parent}")
    if(EXISTS "${folder}/include/torch/csrc/api/include/torch/torch.h")
      string(REGEX REPLACE "/$" "" folder "${folder}")
      set(${variable} "${folder}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${variable} "" PARENT_SCOPE)
endfunction()

# Sets <variable> to the folder of the torch wheel of <python>, or to nothing. Does not import torch.
function(_bluefog_torch_of_python variable python)
  execute_process(
    COMMAND "${python}" -c "import importlib.util, os
spec = importlib.util.find_spec('torch')
print(os.path.dirname(spec.origin) if spec and spec.origin else '', end='')"
    OUTPUT_VARIABLE place ERROR_QUIET RESULT_VARIABLE result)
  set(folder "")
  if(result EQUAL 0 AND place)
    _bluefog_torch_folder(folder "${place}")
  endif()
  set(${variable} "${folder}" PARENT_SCOPE)
endfunction()

# Sets BLUEFOG_TORCH_ROOT, or <reason>.
function(_bluefog_torch_search reason)
  set(install "`python3 -m venv .venv && .venv/bin/pip install torch==2.11.0`, or unpack libtorch from https://pytorch.org")
  set(found "")
  set(${reason} "" PARENT_SCOPE)

  set(given "${Torch_DIR}")
  if(NOT given OR given MATCHES "-NOTFOUND$")
    set(given "$ENV{Torch_DIR}")
  endif()
  if(given)
    _bluefog_torch_folder(found "${given}")
    if(NOT found)
      set(${reason} "bluefog: Torch_DIR=${given} holds no libtorch; name a folder that does with \
-DTorch_DIR=<folder>, or install one with ${install}." PARENT_SCOPE)
      return()
    endif()
  endif()

  if(NOT found)
    cmake_path(CONVERT "$ENV{CMAKE_PREFIX_PATH}" TO_CMAKE_PATH_LIST from_environment)
    foreach(place IN LISTS Torch_ROOT CMAKE_PREFIX_PATH from_environment)
      if(NOT found)
        _bluefog_torch_folder(found "${place}")
      endif()
    endforeach()
  endif()

  if(NOT found AND BLUEFOG_TORCH_PYTHON)
    _bluefog_torch_of_python(found "${BLUEFOG_TORCH_PYTHON}")
    if(NOT found)
      set(${reason} "bluefog: BLUEFOG_TORCH_PYTHON=${BLUEFOG_TORCH_PYTHON} has no torch; install it with \
`${BLUEFOG_TORCH_PYTHON} -m pip install torch==2.11.0`." PARENT_SCOPE)
      return()
    endif()
  endif()

  foreach(place IN LISTS bluefog_torch_HINT)
    if(NOT found)
      _bluefog_torch_folder(found "${place}")
    endif()
  endforeach()

  if(NOT found)
    find_program(_bluefog_python3 python3 NO_CACHE)
    if(_bluefog_python3)
      _bluefog_torch_of_python(found "${_bluefog_python3}")
    endif()
  endif()

  if(NOT found)
    set(${reason} "bluefog: no libtorch found; install it with ${install}, and name it with \
-DBLUEFOG_TORCH_PYTHON=.venv/bin/python or -DTorch_DIR=<folder>, or leave it out (BLUEFOG_WITH_TORCH=OFF, or \
COMPONENTS without torch)." PARENT_SCOPE)
    return()
  endif()
  file(REAL_PATH "${found}" found)
  set(BLUEFOG_TORCH_ROOT "${found}" PARENT_SCOPE)
endfunction()

# Sets <folders> to where the CUDA libraries lie that libtorch_cpu of a CUDA build needs to load, and
# <missing> to those that lie nowhere.
function(_bluefog_torch_cuda_folders folders missing)
  set(places "")
  set(lost "")
  file(STRINGS "${BLUEFOG_TORCH_ROOT}/lib/libtorch_global_deps.so" name
    REGEX "^libcudart[-.a-z0-9]*\\.so\\.[0-9]+" LIMIT_COUNT 1)
  if(name MATCHES "\\.so\\.([0-9]+)")
    set(major "${CMAKE_MATCH_1}")
    foreach(library IN ITEMS cudart cupti)
      # libtorch's own folder, the wheels beside torch, a toolkit, then what the loader knows.
      file(GLOB candidates
        "${BLUEFOG_TORCH_ROOT}/lib/lib${library}*.so.${major}*"
        "${BLUEFOG_TORCH_ROOT}/../nvidia/cu${major}/lib/lib${library}.so.${major}*"
        "${BLUEFOG_TORCH_ROOT}/../nvidia/cuda_${library}/lib/lib${library}.so.${major}*"
        "${BLUEFOG_TORCH_ROOT}/../nvidia/cuda_runtime/lib/lib${library}.so.${major}*")
      if(NOT candidates)
        cmake_path(CONVERT "$ENV{LD_LIBRARY_PATH}" TO_CMAKE_PATH_LIST loader)
        find_file(_bluefog_${library} NAMES lib${library}.so.${major} NO_CACHE
          HINTS ${loader} ENV CUDA_HOME
          PATHS /usr/local/cuda-${major}.0 /usr/local/cuda /usr/local /usr/lib/x86_64-linux-gnu /usr/lib/aarch64-linux-gnu /usr/lib64 /usr
          PATH_SUFFIXES lib64 lib extras/CUPTI/lib64)
        set(candidates ${_bluefog_${library}})
      endif()
      if(candidates)
        list(GET candidates 0 file)
        cmake_path(GET file PARENT_PATH place)
        cmake_path(NORMAL_PATH place)
        list(APPEND places "${place}")
      else()
        list(APPEND lost "${library}")
      endif()
    endforeach()
    list(TRANSFORM lost REPLACE cudart runtime)
    list(TRANSFORM lost PREPEND "nvidia-cuda-")
    if(major LESS 13)
      list(TRANSFORM lost APPEND "-cu${major}")
    endif()
  endif()
  list(REMOVE_DUPLICATES places)
  set(${folders} "${places}" PARENT_SCOPE)
  set(${missing} "${lost}" PARENT_SCOPE)
endfunction()

# Makes bluefog::libtorch from BLUEFOG_TORCH_ROOT, or sets <reason>.
function(_bluefog_torch_target reason)
  set(include "${BLUEFOG_TORCH_ROOT}/include")
  set(lib "${BLUEFOG_TORCH_ROOT}/lib")

  foreach(file IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(NOT version AND EXISTS "${include}/${file}")
      file(STRINGS "${include}/${file}" lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
      list(TRANSFORM lines REPLACE "[^0-9]" "")
      list(JOIN lines "." version)
    endif()
  endforeach()
  if(version VERSION_LESS 2.4)
    set(${reason} "bluefog: ${BLUEFOG_TORCH_ROOT} is libtorch ${version}, 2.4 is the least; install a newer \
one with `pip install torch==2.11.0`." PARENT_SCOPE)
    return()
  endif()

  _bluefog_torch_cuda_folders(folders missing)
  if(missing)
    list(JOIN missing " " missing)
    set(${reason} "bluefog: libtorch in ${BLUEFOG_TORCH_ROOT} is a CUDA build, which loads CUDA libraries \
that are not on this machine, even to compute on the CPU; install them beside it with \
`pip install --no-deps ${missing}`." PARENT_SCOPE)
    return()
  endif()

  # Which of libstdc++'s two string types this libtorch was built with.
  file(STRINGS "${lib}/libc10.so" new_strings REGEX "__cxx11" LIMIT_COUNT 1)
  if(new_strings)
    set(abi 1)
  else()
    set(abi 0)
  endif()

  add_library(bluefog::libtorch INTERFACE IMPORTED)
  set_target_properties(bluefog::libtorch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${include};${include}/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "_GLIBCXX_USE_CXX11_ABI=${abi}"
    INTERFACE_LINK_LIBRARIES "${lib}/libtorch_cpu.so;${lib}/libc10.so")
  foreach(folder IN LISTS folders)
    # A program's run path serves the libraries that its libraries need only in its older form.
    set_property(TARGET bluefog::libtorch APPEND PROPERTY INTERFACE_LINK_OPTIONS
      "LINKER:-rpath-link,${folder}" "LINKER:-rpath,${folder}" "LINKER:--disable-new-dtags")
  endforeach()
  set(bluefog_torch_VERSION "${version}" PARENT_SCOPE)
  set(${reason} "" PARENT_SCOPE)
endfunction()

# Makes bluefog::libtorch_cuda as BLUEFOG_TORCH_CUDA says.
function(_bluefog_torch_cuda_target)
  set(lib "${BLUEFOG_TORCH_ROOT}/lib")
  if(NOT BLUEFOG_TORCH_CUDA OR NOT EXISTS "${lib}/libtorch_cuda.so")
    return()
  endif()
  if(BLUEFOG_TORCH_CUDA STREQUAL "AUTO")
    execute_process(COMMAND ldd "${lib}/libtorch_cuda.so" OUTPUT_VARIABLE needed ERROR_QUIET RESULT_VARIABLE result)
    if(NOT result EQUAL 0 OR needed MATCHES "not found")
      return()
    endif()
  endif()
  add_library(bluefog::libtorch_cuda INTERFACE IMPORTED)
  # Nothing names a symbol of them: they announce themselves to libtorch when they are loaded. What they need
  # in their turn is theirs to find.
  set_target_properties(bluefog::libtorch_cuda PROPERTIES
    INTERFACE_LINK_LIBRARIES bluefog::libtorch
    INTERFACE_LINK_OPTIONS "LINKER:--push-state,--no-as-needed,${lib}/libtorch_cuda.so,${lib}/libc10_cuda.so,\
--pop-state,--allow-shlib-undefined,-rpath,${lib}")
endfunction()

if(TARGET bluefog::libtorch)
  set(bluefog_torch_FOUND TRUE)
else()
  _bluefog_torch_search(bluefog_torch_REASON)
  if(NOT bluefog_torch_REASON)
    _bluefog_torch_target(bluefog_torch_REASON)
  endif()
  if(bluefog_torch_REASON)
    set(bluefog_torch_FOUND FALSE)
    if(bluefog_torch_FIND_REQUIRED)
      message(FATAL_ERROR "${bluefog_torch_REASON}")
    endif()
  else()
    set(bluefog_torch_FOUND TRUE)
    _bluefog_torch_cuda_target()
    if(NOT bluefog_torch_FIND_QUIETLY)
      message(STATUS "Found libtorch ${bluefog_torch_VERSION}: ${BLUEFOG_TORCH_ROOT}")
    endif()
  endif()
endif()
