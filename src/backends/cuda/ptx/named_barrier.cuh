// named_barrier.cuh — barriers among some warps of a block.   PTX ISA 6.0, sm_70 (.aligned forms).
// Number 0 is __syncthreads. Whole warps call; `threads` counts the threads that sync and arrive.
// Shared memory written before an arrive or a sync is visible after the sync that it completes.
#pragma once

namespace tandem::cuda::ptx {

/// barrier.cta.sync: waits for the others.
__device__ __forceinline__ void named_barrier_sync(int number, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" : : "r"(number), "r"(threads) : "memory");
}

/// barrier.cta.arrive: counts as there, goes on.
__device__ __forceinline__ void named_barrier_arrive(int number, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" : : "r"(number), "r"(threads) : "memory");
}

}  // namespace tandem::cuda::ptx
