// linear_kernels.cuh — linear layers on the tensor cores.   Contract: gemm/tensor.h   Oracle:
// ops/ref/gemm_ref.h on activations rounded to bf16, to fp32 accuracy.
// Traffic   up to 8 rows: every weight byte once; memory bound.   More: tiles of outputs x tokens,
//           weights once a tile of tokens.
// Launch    stream: grid (row blocks * cluster, heads); tile: grid (tiles of tokens * cluster,
// tiles of
//           outputs, heads). Graph-safe.
// Numerics  gemm/layout.h's segments; NVFP4 times scale_2 and, when accumulating, + y at the end.
#pragma once

#include "backends/cuda/gemm/linear_launch.cuh"
#include "backends/cuda/gemm/stream_layer.cuh"
#include "backends/cuda/gemm/tile.cuh"
#include "backends/cuda/launch.cuh"

namespace tandem::cuda {

/// Output `row` of a token and head.
__device__ __forceinline__ void store_output(const TensorLinearArgs& p, std::int64_t token,
                                             int head, std::int64_t row, float value) {
  if (token < p.tokens && row < p.shape.out) {
    float* y = p.y.row(token, head) + row;
    *y = p.accumulate ? *y + value : value;
  }
}

template <WeightFormat F, bool kWhole>
__global__ void __launch_bounds__(kStreamThreads, kStreamCtas)
    stream_linear(const __grid_constant__ TensorLinearArgs p) {
  const int head = static_cast<int>(blockIdx.y);
  const int group = static_cast<int>(blockIdx.x) >> (31 - __clz(p.plan.cluster));
  const int tokens = static_cast<int>(p.tokens);
  const int token = min(static_cast<int>(threadIdx.x) % 32 / 4, tokens - 1);
  stream_layer<F, kWhole>(
      {p.weights[head], p.x.row(token, head), p.shape},
      {group * p.plan.row_warps * stream_blocks(F), tokens}, p.plan,
      [&](int to, int output, float value, float) { store_output(p, to, head, output, value); });
}

template <WeightFormat F, bool kWhole, int kTerms>
__global__ void __launch_bounds__(kStreamThreads, kStreamCtas)
    stream_linear_sum(const __grid_constant__ LinearSumArgs p) {
  const int group = static_cast<int>(blockIdx.x) >> (31 - __clz(p.plan.cluster));
  const int token = min(static_cast<int>(threadIdx.x) % 32 / 4, p.tokens - 1);
  const StreamWork work{group * p.plan.row_warps * stream_blocks(F), p.tokens};
  const StreamTerm one{p.weights[0], p.x[0].row(token), p.shapes[0]};
  const auto store = [&](int to, int output, float value, float more) {
    if (output < p.shapes[0].out) {
      const float first = p.base.data != nullptr ? p.base.row(to)[output] + value : value;
      p.y.row(to)[output] = kTerms == 2 ? first + more : first;
    }
  };
  if constexpr (kTerms == 2) {
    stream_two<F, kWhole>(one, {p.weights[1], p.x[1].row(token), p.shapes[1]}, work, p.plan, store);
  } else {
    stream_layer<F, kWhole>(one, work, p.plan, store);
  }
}

/// A tile's sums from all CTAs of its cluster: of each thread's quadruples of accumulators a CTA
/// finishes every cluster-th.
template <TileVariant V, typename Store>
__device__ __forceinline__ void finish_shared_tile(const float4* partial, const TensorLinearArgs& p,
                                                   const Store& store) {
  constexpr int kQuads = V.blocks * V.columns;
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();  // every segment's sum is there
  for (int quad = static_cast<int>(blockIdx.x) % p.cluster; quad < kQuads; quad += p.cluster) {
    float4 total = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    for (int rank = 0; rank < p.cluster; ++rank) {
      const float4* from =
          cluster.map_shared_rank(partial, rank) + quad * V.threads() + threadIdx.x;
      const int count =
          split(p.shape.segments, rank + 1, p.cluster) - split(p.shape.segments, rank, p.cluster);
      for (int slot = 0; slot < count; ++slot) {
        const float4 sum = from[slot * kQuads * V.threads()];
        total = make_float4(total.x + sum.x, total.y + sum.y, total.z + sum.z, total.w + sum.w);
      }
    }
    const int m = quad / V.columns;
    const int n = quad % V.columns;
    store(tile_element<V>(m, n, 0), total.x);
    store(tile_element<V>(m, n, 1), total.y);
    store(tile_element<V>(m, n, 2), total.z);
    store(tile_element<V>(m, n, 3), total.w);
  }
  cluster.sync();  // nobody reads this CTA's sums any more
}

template <WeightFormat F, int kVariant>
__global__ void __launch_bounds__(kLinearTiles[kVariant].threads(), kLinearTiles[kVariant].ctas)
    tile_linear(const __grid_constant__ TensorLinearArgs p) {
  begin_kernel();
  constexpr TileVariant V = kLinearTiles[kVariant];
  auto* smem = dynamic_smem<std::uint8_t>();
  const int head = static_cast<int>(blockIdx.z);
  const int rank = static_cast<int>(blockIdx.x) % p.cluster;
  const std::int64_t first_token = std::int64_t{blockIdx.x / p.cluster} * V.tokens();
  const std::int64_t first_block = std::int64_t{blockIdx.y} * V.row_blocks();
  const std::uint8_t* weight = p.weights[head];
  const auto row = [&](int r) { return tile_row<F>(weight, p.shape, first_block + r); };
  TileInputs<V> inputs;
  inputs.in = p.shape.k_tiles * static_cast<int>(kTileInputs);  // filled with zeros
#pragma unroll
  for (int i = 0; i < TileInputs<V>::kRows; ++i) {
    const std::int64_t token = first_token + TileInputs<V>::token(i);
    inputs.rows[i] = p.x_bf16.row(min(token, p.tokens - 1), head);
  }
  const float factor = sum_factor<F>(weight + p.shape.scale_2_offset);
  const auto store = [&](const TileElement& e, float value) {
    store_output(p, first_token + e.token, head, first_block * 16 + e.output, value * factor);
  };

  auto* partial = reinterpret_cast<float4*>(smem + V.stages * V.stage_bytes(F));
  const int begin = split(p.shape.segments, rank, p.cluster);
  Accumulators<V> total = {};
  multiply_segments<F, V>(
      smem, row, inputs, p.shape, begin, split(p.shape.segments, rank + 1, p.cluster),
      [&](int segment, const Accumulators<V>& acc) {
        if (p.cluster == 1) {
          add_segment<V>(total, acc);
          return;
        }
        float4* to = partial + (segment - begin) * V.blocks * V.columns * V.threads() + threadIdx.x;
#pragma unroll
        for (int quad = 0; quad < V.blocks * V.columns; ++quad) {
          const float(&sum)[4] = acc[quad / V.columns][quad % V.columns];
          to[quad * V.threads()] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
      });
  if (p.cluster > 1) {
    finish_shared_tile<V>(partial, p, store);
    return;
  }
#pragma unroll
  for (int m = 0; m < V.blocks; ++m) {
#pragma unroll
    for (int n = 0; n < V.columns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store(tile_element<V>(m, n, i), total[m][n][i]);
      }
    }
  }
}

template <WeightFormat F, int kVariant>
void launch_tile_variant(const ExecCtx& ctx, const LinearConfig& config,
                         const TensorLinearArgs& args, int heads) {
  const Launch how{.grid = dim3(static_cast<unsigned>(config.grid_x),
                                static_cast<unsigned>(config.grid_y), static_cast<unsigned>(heads)),
                   .block = static_cast<unsigned>(config.threads),
                   .smem_bytes = config.smem_bytes,
                   .cluster = config.cluster};
  launch(ctx, "linear", tile_linear<F, kVariant>, how, args);
}

template <WeightFormat F>
void launch_linear_sum(const ExecCtx& ctx, const LinearConfig& config, const LinearSumArgs& args,
                       int terms) {
  const Launch how{.grid = dim3(static_cast<unsigned>(config.grid_x)),
                   .block = static_cast<unsigned>(config.threads),
                   .smem_bytes = config.smem_bytes,
                   .cluster = config.plan.cluster};
  const auto kernel =
      terms == 2 ? (args.whole ? stream_linear_sum<F, true, 2> : stream_linear_sum<F, false, 2>)
                 : (args.whole ? stream_linear_sum<F, true, 1> : stream_linear_sum<F, false, 1>);
  launch(ctx, "linear_sum", kernel, how, args);
}

template <WeightFormat F>
void launch_linear(const ExecCtx& ctx, const LinearConfig& config, const TensorLinearArgs& args,
                   int heads) {
  if (config.stream) {
    const Launch how{
        .grid = dim3(static_cast<unsigned>(config.grid_x), static_cast<unsigned>(heads)),
        .block = static_cast<unsigned>(config.threads),
        .smem_bytes = config.smem_bytes,
        .cluster = config.plan.cluster};
    launch(ctx, "linear", args.whole ? stream_linear<F, true> : stream_linear<F, false>, how, args);
    return;
  }
  switch (config.variant) {
    case 0:
      return launch_tile_variant<F, 0>(ctx, config, args, heads);
    case 1:
      return launch_tile_variant<F, 1>(ctx, config, args, heads);
    case 2:
      return launch_tile_variant<F, 2>(ctx, config, args, heads);
    default:
      return launch_tile_variant<F, 3>(ctx, config, args, heads);
  }
}

}  // namespace tandem::cuda
