// bulk_copy.cuh — copies by the bulk copy engine and the barriers they complete.   PTX ISA 8.0,
// sm_90. Any thread, alone. Shared memory that was read before must be ordered before the copy by a
// barrier among its readers (__syncwarp is one).
#pragma once

#include <cstdint>

namespace tandem::cuda::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

/// mbarrier.init. For other threads: after a barrier.
__device__ __forceinline__ void mbarrier_init(std::uint64_t* barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}
/// fence.mbarrier_init: barriers that this thread has set up exist for the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" : : : "memory");
}

/// mbarrier.arrive.expect_tx: one arrival, and `bytes` that copies will bring in this phase.
__device__ __forceinline__ void mbarrier_expect(std::uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

/// mbarrier.arrive: one arrival. What the thread wrote before is visible to those who wait.
__device__ __forceinline__ void mbarrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :
               : "r"(shared_address(barrier))
               : "memory");
}

/// fence.proxy.async: this thread's ordinary accesses to shared memory come before later copies and
/// products of a warpgroup.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}

/// Waits for the end of the phase of this parity: 0 for the first one, then 1, 0, ...
__device__ __forceinline__ void mbarrier_wait(std::uint64_t* barrier, unsigned parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

/// cp.async.bulk: addresses and `bytes` are multiples of 16; counts as `bytes` of the barrier's
/// phase.
__device__ __forceinline__ void bulk_copy(void* to_shared, const void* from_global, unsigned bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared_address(to_shared)), "l"(__cvta_generic_to_global(from_global)), "r"(bytes),
        "r"(shared_address(barrier))
      : "memory");
}

}  // namespace tandem::cuda::ptx
