// tensor_copy.cuh — boxes of a tensor, copied by the bulk copy engine.   PTX ISA 8.0, sm_90.
// Any thread, alone. The map lies in a kernel's __grid_constant__ argument, aligned to 64 bytes;
// what completes counts as the box's bytes of the barrier's phase.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "backends/cuda/ptx/bulk_copy.cuh"

namespace tandem::cuda::ptx {

/// createpolicy: what is copied stays in the L2 cache as usual, or is the first to leave it.
__device__ __forceinline__ std::uint64_t keep_in_l2() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ std::uint64_t leave_l2_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}

/// cp.async.bulk.tensor.2d: the box at element `column` of row `row`.
__device__ __forceinline__ void tensor_copy_2d(void* to_shared, const CUtensorMap& map, int column,
                                               int row, std::uint64_t* barrier,
                                               std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
      :
      : "r"(shared_address(to_shared)), "l"(&map), "r"(column), "r"(row),
        "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

/// The same into each CTA of `ctas` (a mask of ranks in the cluster), there at the same place and
/// for the barrier at the same place.
__device__ __forceinline__ void tensor_copy_2d_multicast(void* to_shared, const CUtensorMap& map,
                                                         int column, int row,
                                                         std::uint64_t* barrier,
                                                         std::uint64_t policy, std::uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;"
      :
      : "r"(shared_address(to_shared)), "l"(&map), "r"(column), "r"(row),
        "r"(shared_address(barrier)), "h"(ctas), "l"(policy)
      : "memory");
}

}  // namespace tandem::cuda::ptx
