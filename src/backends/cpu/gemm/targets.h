// targets.h — which SIMD targets the matrix kernels are compiled for. Include before Highway.
// AVX-512 (AVX3) and AVX2 on x86, NEON on Arm, and the scalar fallback; SSE has no fused
// multiply-add and SVE's vectors cannot stand in arrays.
#pragma once

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS \
  (HWY_SSE4 | HWY_SSSE3 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
