# The CUDA backend: machine code for Hopper, and PTX that the driver compiles for newer GPUs.
if(NOT CMAKE_CUDA_COMPILER AND EXISTS /usr/local/cuda/bin/nvcc)
  set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
endif()
set(CMAKE_CUDA_ARCHITECTURES 90a-real 90-virtual)
if(TDM_CUDA_SM100)
  list(APPEND CMAKE_CUDA_ARCHITECTURES 100f-real)
endif()
enable_language(CUDA)
# CMake 3.25 does not know that nvcc speaks C++20.
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
if(TDM_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${TDM_CCACHE})
endif()
find_package(CUDAToolkit 13.0 REQUIRED)

# Warnings are errors in device code; contractions are written out (fmaf). 554: a conversion of a view of
# const elements to itself is declared and never called.
add_library(tdm_cuda_flags INTERFACE)
target_compile_options(tdm_cuda_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:--extended-lambda --expt-relaxed-constexpr -Werror=all-warnings -diag-suppress=554
    -fmad=false -Xcompiler=-Wall,-Wextra,-ffp-contract=off>)
