# SPDX-License-Identifier: Apache-2.0
# Options and compiler flags, in one place. The third-party packages are in WaybillDependencies.cmake.
option(WAYBILL_BUILD_TOOLS "Build the waybill command" ${PROJECT_IS_TOP_LEVEL})
option(WAYBILL_BUILD_TESTS "Build the tests" OFF)
option(WAYBILL_BUILD_BENCH "Build the Google Benchmark programs" OFF)
option(WAYBILL_PYTHON "Build what the Python package needs, and its tests" ${PROJECT_IS_TOP_LEVEL})
option(WAYBILL_FUZZ "Build the libFuzzer harnesses (clang)" OFF)
option(WAYBILL_DEV "Warnings are errors" OFF)
set(WAYBILL_CUDA "AUTO" CACHE STRING "CUDA kernels: ON, OFF or AUTO (on when nvcc is found)")
set(WAYBILL_SANITIZE "" CACHE STRING "Sanitizers for every target, for example address,undefined or thread")
set_property(CACHE WAYBILL_CUDA PROPERTY STRINGS AUTO ON OFF)

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

# -ffp-contract=off: the same source gives the same bits with every compiler flag set; kernels that want FMA say so.
add_library(waybill_flags INTERFACE)
target_compile_options(waybill_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off;-fno-math-errno;-Wall;-Wextra>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${WAYBILL_DEV}>>:-Werror;-Wshadow;-Wno-error=deprecated-declarations>)
if(WAYBILL_SANITIZE)
  target_compile_options(waybill_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${WAYBILL_SANITIZE};-fno-omit-frame-pointer;-g>)
  target_link_options(waybill_flags INTERFACE -fsanitize=${WAYBILL_SANITIZE})
endif()

find_program(WAYBILL_CCACHE ccache)
if(WAYBILL_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${WAYBILL_CCACHE})
endif()

include(WaybillDependencies)

set(WAYBILL_HAS_CUDA OFF)
if(NOT WAYBILL_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    include(WaybillCuda)
    set(WAYBILL_HAS_CUDA ON)
  elseif(WAYBILL_CUDA STREQUAL "ON")
    message(FATAL_ERROR "WAYBILL_CUDA=ON but no nvcc was found. Put nvcc on PATH, set CUDACXX, or use -DWAYBILL_CUDA=OFF.")
  endif()
endif()
