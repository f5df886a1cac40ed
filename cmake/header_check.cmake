# Every header under src/ must compile alone, and twice: one generated translation unit each, built
# with the tests. *-inl.h are parts of a translation unit by design (one inclusion for each SIMD target).
file(GLOB_RECURSE TDM_HEADERS CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/src
     ${PROJECT_SOURCE_DIR}/src/*.h)
list(FILTER TDM_HEADERS EXCLUDE REGEX "-inl\\.h$")
list(FILTER TDM_HEADERS EXCLUDE REGEX "^backends/cuda/")  # nvcc's, and this build may have no CUDA
set(TDM_HEADER_UNITS)
foreach(HEADER ${TDM_HEADERS})
  set(UNIT ${PROJECT_BINARY_DIR}/header_check/${HEADER}.cpp)
  file(CONFIGURE OUTPUT ${UNIT} CONTENT "#include \"${HEADER}\"\n\n#include \"${HEADER}\"\n")
  list(APPEND TDM_HEADER_UNITS ${UNIT})
endforeach()
add_library(header_check OBJECT ${TDM_HEADER_UNITS})
target_include_directories(header_check PRIVATE ${PROJECT_SOURCE_DIR}/src)
target_compile_options(header_check PRIVATE -O0)  # only the diagnostics matter
target_link_libraries(header_check PRIVATE tdm_warnings fmt::fmt)
