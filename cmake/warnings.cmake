# Warnings are errors everywhere; one interface target carries the flags.
add_library(tdm_warnings INTERFACE)
target_compile_options(tdm_warnings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:
  -Wall -Wextra -Wpedantic -Werror -Wshadow -Wconversion -Wsign-conversion -Wold-style-cast
  -Wnon-virtual-dtor -Woverloaded-virtual -Wimplicit-fallthrough
  -fno-math-errno -ffp-contract=off>)  # contractions are spelled out (MulAdd, std::fma), never left to the compiler
