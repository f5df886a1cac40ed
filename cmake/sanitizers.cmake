add_library(tdm_sanitizers INTERFACE)
if(TDM_SANITIZE)
  target_compile_options(tdm_sanitizers INTERFACE
    -fsanitize=${TDM_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_link_options(tdm_sanitizers INTERFACE -fsanitize=${TDM_SANITIZE})
endif()
if(TDM_FUZZ)
  # Coverage of the layers guides the fuzzer; libFuzzer's main() is linked into the fuzzers only.
  target_compile_options(tdm_sanitizers INTERFACE -fsanitize=fuzzer-no-link)
endif()
