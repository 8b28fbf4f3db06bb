# SPDX-License-Identifier: Apache-2.0
# cmake --install: headers, libwaybill.so, the waybill command, configs, and a CMake package (find_package(waybill)).
include(CMakePackageConfigHelpers)

# The version stands in version.h, for C and C++ callers; the project must say the same.
file(READ ${PROJECT_SOURCE_DIR}/include/waybill/version.h version_header)
string(REGEX MATCH "WB_VERSION_STRING \"([0-9.]+)\"" _ "${version_header}")
if(NOT CMAKE_MATCH_1 STREQUAL PROJECT_VERSION)
  message(FATAL_ERROR "CMakeLists.txt says version ${PROJECT_VERSION}, include/waybill/version.h says ${CMAKE_MATCH_1}; make them equal.")
endif()

# Not installed: headers of what libwaybill.so does not hold (the MPI engine, the designs of the comparison).
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/waybill DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h"
  PATTERN mpi_fabric.h EXCLUDE PATTERN baselines.h EXCLUDE)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/configs DESTINATION ${CMAKE_INSTALL_DATADIR}/waybill FILES_MATCHING PATTERN "*.toml")
install(DIRECTORY ${PROJECT_SOURCE_DIR}/bench/shapes DESTINATION ${CMAKE_INSTALL_DATADIR}/waybill FILES_MATCHING PATTERN "*.toml")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(TARGETS waybill_shared EXPORT waybill_targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT waybill_targets NAMESPACE waybill:: FILE waybill-targets.cmake DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/waybill)

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/waybill-config.cmake.in ${PROJECT_BINARY_DIR}/waybill-config.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/waybill)
# Before 1.0 a minor release may change the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/waybill-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/waybill-config.cmake ${PROJECT_BINARY_DIR}/waybill-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/waybill)
