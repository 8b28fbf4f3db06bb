# SPDX-License-Identifier: Apache-2.0
# CUDA: compiler, code objects, and the two kinds of target. CPU-only builds never read this file.
# All kernels are built for sm_90a. WAYBILL_CUDA_PORTABLE adds sm_80 and sm_100a objects of all but the kernels on warpgroup matrix instructions
# (SM90 below), which the portable matmul replaces there, and for sm_80 of those that live on bulk copies (BULK). Neither was ever run by us: unverified.
option(WAYBILL_CUDA_PORTABLE "Also build sm_80 and sm_100a objects of portable code (not run)" OFF)
option(WAYBILL_CUDA_COMPILE_ONLY "Host code of GPU tests without optimisation, where they are compiled and not run" OFF)
option(WAYBILL_PORTABLE_BINARIES "Link what a bare GPU machine may lack (fmt, libstdc++) into the programs" OFF)

if(NOT CMAKE_CUDA_HOST_COMPILER)
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
# CMake 3.25 does not know nvcc 13's standards, so the flag is given by hand (waybill_cuda_flags) and feature checks are told so.
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_EXTENSIONS OFF)
list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

set(WAYBILL_CUDA_GENCODE -gencode=arch=compute_90a,code=sm_90a)
set(WAYBILL_CUDA_SM80_GENCODE -gencode=arch=compute_80,code=sm_80)
set(WAYBILL_CUDA_SM100_GENCODE -gencode=arch=compute_100a,code=sm_100a)

# The launcher runs nvcc and fails on spills and on the warnings that mean serialised wgmma or ignored setmaxnreg (C7508, C7510).
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(CMAKE_CUDA_COMPILER_LAUNCHER ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/check_ptxas.py)

# fmad=false: the same rule as -ffp-contract=off on the host, so that host and device give the same bits; kernels write fmaf.
add_library(waybill_cuda_flags INTERFACE)
target_compile_options(waybill_cuda_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:${WAYBILL_CUDA_GENCODE};-fmad=false;-lineinfo;-Xptxas=-v;--expt-relaxed-constexpr;--extended-lambda;-Xcompiler=-ffp-contract=off>)

if(WAYBILL_PORTABLE_BINARIES)
  set_target_properties(fmt::fmt PROPERTIES INTERFACE_COMPILE_DEFINITIONS FMT_HEADER_ONLY=1)
  add_link_options(-static-libstdc++ -static-libgcc -Wl,--as-needed)
endif()

# waybill_add_cuda_folder(<name> SOURCES ... [SM90 <source> ...] [BULK <source> ...] LINK <target> ...): the static library waybill_<name>_cuda. SM90:
# sources of kernels that only sm_90a can run; BULK: sm_90 and up.
function(waybill_add_cuda_folder name)
  cmake_parse_arguments(ARG "" "" "SOURCES;SM90;BULK;LINK" ${ARGN})
  add_library(waybill_${name}_cuda STATIC ${ARG_SOURCES} ${ARG_SM90} ${ARG_BULK})
  if(WAYBILL_CUDA_PORTABLE)
    set(portable ${ARG_SOURCES})
    list(FILTER portable INCLUDE REGEX "\\.cu$")
    foreach(source IN LISTS portable)
      set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${WAYBILL_CUDA_SM80_GENCODE} ${WAYBILL_CUDA_SM100_GENCODE})
    endforeach()
    foreach(source IN LISTS ARG_BULK)
      set_property(SOURCE ${source} APPEND PROPERTY COMPILE_OPTIONS ${WAYBILL_CUDA_SM100_GENCODE})
    endforeach()
  endif()
  add_library(waybill::${name}_cuda ALIAS waybill_${name}_cuda)
  target_include_directories(waybill_${name}_cuda PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(waybill_${name}_cuda PUBLIC ${ARG_LINK} CUDA::cudart_static PRIVATE $<BUILD_INTERFACE:waybill_flags>
    $<BUILD_INTERFACE:waybill_cuda_flags>)
endfunction()

# waybill_add_cuda_test(<name> SOURCES ... LINK ...): a GoogleTest program for a machine with a GPU (label gpu; skips without one).
function(waybill_add_cuda_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE $<BUILD_INTERFACE:waybill_flags> $<BUILD_INTERFACE:waybill_cuda_flags> ${ARG_LINK} GTest::gtest GTest::gmock)
  if(WAYBILL_CUDA_COMPILE_ONLY) # nobody runs them: half of the compiler's time
    target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
  endif()
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/gpu_bin)
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 600 LABELS gpu)
endfunction()
