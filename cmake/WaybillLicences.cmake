# SPDX-License-Identifier: Apache-2.0
# The licence texts of the shared libraries that travel in a wheel, as the build machine's packages bring them.
# Set WAYBILL_LICENCE_DIR first: a folder with texts named NAME or NAME.*, or empty for those of the system.

# Sets `out` to the file with the licence of the shared library at `path`. An error where there is none: a wheel without it may not be passed on.
function(waybill_licence_of path out)
  file(REAL_PATH ${path} path)
  get_filename_component(file ${path} NAME)
  string(REGEX REPLACE "^lib(.+)[.]so.*$" "\\1" name ${file})
  cmake_path(GET path PARENT_PATH folder)
  set(candidates)
  if(WAYBILL_LICENCE_DIR)
    file(GLOB candidates ${WAYBILL_LICENCE_DIR}/${name} ${WAYBILL_LICENCE_DIR}/${name}.*)
  else()
    find_program(WAYBILL_DPKG_QUERY dpkg-query)
    if(WAYBILL_DPKG_QUERY)
      # A package made before /lib became a link to /usr/lib owns the path without /usr.
      string(REGEX REPLACE "^/usr" "" without_usr ${path})
      execute_process(COMMAND ${WAYBILL_DPKG_QUERY} -S ${path} ${without_usr} OUTPUT_VARIABLE owners ERROR_QUIET)
      if(owners MATCHES "^([^:, \n]+)")
        list(APPEND candidates /usr/share/doc/${CMAKE_MATCH_1}/copyright)
      endif()
    endif()
    # Installed from source, by Conda, vcpkg or other distributions: PREFIX/lib*/NAME.so, PREFIX/share.
    foreach(up .. ../..)
      foreach(kind licenses doc "")
        file(GLOB found ${folder}/${up}/share/${kind}/${name}/LICEN[CS]E* ${folder}/${up}/share/${kind}/${name}/COPYING*
          ${folder}/${up}/share/${kind}/${name}/copyright)
        list(APPEND candidates ${found})
      endforeach()
    endforeach()
  endif()
  foreach(candidate IN LISTS candidates)
    if(EXISTS ${candidate})
      file(REAL_PATH ${candidate} candidate)
      set(${out} ${candidate} PARENT_SCOPE)
      return()
    endif()
  endforeach()
  message(FATAL_ERROR "no licence text was found for ${path}, which a wheel bundles; give a folder with ${name}.txt in it: "
    "pip ... --config-settings=cmake.define.WAYBILL_LICENCE_DIR=FOLDER")
endfunction()
