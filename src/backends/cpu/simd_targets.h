// simd_targets.h — which instruction sets Highway compiles for. Include before any hwy header. On
// x86: AVX-512 (AVX3), AVX2 and the SSE2 baseline; the steps between would double compile time for
// machines nobody serves a model on.
#pragma once

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)
#endif
