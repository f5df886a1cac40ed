// cp_async.cuh — asynchronous copies from global to shared memory.   PTX ISA 7.0, sm_80.
// A copy is visible to the thread that issued it after its wait, to others after a barrier as well.
#pragma once

#include <cstdint>

namespace tandem::cuda::ptx {

/// cp.async.ca, 4 bytes, both addresses 4-byte aligned. Any thread, alone.
__device__ __forceinline__ void cp_async_4(void* to_shared, const void* from_global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
               :
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(to_shared))),
                 "l"(__cvta_generic_to_global(from_global))
               : "memory");
}

/// cp.async.cg, 16 bytes, both addresses 16-byte aligned: the first `bytes` of them from
/// `from_global`, zeros after. Any thread, alone.
__device__ __forceinline__ void cp_async_16(void* to_shared, const void* from_global,
                                            int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(to_shared))),
                 "l"(__cvta_generic_to_global(from_global)), "r"(bytes)
               : "memory");
}

/// cp.async.commit_group: this thread's copies since its last commit become one group.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}

/// cp.async.wait_group: waits until at most kPending of this thread's newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

}  // namespace tandem::cuda::ptx
