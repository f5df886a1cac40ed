// kda_decode.cuh — what a block of kda_decode.cu reads, and what its warps do beside their columns
// of the state.
#pragma once

#include <cmath>
#include <cstdint>

#include "backends/cuda/conv1d.cuh"
#include "backends/cuda/device_view.cuh"
#include "backends/cuda/gemm/multiply_tile.cuh"
#include "backends/cuda/kda/choose_kda.h"
#include "backends/cuda/kda/kda_gate.cuh"
#include "backends/cuda/kda/kda_step.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/norm.cuh"
#include "backends/cuda/ptx/cp_async.cuh"

namespace tandem::cuda::kda_fused {

constexpr int kHeadDim = 128;  // K and V
constexpr int kQuads = state_quads(kHeadDim);
constexpr int kTaps = 4;
constexpr int kPast = kTaps - 1;
constexpr int kThreads = kDecodeWarps * kWarp;

// The projection of the decay: a warp has a block of 16 outputs.
constexpr int kInner = 128;
constexpr int kInnerTiles = kInner / static_cast<int>(kTileInputs);
constexpr int kBlockBytes = kInnerTiles * static_cast<int>(tile_bytes(WeightFormat::kBF16));
constexpr int kCopies = kBlockBytes / (kWarp * 16);  // a lane's
static_assert(kDecodeWarps * kTileRows == kHeadDim);
static_assert(kInner <= segment_inputs(WeightFormat::kBF16));

/// What the warps of a block do beside their columns, by number.
enum Role { kConvQ, kConvK, kConvV, kGate, kNorm };
static_assert(kNorm < kDecodeWarps && kHeadDim == kWarp * kQuad);

struct DecodeArgs {
  Cube<float> y;
  Mat<const float> qkv;
  Cube<const float> f;  // projected before; or here:
  Mat<const float> f_a;
  const std::uint8_t* f_b;  // packed
  Cube<const float> gate_out;
  Cube<const float> b;
  const float* filters[3];
  const float* a_log;
  const float* dt_bias;
  const float* o_norm;
  Cube<float> conv;
  const std::int32_t* slots;
  std::int64_t prefetch_slots;  // 0: nothing is to be prefetched
  float* states;
  int heads;
  KdaGateParams gate;
  float q_scale, l2_eps, norm_eps;

  [[nodiscard]] __device__ std::int64_t width() const {
    return static_cast<std::int64_t>(heads) * kHeadDim;
  }
};

struct alignas(16) Shared {
  float q[kHeadDim];
  float k[kHeadDim];
  float e[kHeadDim];
  float v[kHeadDim];
  float o[kHeadDim];     // the first block's counts
  std::uint64_t o_done;  // in a cluster: of its phase 0
  float beta;
};

/// Which columns of which sequence and head a block has, and what of its head's rows a lane has.
template <int kColumns>
struct Place {
  static constexpr int kCluster = kHeadDim / (kDecodeWarps * kColumnLanes * kColumns);
  int seq;
  int head;
  int rank;  // in the cluster
  int warp;
  int column;   // the lane's first
  int channel;  // first of the lane's four

  __device__ explicit Place(int heads) {
    const int item = static_cast<int>(blockIdx.x) / kCluster;
    rank = static_cast<int>(blockIdx.x) % kCluster;
    seq = item / heads;
    head = item % heads;
    warp = same_in_warp(static_cast<int>(threadIdx.x) / kWarp);
    column = ((rank * kDecodeWarps + warp) * kColumnLanes + column_lane()) * kColumns;
    channel = static_cast<int>(threadIdx.x) % kWarp * kQuad;
  }
  /// On an axis of all heads' channels.
  [[nodiscard]] __device__ std::int64_t wide_head() const {
    return static_cast<std::int64_t>(head) * kHeadDim;
  }
  [[nodiscard]] __device__ std::int64_t wide_channel() const { return wide_head() + channel; }
};

__device__ __forceinline__ Quad quad_at(const float* row) {
  return load_quad<true>(row, 0, kQuad);
}
__device__ __forceinline__ void put_quad(float* row, const Quad& quad) {
  store_quad<true>(row, 0, kQuad, quad);
}

/// Asks for the item's state and windows, each block of a cluster its part. Only a hint, so it may
/// come before begin_kernel(), and the slot read for it needs to be some slot, not the right one.
template <int kColumns>
__device__ __forceinline__ void prefetch_memory(const DecodeArgs& x, const Place<kColumns>& at) {
  constexpr int kCluster = Place<kColumns>::kCluster;
  constexpr unsigned kHeadBytes = kHeadDim * sizeof(float);
  constexpr unsigned kStateBytes = kHeadDim * kHeadBytes / kCluster;
  const std::int64_t slot =
      min(max(std::int64_t{x.slots[at.seq]}, std::int64_t{0}), x.prefetch_slots - 1);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    const float* const state = x.states + (slot * x.heads + at.head) * kHeadDim * kHeadDim;
    ptx::prefetch_to_l2(state + at.rank * (kStateBytes / sizeof(float)), kStateBytes);
  } else if (at.rank == 0 && thread <= 3 * kPast) {
    const int part = (thread - 1) % 3;  // q, k or v
    ptx::prefetch_to_l2(x.conv.row(slot, (thread - 1) / 3) + part * x.width() + at.wide_head(),
                        kHeadBytes);
  }
}

/// A role's operands: of a convolution [channel] taps, and [tap] inputs; of the others [0] alone,
/// the norm's input being its gate.
struct Operands {
  Quad weights[kQuad];
  Quad inputs[kTaps];
  float scalar;  // of the gate: the raw write strength
};

/// What no kernel writes.
template <bool kProject, int kColumns>
__device__ __forceinline__ void load_weights(Operands& mine, const DecodeArgs& x,
                                             const Place<kColumns>& at) {
  if (at.warp <= kConvV) {
    const float* filter = x.filters[0];
    filter = at.warp == kConvK ? x.filters[1] : filter;
    filter = at.warp == kConvV ? x.filters[2] : filter;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      mine.weights[i] = quad_at(filter + (at.wide_channel() + i) * kTaps);
    }
  } else if (at.warp == kGate && !kProject) {
    mine.weights[0] = quad_at(x.dt_bias + at.wide_channel());
  } else if (at.warp == kNorm) {
    mine.weights[0] = quad_at(x.o_norm + at.channel);
  }
}

/// The token's row, which does not depend on the slot.
template <bool kProject, int kColumns>
__device__ __forceinline__ void load_row(Operands& mine, const DecodeArgs& x,
                                         const Place<kColumns>& at) {
  if (at.warp <= kConvV) {
    mine.inputs[kPast] = quad_at(x.qkv.row(at.seq) + at.warp * x.width() + at.wide_channel());
  } else if (at.warp == kGate) {
    if constexpr (!kProject) {
      mine.inputs[0] = quad_at(x.f.row(at.seq, at.head) + at.channel);
    }
    mine.scalar = *x.b.row(at.seq, at.head);
  } else if (at.warp == kNorm) {
    mine.inputs[0] = quad_at(x.gate_out.row(at.seq, at.head) + at.channel);
  }
}

/// Row r of the window of a convolution warp.
template <int kColumns>
__device__ __forceinline__ float* window_row(const DecodeArgs& x, const Place<kColumns>& at,
                                             int slot, int r) {
  return x.conv.row(slot, r) + at.warp * x.width() + at.wide_channel();
}

/// The window moves on by the token.
template <int kColumns>
__device__ __forceinline__ void store_window(const Operands& mine, const DecodeArgs& x,
                                             const Place<kColumns>& at, int slot) {
#pragma unroll
  for (int r = 0; r < kPast; ++r) {
    const Quad& row = mine.inputs[r + 1];
    __stcg(reinterpret_cast<float4*>(window_row(x, at, slot, r)),
           make_float4(row.v[0], row.v[1], row.v[2], row.v[3]));
  }
}

/// Warps 0 to 2: a channel's four taps, SiLU; q and k normalised.
template <int kColumns>
__device__ __forceinline__ void convolve(Shared& shared, const Operands& mine, const DecodeArgs& x,
                                         const Place<kColumns>& at) {
  Quad y;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    float inputs[kTaps];
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      inputs[j] = mine.inputs[j].v[i];
    }
    y.v[i] = silu(tap_sum(mine.weights[i].v, inputs));
  }
  if (at.warp != kConvV) {
    const float factor = at.warp == kConvQ ? x.q_scale : 1.0F;
    const float scale = l2_scale(warp_sum(add_squares(0.0F, y)), factor, x.l2_eps);
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      y.v[i] *= scale;
    }
  }
  float* const vector = at.warp == kConvQ ? shared.q : at.warp == kConvK ? shared.k : shared.v;
  put_quad(vector + at.channel, y);
}

/// Warp 3, where the decay is projected before.
template <int kColumns>
__device__ __forceinline__ void decay_rows(Shared& shared, const Operands& mine,
                                           const DecodeArgs& x, const Place<kColumns>& at,
                                           float rate) {
  Quad e;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    e.v[i] = expf(log_decay(mine.inputs[0].v[i] + mine.weights[0].v[i], rate, x.gate));
  }
  put_quad(shared.e + at.channel, e);
}

/// The decay's projection of 16 channels a warp; a lane that reports has two of them.
template <bool kProject, int kColumns>
class Projection {
 public:
  static constexpr int kPairs = kInnerTiles * kStepsPerTile * 2;
  static constexpr int kSharedBytes = kProject ? kDecodeWarps * kBlockBytes : 0;

  /// Weights alone: before the kernel in front has ended.
  __device__ __forceinline__ Projection(const DecodeArgs& x, const Place<kColumns>& at)
      : lane_(static_cast<int>(threadIdx.x) % kWarp),
        channel_(at.warp * static_cast<int>(kTileRows) + lane_ / 4),
        weights_(dynamic_smem<std::uint8_t>() + sizeof(Shared) + at.warp * kBlockBytes) {
    if constexpr (kProject) {
      const std::int64_t block = static_cast<std::int64_t>(at.head) * kDecodeWarps + at.warp;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int place = (i * kWarp + lane_) * 16;
        ptx::cp_async_16(weights_ + place, x.f_b + block * kBlockBytes + place);
      }
      ptx::cp_async_commit();
      const float* const bias = x.dt_bias + at.wide_head();
      bias_[0] = bias[channel_];
      bias_[1] = bias[channel_ + 8];
    }
  }

  /// As the lane wants them in B fragments (mma.cuh), but for their rounding.
  __device__ __forceinline__ void load(const DecodeArgs& x, const Place<kColumns>& at) {
    if constexpr (kProject) {
      const float* const row = x.f_a.row(at.seq) + lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        inputs_[i] = *reinterpret_cast<const float2*>(row + i * 8);
      }
    }
  }

  /// All eight columns of the product are the token; a lane reads the weights that it has copied.
  __device__ __forceinline__ void decay_rows(Shared& shared, const DecodeArgs& x, float rate) {
    if constexpr (kProject) {
      float sum[1][4] = {};
      ptx::cp_async_wait<0>();
#pragma unroll
      for (int i = 0; i < kInnerTiles; ++i) {
        RawTile<WeightFormat::kBF16> tile[1];
        RawScales<WeightFormat::kBF16> none;
        load_shared_tile(tile[0], none, weights_ + i * tile_bytes(WeightFormat::kBF16), nullptr,
                         lane_);
        const TileScales scales[1] = {};
        std::uint32_t b[kStepsPerTile][2];
#pragma unroll
        for (int pair = 0; pair < 2 * kStepsPerTile; ++pair) {
          const float2 inputs = inputs_[i * 2 * kStepsPerTile + pair];
          b[pair / 2][pair % 2] = ptx::cvt_bf16x2(inputs.x, inputs.y);
        }
        multiply_tile<WeightFormat::kBF16>(sum, tile, scales, i, b);
      }
      if (lane_ % 4 == 0) {
        const float low = 0.0F + sum[0][0];  // a sum of segments begins with 0
        const float high = 0.0F + sum[0][2];
        shared.e[channel_] = expf(log_decay(low + bias_[0], rate, x.gate));
        shared.e[channel_ + 8] = expf(log_decay(high + bias_[1], rate, x.gate));
      }
      __syncwarp();
    }
  }

 private:
  int lane_;
  int channel_;
  std::uint8_t* weights_;
  float bias_[2];
  float2 inputs_[kPairs];
};

/// Warp 4 of the first block, once all outputs are there.
template <int kColumns>
__device__ __forceinline__ void normalise(const Shared& shared, const Operands& mine,
                                          const DecodeArgs& x, const Place<kColumns>& at) {
  const Quad o = quad_at(shared.o + at.channel);
  const float scale = rms_scale(warp_sum(add_squares(0.0F, o)), kHeadDim, x.norm_eps);
  Quad y;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    y.v[i] = gated_value(o.v[i], scale, mine.weights[0].v[i], mine.inputs[0].v[i]);
  }
  put_quad(x.y.row(at.seq, at.head) + at.channel, y);
}

}  // namespace tandem::cuda::kda_fused
