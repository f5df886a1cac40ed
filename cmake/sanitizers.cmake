add_library(tdm_sanitizers INTERFACE)
if(TDM_SANITIZE)
  target_compile_options(tdm_sanitizers INTERFACE
    -fsanitize=${TDM_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(tdm_sanitizers INTERFACE -fsanitize=${TDM_SANITIZE})
endif()
# Kernels are the slowest to compile under a sanitizer, once for each instruction set: AVX-512 and the
# portable fallback have the widest and the narrowest tails, so the one between is left out.
if(TDM_SANITIZE AND NOT TDM_FUZZ)
  target_compile_definitions(tdm_sanitizers INTERFACE
    "HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4|HWY_AVX2)")
endif()
if(TDM_FUZZ)
  # Coverage of the layers guides the fuzzer; libFuzzer's main() is linked into the fuzzers only.
  target_compile_options(tdm_sanitizers INTERFACE -fsanitize=fuzzer-no-link)
endif()
