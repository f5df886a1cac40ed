// group_kernels.cuh — several independent linear layers on the decode path.
// Contract  gemm/tensor.h
// Oracle    linear_kernels.cuh, bit for bit
// Traffic   every weight byte once; memory bound.
// Launch    grid (groups of row blocks of all layers, one layer behind the other, times cluster);
//           one plan for all of them. Graph-safe.
// Numerics  stream_layer.cuh; no plan changes a bit.
#pragma once

#include "backends/cuda/gemm/group_launch.cuh"
#include "backends/cuda/gemm/stream_layer.cuh"
#include "backends/cuda/situ.cuh"

namespace tandem::cuda {

template <WeightFormat F, bool kWhole>
__global__ void __launch_bounds__(kStreamThreads, kStreamCtas)
    stream_linear_group(const __grid_constant__ LinearGroupArgs p) {
  const StreamPlan& plan = p.plan;
  const int group = static_cast<int>(blockIdx.x) >> (31 - __clz(plan.cluster));
  int at = 0;  // the same in all CTAs of a cluster
  while (at + 1 < p.count && group >= p.layers[at + 1].first_group) {
    ++at;
  }
  const GroupLayer& layer = p.layers[at];
  const int blocks = plan.row_warps * stream_blocks(F) / (layer.up != nullptr ? 2 : 1);
  const int token = min(static_cast<int>(threadIdx.x) % 32 / 4, layer.tokens - 1);
  stream_layer<F, kWhole>({layer.weight, layer.x.row(token), layer.shape},
                          {(group - layer.first_group) * blocks, layer.tokens, layer.up}, plan,
                          [&](int to, int output, float value, float up) {
                            if (output < layer.shape.out) {
                              layer.y.row(to)[output] =
                                  layer.up != nullptr ? situ_value(value, up, layer.act) : value;
                            }
                          });
}

template <WeightFormat F>
void launch_linear_group(const ExecCtx& ctx, const LinearConfig& config,
                         const LinearGroupArgs& args) {
  const Launch how{.grid = dim3(static_cast<unsigned>(config.grid_x)),
                   .block = config.threads,
                   .smem_bytes = config.smem_bytes,
                   .cluster = config.plan.cluster};
  launch(ctx, "linear_group",
         args.whole ? stream_linear_group<F, true> : stream_linear_group<F, false>, how, args);
}

}  // namespace tandem::cuda
