// ring_kernels.cuh — the decode path of routed experts in FP4: experts_kernels.cuh's stream_* with
// the weights through rings in shared memory (gemm/ring.cuh).   Contract: experts/tensor.h
// Traffic   every weight byte once; memory bound.
// Launch    a fixed number of CTAs that share the units of all work items evenly, each a run of
//           them in order: their rings never run dry between units.   Graph-safe.
// Numerics  experts_kernels.cuh's, bit for bit.
// Measured  2026-12-01 H200, K3 NVFP4, all launches in us, CTAs of at most 8 / 16 warps: 2 tokens
//           194 / 218, 4 349 / 395, 8 893 / 737, 16 1646 / 1359, 64 4485 / 3713. One token: 107 /
//           119.
//           k3-mid, k3-mini in MXFP4: no difference beyond noise.
#pragma once

#include "backends/cuda/experts/experts_launch.cuh"
#include "backends/cuda/gemm/ring.cuh"
#include "backends/cuda/gemm/stream.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/situ.cuh"

namespace tandem::cuda {

/// A CTA's share of the units of all items, in order. settle() comes before anything is read, so
/// that a caller may have other loads under way with the first item's.
struct UnitWalk {
  int item;
  int unit;  // of the item
  int left;
  ExpertItem what{-1, 0, 0};

  __device__ __forceinline__ UnitWalk(const ExpertWork& work, int units) {
    const unsigned total = static_cast<unsigned>(work.count()) * static_cast<unsigned>(units);
    const unsigned share = total / gridDim.x;
    const unsigned more = total - share * gridDim.x;  // CTAs with one unit more
    const unsigned begin = share * blockIdx.x + min(blockIdx.x, more);
    item = static_cast<int>(begin / static_cast<unsigned>(units));
    unit = static_cast<int>(begin) - item * units;
    left = static_cast<int>(share + (blockIdx.x < more ? 1 : 0));
    if (left > 0) {
      what = work.item(static_cast<unsigned>(item));
    }
  }
  /// Items of no expert are passed over.
  __device__ __forceinline__ void settle(const ExpertWork& work, int units) {
    while (left > 0 && what.expert < 0) {
      left -= units - unit;
      unit = 0;
      ++item;
      if (left > 0) {
        what = work.item(static_cast<unsigned>(item));
      }
    }
  }
  __device__ __forceinline__ void next(const ExpertWork& work, int units) {
    --left;
    if (++unit == units) {
      unit = 0;
      ++item;
      if (left > 0) {
        what = work.item(static_cast<unsigned>(item));
        settle(work, units);
      }
    }
  }
};

/// A unit's sums in shared memory: of every block and segment, [token pair][row g][4].
struct UnitSums {
  const float* base;
  int segments;
  int pairs;

  /// Output `output` (of 16) of block `block` and token `token`: the segments' sums in rising
  /// order.
  __device__ __forceinline__ float total(int block, int output, int token) const {
    const int step = pairs * (kRingSumBytes / 4);
    const float* from = base + block * segments * step + (token / 2 * 8 + output % 8) * 4 +
                        output / 8 * 2 + token % 2;
    float sum = 0.0F;
#pragma unroll 4
    for (int i = 0; i < segments; ++i) {
      sum += from[i * step];
    }
    return sum;
  }
};

/// Runs the CTA's units; the kernel's beginning is in here. Op: kItemsKnown: the items were written
/// before the kernel before began, so that weights may be asked for while it ends; kBlocks of a
/// stage; kUnitBlocks of outputs; units() of an item; data(expert, lane) and block(lane): the
/// weight and the unit's block that a lane fetches; key(item): equal where inputs are; one_input():
/// whether all items have key 0; stage(to, item): the inputs; factors(expert); finish(factors,
/// pair, unit, sums, output, token).
template <WeightFormat F, bool kWhole, typename Op>
__device__ __forceinline__ void walk_units(const Op& op, const ExpertWork& work,
                                           const TensorShape& shape, const RingPlan& plan) {
  using Stage = RingStage<F, Op::kBlocks>;
  constexpr unsigned kTileSum =
      Op::kBlocks * static_cast<unsigned>(tile_bytes(F) + tile_scale_bytes(F));
  __shared__ std::int32_t pairs_of_item[2][kStreamTokens];
  auto* smem = dynamic_smem<std::uint8_t>();
  auto* inputs =
      smem + ring_barrier_bytes(plan.warps, plan.stages) + plan.warps * plan.stages * Stage::kBytes;
  auto* sums = reinterpret_cast<float4*>(inputs + plan.tokens * ring_row_bytes(shape.k_tiles));
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int units = op.units();
  const int sum_step = plan.token_pairs() * (kRingSumBytes / 16);  // float4s of a segment

  Ring<Stage> ring(smem, plan.warps, plan.stages);
  if constexpr (!Op::kItemsKnown) {
    begin_kernel();
  }
  UnitWalk ahead(work, units);
  int key = -1;  // of the inputs that are there
  if (op.one_input()) {
    op.stage(inputs, {0, 0, 1});
    key = 0;
  }
  ahead.settle(work, units);
  UnitWalk at = ahead;
  int ahead_segment = warp;
  auto source = RingSource::of_lane<F, Stage>(lane);
  const auto aim = [&] {
    if (ahead.left > 0) {
      source.from = op.data(ahead.what.expert, lane) +
                    source.place(shape, ahead.unit * Op::kUnitBlocks + op.block(lane), lane);
    }
  };
  aim();
  const auto put = [&] {
    if (ahead.left <= 0) {
      return;
    }
    const int tile = ahead_segment * Stage::kTiles;
    ring.put(source, 2 * Op::kBlocks, kTileSum, tile,
             kWhole ? Stage::kTiles : min(Stage::kTiles, shape.k_tiles - tile));
    ahead_segment += plan.warps;
    if (ahead_segment >= shape.segments) {
      ahead_segment = warp;
      const int before = ahead.item;
      ahead.next(work, units);
      if (ahead.item == before && (ahead.unit + 1) * Op::kUnitBlocks <= shape.row_blocks) {
        source.from += static_cast<unsigned>(Op::kUnitBlocks * shape.k_tiles) * source.step;
      } else {
        aim();
      }
    }
  };
  for (int i = 0; i < plan.stages; ++i) {
    put();
  }
  if constexpr (Op::kItemsKnown) {
    begin_kernel();
  }

  int item = -1;
  int turn = 0;  // the warp that finishes the unit's first outputs
  int odd_item = 0;
  int odd_unit = 0;
  const std::uint8_t* own_inputs = nullptr;
  typename Op::Factors factors{};
  for (; at.left > 0; at.next(work, units), odd_unit ^= 1) {
    if (item != at.item) {  // all threads have done with the inputs of the one before
      item = at.item;
      odd_item ^= 1;
      factors = op.factors(at.what.expert);
      if (static_cast<int>(threadIdx.x) < at.what.count) {
        pairs_of_item[odd_item][threadIdx.x] =
            work.pair(at.what.first + static_cast<int>(threadIdx.x));
      }
      if (key != op.key(at.item)) {
        key = op.key(at.item);
        op.stage(inputs, at.what);
      }
      own_inputs =
          inputs + min(lane / 4, at.what.count - 1) * ring_row_bytes(shape.k_tiles) + lane % 4 * 16;
      __syncthreads();  // inputs and pairs are there
    }
    float4* unit_sums = sums + odd_unit * Op::kBlocks * shape.segments * sum_step;
    for (int segment = warp; segment < shape.segments; segment += plan.warps) {
      RingTiles<F, Op::kBlocks> tiles;
      tiles.load(ring.wait(), lane);
      __syncwarp();  // the stage is read
      ring.next();
      put();
      float acc[Op::kBlocks][4] = {};
      multiply_ring_tiles<F, Op::kBlocks, kWhole>(acc, tiles,
                                                  own_inputs + segment * (Stage::kTiles * 128),
                                                  shape.k_tiles - segment * Stage::kTiles);
      if (lane % 4 < plan.token_pairs()) {
#pragma unroll
        for (int m = 0; m < Op::kBlocks; ++m) {
          unit_sums[(m * shape.segments + segment) * sum_step + lane % 4 * 8 + lane / 4] =
              make_float4(acc[m][0], acc[m][1], acc[m][2], acc[m][3]);
        }
      }
    }
    // Every segment's sum is there; and the sums of the unit before are read, so that the next one
    // may overwrite them.
    __syncthreads();
    const UnitSums of_unit{reinterpret_cast<const float*>(unit_sums), shape.segments,
                           plan.token_pairs()};
    for (int job = warp < turn ? warp - turn + plan.warps : warp - turn; job < plan.token_pairs();
         job += plan.warps) {
      const int token = job * 2 + lane / 16;
      if (token < at.what.count) {
        op.finish(factors, pairs_of_item[odd_item][token], at.unit, of_unit, lane % 16, token);
      }
    }
    turn = (turn + plan.token_pairs()) % plan.warps;
  }
}

/// Rows of hidden = SiTU(gate, up): a unit is 16 of them.
template <WeightFormat F, bool kWhole>
struct RingGateUp {
  static constexpr int kBlocks = kGateUpBlocks;
  static constexpr int kUnitBlocks = 1;
  static constexpr bool kItemsKnown = false;
  using Factors = float2;
  const GateUpArgs& p;

  __device__ __forceinline__ int units() const { return p.shape.row_blocks; }
  __device__ __forceinline__ const std::uint8_t* data(int expert, int lane) const {
    return lane < 2 ? p.w1[expert] : p.w3[expert];
  }
  __device__ __forceinline__ int block(int) const { return 0; }
  /// A single token is every item's.
  __device__ __forceinline__ bool one_input() const { return p.work.items == nullptr; }
  __device__ __forceinline__ int key(int item) const { return one_input() ? 0 : item; }
  __device__ __forceinline__ void stage(std::uint8_t* to, const ExpertItem& item) const {
    stage_ring_inputs(to, item.count, p.shape.k_tiles, [&](int i, int t) {
      return F32Inputs<kWhole>(p.x.row(p.work.pair(item.first + i) / p.slots), p.shape.in, t);
    });
  }
  __device__ __forceinline__ Factors factors(int expert) const {
    return {sum_factor<F>(p.w1[expert] + p.shape.scale_2_offset),
            sum_factor<F>(p.w3[expert] + p.shape.scale_2_offset)};
  }
  __device__ __forceinline__ void finish(const Factors& factors, std::int32_t pair, int unit,
                                         const UnitSums& sums, int output, int token) const {
    const std::int64_t row = std::int64_t{16} * unit + output;
    const float gate = sums.total(0, output, token) * factors.x;
    const float up = sums.total(1, output, token) * factors.y;
    const float value = situ_value(gate, up, p.act);
    p.hidden.row(pair)[row] = static_cast<std::uint16_t>(ptx::cvt_bf16x2(value, 0.0F));
  }
};

template <WeightFormat F, bool kWhole>
__global__ void __launch_bounds__(kRingThreads, 1)
    ring_gate_up(const __grid_constant__ GateUpArgs p) {
  walk_units<F, kWhole>(RingGateUp<F, kWhole>{p}, p.work, p.shape, p.ring);
}

/// Rows of y = hidden w2^T: a unit is 32 of them.
template <WeightFormat F, bool kWhole>
struct RingDown {
  static constexpr int kBlocks = stream_blocks(F);
  static constexpr int kUnitBlocks = kBlocks;
  static constexpr bool kItemsKnown = true;  // gate and up came between, and waited for them
  using Factors = float;
  const DownArgs& p;

  __device__ __forceinline__ int units() const {
    return (p.shape.row_blocks + kBlocks - 1) / kBlocks;
  }
  __device__ __forceinline__ const std::uint8_t* data(int expert, int) const {
    return p.w2[expert];
  }
  __device__ __forceinline__ int block(int lane) const { return lane / 2; }
  __device__ __forceinline__ bool one_input() const { return false; }
  __device__ __forceinline__ int key(int item) const { return item; }
  __device__ __forceinline__ void stage(std::uint8_t* to, const ExpertItem& item) const {
    const std::int64_t filled = (p.shape.in + 15) / 16 * 16;
    stage_ring_inputs(to, item.count, p.shape.k_tiles, [&](int i, int t) {
      return Bf16Inputs<kWhole>(p.hidden.row(p.work.pair(item.first + i)), filled, t);
    });
  }
  __device__ __forceinline__ Factors factors(int expert) const {
    return sum_factor<F>(p.w2[expert] + p.shape.scale_2_offset);
  }
  __device__ __forceinline__ void finish(Factors factor, std::int32_t pair, int unit,
                                         const UnitSums& sums, int output, int token) const {
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      const std::int64_t row = std::int64_t{16} * (unit * kBlocks + m) + output;
      if (row < p.shape.out) {
        p.y.row(pair)[row] = sums.total(m, output, token) * factor;
      }
    }
  }
};

template <WeightFormat F, bool kWhole>
__global__ void __launch_bounds__(kRingThreads, 1) ring_down(const __grid_constant__ DownArgs p) {
  walk_units<F, kWhole>(RingDown<F, kWhole>{p}, p.work, p.shape, p.ring);
}

[[nodiscard]] inline Launch ring_launch(const RingPlan& plan) {
  return {.grid = dim3(static_cast<unsigned>(plan.ctas)),
          .block = static_cast<unsigned>(32 * plan.warps),
          .smem_bytes = plan.smem_bytes};
}

template <WeightFormat F>
void launch_ring_gate_up(const ExecCtx& ctx, const GateUpArgs& args) {
  const bool whole = args.whole && args.shape.k_tiles % RingStage<F, 1>::kTiles == 0;
  launch(ctx, "experts", whole ? ring_gate_up<F, true> : ring_gate_up<F, false>,
         ring_launch(args.ring), args);
}

template <WeightFormat F>
void launch_ring_down(const ExecCtx& ctx, const DownArgs& args) {
  const bool whole = args.shape.in % segment_inputs(F) == 0;
  launch(ctx, "experts", whole ? ring_down<F, true> : ring_down<F, false>, ring_launch(args.ring),
         args);
}

}  // namespace tandem::cuda
