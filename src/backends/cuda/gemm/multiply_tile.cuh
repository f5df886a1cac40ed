// multiply_tile.cuh — what all kernels of the decode path do with a tile once it is in registers.
#pragma once

#include "backends/cuda/gemm/dequant.cuh"
#include "backends/cuda/ptx/mma.cuh"

namespace tandem::cuda {

/// acc += the product with tile i of those that a lane has in registers; `b`: its steps' B
/// fragments.
template <WeightFormat F, int kBlocks>
__device__ __forceinline__ void multiply_tile(float (&acc)[kBlocks][4],
                                              const RawTile<F> (&raw)[kBlocks],
                                              const TileScales (&scales)[kBlocks], int i,
                                              const std::uint32_t (&b)[kStepsPerTile][2]) {
  TileScales of_tile[kBlocks];
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    of_tile[m] = scales_of_tile<F>(scales[m], i);
  }
  each_step([&](auto step) {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      std::uint32_t a[4];
      a_fragment<F, step.value>(a, raw[m], of_tile[m]);
      ptx::mma_m16n8k16_bf16(acc[m], a, b[step.value]);
    }
  });
}

}  // namespace tandem::cuda
