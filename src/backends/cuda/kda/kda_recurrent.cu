// kda_recurrent.cu — the KDA recurrence.   Contract: ops/kda.h   Oracle: ops/ref/kda_ref.h
// Math      S <- diag(e^g) S;  r = v - S^T k;  S <- S + k (beta r)^T;  o = S^T q
// Schedule  A block owns some value columns of one (sequence, head): up to four warps keep them in
//           registers from the first token to the last (kda_step.cuh); one more feeds them
//           (kda_feed.cuh): it brings q, k, g, v, beta of the next chunks of tokens into a ring in
//           shared memory and replaces g by e^g, once for all columns.
// Latency   A token's way through its warp is 16 fused multiply-adds for S^T (e k), three shuffles
//           and 16 more for the write; the decay, the output of the token before and the reads of
//           the next one fill the wait for the shuffles.
// Traffic   decode: S read and written once, 8 K V bytes a sequence and head. K3: 12.6 MB for a
//           sequence and layer, 2.9 us at 4.3 TB/s. All of a lane's loads are in flight at once.
// Numerics  fp32; the order of every sum is kda_step.cuh's for every plan, batch and split.
// Launch    choose_kda.h; K <= 128; graph-safe.
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "backends/cuda/families.h"
#include "backends/cuda/kda/choose_kda.h"
#include "backends/cuda/kda/kda_batch.cuh"
#include "backends/cuda/kda/kda_feed.cuh"
#include "backends/cuda/kda/kda_step.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/runtime/cuda_device.h"
#include "core/check.h"

namespace tandem::cuda {
namespace kda_recurrence {
namespace {

constexpr int kMostThreads = (kMostStateWarps + 1) * kWarp;
constexpr int kMostKeys = 128;

/// What a state warp's lane reads of a token, by its address in shared memory.
template <int kQuads, int kColumns>
struct Seen {
  using OfToken = Token<kQuads, kColumns>;
  static constexpr std::uint32_t kKeyBytes = OfToken::kKeys * sizeof(float);
  static constexpr std::uint32_t kBytes = OfToken::kFloats * sizeof(float);

  std::uint32_t token;
  std::uint32_t rows;    // lane_rows() of its q
  std::uint32_t column;  // of the lane's values

  __device__ Seen(std::uint32_t address, int first_column)
      : token(address),
        rows(lane_rows(address)),
        column(address + 3 * kKeyBytes + static_cast<std::uint32_t>(first_column) * 4) {}

  __device__ void move(std::uint32_t bytes) {
    token += bytes;
    rows += bytes;
    column += bytes;
  }
  [[nodiscard]] __device__ TokenRows vectors() const {
    return {rows, rows + kKeyBytes, rows + 2 * kKeyBytes};
  }
  [[nodiscard]] __device__ RowValues<kQuads> q() const { return read_rows<kQuads>(vectors().q); }
  [[nodiscard]] __device__ RowValues<kQuads> k() const { return read_rows<kQuads>(vectors().k); }
  [[nodiscard]] __device__ RowValues<kQuads> e() const { return read_rows<kQuads>(vectors().e); }
  [[nodiscard]] __device__ float beta() const {
    return ptx::load_shared_4(token + 3 * kKeyBytes + OfToken::kValues * sizeof(float));
  }
};

/// A state warp's lane: its columns, and where they are in memory.
template <int kQuads, int kColumns>
struct Lane {
  StateTile<kQuads, kColumns> tile;
  int column;              // its first, from the block's first
  bool active;             // its columns exist
  bool stores;             // and it stores one of them
  std::byte* o;            // that column of the next output
  std::int64_t row_bytes;  // from one output to the next

  __device__ Lane(const Recurrence& x, const Place& at, int warp)
      : column((warp * kColumnLanes + column_lane()) * kColumns),
        active(column < at.columns),
        stores(active && row_group() < kColumns),
        o(reinterpret_cast<std::byte*>(x.o.row(at.begin, at.head) + at.column + column +
                                       row_group())),
        row_bytes(same_in_warp(x.o.stride_a * static_cast<std::int64_t>(sizeof(float)))) {}
  /// One row's output; the next call is about the next row.
  __device__ __forceinline__ void store(const float (&out)[kColumns], bool wanted) {
    if (stores && wanted) {
      *reinterpret_cast<float*>(o) = own_column(out);
    }
    o += row_bytes;
  }
};

/// Tokens one after the other: for many columns a lane, which hide each other's latency.
template <int kQuads, int kColumns>
struct Plain {
  Lane<kQuads, kColumns>& lane;

  __device__ __forceinline__ void run(Seen<kQuads, kColumns> token, int count) {
    for (int r = 0; r < count; ++r) {
      float v[kColumns];
      float o[kColumns];
      read_columns(v, token.column);
      token_step(lane.tile, token.vectors(), token.beta(), v, o);
      lane.store(o, true);
      token.move(token.kBytes);
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
  Lane<kQuads, kColumns>& lane;
  Rows even{}, odd{};      // tokens of a chunk alternate; a token's q outlives it
  RowValues<kQuads> ek{};  // of the next token
  bool pending = false;    // an output is still to be summed: of the row before the lane's

  __device__ explicit Pipelined(Lane<kQuads, kColumns>& mine) : lane(mine) {
    lane.o -= lane.row_bytes;
  }

  /// Token `now`, while the rows of the next one arrive in `other`, which held the token before.
  /// The order of the statements is the schedule: a third of the other work behind each shuffle.
  __device__ __forceinline__ void step(const Rows& now, Rows& other, Seen<kQuads, kColumns>& token,
                                       Seen<kQuads, kColumns>& next, bool one_more) {
    float dot[kColumns];
    float o[kColumns];
    float theirs[kColumns];
    float o_theirs[kColumns];
    float v[kColumns];
    other.k = next.k();
    other.e = next.e();
    read_columns(v, token.column);
    const float beta = token.beta();
    __syncwarp();  // no read is moved over it
    lane_dot(dot, lane.tile, ek);
    from_group(theirs, dot, 1);
    lane_dot(o, lane.tile, other.q);
    other.q = next.q();
    add(dot, theirs);
    from_group(theirs, dot, 2);
    from_group(o_theirs, o, 1);
    decay(lane.tile, now.e);
    add(dot, theirs);
    from_group(theirs, dot, 4);
    ek = product(other.e, other.k);
    add(o, o_theirs);
    from_group(o_theirs, o, 2);
    add(dot, theirs);
    float u[kColumns];
    written(u, v, dot, beta);
    add_outer(lane.tile, now.k, u);
    token = next;
    next.move(one_more ? next.kBytes : 0U);
    add(o, o_theirs);
    from_group(o_theirs, o, 4);
    add(o, o_theirs);
    lane.store(o, pending);
    pending = true;
  }

  __device__ __forceinline__ void run(Seen<kQuads, kColumns> token, int count) {
    even = {token.q(), token.k(), token.e()};
    ek = product(even.e, even.k);
    // Behind the last token it is read once more: whichever of the two it is, both then hold its q.
    Seen<kQuads, kColumns> next = token;
    next.move(count > 1 ? next.kBytes : 0U);
    int left = count;
#pragma unroll 1
    while (true) {
      step(even, odd, token, next, left > 2);
      if (--left == 0) {
        break;
      }
      step(odd, even, token, next, left > 2);
      if (--left == 0) {
        break;
      }
    }
  }
  __device__ __forceinline__ void finish() {
    float o[kColumns];
    lane_dot(o, lane.tile, odd.q);
    sum_groups(o);
    lane.store(o, pending);
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
  Order order{lane};
  const std::uint32_t shared = same_in_warp(ptx::shared_address(ring.data));
  for (int n = 0; n < at.chunks; ++n) {
    const std::int64_t first = static_cast<std::int64_t>(n) * x.chunk;
    if (saved != nullptr && first % kRows == 0) {
      store_state(lane.tile, saved + first / kRows * x.num_heads * state_size, x.keys, x.values);
    }
    __syncwarp();
    ptx::named_barrier_sync(ring.full(n), block_threads());
    const auto offset = static_cast<std::uint32_t>(ring.token(n, 0).data - ring.data);
    order.run({shared + offset * 4, lane.column}, at.tokens_of(n, x.chunk));
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
  const Ring<kQuads, kColumns> ring{dynamic_smem<float>(), x.chunk};
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
}  // namespace kda_recurrence

void add_kda_recurrent_ops(KdaOps& ops) {
  ops.recurrent = kda_recurrence::recurrent;
  ops.recurrent_bwd = kda_recurrent_bwd;
}

}  // namespace tandem::cuda
