// kda_recurrent.cu — the KDA recurrence.   Contract: ops/kda.h   Oracle: ops/ref/kda_ref.h
// Math      S <- diag(e^g) S;  r = v - S^T k;  S <- S + k (beta r)^T;  o = S^T q
// Schedule  A block is one warp and owns 32 value columns of one (sequence, head): lane j keeps
//           column j of S in K registers from the first token to the last. k, q, g, v, beta of a
//           token come through a ring of kStages tokens in shared memory, by asynchronous copies.
// Traffic   decode: S read and written once, 8 K V bytes a sequence and head. K3: 12.6 MB for a
//           sequence and layer, 2.9 us at 4.3 TB/s. A lane's K loads are all in flight at once.
// Numerics  fp32; sums over k in four chains (k mod 4), added in pairs: one order for every K,
//           whatever the batch or the split into calls.
// Launch    one warp for every sequence, head and 32 columns; graph-safe.
#include <cmath>

#include "backends/cuda/families.h"
#include "backends/cuda/kda_batch.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/ptx/cp_async.cuh"
#include "backends/cuda/runtime/cuda_device.h"
#include "core/check.h"

namespace tandem::cuda {
namespace {

constexpr int kStages = 4;     // tokens of the ring
constexpr int kChains = 4;     // partial sums over k
constexpr int kOtherKeys = 0;  // any K: the state lies in shared memory

struct Recurrence {
  Cube<float> o;
  Cube<const float> q, k, v, g;
  Cube<const float> beta;
  const std::int32_t* cu_seqlens;
  const std::int32_t* slots;  // null: training
  float* states;
  float* checkpoints;  // may be null
  int num_heads;
  int keys;
  int values;

  __host__ __device__ int column_blocks() const { return (values + kWarp - 1) / kWarp; }
};

/// A lane's column of the state.
template <int kKeys>
struct Column {
  float s[kKeys];
  __device__ float& at(int k) { return s[k]; }
};
template <>
struct Column<kOtherKeys> {
  float* s;
  __device__ float& at(int k) { return s[k * kWarp]; }
};

__host__ __device__ constexpr int padded_keys(int keys) {
  return (keys + kChains - 1) / kChains * kChains;
}

/// A token's inputs in shared memory: q, k, e [padded_keys], v [32], beta.
struct Token {
  float* q;
  float* k;
  float* e;  // g until exponentiate()
  float* v;
  float* beta;

  __device__ Token(float* stage, int padded)
      : q(stage), k(q + padded), e(k + padded), v(e + padded), beta(v + kWarp) {}
  static __host__ __device__ constexpr int floats(int padded) {
    return 3 * padded + kWarp + kChains;  // a multiple of 16 bytes
  }
};

/// Which columns of which sequence and head a block runs.
struct Place {
  int seq;
  int head;
  int column;   // this lane's
  bool active;  // the column exists

  __device__ Place(const Recurrence& x, int lane) {
    const int blocks = x.column_blocks();
    const int item = static_cast<int>(blockIdx.x) / blocks;
    column = static_cast<int>(blockIdx.x) % blocks * kWarp + lane;
    active = column < x.values;
    seq = item / x.num_heads;
    head = item % x.num_heads;
  }
};

/// fn(c) for the lane's channels lane, lane + 32, ...
template <int kKeys, typename Fn>
__device__ __forceinline__ void each_channel(int keys, const Fn& fn) {
  const int lane = static_cast<int>(threadIdx.x);
  if constexpr (kKeys != kOtherKeys && kKeys % kWarp == 0) {
#pragma unroll
    for (int i = 0; i < kKeys / kWarp; ++i) {
      fn(lane + i * kWarp);
    }
  } else {
    for (int c = lane; c < keys; c += kWarp) {
      fn(c);
    }
  }
}

/// Starts the copies of token t, each lane its channels.
template <int kKeys>
__device__ __forceinline__ void fetch(const Recurrence& x, const Place& at, int keys,
                                      std::int64_t t, const Token& token) {
  const int lane = static_cast<int>(threadIdx.x);
  const float* q = x.q.row(t, at.head);
  const float* k = x.k.row(t, at.head);
  const float* g = x.g.row(t, at.head);
  each_channel<kKeys>(keys, [&](int c) {
    ptx::cp_async_4(token.q + c, q + c);
    ptx::cp_async_4(token.k + c, k + c);
    ptx::cp_async_4(token.e + c, g + c);
  });
  if (at.active) {
    ptx::cp_async_4(token.v + lane, x.v.row(t, at.head) + at.column);
  }
  if (lane == 0) {
    ptx::cp_async_4(token.beta, x.beta.row(t, at.head));
  }
}

/// g -> e^g, each lane the channels that it has copied.
template <int kKeys>
__device__ __forceinline__ void exponentiate(const Token& token, int keys) {
  each_channel<kKeys>(keys, [&](int c) { token.e[c] = expf(token.e[c]); });
}

__device__ __forceinline__ void four(const float* from, float (&to)[kChains]) {
  const float4 x = *reinterpret_cast<const float4*>(from);
  to[0] = x.x;
  to[1] = x.y;
  to[2] = x.z;
  to[3] = x.w;
}

/// One token on a lane's column; returns its output.
template <int kKeys>
__device__ __forceinline__ float step(Column<kKeys>& state, const Token& token, int keys, float v) {
  float k[kChains];
  float other[kChains];
  float sum[kChains] = {};
#pragma unroll
  for (int first = 0; first < keys; first += kChains) {
    four(token.k + first, k);
    four(token.e + first, other);
#pragma unroll
    for (int i = 0; i < kChains; ++i) {
      if (kKeys != kOtherKeys || first + i < keys) {
        float& s = state.at(first + i);
        s *= other[i];
        sum[i] = fmaf(s, k[i], sum[i]);
      }
    }
  }
  const float u = *token.beta * (v - ((sum[0] + sum[1]) + (sum[2] + sum[3])));
  __syncwarp();  // so that k is read again: kept from above, it would take K more registers
  float out[kChains] = {};
#pragma unroll
  for (int first = 0; first < keys; first += kChains) {
    four(token.k + first, k);
    four(token.q + first, other);
#pragma unroll
    for (int i = 0; i < kChains; ++i) {
      if (kKeys != kOtherKeys || first + i < keys) {
        float& s = state.at(first + i);
        s = fmaf(k[i], u, s);
        out[i] = fmaf(s, other[i], out[i]);
      }
    }
  }
  return (out[0] + out[1]) + (out[2] + out[3]);
}

/// `from` is the lane's column in [K, V]; null: zeros. Streaming: no state is read twice from L2.
template <int kKeys>
__device__ __forceinline__ void load_state(Column<kKeys>& state, const float* from, int keys,
                                           int values) {
  if (from == nullptr) {
#pragma unroll
    for (int k = 0; k < keys; ++k) {
      state.at(k) = 0.0F;
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < keys; ++k) {
    state.at(k) = __ldcs(from);
    from += values;
  }
}

template <int kKeys>
__device__ __forceinline__ void store_state(Column<kKeys>& state, float* to, int keys, int values) {
#pragma unroll
  for (int k = 0; k < keys; ++k) {
    __stcs(to, state.at(k));
    to += values;
  }
}

__device__ void zero_outputs(const Recurrence& x, const Place& at, int begin, int end) {
  if (at.active) {
    for (int t = begin; t < end; ++t) {
      x.o.row(t, at.head)[at.column] = 0.0F;
    }
  }
}

/// Blocks an SM should hold: in decode 8 of K = 128 keep up to 128 KiB of state loads in flight.
template <int kKeys>
constexpr int kBlocksPerSm = kKeys == 128 ? 8 : 16;

template <int kKeys>
__global__ void __launch_bounds__(kWarp, kBlocksPerSm<kKeys>) recur(const Recurrence x) {
  begin_kernel();
  extern __shared__ float4 shared[];
  constexpr int kRows = static_cast<int>(kKdaCheckpointRows);
  const int lane = static_cast<int>(threadIdx.x);
  const int keys = kKeys != kOtherKeys ? kKeys : x.keys;
  const int padded = padded_keys(keys);
  float* const ring = reinterpret_cast<float*>(shared);
  const auto token = [&](int t) {
    return Token(ring + t % kStages * Token::floats(padded), padded);
  };

  const Place at(x, lane);
  const int begin = x.cu_seqlens[at.seq];
  const int length = x.cu_seqlens[at.seq + 1] - begin;
  const int slot = x.slots != nullptr ? x.slots[at.seq] : 0;
  if (length == 0) {
    return;
  }
  if (slot < 0) {
    zero_outputs(x, at, begin, begin + length);
    return;
  }
  for (int t = 0; t < kStages - 1; ++t) {
    if (t < length) {
      fetch<kKeys>(x, at, keys, begin + t, token(t));
    }
    ptx::cp_async_commit();
  }

  const std::int64_t state_size = static_cast<std::int64_t>(keys) * x.values;
  Column<kKeys> state;
  if constexpr (kKeys == kOtherKeys) {
    state.s = ring + kStages * Token::floats(padded) + lane;
  }
  float* const pooled =
      x.slots != nullptr && at.active
          ? x.states + (static_cast<std::int64_t>(slot) * x.num_heads + at.head) * state_size +
                at.column
          : nullptr;
  load_state(state, pooled, keys, x.values);
  float* saved = nullptr;
  if (x.checkpoints != nullptr) {
    const std::int64_t index = first_checkpoint(x.cu_seqlens, at.seq) * x.num_heads + at.head;
    saved = x.checkpoints + index * state_size + at.column;
  }

  for (int t = 0; t < length; ++t) {
    const Token now = token(t);
    ptx::cp_async_wait<kStages - 2>();
    exponentiate<kKeys>(now, keys);
    __syncwarp();  // token t is complete, and every lane has left token t - 1: its place is free
    if (t + kStages - 1 < length) {
      fetch<kKeys>(x, at, keys, begin + t + kStages - 1, token(t + kStages - 1));
    }
    ptx::cp_async_commit();
    if (saved != nullptr && t % kRows == 0 && at.active) {
      store_state(state, saved + t / kRows * x.num_heads * state_size, keys, x.values);
    }
    const float o = step(state, now, keys, at.active ? now.v[lane] : 0.0F);
    if (at.active) {
      x.o.row(begin + t, at.head)[at.column] = o;
    }
  }
  if (pooled != nullptr) {
    store_state(state, pooled, keys, x.values);
  }
}

template <int kKeys>
void launch_recur(const ExecCtx& ctx, const Recurrence& x, std::int64_t blocks) {
  const DeviceInfo& info = device_of(ctx).info();
  const int padded = padded_keys(x.keys);
  const int state = kKeys == kOtherKeys ? x.keys * kWarp : 0;
  const int bytes = (kStages * Token::floats(padded) + state) * static_cast<int>(sizeof(float));
  TDM_CHECK(bytes <= info.smem_per_block, bytes, info.smem_per_block);
  launch(ctx, "kda_recurrent", recur<kKeys>, {static_cast<unsigned>(blocks), kWarp, bytes}, x);
}

void recurrent(const ExecCtx& ctx, F32Cube o, const KdaInputs& in, const KdaStatePool& pool,
               const SeqBatch& seqs, float* checkpoints) {
  const Recurrence x{.o = device_cube(o),
                     .q = device_cube(in.q),
                     .k = device_cube(in.k),
                     .v = device_cube(in.v),
                     .g = device_cube(in.g),
                     .beta = device_elements(in.beta),
                     .cu_seqlens = seqs.cu_seqlens.data(),
                     .slots = seqs.keeps_state() ? seqs.state_slots.data() : nullptr,
                     .states = pool.data,
                     .checkpoints = checkpoints,
                     .num_heads = static_cast<int>(o.size(1)),
                     .keys = static_cast<int>(in.q.size(2)),
                     .values = static_cast<int>(o.size(2))};
  const std::int64_t blocks = seqs.num_seqs() * o.size(1) * x.column_blocks();
  if (blocks == 0 || o.size(0) == 0) {
    return;
  }
  TDM_CHECK(blocks <= INT32_MAX, blocks);
  switch (x.keys) {
    case 16:
      return launch_recur<16>(ctx, x, blocks);
    case 32:
      return launch_recur<32>(ctx, x, blocks);
    case 64:
      return launch_recur<64>(ctx, x, blocks);
    case 128:
      return launch_recur<128>(ctx, x, blocks);
    default:
      return launch_recur<kOtherKeys>(ctx, x, blocks);
  }
}

}  // namespace

void add_kda_recurrent_ops(KdaOps& ops) {
  ops.recurrent = recurrent;
  ops.recurrent_bwd = kda_recurrent_bwd;
}

}  // namespace tandem::cuda
