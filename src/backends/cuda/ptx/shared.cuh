// shared.cuh — reads of shared memory by its 32-bit address: one addition instead of the three
// instructions that make a generic pointer. Volatile: they stay in program order.   PTX ISA 1.0.
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/bulk_copy.cuh"

namespace tandem::cuda::ptx {

__device__ __forceinline__ float load_shared_4(std::uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}
/// `address` is a multiple of 8.
__device__ __forceinline__ float2 load_shared_8(std::uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}
/// `address` is a multiple of 16.
__device__ __forceinline__ float4 load_shared_16(std::uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(address));
  return x;
}

}  // namespace tandem::cuda::ptx
