// cluster.cuh — the barrier of a cluster's CTAs, and stores to each other's shared memory.
// PTX ISA 7.8, sm_90. Whole warps call (.aligned forms). Between two arrivals a thread waits; one
// that only others wait for may end after its arrival.
#pragma once

#include <cstdint>

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

}  // namespace tandem::cuda::ptx
