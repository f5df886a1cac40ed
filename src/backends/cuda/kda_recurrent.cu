// kda_recurrent.cu — the KDA recurrence.   Contract: ops/kda.h   Oracle: ops/ref/kda_ref.h
// Math      S <- diag(e^g) S;  r = v - S^T k;  S <- S + k (beta r)^T;  o = S^T q
// Schedule  A block owns some value columns of one (sequence, head): up to four warps keep them in
//           registers from the first token to the last (kda_step.cuh); one more feeds them. It
//           brings q, k, g, v, beta of the next chunks of tokens into a ring in shared memory and
//           replaces g by e^g, once for all columns, while the others work on the chunk before.
// Latency   Of a token on its warp, in cycles: 16 fused multiply-adds for S^T (e k), three
// shuffles,
//           16 more for the write; the decay, the output of the token before and the reads of the
//           next token fill the wait for the shuffles.
// Traffic   decode: S read and written once, 8 K V bytes a sequence and head. K3: 12.6 MB for a
//           sequence and layer, 2.9 us at 4.3 TB/s. All of a lane's loads are in flight at once.
// Numerics  fp32; the order of every sum is kda_step.cuh's for every plan, batch and split.
// Launch    choose_kda.h; K <= 128; graph-safe.
#include <cmath>
#include <cstring>

#include "backends/cuda/choose_kda.h"
#include "backends/cuda/families.h"
#include "backends/cuda/kda_batch.cuh"
#include "backends/cuda/kda_step.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/ptx/cp_async.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/runtime/cuda_device.h"
#include "core/check.h"

namespace tandem::cuda {
namespace {

constexpr int kStages = 3;  // chunks of the ring
constexpr int kMostThreads = (kMostStateWarps + 1) * kWarp;
constexpr int kMostKeys = 128;

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
  int column_blocks;
  int state_warps;
  int chunk;   // tokens
  bool quads;  // rows of q, k, g start on 16 bytes and hold whole quads
};

/// A token's inputs in shared memory: q, k, e [32 kQuads], v of the block's columns, beta.
/// Offsets are those of the widest block.
template <int kQuads, int kColumns>
struct Token {
  static constexpr int kKeys = kQuads * kRowsOfQuads;
  static constexpr int kValues = kMostStateWarps * kColumnLanes * kColumns;
  static constexpr int kFloats = 3 * kKeys + kValues + kQuad;  // whole quads

  int place;  // floats; no pointer, so that the compiler knows these for shared memory

  __device__ float* q() const { return dynamic_smem<float>() + place; }
  __device__ float* k() const { return q() + kKeys; }
  __device__ float* e() const { return q() + 2 * kKeys; }  // g until exponentiate()
  __device__ float* v() const { return q() + 3 * kKeys; }
  __device__ float* beta() const { return q() + 3 * kKeys + kValues; }
  __device__ Token after() const { return {place + kFloats}; }
};

/// Chunk n lies in stage n % kStages.
template <int kQuads, int kColumns>
struct Ring {
  int chunk;
  __device__ Token<kQuads, kColumns> token(int n, int r) const {
    return {(n % kStages * chunk + r) * Token<kQuads, kColumns>::kFloats};
  }
  // The feeder has filled the stage; the state warps have left it.
  __device__ static int full(int n) { return 1 + n % kStages; }
  __device__ static int empty(int n) { return 1 + kStages + n % kStages; }
};

__device__ __forceinline__ int block_threads() {
  return static_cast<int>(blockDim.x);
}

/// Which columns of which sequence and head a block has.
struct Place {
  int seq;
  int head;
  int column;   // the first
  int columns;  // the block's; those from the state's end on do not exist
  int begin;    // row of the first token
  int length;
  int chunks;

  __device__ Place(const Recurrence& x, int warp_columns) {
    const int item = static_cast<int>(blockIdx.x) / x.column_blocks;
    const int first = static_cast<int>(blockIdx.x) % x.column_blocks * x.state_warps;
    column = first * warp_columns;
    columns = min(x.state_warps * warp_columns, x.values - column);
    seq = item / x.num_heads;
    head = item % x.num_heads;
    begin = same_in_warp(x.cu_seqlens[seq]);
    length = same_in_warp(x.cu_seqlens[seq + 1]) - begin;
    chunks = (length + x.chunk - 1) / x.chunk;
  }
  __device__ int tokens_of(int n, int chunk) const { return min(chunk, length - n * chunk); }
};

/// Starts the copies of token t. A lane brings channels 4 lane .. 4 lane + 3 of q, k and g.
template <int kQuads, int kColumns>
__device__ __forceinline__ void fetch(const Recurrence& x, const Place& at, std::int64_t t,
                                      const Token<kQuads, kColumns>& token) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int channel = lane * kQuad;
  const float* const q = x.q.row(t, at.head) + channel;
  const float* const k = x.k.row(t, at.head) + channel;
  const float* const g = x.g.row(t, at.head) + channel;
  if (x.quads) {
    if (channel < x.keys) {
      ptx::cp_async_16(token.q() + channel, q);
      ptx::cp_async_16(token.k() + channel, k);
      ptx::cp_async_16(token.e() + channel, g);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (channel + i < x.keys) {
        ptx::cp_async_4(token.q() + channel + i, q + i);
        ptx::cp_async_4(token.k() + channel + i, k + i);
        ptx::cp_async_4(token.e() + channel + i, g + i);
      }
    }
  }
  const float* const v = x.v.row(t, at.head) + at.column;
  for (int c = lane; c < at.columns; c += kWarp) {
    ptx::cp_async_4(token.v() + c, v + c);
  }
  if (lane == 0) {
    ptx::cp_async_4(token.beta(), x.beta.row(t, at.head));
  }
}

template <int kQuads, int kColumns>
__device__ __forceinline__ void fetch_chunk(const Recurrence& x, const Place& at, int n,
                                            const Ring<kQuads, kColumns>& ring) {
  if (n < at.chunks) {
    const int count = at.tokens_of(n, x.chunk);
    const std::int64_t first = at.begin + static_cast<std::int64_t>(n) * x.chunk;
    for (int r = 0; r < count; ++r) {
      fetch(x, at, first + r, ring.token(n, r));
    }
  }
  ptx::cp_async_commit();
}

/// g -> e^g for the channels that this lane has copied.
template <int kQuads, int kColumns>
__device__ __forceinline__ void exponentiate(const Token<kQuads, kColumns>& token, int keys) {
  const int channel = static_cast<int>(threadIdx.x) % kWarp * kQuad;
  float* const e = token.e() + channel;
  if (channel + kQuad <= keys) {
    float4* const quad = reinterpret_cast<float4*>(e);
    const float4 g = *quad;
    *quad = make_float4(expf(g.x), expf(g.y), expf(g.z), expf(g.w));
  } else {
    for (int i = 0; channel + i < keys; ++i) {
      e[i] = expf(e[i]);
    }
  }
}

/// The last warp.
template <int kQuads, int kColumns>
__device__ __forceinline__ void feed(const Recurrence& x, const Place& at,
                                     const Ring<kQuads, kColumns>& ring) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (x.keys < ring.token(0, 0).kKeys) {  // channels beyond K are never copied
    for (int i = lane; i < kStages * x.chunk * Token<kQuads, kColumns>::kFloats; i += kWarp) {
      dynamic_smem<float>()[i] = 0.0F;
    }
    __syncwarp();
  }
  for (int n = 0; n < kStages - 1; ++n) {
    fetch_chunk(x, at, n, ring);
  }
  for (int n = 0; n < at.chunks; ++n) {
    ptx::cp_async_wait<kStages - 2>();
    const int count = at.tokens_of(n, x.chunk);
#pragma unroll 4
    for (int r = 0; r < count; ++r) {
      exponentiate(ring.token(n, r), x.keys);
    }
    __syncwarp();
    ptx::named_barrier_arrive(ring.full(n), block_threads());
    const int next = n + kStages - 1;
    if (n > 0 && next < at.chunks) {  // into the place of chunk n - 1
      ptx::named_barrier_sync(ring.empty(next), block_threads());
    }
    fetch_chunk(x, at, next, ring);
  }
}

/// A state warp's lane: its columns, and where they are in memory.
template <int kQuads, int kColumns>
struct Lane {
  StateTile<kQuads, kColumns> tile;
  int column;   // its first, from the block's first
  bool active;  // its columns exist
  bool stores;  // and it stores one of them
  float* o;     // that column of token 0's output

  __device__ Lane(const Recurrence& x, const Place& at, int warp) {
    column = (warp * kColumnLanes + column_lane()) * kColumns;
    active = column < at.columns;
    stores = active && row_group() < kColumns;
    o = x.o.row(at.begin, at.head) + at.column + column + row_group();
  }
  __device__ void values(float (&v)[kColumns], const Token<kQuads, kColumns>& token) const {
    using Vector = typename Columns<kColumns>::Vector;
    Vector x{};
    if (active) {
      x = *reinterpret_cast<const Vector*>(token.v() + column);
    }
    memcpy(v, &x, sizeof(x));
  }
  __device__ void store(float* to, const float (&out)[kColumns]) const {
    if (stores) {
      *to = own_column(out);
    }
  }
};

template <int kQuads, int kColumns>
__device__ __forceinline__ TokenRows rows_of(const Token<kQuads, kColumns>& token) {
  return {token.q(), token.k(), token.e()};
}

/// Tokens one after the other: for many columns a lane, which hide each other's latency.
template <int kQuads, int kColumns>
struct Plain {
  const Recurrence& x;
  Lane<kQuads, kColumns>& lane;
  float* to;  // the next token's output

  __device__ Plain(const Recurrence& args, Lane<kQuads, kColumns>& mine)
      : x(args), lane(mine), to(mine.o) {}

  __device__ __forceinline__ void run(Token<kQuads, kColumns> token, int count) {
    for (int r = 0; r < count; ++r) {
      float v[kColumns];
      float o[kColumns];
      lane.values(v, token);
      token_step(lane.tile, rows_of(token), *token.beta(), v, o);
      lane.store(to, o);
      to += x.o.stride_a;
      token = token.after();
    }
  }
  __device__ void finish() {}
};

/// The same sums, but a token's output is summed during the next token, and a token's rows are read
/// during the one before.
template <int kQuads, int kColumns>
struct Pipelined {
  struct Rows {
    RowValues<kQuads> q, k, e;
  };
  const Recurrence& x;
  Lane<kQuads, kColumns>& lane;
  Rows even{}, odd{};      // tokens of a chunk alternate; a token's q outlives it
  RowValues<kQuads> ek{};  // of the next token
  float* to;               // the output of the token before; what token 0 writes there is replaced
  std::int64_t ahead = 0;

  __device__ Pipelined(const Recurrence& args, Lane<kQuads, kColumns>& mine)
      : x(args), lane(mine), to(mine.o) {}

  /// Token `now`, while the rows of `next` arrive in `other`, which held the token before. The
  /// order of the statements is the schedule: a third of the other work behind each shuffle.
  __device__ __forceinline__ void step(const Rows& now, Rows& other,
                                       const Token<kQuads, kColumns>& token,
                                       const Token<kQuads, kColumns>& next) {
    float dot[kColumns];
    float o[kColumns];
    float theirs[kColumns];
    float o_theirs[kColumns];
    float v[kColumns];
    other.k = read_rows<kQuads>(next.k());
    other.e = read_rows<kQuads>(next.e());
    lane_dot(dot, lane.tile, ek);
    from_group(theirs, dot, 1);
    lane_dot(o, lane.tile, other.q);
    lane.values(v, token);
    const float beta = *token.beta();
    add(dot, theirs);
    from_group(theirs, dot, 2);
    from_group(o_theirs, o, 1);
    decay(lane.tile, now.e);
    add(dot, theirs);
    from_group(theirs, dot, 4);
    add(o, o_theirs);
    from_group(o_theirs, o, 2);
    ek = product(other.e, other.k);
    other.q = read_rows<kQuads>(next.q());
    add(dot, theirs);
    float u[kColumns];
    written(u, v, dot, beta);
    add_outer(lane.tile, now.k, u);
    add(o, o_theirs);
    from_group(o_theirs, o, 4);
    add(o, o_theirs);
    lane.store(to, o);
    to += ahead;
    ahead = x.o.stride_a;
  }

  __device__ __forceinline__ void run(Token<kQuads, kColumns> token, int count) {
    even = {read_rows<kQuads>(token.q()), read_rows<kQuads>(token.k()),
            read_rows<kQuads>(token.e())};
    ek = product(even.e, even.k);
    // Behind the last token it is read once more: whichever of the two it is, both then hold its q.
#pragma unroll 1
    for (int r = 0; r < count; r += 2) {
      const Token<kQuads, kColumns> second = r + 1 < count ? token.after() : token;
      step(even, odd, token, second);
      if (r + 1 < count) {
        token = r + 2 < count ? second.after() : second;
        step(odd, even, second, token);
      }
    }
  }
  __device__ __forceinline__ void finish() {
    float o[kColumns];
    lane_dot(o, lane.tile, odd.q);
    sum_groups(o);
    lane.store(to, o);
  }
};

/// The other warps.
template <typename Order, int kQuads, int kColumns>
__device__ __forceinline__ void keep_state(const Recurrence& x, const Place& at, int slot, int warp,
                                           const Ring<kQuads, kColumns>& ring) {
  constexpr int kRows = static_cast<int>(kKdaCheckpointRows);
  Lane<kQuads, kColumns> lane(x, at, warp);
  const std::int64_t state_size = static_cast<std::int64_t>(x.keys) * x.values;
  float* pooled = nullptr;
  if (x.slots != nullptr && lane.active) {
    float* const state =
        x.states + (static_cast<std::int64_t>(slot) * x.num_heads + at.head) * state_size;
    pooled = first_row(state + at.column + lane.column, x.values);
  }
  load_state(lane.tile, pooled, x.keys, x.values);
  float* saved = nullptr;
  if (x.checkpoints != nullptr) {
    const std::int64_t index = first_checkpoint(x.cu_seqlens, at.seq) * x.num_heads + at.head;
    float* const first = x.checkpoints + index * state_size;
    saved = lane.active ? first_row(first + at.column + lane.column, x.values) : nullptr;
  }
  Order order(x, lane);
  for (int n = 0; n < at.chunks; ++n) {
    const std::int64_t first = static_cast<std::int64_t>(n) * x.chunk;
    if (saved != nullptr && first % kRows == 0) {
      store_state(lane.tile, saved + first / kRows * x.num_heads * state_size, x.keys, x.values);
    }
    __syncwarp();
    ptx::named_barrier_sync(ring.full(n), block_threads());
    order.run(ring.token(n, 0), at.tokens_of(n, x.chunk));
    if (n + kStages < at.chunks) {
      __syncwarp();
      ptx::named_barrier_arrive(ring.empty(n), block_threads());
    }
  }
  if (pooled != nullptr) {
    store_state(lane.tile, pooled, x.keys, x.values);
  }
  order.finish();
}

__device__ void zero_outputs(const Recurrence& x, const Place& at) {
  for (int c = static_cast<int>(threadIdx.x); c < at.columns; c += block_threads()) {
    for (int t = at.begin; t < at.begin + at.length; ++t) {
      x.o.row(t, at.head)[at.column + c] = 0.0F;
    }
  }
}

/// Three or more blocks of wide tiles have 96 KiB of state loads in flight.
template <int kColumns>
constexpr int kBlocksPerSm = kColumns == 4   ? 3
                             : kColumns == 2 ? 4
                                             : 2;

template <int kQuads, int kColumns>
__global__ void __launch_bounds__(kMostThreads, kBlocksPerSm<kColumns>)
    recur(const __grid_constant__ Recurrence x) {
  begin_kernel();
  using Order =
      std::conditional_t<kColumns == 1, Pipelined<kQuads, kColumns>, Plain<kQuads, kColumns>>;
  const Ring<kQuads, kColumns> ring{x.chunk};
  const Place at(x, kColumnLanes * kColumns);
  const int slot = x.slots != nullptr ? same_in_warp(x.slots[at.seq]) : 0;
  const int warp = same_in_warp(static_cast<int>(threadIdx.x) / kWarp);
  if (at.length == 0) {
    return;
  }
  if (slot < 0) {
    zero_outputs(x, at);
  } else if (warp < x.state_warps) {
    keep_state<Order>(x, at, slot, warp, ring);
  } else {
    feed(x, at, ring);
  }
}

/// The most adjacent columns that one access to a state may move.
int adjacent_columns(const Recurrence& x) {
  int columns = kQuad;
  const auto address =
      reinterpret_cast<std::uintptr_t>(x.states) | reinterpret_cast<std::uintptr_t>(x.checkpoints);
  while (x.values % columns != 0 || address % (sizeof(float) * static_cast<unsigned>(columns))) {
    columns /= 2;
  }
  return columns;
}

template <int kQuads, int kColumns>
void launch_recur(const ExecCtx& ctx, const Recurrence& x, std::int64_t items) {
  const std::int64_t blocks = items * x.column_blocks;
  TDM_CHECK(blocks <= INT32_MAX, blocks);
  const std::int64_t bytes = std::int64_t{kStages} * x.chunk * Token<kQuads, kColumns>::kFloats *
                             static_cast<std::int64_t>(sizeof(float));
  launch(ctx, "kda_recurrent", recur<kQuads, kColumns>,
         {static_cast<unsigned>(blocks), static_cast<unsigned>((x.state_warps + 1) * kWarp), bytes},
         x);
}

template <int kQuads>
void launch_recur(const ExecCtx& ctx, const Recurrence& x, std::int64_t items, int columns) {
  const auto launch_columns = columns == 4   ? launch_recur<kQuads, 4>
                              : columns == 2 ? launch_recur<kQuads, 2>
                                             : launch_recur<kQuads, 1>;
  launch_columns(ctx, x, items);
}

void recurrent(const ExecCtx& ctx, F32Cube o, const KdaInputs& in, const KdaStatePool& pool,
               const SeqBatch& seqs, float* checkpoints) {
  Recurrence x{.o = device_cube(o),
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
               .values = static_cast<int>(o.size(2)),
               .column_blocks = 0,
               .state_warps = 0,
               .chunk = 0,
               .quads = whole_quads(in.q) && whole_quads(in.k) && whole_quads(in.g)};
  TDM_CHECK(x.keys <= kMostKeys, x.keys);
  const std::int64_t items = seqs.num_seqs() * o.size(1);
  if (items == 0 || o.size(0) == 0) {
    return;
  }
  const RecurrencePlan plan = choose_recurrence({.seqs = seqs.num_seqs(),
                                                 .rows = o.size(0),
                                                 .heads = o.size(1),
                                                 .values = o.size(2),
                                                 .adjacent = adjacent_columns(x)},
                                                device_of(ctx).info());
  x.column_blocks = static_cast<int>(plan.column_blocks(o.size(2)));
  x.state_warps = plan.state_warps;
  x.chunk = plan.chunk;
  const int quads = state_quads(x.keys);
  const auto launch_quads = quads == 1   ? launch_recur<1>
                            : quads == 2 ? launch_recur<2>
                                         : launch_recur<4>;
  launch_quads(ctx, x, items, plan.columns);
}

}  // namespace

void add_kda_recurrent_ops(KdaOps& ops) {
  ops.recurrent = recurrent;
  ops.recurrent_bwd = kda_recurrent_bwd;
}

}  // namespace tandem::cuda
