// stream_layer.cuh — a CTA's (or cluster's) part of one layer on the decode path, from its segments
// to finished sums; the kernel's beginning is in here. Shared by single layers and groups of them.
// Schedule, Sum, Numerics: stream.cuh
#pragma once

#include "backends/cuda/gemm/stream.cuh"
#include "backends/cuda/launch.cuh"

namespace tandem::cuda {

/// What a CTA streams: row blocks from first_block on, for `tokens` rows of inputs.
struct StreamWork {
  const std::uint8_t* weight;
  int first_block;
  std::int64_t tokens;
};

/// store(token, output, sum) of every output of the CTA's cluster; `x`: the row of the calling
/// lane's token, lane / 4.
template <WeightFormat F, bool kWhole, typename Store>
__device__ __forceinline__ void stream_layer(const StreamWork& work, const TensorShape& shape,
                                             const StreamPlan& plan, const float* x,
                                             const Store& store) {
  constexpr int kBlocks = stream_blocks(F);
  constexpr int kLoad = F == WeightFormat::kFp8Block ? 2 : 4;
  auto* partial = dynamic_smem<float4>();
  const int rank = static_cast<int>(blockIdx.x) % plan.cluster;
  const int row_warp = static_cast<int>(threadIdx.x) / 32 / plan.k_warps;
  const int lane = static_cast<int>(threadIdx.x) % 32;

  TileRow rows[kBlocks];
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    rows[m] = tile_row<F>(work.weight, shape, work.first_block + row_warp * kBlocks + m);
  }
  prefetch_segments<F>(rows, shape, plan);
  begin_kernel();
  const F32Inputs<kWhole> inputs(x, shape.in, lane);
  stream_segments<F, kBlocks, kLoad>(partial + row_warp * kBlocks * plan.slots * 32, rows, inputs,
                                     shape, plan);
  const float factor = sum_factor<F>(work.weight + shape.scale_2_offset);
  cluster_barrier(plan.cluster);  // every segment's sum is there

  // The CTAs of a cluster finish a part of the outputs each.
  const int elements = plan.row_warps * kBlocks * kBlockElements;
  const int share = (elements + plan.cluster - 1) / plan.cluster;
  const int end = min(elements, (rank + 1) * share);
  for (int i = rank * share + static_cast<int>(threadIdx.x); i < end;
       i += static_cast<int>(blockDim.x)) {
    const int block = i / kBlockElements;
    const BlockElement e = block_element(i % kBlockElements);
    if (e.token < work.tokens) {
      const float total = sum_segments(reinterpret_cast<const float*>(partial), block,
                                       i % kBlockElements, shape, plan);
      store(e.token, std::int64_t{16} * (work.first_block + block) + e.output, total * factor);
    }
  }
  if (plan.cluster > 1) {
    cluster_barrier(plan.cluster);  // nobody reads this CTA's sums any more
  }
}

}  // namespace tandem::cuda
