// tensor_copy.cuh — boxes of a tensor, copied by the bulk copy engine.   PTX ISA 8.0, sm_90.
// Any thread, alone. The map lies in a kernel's __grid_constant__ argument, aligned to 64 bytes;
// what completes counts as the box's bytes of the barrier's phase.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "backends/cuda/ptx/bulk_copy.cuh"

namespace tandem::cuda::ptx {

/// cp.async.bulk.tensor.2d: the box at element `column` of row `row`.
__device__ __forceinline__ void tensor_copy_2d(void* to_shared, const CUtensorMap& map, int column,
                                               int row, std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];"
      :
      : "r"(shared_address(to_shared)), "l"(&map), "r"(column), "r"(row),
        "r"(shared_address(barrier))
      : "memory");
}

/// The same into each CTA of `ctas` (a mask of ranks in the cluster), there at the same place and
/// for the barrier at the same place.
__device__ __forceinline__ void tensor_copy_2d_multicast(void* to_shared, const CUtensorMap& map,
                                                         int column, int row,
                                                         std::uint64_t* barrier,
                                                         std::uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
      :
      : "r"(shared_address(to_shared)), "l"(&map), "r"(column), "r"(row),
        "r"(shared_address(barrier)), "h"(ctas)
      : "memory");
}

}  // namespace tandem::cuda::ptx
