// cluster.cuh — the barrier of a cluster's CTAs, stores to each other's shared memory and arrivals.
// PTX ISA 8.1, sm_90. Whole warps call (.aligned forms). Between two arrivals a thread waits; one
// that only others wait for may end after its arrival.
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/bulk_copy.cuh"

namespace tandem::cuda::ptx {

/// barrier.cluster.arrive.relaxed: orders no memory, so that it waits for none. Whole warps call;
/// between two arrivals a thread waits.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" : : : "memory");
}

/// barrier.cluster.arrive.release: what this thread has written is visible after the waits.
__device__ __forceinline__ void cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" : : : "memory");
}

/// barrier.cluster.wait.acquire: until every thread of the cluster has arrived. Whole warps call.
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" : : : "memory");
}

/// st.async: `value` to where `shared` lies in CTA `rank` of the cluster; it counts as 4 bytes of
/// the phase of that CTA's `barrier`, and whoever waits for the phase sees it. The CTA must have
/// started, set up the barrier, and not have ended. Any thread, alone.
__device__ __forceinline__ void store_to_rank(float* shared, std::uint64_t* barrier, unsigned rank,
                                              float value) {
  asm volatile(
      "{ .reg .u32 place, barrier; mapa.shared::cluster.u32 place, %0, %2;"
      "  mapa.shared::cluster.u32 barrier, %1, %2;"
      "  st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [place], %3, [barrier]; }"
      :
      : "r"(shared_address(shared)), "r"(shared_address(barrier)), "r"(rank),
        "r"(__float_as_uint(value))
      : "memory");
}

/// st.shared::cluster: the same without a barrier of its own; visible after the waits that follow
/// cluster_arrive_release().
__device__ __forceinline__ void store_to_rank(float* shared, unsigned rank, float value) {
  asm volatile(
      "{ .reg .u32 place; mapa.shared::cluster.u32 place, %0, %1;"
      "  st.shared::cluster.f32 [place], %2; }"
      :
      : "r"(shared_address(shared)), "r"(rank), "f"(value)
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
