// mma.cuh — matrix products of a warp on registers.   PTX ISA 7.0, sm_80. All 32 lanes must call.
#pragma once

#include <cstdint>

namespace tandem::cuda::ptx {

/// mma.m16n8k16 of bf16 with fp32 sums: d += a b. With g = lane / 4 and t = lane % 4,
///   a (16 x 16): a[0] row g, a[1] row g + 8 of columns 2t, 2t+1; a[2], a[3] of columns 2t+8, 2t+9
///   b (16 x 8):  b[0] rows 2t, 2t+1, b[1] rows 2t+8, 2t+9 of column g
///   d (16 x 8):  d[0], d[1] row g, d[2], d[3] row g + 8, columns 2t, 2t+1
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const std::uint32_t (&a)[4],
                                                  const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace tandem::cuda::ptx
