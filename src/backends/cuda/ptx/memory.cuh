// memory.cuh — loads and prefetches of weights that are read once. One wrapper an instruction.
#pragma once

#include <cstdint>

namespace tandem::cuda::ptx {

// Loads of what no kernel in flight writes, and that leave the L1 cache to the activations.
// Volatile: they stay in program order, before the instructions that use them.   PTX ISA 7.4,
// sm_70.
__device__ __forceinline__ uint4 load_streaming_16(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
__device__ __forceinline__ uint2 load_streaming_8(const void* from) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(from));
  return v;
}
__device__ __forceinline__ std::uint32_t load_streaming_4(const void* from) {
  std::uint32_t v;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

/// Asks for bytes to be brought into the L2 cache; address and count are multiples of 16. A hint:
/// nothing is read, so it may come while another kernel writes them.   PTX ISA 8.0, sm_90.
__device__ __forceinline__ void prefetch_to_l2(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" : : "l"(from), "r"(bytes));
}

/// `pointer`, of which the compiler no longer knows how it came about. No instruction.
template <typename T>
__device__ __forceinline__ T* opaque(T* pointer) {
  asm("" : "+l"(pointer));
  return pointer;
}

}  // namespace tandem::cuda::ptx
