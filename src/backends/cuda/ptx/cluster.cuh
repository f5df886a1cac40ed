// cluster.cuh — CTAs that run together and reach each other's shared memory.   PTX ISA 7.8, sm_90.
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/bulk_copy.cuh"

namespace tandem::cuda::ptx {

/// barrier.cluster: all threads of all CTAs of the cluster call it. Shared memory that they wrote
/// before is visible after it.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;"
      :
      :
      : "memory");
}

/// mbarrier.arrive at the barrier that CTA `rank` has where this CTA has `barrier`.
__device__ __forceinline__ void mbarrier_arrive_at(std::uint64_t* barrier, unsigned rank) {
  asm volatile(
      "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
      "  mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }"
      :
      : "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

/// mbarrier_wait for arrivals from other CTAs.
__device__ __forceinline__ void mbarrier_wait_cluster(std::uint64_t* barrier, unsigned parity) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
        "  selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

}  // namespace tandem::cuda::ptx
