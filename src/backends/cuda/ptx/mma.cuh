// mma.cuh — warp-wide matrix multiply-accumulate. One wrapper an instruction.
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/ldmatrix.cuh"

namespace tandem::cuda::ptx {

/// d += a b: a [16 x 16] and b [16 x 8] are bf16, d is fp32. All 32 lanes call it.   PTX ISA 7.0,
/// sm_80. Fragments: lane (g = lane / 4, t = lane % 4) holds of a (g | g + 8, 2t .. 2t+1 | + 8), of
/// b (inputs 2t, 2t+1 | + 8; column g), of d (g, 2t), (g, 2t+1), (g + 8, 2t), (g + 8, 2t+1).
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const std::uint32_t (&a)[4],
                                                  const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// The product of two bf16 pairs, each rounded to nearest even; subnormals are kept.   PTX ISA 7.8,
/// sm_90.
__device__ __forceinline__ std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

/// The same with one half of `b` for both: an operand modifier of the multiplication, no
/// instruction of its own.
template <int kHalf>
__device__ __forceinline__ std::uint32_t mul_bf16x2_half(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  if constexpr (kHalf == 0) {
    asm("{ .reg .b16 lo, hi; .reg .b32 both; mov.b32 {lo, hi}, %2; mov.b32 both, {lo, lo};"
        "  mul.rn.bf16x2 %0, %1, both; }"
        : "=r"(d)
        : "r"(a), "r"(b));
  } else {
    asm("{ .reg .b16 lo, hi; .reg .b32 both; mov.b32 {lo, hi}, %2; mov.b32 both, {hi, hi};"
        "  mul.rn.bf16x2 %0, %1, both; }"
        : "=r"(d)
        : "r"(a), "r"(b));
  }
  return d;
}

/// Two fp32 rounded to bf16, nearest even: `low` in the lower half.   PTX ISA 7.0, sm_80.
__device__ __forceinline__ std::uint32_t cvt_bf16x2(float low, float high) {
  std::uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

}  // namespace tandem::cuda::ptx
