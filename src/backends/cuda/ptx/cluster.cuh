// cluster.cuh — the barrier of a cluster's CTAs, stores to each other's shared memory and arrivals.
// PTX ISA 7.8, sm_90. Whole warps call (.aligned forms). Between two arrivals a thread waits; one
// that only others wait for may end after its arrival.
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/bulk_copy.cuh"

namespace tandem::cuda::ptx {

/// barrier.cluster.arrive.release: what this thread has written is visible after the waits.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}

/// barrier.cluster.wait.acquire: until every thread of the cluster has arrived or ended.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

/// mapa, st.shared::cluster: to where `shared` lies in CTA `rank` of the cluster, which must have
/// started and must not end before an arrival of this thread has been waited for. Any thread,
/// alone.
__device__ __forceinline__ void store_to_rank(float* shared, unsigned rank, float value) {
  asm volatile(
      "{ .reg .u32 place; mapa.shared::cluster.u32 place, %0, %1;"
      "  st.shared::cluster.f32 [place], %2; }"
      :
      : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(shared))), "r"(rank), "f"(value)
      : "memory");
}

/// mapa, mbarrier.arrive.release.cluster: at the barrier that CTA `rank` has where this CTA has
/// `barrier`, under the same conditions. Any thread, alone.
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
