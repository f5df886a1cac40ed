// kda_decode.cu — a KDA mixer between its projections, one token a sequence, in one launch.
// Contract: ops/kda.h: kda_decode   Oracle: the ops it stands for, bit for bit
// Math      q, k, v <- silu(conv(x)); q, k L2-normalised; e^g and beta; one step of the recurrence
//           (kda_recurrent.cu); o rms(o) w sigmoid(gate)
// Schedule  A block of eight warps has 32, 64 or 128 value columns of one (sequence, head), a
// cluster
//           all 128. Each warp starts the loads of its columns of the state; while they are under
//           way, warps 0 to 2 do the convolutions of q, k and v (a lane four channels), warp 3 the
//           gate; in a cluster every block does so for all channels. Outputs meet in the first
//           block, where warp 4 normalises them while the others store the state.
// Traffic   S read and written once: 131,072 bytes a sequence and head; the rest is 5,632 (the
//           convolution's windows 3,072 each way and its inputs). K3: 4.3 TB/s is 3.1 us a
//           sequence.
// Numerics  those of the parts: conv1d.cuh, norm.cuh, kda_gate.cuh, kda_step.cuh.
// Hazards   a block of a cluster may read a window that another writes: the first one writes, after
//           a barrier that all reach with their windows in registers.
// Launch    choose_kda.h; K = V = 128, four taps; graph-safe.
#include <cmath>

#include "backends/cuda/choose_kda.h"
#include "backends/cuda/conv1d.cuh"
#include "backends/cuda/families.h"
#include "backends/cuda/kda_batch.cuh"
#include "backends/cuda/kda_gate.cuh"
#include "backends/cuda/kda_step.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/norm.cuh"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/runtime/cuda_device.h"
#include "ops/op_table.h"

namespace tandem::cuda {
namespace {

constexpr int kHeadDim = 128;  // K and V
constexpr int kQuads = state_quads(kHeadDim);
constexpr int kTaps = 4;
constexpr int kPast = kTaps - 1;
constexpr int kThreads = kDecodeWarps * kWarp;
constexpr int kOutputsDone = 1;  // named barrier

/// What the warps of a block do beside their columns, by number.
enum Role { kConvQ, kConvK, kConvV, kGate, kNorm };
static_assert(kNorm < kDecodeWarps && kHeadDim == kWarp * kQuad);

struct DecodeArgs {
  Cube<float> y;
  Mat<const float> qkv;
  Cube<const float> f, gate_out;
  Cube<const float> b;
  const float* filters[3];
  const float* a_log;
  const float* dt_bias;
  const float* o_norm;
  Cube<float> conv;
  const std::int32_t* slots;
  float* states;
  int heads;
  KdaGateParams gate;
  float q_scale, l2_eps, norm_eps;

  [[nodiscard]] __device__ std::int64_t width() const {
    return static_cast<std::int64_t>(heads) * kHeadDim;
  }
};

struct Shared {
  float q[kHeadDim];
  float k[kHeadDim];
  float e[kHeadDim];
  float v[kHeadDim];
  float o[kHeadDim];  // the first block's counts
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
  /// Of an axis of all heads' channels.
  [[nodiscard]] __device__ std::int64_t wide_channel() const {
    return static_cast<std::int64_t>(head) * kHeadDim + channel;
  }
};

__device__ __forceinline__ Quad quad_at(const float* row) {
  return load_quad<true>(row, 0, kQuad);
}
__device__ __forceinline__ void put_quad(float* row, const Quad& quad) {
  store_quad<true>(row, 0, kQuad, quad);
}

/// A role's operands: of a convolution [channel] taps, and [tap] inputs; of the others [0] alone,
/// the norm's input being its gate.
struct Operands {
  Quad weights[kQuad];
  Quad inputs[kTaps];
  float scalar;  // of the gate: the raw write strength
};

/// What no kernel writes.
template <int kColumns>
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
  } else if (at.warp == kGate) {
    mine.weights[0] = quad_at(x.dt_bias + at.wide_channel());
  } else if (at.warp == kNorm) {
    mine.weights[0] = quad_at(x.o_norm + at.channel);
  }
}

/// The token's row, which does not depend on the slot.
template <int kColumns>
__device__ __forceinline__ void load_row(Operands& mine, const DecodeArgs& x,
                                         const Place<kColumns>& at) {
  if (at.warp <= kConvV) {
    mine.inputs[kPast] = quad_at(x.qkv.row(at.seq) + at.warp * x.width() + at.wide_channel());
  } else if (at.warp == kGate) {
    mine.inputs[0] = quad_at(x.f.row(at.seq, at.head) + at.channel);
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
    put_quad(window_row(x, at, slot, r), mine.inputs[r + 1]);
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

/// Warp 3.
template <int kColumns>
__device__ __forceinline__ void decay_and_beta(Shared& shared, const Operands& mine,
                                               const DecodeArgs& x, const Place<kColumns>& at,
                                               float rate) {
  Quad e;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    e.v[i] = expf(log_decay(mine.inputs[0].v[i] + mine.weights[0].v[i], rate, x.gate));
  }
  put_quad(shared.e + at.channel, e);
  if (at.channel == 0) {
    shared.beta = sigmoid(mine.scalar);
  }
}

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

/// The lanes' outputs to the first block, and on to its warp 4, which waits for them.
template <int kColumns>
__device__ __forceinline__ void deliver(Shared& shared, const Operands& mine, const DecodeArgs& x,
                                        const Place<kColumns>& at, int slot,
                                        const float (&o)[kColumns]) {
  const bool delivers = row_group() < kColumns;
  float* const place = shared.o + at.column + row_group();
  if constexpr (Place<kColumns>::kCluster == 1) {
    if (delivers) {
      *place = own_column(o);
    }
    __syncwarp();
    if (at.warp == kNorm) {
      ptx::named_barrier_sync(kOutputsDone, kThreads);
    } else {
      ptx::named_barrier_arrive(kOutputsDone, kThreads);
    }
  } else {
    __syncwarp();
    ptx::cluster_wait();  // all blocks have started, and all have read their windows
    if (delivers) {
      ptx::store_to_rank(place, 0, own_column(o));
    }
    __syncwarp();
    ptx::cluster_arrive();
    if (at.rank == 0 && at.warp <= kConvV) {
      store_window(mine, x, at, slot);
    }
    if (at.rank == 0 && at.warp == kNorm) {
      __syncwarp();
      ptx::cluster_wait();
    }
  }
  if (at.rank == 0 && at.warp == kNorm) {
    normalise(shared, mine, x, at);
  }
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads, 2) decode(const __grid_constant__ DecodeArgs x) {
  constexpr bool kAlone = Place<kColumns>::kCluster == 1;
  Shared& shared = *dynamic_smem<Shared>();
  const Place<kColumns> at(x.heads);
  Operands mine{};
  load_weights(mine, x, at);
  const float a_log = x.a_log[at.head];
  begin_kernel();
  const int slot = same_in_warp(x.slots[at.seq]);
  if (slot < 0) {
    if (at.rank == 0 && at.warp == kNorm) {
      put_quad(x.y.row(at.seq, at.head) + at.channel, Quad{});
    }
    return;  // the whole cluster
  }
  load_row(mine, x, at);
  if (at.warp <= kConvV) {
#pragma unroll
    for (int r = 0; r < kPast; ++r) {
      mine.inputs[r] = quad_at(window_row(x, at, slot, r));
    }
  }
  const std::int64_t item = static_cast<std::int64_t>(slot) * x.heads + at.head;
  float* const state = first_row(x.states + item * kHeadDim * kHeadDim + at.column, kHeadDim);
  StateTile<kQuads, kColumns> tile;
  load_state(tile, state, kHeadDim, kHeadDim);

  if (at.warp <= kConvV) {
    convolve(shared, mine, x, at);
    if constexpr (kAlone) {
      store_window(mine, x, at, slot);
    }
  } else if (at.warp == kGate) {
    decay_and_beta(shared, mine, x, at, decay_rate(a_log));
  } else if (at.warp == kNorm) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      mine.inputs[0].v[i] = sigmoid(mine.inputs[0].v[i]);
    }
  }
  __syncwarp();
  if constexpr (!kAlone) {
    ptx::cluster_arrive();
  }
  __syncthreads();  // q, k, e, v, beta are there

  using Vector = typename Columns<kColumns>::Vector;
  const Vector vector = *reinterpret_cast<const Vector*>(shared.v + at.column);
  float v[kColumns];
  float o[kColumns];
  memcpy(v, &vector, sizeof(v));
  token_step(tile, {shared.q, shared.k, shared.e}, shared.beta, v, o);
  deliver(shared, mine, x, at, slot, o);
  store_state(tile, state, kHeadDim, kHeadDim);
}

[[nodiscard]] bool supported(const KdaDecode& in, const F32Cube& y, const KdaStatePool& pool,
                             const F32Cube& conv) {
  bool whole = y.size(2) == kHeadDim && in.filters[0].size(1) == kTaps && whole_quads(y) &&
               whole_quads(in.qkv) && whole_quads(in.gate_out) && whole_quads(conv) &&
               whole_quads(in.o_norm) && whole_quads(in.dt_bias) &&
               reinterpret_cast<std::uintptr_t>(pool.data) % sizeof(float4) == 0;
  for (const ConstF32Mat& filter : in.filters) {
    whole = whole && whole_quads(filter);
  }
  return whole;
}

template <int kColumns>
void launch_decode(const ExecCtx& ctx, const DecodeArgs& x, std::int64_t items) {
  constexpr int kCluster = Place<kColumns>::kCluster;
  launch(ctx, "kda_decode", decode<kColumns>,
         {.grid = static_cast<unsigned>(items * kCluster),
          .block = kThreads,
          .smem_bytes = sizeof(Shared),
          .cluster = kCluster},
         x);
}

bool kda_decode(const ExecCtx& ctx, F32Cube y, const KdaDecode& in, const KdaStatePool& pool,
                F32Cube conv, const SeqBatch& seqs) {
  if (!supported(in, y, pool, conv)) {
    return false;
  }
  const std::int64_t items = y.size(0) * y.size(1);
  if (items == 0) {
    return true;
  }
  TDM_CHECK(items <= INT32_MAX / 4, items);
  const ArenaScope scope(*ctx.workspace);
  const F32Cube f{ctx.workspace->take<float>(items * kHeadDim).data(),
                  {y.size(0), y.size(1), kHeadDim}};
  ctx.ops->gemm.linear(ctx, {f.data(), {y.size(0), in.f_b->out}}, in.f_a, *in.f_b, false);
  const DecodeArgs x{.y = device_cube(y),
                     .qkv = device_mat(in.qkv),
                     .f = {f.data(), f.stride(0), f.stride(1)},
                     .gate_out = device_cube(in.gate_out),
                     .b = device_elements(in.b),
                     .filters = {in.filters[0].data(), in.filters[1].data(), in.filters[2].data()},
                     .a_log = in.a_log.data(),
                     .dt_bias = in.dt_bias.data(),
                     .o_norm = in.o_norm.data(),
                     .conv = device_cube(conv),
                     .slots = seqs.state_slots.data(),
                     .states = pool.data,
                     .heads = static_cast<int>(y.size(1)),
                     .gate = in.gate,
                     .q_scale = in.q_scale,
                     .l2_eps = in.l2_eps,
                     .norm_eps = in.norm_eps};
  switch (choose_decode_columns(items, device_of(ctx).info())) {
    case 1:
      launch_decode<1>(ctx, x, items);
      break;
    case 2:
      launch_decode<2>(ctx, x, items);
      break;
    default:
      launch_decode<4>(ctx, x, items);
  }
  return true;
}

}  // namespace

void add_kda_decode_ops(KdaOps& ops) {
  ops.decode = kda_decode;
}

}  // namespace tandem::cuda
