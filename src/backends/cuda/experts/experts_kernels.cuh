// experts_kernels.cuh — the routed experts on the tensor cores.
// Contract  experts/tensor.h
// Oracle    ops/ref/moe_ref.h with activations rounded to bf16 before each product, to fp32
// accuracy Traffic   up to 8 tokens of an expert: its weights once; memory bound. More: once a tile
// of tokens. Launch    grid (outputs, work items): CTAs of one expert run together, items beyond
// the last exit.
//           Graph-safe.
// Numerics  gemm/layout.h's segments, then scale_2, SiTU in fp32, one rounding to bf16. A pair's
// row
//           depends on its token and its expert alone.
#pragma once

#include "backends/cuda/experts/experts_launch.cuh"
#include "backends/cuda/experts/ring_kernels.cuh"
#include "backends/cuda/gemm/stream.cuh"
#include "backends/cuda/gemm/tile.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/situ.cuh"

namespace tandem::cuda {

/// Rows of hidden are filled up to here by gate_up's blocks of 16 outputs.
__device__ __forceinline__ int filled_width(const TensorShape& down) {
  return static_cast<int>((down.in + 15) / 16 * 16);
}

template <WeightFormat F>
struct GateUpFactors {
  float gate;
  float up;
  __device__ __forceinline__ GateUpFactors(const GateUpArgs& p, int expert)
      : gate(sum_factor<F>(p.w1[expert] + p.shape.scale_2_offset)),
        up(sum_factor<F>(p.w3[expert] + p.shape.scale_2_offset)) {}
};

/// Writes hidden of output `row` of a pair, from the sums over all segments.
__device__ __forceinline__ void store_hidden(const GateUpArgs& p, std::int32_t pair,
                                             std::int64_t row, float gate, float up) {
  const float value = situ_value(gate, up, p.act);
  p.hidden.row(pair)[row] = static_cast<std::uint16_t>(ptx::cvt_bf16x2(value, 0.0F));
}

template <WeightFormat F, bool kWhole>
__global__ void __launch_bounds__(kStreamThreads, kStreamCtas)
    stream_gate_up(const __grid_constant__ GateUpArgs p) {
  begin_kernel();
  // Two blocks of bf16: half a segment of both fills the registers, and tests take some of them.
  constexpr int kLoad = F == WeightFormat::kNvFp4 || F == WeightFormat::kMxFp4 ? 4
                        : F == WeightFormat::kFp8Block || kWhole               ? 2
                                                                               : 1;
  const ExpertItem item = p.work.item(blockIdx.y);
  if (item.expert < 0) {
    return;
  }
  const SegmentSums sums(dynamic_smem<float>(), p.plan, kGateUpBlocks, 2);
  const int first = static_cast<int>(blockIdx.x) * p.plan.row_warps;
  const int row_warp = static_cast<int>(threadIdx.x) / 32 / p.plan.k_warps;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const TileRow rows[kGateUpBlocks] = {tile_row<F>(p.w1[item.expert], p.shape, first + row_warp),
                                       tile_row<F>(p.w3[item.expert], p.shape, first + row_warp)};
  const std::int32_t own = p.work.pair(item.first + min(lane / 4, item.count - 1));
  const F32Inputs<kWhole> inputs(p.x.row(own / p.slots), p.shape.in, lane);
  StreamPiece<F, kGateUpBlocks, kLoad> piece;
  bool loaded = false;
  stream_segments(
      piece, rows, inputs, p.shape.k_tiles,
      {static_cast<int>(threadIdx.x) / 32 % p.plan.k_warps, p.shape.segments, p.plan.k_warps},
      loaded, [&](int segment, const float(&acc)[kGateUpBlocks][4]) {
        sums.put(segment, 0, 16 * row_warp, acc[0], lane);
        sums.put(segment, 1, 16 * row_warp, acc[1], lane);
      });
  const GateUpFactors<F> factors(p, item.expert);
  sums.meet();

  sums.each(item.count, [&](int token, int output) {
    if (first * 16 + output < p.shape.row_blocks * 16) {
      const float gate = sums.total(0, output, token, 0, p.shape.segments);
      const float up = sums.total(1, output, token, 0, p.shape.segments);
      store_hidden(p, p.work.pair(item.first + token), std::int64_t{16} * first + output,
                   gate * factors.gate, up * factors.up);
    }
  });
}

template <WeightFormat F, bool kWhole>
__global__ void __launch_bounds__(kStreamThreads, kStreamCtas)
    stream_down(const __grid_constant__ DownArgs p) {
  begin_kernel();
  constexpr int kBlocks = stream_blocks(F);
  const ExpertItem item = p.work.item(blockIdx.y);
  if (item.expert < 0) {
    return;
  }
  const SegmentSums sums(dynamic_smem<float>(), p.plan, kBlocks, 1);
  const int first = static_cast<int>(blockIdx.x) * p.plan.row_warps * kBlocks;
  const int row_block = static_cast<int>(threadIdx.x) / 32 / p.plan.k_warps * kBlocks;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  TileRow rows[kBlocks];
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
    rows[m] = tile_row<F>(p.w2[item.expert], p.shape, first + row_block + m);
  }
  const std::int32_t own = p.work.pair(item.first + min(lane / 4, item.count - 1));
  const Bf16Inputs<kWhole> inputs(p.hidden.row(own), filled_width(p.shape), lane);
  StreamPiece<F, kBlocks, kSegmentTiles<F>> piece;
  bool loaded = false;
  stream_segments(
      piece, rows, inputs, p.shape.k_tiles,
      {static_cast<int>(threadIdx.x) / 32 % p.plan.k_warps, p.shape.segments, p.plan.k_warps},
      loaded, [&](int segment, const float(&acc)[kBlocks][4]) {
#pragma unroll
        for (int m = 0; m < kBlocks; ++m) {
          sums.put(segment, 0, 16 * (row_block + m), acc[m], lane);
        }
      });
  const float factor = sum_factor<F>(p.w2[item.expert] + p.shape.scale_2_offset);
  sums.meet();

  sums.each(item.count, [&](int token, int output) {
    if (first * 16 + output < p.shape.out) {
      p.y.row(p.work.pair(item.first + token))[std::int64_t{16} * first + output] =
          sums.total(0, output, token, 0, p.shape.segments) * factor;
    }
  });
}

template <WeightFormat F, int kVariant>
__global__ void __launch_bounds__(kExpertTiles[kVariant].threads(), kExpertTiles[kVariant].ctas)
    tile_gate_up(const __grid_constant__ GateUpArgs p) {
  begin_kernel();
  constexpr TileVariant V = kExpertTiles[kVariant];
  static_assert(V.blocks == 2);  // gate and up of the same outputs
  const ExpertItem item = p.work.item(blockIdx.y);
  if (item.expert < 0) {
    return;
  }
  const std::int64_t first = std::int64_t{blockIdx.x} * (V.row_blocks() / 2);
  const std::uint8_t* gate = p.w1[item.expert];
  const std::uint8_t* up = p.w3[item.expert];
  const auto row = [&](int r) {
    return tile_row<F>(r % 2 == 0 ? gate : up, p.shape, first + r / 2);
  };
  TileInputs<V> inputs;
  inputs.in = p.shape.k_tiles * static_cast<int>(kTileInputs);  // filled with zeros
#pragma unroll
  for (int i = 0; i < TileInputs<V>::kRows; ++i) {
    const int token = min(TileInputs<V>::token(i), item.count - 1);
    inputs.rows[i] = p.x_bf16.row(p.work.pair(item.first + token) / p.slots);
  }
  const GateUpFactors<F> factors(p, item.expert);
  Accumulators<V> total = {};
  multiply_segments<F, V>(dynamic_smem<std::uint8_t>(), row, inputs, p.shape, 0, p.shape.segments,
                          [&](int, const Accumulators<V>& acc) { add_segment<V>(total, acc); });
#pragma unroll
  for (int n = 0; n < V.columns; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const TileElement e = tile_element<V>(0, n, i);
      const std::int64_t output = first * 16 + e.output / 32 * 16 + e.output % 16;
      if (e.token < item.count && output < std::int64_t{16} * p.shape.row_blocks) {
        store_hidden(p, p.work.pair(item.first + e.token), output, total[0][n][i] * factors.gate,
                     total[1][n][i] * factors.up);
      }
    }
  }
}

template <WeightFormat F, int kVariant>
__global__ void __launch_bounds__(kExpertTiles[kVariant].threads(), kExpertTiles[kVariant].ctas)
    tile_down(const __grid_constant__ DownArgs p) {
  begin_kernel();
  constexpr TileVariant V = kExpertTiles[kVariant];
  const ExpertItem item = p.work.item(blockIdx.y);
  if (item.expert < 0) {
    return;
  }
  const std::int64_t first = std::int64_t{blockIdx.x} * V.row_blocks();
  const std::uint8_t* weight = p.w2[item.expert];
  const auto row = [&](int r) { return tile_row<F>(weight, p.shape, first + r); };
  TileInputs<V> inputs;
  inputs.in = filled_width(p.shape);
#pragma unroll
  for (int i = 0; i < TileInputs<V>::kRows; ++i) {
    const int token = min(TileInputs<V>::token(i), item.count - 1);
    inputs.rows[i] = p.hidden.row(p.work.pair(item.first + token));
  }
  const float factor = sum_factor<F>(weight + p.shape.scale_2_offset);
  Accumulators<V> total = {};
  multiply_segments<F, V>(dynamic_smem<std::uint8_t>(), row, inputs, p.shape, 0, p.shape.segments,
                          [&](int, const Accumulators<V>& acc) { add_segment<V>(total, acc); });
#pragma unroll
  for (int m = 0; m < V.blocks; ++m) {
#pragma unroll
    for (int n = 0; n < V.columns; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const TileElement e = tile_element<V>(m, n, i);
        const std::int64_t output = first * 16 + e.output;
        if (e.token < item.count && output < p.shape.out) {
          p.y.row(p.work.pair(item.first + e.token))[output] = total[m][n][i] * factor;
        }
      }
    }
  }
}

/// Grid (CTAs of `blocks` blocks of 16 outputs each, items).
[[nodiscard]] inline dim3 expert_grid(const TensorShape& shape, int blocks,
                                      const ExpertsConfig& config) {
  return dim3(static_cast<unsigned>((shape.row_blocks + blocks - 1) / blocks),
              static_cast<unsigned>(config.items));
}

template <WeightFormat F>
void launch_gate_up(const ExecCtx& ctx, const ExpertsConfig& config, const GateUpArgs& args) {
  if constexpr (F == WeightFormat::kMxFp4 || F == WeightFormat::kNvFp4) {
    if (config.ring) {
      return launch_ring_gate_up<F>(ctx, args);
    }
  }
  if (config.stream) {
    const StreamPlan& plan = config.gate_up;
    const Launch how{.grid = expert_grid(args.shape, plan.row_warps, config),
                     .block = static_cast<unsigned>(plan.threads()),
                     .smem_bytes = plan.smem_bytes(kGateUpBlocks)};
    return launch(ctx, "experts", args.whole ? stream_gate_up<F, true> : stream_gate_up<F, false>,
                  how, args);
  }
  const TileVariant& v = kExpertTiles[config.variant];
  const Launch how{.grid = expert_grid(args.shape, v.row_blocks() / 2, config),
                   .block = static_cast<unsigned>(v.threads()),
                   .smem_bytes = v.smem_bytes(F, 0)};
  launch(ctx, "experts", config.variant == 0 ? tile_gate_up<F, 0> : tile_gate_up<F, 1>, how, args);
}

template <WeightFormat F>
void launch_down(const ExecCtx& ctx, const ExpertsConfig& config, const DownArgs& args) {
  if constexpr (F == WeightFormat::kMxFp4 || F == WeightFormat::kNvFp4) {
    if (config.ring) {
      return launch_ring_down<F>(ctx, args);
    }
  }
  if (config.stream) {
    const StreamPlan& plan = config.down;
    const Launch how{.grid = expert_grid(args.shape, plan.row_warps * stream_blocks(F), config),
                     .block = static_cast<unsigned>(plan.threads()),
                     .smem_bytes = plan.smem_bytes(stream_blocks(F))};
    const bool whole = args.shape.in % kTileInputs == 0;
    return launch(ctx, "experts", whole ? stream_down<F, true> : stream_down<F, false>, how, args);
  }
  const TileVariant& v = kExpertTiles[config.variant];
  const Launch how{.grid = expert_grid(args.shape, v.row_blocks(), config),
                   .block = static_cast<unsigned>(v.threads()),
                   .smem_bytes = v.smem_bytes(F, 0)};
  launch(ctx, "experts", config.variant == 0 ? tile_down<F, 0> : tile_down<F, 1>, how, args);
}

}  // namespace tandem::cuda
