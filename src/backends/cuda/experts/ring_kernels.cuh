// ring_kernels.cuh — the decode path of routed experts in FP4: experts_kernels.cuh's stream_* with
// the weights through rings in shared memory (gemm/ring.cuh).   Contract: experts/tensor.h
// Traffic   every weight byte once; memory bound.
// Launch    a fixed number of CTAs that share the units of all work items evenly, each a run of
//           them in order: their rings never run dry between units. One token: down and combine are
//           one kernel, a CTA a block of 16 outputs.   Graph-safe.
// Numerics  experts_kernels.cuh's and combine's, bit for bit.
#pragma once

#include "backends/cuda/experts/experts_launch.cuh"
#include "backends/cuda/experts/situ.cuh"
#include "backends/cuda/gemm/ring.cuh"
#include "backends/cuda/gemm/stream.cuh"
#include "backends/cuda/launch.cuh"

namespace tandem::cuda {

/// A CTA's share of the units of all items, in order.
struct UnitWalk {
  int item;
  int unit;  // of the item
  int left;
  ExpertItem what;

  __device__ __forceinline__ UnitWalk(const ExpertWork& work, int units) {
    const std::int64_t total = std::int64_t{work.count()} * units;
    const std::int64_t begin = total * blockIdx.x / gridDim.x;
    item = static_cast<int>(begin / units);
    unit = static_cast<int>(begin % units);
    left = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x - begin);
    open(work, units);
  }
  __device__ __forceinline__ void next(const ExpertWork& work, int units) {
    --left;
    if (++unit == units) {
      unit = 0;
      ++item;
      open(work, units);
    }
  }

 private:
  /// Items of no expert are passed over.
  __device__ __forceinline__ void open(const ExpertWork& work, int units) {
    while (left > 0) {
      what = work.item(static_cast<unsigned>(item));
      if (what.expert >= 0) {
        return;
      }
      left -= units - unit;
      unit = 0;
      ++item;
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

/// Runs the CTA's units. Op: kBlocks of a stage; kUnitBlocks of outputs; units() of an item;
/// data(expert, lane) and block(lane): the weight and the unit's block that a lane fetches;
/// key(item): equal where inputs are; stage(to, item): the inputs; factors(expert); finish(factors,
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
  UnitWalk ahead(work, units);
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

  int item = -1;
  int key = -1;
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
  using Factors = float2;
  const GateUpArgs& p;

  __device__ __forceinline__ int units() const { return p.shape.row_blocks; }
  __device__ __forceinline__ const std::uint8_t* data(int expert, int lane) const {
    return lane < 2 ? p.w1[expert] : p.w3[expert];
  }
  __device__ __forceinline__ int block(int) const { return 0; }
  /// A single token is every item's.
  __device__ __forceinline__ int key(int item) const { return p.work.items == nullptr ? 0 : item; }
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
    p.hidden.row(pair)[p.ring_order ? ring_place(row) : row] =
        static_cast<std::uint16_t>(ptx::cvt_bf16x2(value, 0.0F));
  }
};

template <WeightFormat F, bool kWhole>
__global__ void __launch_bounds__(kRingThreads, 1)
    ring_gate_up(const __grid_constant__ GateUpArgs p) {
  begin_kernel();
  walk_units<F, kWhole>(RingGateUp<F, kWhole>{p}, p.work, p.shape, p.ring);
}

/// Rows of y = hidden w2^T: a unit is 32 of them.
template <WeightFormat F, bool kWhole>
struct RingDown {
  static constexpr int kBlocks = stream_blocks(F);
  static constexpr int kUnitBlocks = kBlocks;
  using Factors = float;
  const DownArgs& p;

  __device__ __forceinline__ int units() const {
    return (p.shape.row_blocks + kBlocks - 1) / kBlocks;
  }
  __device__ __forceinline__ const std::uint8_t* data(int expert, int) const {
    return p.w2[expert];
  }
  __device__ __forceinline__ int block(int lane) const { return lane / 2; }
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
  begin_kernel();
  walk_units<F, kWhole>(RingDown<F, kWhole>{p}, p.work, p.shape, p.ring);
}

/// A slot of the one token.
struct RingSlot {
  const std::uint8_t* data;  // of its expert's w2; null for no expert
  float factor;
  float weight;
};
static_assert(kRingSlotBytes == sizeof(RingSlot) + 16 * sizeof(float));

/// The segments of all slots' products that one warp computes, in order.
struct SlotWalk {
  int slot = 0;
  int segment;

  __device__ __forceinline__ void next(const RingSlot* slots, int num_slots, int segments,
                                       int step) {
    segment += step;
    seek(slots, num_slots, segments, step);
  }
  /// Forward to a segment of a slot that has an expert.
  __device__ __forceinline__ void seek(const RingSlot* slots, int num_slots, int segments,
                                       int step) {
    while (slot < num_slots && (segment >= segments || slots[slot].data == nullptr)) {
      if (segment >= segments) {
        segment -= segments;
        ++slot;
      } else {
        segment += step;
      }
    }
  }
};

/// out = the weighted sum over slots of hidden w2^T, one token: a CTA has 16 outputs, all slots'
/// segments spread over its warps. hidden is in the order of ring_place.
template <WeightFormat F, bool kWhole>
__global__ void __launch_bounds__(kRingThreads, 1)
    ring_down_combine(const __grid_constant__ DownArgs p) {
  begin_kernel();
  using Stage = RingStage<F, 1, kRingHiddenBytes>;
  constexpr auto kHiddenTile = static_cast<unsigned>(kTileInputs * 2);
  constexpr unsigned kTileSum =
      static_cast<unsigned>(tile_bytes(F) + tile_scale_bytes(F)) + kHiddenTile;
  const RingPlan& plan = p.ring;
  const TensorShape& shape = p.shape;
  auto* smem = dynamic_smem<std::uint8_t>();
  auto* sums = reinterpret_cast<float4*>(smem + ring_barrier_bytes(plan.warps, plan.stages) +
                                         plan.warps * plan.stages * Stage::kBytes);
  auto* slots = reinterpret_cast<RingSlot*>(sums + p.slots * shape.segments * (kRingSumBytes / 16));
  auto* outputs = reinterpret_cast<float*>(slots + p.slots);  // [slot][16]
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;

  for (int i = static_cast<int>(threadIdx.x); i < p.slots; i += static_cast<int>(blockDim.x)) {
    const int expert = p.work.item(static_cast<unsigned>(i)).expert;
    const std::uint8_t* data = expert < 0 ? nullptr : p.w2[expert];
    slots[i] = {data, data == nullptr ? 0.0F : sum_factor<F>(data + shape.scale_2_offset),
                p.weights[i]};
  }
  Ring<Stage> ring(smem, plan.warps, plan.stages);
  __syncthreads();  // slots are there

  // Lanes 0 and 1 fetch weights, lane 2 the activations.
  auto source = RingSource::of_lane<F, Stage>(lane);
  const std::int64_t place = source.place(shape, static_cast<int>(blockIdx.x), lane);
  if (lane == 2) {
    source.step = kHiddenTile;
    source.to = Stage::kBlockBytes;
  }
  SlotWalk ahead{0, warp};
  ahead.seek(slots, p.slots, shape.segments, plan.warps);
  SlotWalk at = ahead;
  const auto put = [&] {
    if (ahead.slot >= p.slots) {
      return;
    }
    source.from = lane == 2 ? reinterpret_cast<const std::uint8_t*>(p.hidden.row(ahead.slot))
                            : slots[ahead.slot].data + place;
    const int tile = ahead.segment * Stage::kTiles;
    ring.put(source, 3, kTileSum, tile,
             kWhole ? Stage::kTiles : min(Stage::kTiles, shape.k_tiles - tile));
    ahead.next(slots, p.slots, shape.segments, plan.warps);
  };
  for (int i = 0; i < plan.stages; ++i) {
    put();
  }
  for (; at.slot < p.slots; at.next(slots, p.slots, shape.segments, plan.warps)) {
    const std::uint8_t* stage = ring.wait();
    RingTiles<F, 1> tiles;
    tiles.load(stage, lane);
    float acc[1][4] = {};
    multiply_ring_tiles<F, 1, kWhole>(acc, tiles, stage + Stage::kBlockBytes + lane % 4 * 16,
                                      shape.k_tiles - at.segment * Stage::kTiles);
    __syncwarp();  // the stage is read
    ring.next();
    put();
    if (lane % 4 == 0) {
      sums[(at.slot * shape.segments + at.segment) * (kRingSumBytes / 16) + lane / 4] =
          make_float4(acc[0][0], acc[0][1], acc[0][2], acc[0][3]);
    }
  }
  __syncthreads();  // every segment's sum is there
  for (int i = static_cast<int>(threadIdx.x); i < p.slots * 16; i += static_cast<int>(blockDim.x)) {
    const UnitSums of_slot{
        reinterpret_cast<const float*>(sums + i / 16 * shape.segments * (kRingSumBytes / 16)),
        shape.segments, 1};
    if (slots[i / 16].data != nullptr) {
      outputs[i] = of_slot.total(0, i % 16, 0) * slots[i / 16].factor;
    }
  }
  __syncthreads();  // every slot's outputs are there
  const std::int64_t row = std::int64_t{16} * blockIdx.x + threadIdx.x;
  if (threadIdx.x < 16 && row < shape.out) {
    float sum = 0.0F;
    for (int slot = 0; slot < p.slots; ++slot) {
      if (slots[slot].data != nullptr) {
        sum = fmaf(slots[slot].weight, outputs[slot * 16 + threadIdx.x], sum);
      }
    }
    p.out[row] = sum;
  }
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
void launch_ring_down(const ExecCtx& ctx, const ExpertsConfig& config, const DownArgs& args) {
  const bool whole = args.shape.in % segment_inputs(F) == 0;
  if (config.fused) {
    return launch(ctx, "experts", whole ? ring_down_combine<F, true> : ring_down_combine<F, false>,
                  ring_launch(args.ring), args);
  }
  launch(ctx, "experts", whole ? ring_down<F, true> : ring_down<F, false>, ring_launch(args.ring),
         args);
}

}  // namespace tandem::cuda
