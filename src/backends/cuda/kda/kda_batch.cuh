// kda_batch.cuh — what the forward and backward kernels of the KDA recurrence share.
#pragma once

#include <cstdint>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/reduce.cuh"
#include "ops/kda.h"

namespace tandem::cuda {

/// Element (t, h) of a matrix is *row(t, h).
template <typename T>
[[nodiscard]] Cube<T> device_elements(const TensorView<T, 2>& view) {
  return {view.data(), view.stride(0), view.stride(1)};
}

/// Checkpoints of the sequences before `seq`. All lanes of a warp must call; each gets the count.
__device__ __forceinline__ std::int64_t first_checkpoint(const std::int32_t* cu_seqlens, int seq) {
  constexpr int kRows = static_cast<int>(kKdaCheckpointRows);
  int count = 0;
  for (int b = static_cast<int>(threadIdx.x) % kWarp; b < seq; b += kWarp) {
    count += (cu_seqlens[b + 1] - cu_seqlens[b] + kRows - 1) / kRows;
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    count += __shfl_xor_sync(kFullWarp, count, offset);
  }
  return count;
}

void kda_recurrent_bwd(const ExecCtx& ctx, const KdaGrads& grads, ConstF32Cube d_o,
                       const KdaInputs& in, const SeqBatch& seqs, const float* checkpoints);

}  // namespace tandem::cuda
