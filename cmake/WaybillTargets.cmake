# SPDX-License-Identifier: Apache-2.0
# waybill_add_folder(<name> SOURCES ... LINK <folder> ...)
# The static library waybill_<name> of one src folder. LINK names earlier folders (scripts/check_layers.py checks includes).
function(waybill_add_folder name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK;PRIVATE_LINK" ${ARGN})
  if(ARG_SOURCES)
    add_library(waybill_${name} STATIC ${ARG_SOURCES})
    set(scope PUBLIC)
    target_link_libraries(waybill_${name} PRIVATE $<BUILD_INTERFACE:waybill_flags> ${ARG_PRIVATE_LINK})
  else()
    add_library(waybill_${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(waybill::${name} ALIAS waybill_${name})
  target_include_directories(waybill_${name} ${scope}
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/src>
    $<INSTALL_INTERFACE:include>)
  target_compile_features(waybill_${name} ${scope} cxx_std_20)
  foreach(dependency IN LISTS ARG_LINK)
    target_link_libraries(waybill_${name} ${scope} waybill_${dependency})
  endforeach()
  set_property(GLOBAL APPEND PROPERTY WAYBILL_FOLDERS waybill_${name})
endfunction()

# Tests are compiled more often than they are run, so they get -O1 (-O0 with sanitizers, where -O1 takes five times as long); the code
# under test keeps its own level. At -O1 GCC 12 sees overruns in the concatenation of strings that are none.
set(WAYBILL_TEST_OPTIONS "$<$<CONFIG:Release>:-O1>" "$<$<CONFIG:RelWithDebInfo>:-O0>" "$<$<CXX_COMPILER_ID:GNU>:-Wno-array-bounds>"
  "$<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overflow>")

# The headers that nearly every test includes are compiled once: they are a third of a test's compile time.
function(waybill_reuse_test_headers name)
  if(NOT TARGET waybill_test_headers)
    # A program like the tests, because a precompiled header only fits code that is compiled with the same options (-fPIE).
    file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/test_headers.cc CONTENT "int main() {}\n")
    add_executable(waybill_test_headers ${PROJECT_BINARY_DIR}/test_headers.cc)
    target_link_libraries(waybill_test_headers PRIVATE $<BUILD_INTERFACE:waybill_flags> fmt::fmt GTest::gtest_main GTest::gmock)
    target_compile_features(waybill_test_headers PRIVATE cxx_std_20)
    target_compile_options(waybill_test_headers PRIVATE ${WAYBILL_TEST_OPTIONS})
    target_precompile_headers(waybill_test_headers PRIVATE <gtest/gtest.h> <gmock/gmock.h> <fmt/format.h> <chrono> <filesystem> <fstream> <functional>
      <map> <memory> <mutex> <random> <set> <span> <sstream> <string> <thread> <vector>)
  endif()
  target_compile_options(${name} PRIVATE ${WAYBILL_TEST_OPTIONS})
  target_precompile_headers(${name} REUSE_FROM waybill_test_headers)
endfunction()

# waybill_add_test(<name> SOURCES ... LINK ... [LABELS ...] [TIMEOUT seconds])
# One GoogleTest program; every test case is a ctest entry.
function(waybill_add_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;LINK;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE $<BUILD_INTERFACE:waybill_flags> ${ARG_LINK} GTest::gtest_main GTest::gmock rapidcheck)
  waybill_reuse_test_headers(${name})
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
endfunction()
