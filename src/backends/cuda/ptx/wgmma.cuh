// wgmma.cuh — matrix multiply-accumulate of a warpgroup with both operands in shared memory.
// PTX ISA 8.0, sm_90a alone. All 128 threads of four warps that start at a multiple of four call.
//
// Operands are boxes of 128-byte rows, 1024-byte aligned, whose 16-byte chunks are swizzled: chunk
// c of row r lies at chunk c ^ (r % 8). A is [64, 16], B [n, 16]; K-major: a row holds 64 elements
// of k, so that step s of 16 begins 32 s bytes on; rows are the operand's m or n. Transposed (A
// only): a row is one k, and holds 64 elements of m; step s begins 16 rows on. D is fp32, d[j][i]
// of lane (g = lane / 4, t = lane % 4) of warp w being row 16 w + g + i / 2 * 8, column 8 j + 2 t +
// i % 2.
//
// Order: wgmma_fence, products, wgmma_commit, wgmma_wait. Other code touches D, or the operands
// again, only after the wait; operands that threads wrote are fenced by them (async_proxy_fence)
// before a barrier.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/cuda/ptx/bulk_copy.cuh"

namespace tandem::cuda::ptx {

/// wgmma.fence: registers that other code wrote may be read and written by products.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}
/// wgmma.commit_group: the products since the last commit become one group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
}
/// wgmma.wait_group: waits until at most kPending of the newest groups are not complete.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}
/// Keeps the compiler from moving reads or writes of `d` across. No instruction.
template <int kBlocks>
__device__ __forceinline__ void keep_in_order(float (&d)[kBlocks][4]) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("" : "+f"(d[j][i]) : : "memory");
    }
  }
}

/// Asks for kRegisters a thread, more or fewer than the launch gave. All warps of a warpgroup.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

/// The descriptor of an operand that begins at a shared address. Groups of 8 rows are 1024 bytes
/// apart; an operand is no more than one box wide, so the other stride (given too) is not used.
__device__ __forceinline__ std::uint64_t wgmma_operand(std::uint32_t address) {
  constexpr std::uint64_t kStride = 1024 / 16;
  constexpr std::uint64_t kSwizzle128 = 1;
  return (address & 0x3FFFFU) / 16 | kStride << 16 | kStride << 32 | kSwizzle128 << 62;
}
/// The same operand `bytes` further on.
__device__ __forceinline__ std::uint64_t wgmma_advance(std::uint64_t operand, int bytes) {
  return operand + static_cast<std::uint64_t>(bytes / 16);
}

// d = a b, or d += a b if `accumulate`. The type of an element comes as a value of it.

template <int kTransposeA>
__device__ __forceinline__ void wgmma_k16(float (&d)[2][4], __nv_bfloat16 /*type*/, std::uint64_t a,
                                          std::uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %10, 0;"
      " wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, %8, %9, p, 1, 1, %11, 0; }"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3])
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA));
}

template <int kTransposeA>
__device__ __forceinline__ void wgmma_k16(float (&d)[2][4], __half /*type*/, std::uint64_t a,
                                          std::uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %10, 0;"
      " wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, %8, %9, p, 1, 1, %11, 0; }"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3])
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA));
}

template <int kTransposeA>
__device__ __forceinline__ void wgmma_k16(float (&d)[4][4], __nv_bfloat16 /*type*/, std::uint64_t a,
                                          std::uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %18, 0;"
      " wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, p, 1, 1, %19, 0; }"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA));
}

template <int kTransposeA>
__device__ __forceinline__ void wgmma_k16(float (&d)[4][4], __half /*type*/, std::uint64_t a,
                                          std::uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %18, 0;"
      " wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, p, 1, 1, %19, 0; }"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA));
}

template <int kTransposeA>
__device__ __forceinline__ void wgmma_k16(float (&d)[6][4], __nv_bfloat16 /*type*/, std::uint64_t a,
                                          std::uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %26, 0;"
      " wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23"
      "}, %24, %25, p, 1, 1, %27, 0; }"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA));
}

template <int kTransposeA>
__device__ __forceinline__ void wgmma_k16(float (&d)[6][4], __half /*type*/, std::uint64_t a,
                                          std::uint64_t b, int accumulate) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %26, 0;"
      " wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23"
      "}, %24, %25, p, 1, 1, %27, 0; }"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA));
}

}  // namespace tandem::cuda::ptx
