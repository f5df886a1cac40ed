// kda_decode.cu — a KDA mixer between its projections, one token a sequence, in one launch.
// Contract: ops/kda.h: kda_decode   Oracle: the ops it stands for, bit for bit
// Math      q, k, v <- silu(conv(x)); q, k L2-normalised; e^g and beta; one step of the recurrence
//           (kda_recurrent.cu); o rms(o) w sigmoid(gate)
// Schedule  A block of eight warps has 32, 64 or 128 value columns of one (sequence, head), and a
//           cluster all 128. Each warp starts the loads of its columns of the state; while they are
//           under way, warps 0 to 2 do the convolutions of q, k and v (a lane four channels), warp
//           3 the gate; in a cluster every block does so for all channels. Outputs meet in the
//           first block, where warp 4 normalises them while the others store the state.
// Decay     Of few states at a time the decay's second projection is done here as well, where its
//           weight is bf16 with 128 inputs: a warp has 16 of the head's channels, copied to shared
//           memory before the kernel in front has ended.
// Traffic   S read and written once: 131,072 bytes a sequence and head; windows and rows are 12,288
//           more. K3: 3.2 us a sequence at 4.3 TB/s.
// Numerics  those of the parts: conv1d.cuh, norm.cuh, kda_gate.cuh, kda_step.cuh; the projection is
//           one segment of gemm/layout.h.
// Hazards   a block of a cluster may read a window that another writes: the first one writes, after
//           a barrier that all reach with their windows in registers.
// Launch    choose_kda.h; K = V = 128, four taps; graph-safe.
#include <algorithm>

#include "backends/cuda/families.h"
#include "backends/cuda/kda/choose_kda.h"
#include "backends/cuda/kda/kda_batch.cuh"
#include "backends/cuda/kda/kda_decode.cuh"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/runtime/cuda_device.h"
#include "ops/op_table.h"

namespace tandem::cuda {
namespace kda_fused {
namespace {

constexpr int kOutputsDone = 1;  // named barrier

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
    ptx::cluster_wait();  // the first block's barrier is set up, and all have read their windows
    if (delivers) {
      ptx::store_to_rank(place, &shared.o_done, 0, own_column(o));
    }
    if (at.rank == 0 && at.warp <= kConvV) {
      store_window(mine, x, at, slot);
    }
    if (at.rank == 0 && at.warp == kNorm) {
      ptx::mbarrier_wait(&shared.o_done, 0);
    }
  }
  if (at.rank == 0 && at.warp == kNorm) {
    normalise(shared, mine, x, at);
  }
}

/// Everything up to the recurrence: to shared memory, but for the state, which is under way.
template <bool kProject, int kColumns>
__device__ __forceinline__ void prepare(Shared& shared, Operands& mine,
                                        Projection<kProject, kColumns>& projection,
                                        const DecodeArgs& x, const Place<kColumns>& at, int slot,
                                        float a_log) {
  const float rate = decay_rate(a_log);
  projection.decay_rows(shared, x, rate);
  if (at.warp <= kConvV) {
    convolve(shared, mine, x, at);
    if constexpr (Place<kColumns>::kCluster == 1) {
      store_window(mine, x, at, slot);
    }
  } else if (at.warp == kGate) {
    if constexpr (!kProject) {
      decay_rows(shared, mine, x, at, rate);
    }
    shared.beta = sigmoid(mine.scalar);  // the same from every lane
  } else if (at.warp == kNorm) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      mine.inputs[0].v[i] = sigmoid(mine.inputs[0].v[i]);
    }
  }
  __syncwarp();
  if constexpr (Place<kColumns>::kCluster > 1) {
    ptx::cluster_arrive();
  }
  __syncthreads();  // q, k, e, v, beta are there
}

template <bool kProject, int kColumns>
__global__ void __launch_bounds__(kThreads, 2) decode(const __grid_constant__ DecodeArgs x) {
  Shared& shared = *dynamic_smem<Shared>();
  const Place<kColumns> at(x.heads);
  Operands mine{};
  load_weights<kProject>(mine, x, at);
  Projection<kProject, kColumns> projection(x, at);
  const float a_log = x.a_log[at.head];
  if constexpr (Place<kColumns>::kCluster > 1) {
    if (x.prefetch_slots > 0) {
      prefetch_memory(x, at);
    }
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(&shared.o_done, 1);
      ptx::mbarrier_init_fence();
      ptx::mbarrier_expect(&shared.o_done, kHeadDim * sizeof(float));
    }
  }
  begin_kernel();
  const int slot = same_in_warp(x.slots[at.seq]);
  if (slot < 0) {
    if (at.rank == 0 && at.warp == kNorm) {
      put_quad(x.y.row(at.seq, at.head) + at.channel, Quad{});
    }
    return;  // the whole cluster
  }
  load_row<kProject>(mine, x, at);
  projection.load(x, at);
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
  __syncwarp();  // ptxas moves no load over it: all of them are under way
  prepare(shared, mine, projection, x, at, slot, a_log);

  const auto rows_of = [](const float* vector) { return lane_rows(ptx::shared_address(vector)); };
  float v[kColumns];
  float o[kColumns];
  read_columns(v, ptx::shared_address(shared.v + at.column));
  token_step(tile, {rows_of(shared.q), rows_of(shared.k), rows_of(shared.e)}, shared.beta, v, o);
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

/// Whether the decay may be projected here, bit for bit as ops::linear does it.
[[nodiscard]] bool projects(const ExecCtx& ctx, const KdaDecode& in) {
  return in.f_b->format == WeightFormat::kBF16 && in.f_b->in == kInner && whole_quads(in.f_a) &&
         !device_of(ctx).options().exact_linear;
}

template <bool kProject, int kColumns>
void launch_decode(const ExecCtx& ctx, const DecodeArgs& x, std::int64_t items) {
  constexpr int kCluster = Place<kColumns>::kCluster;
  constexpr std::int64_t kBytes = sizeof(Shared) + Projection<kProject, kColumns>::kSharedBytes;
  launch(ctx, "kda_decode", decode<kProject, kColumns>,
         {static_cast<unsigned>(items * kCluster), kThreads, kBytes, kCluster}, x);
}

DecodeArgs decode_args(const F32Cube& y, const KdaDecode& in, const KdaStatePool& pool,
                       const F32Cube& conv, const SeqBatch& seqs) {
  return {.y = device_cube(y),
          .qkv = device_mat(in.qkv),
          .f = {},
          .f_a = device_mat(in.f_a),
          .f_b = reinterpret_cast<const std::uint8_t*>(in.f_b->data.data()),
          .gate_out = device_cube(in.gate_out),
          .b = device_elements(in.b),
          .filters = {in.filters[0].data(), in.filters[1].data(), in.filters[2].data()},
          .a_log = in.a_log.data(),
          .dt_bias = in.dt_bias.data(),
          .o_norm = in.o_norm.data(),
          .conv = device_cube(conv),
          .slots = seqs.state_slots.data(),
          .prefetch_slots = 0,
          .states = pool.data,
          .heads = static_cast<int>(y.size(1)),
          .gate = in.gate,
          .q_scale = in.q_scale,
          .l2_eps = in.l2_eps,
          .norm_eps = in.norm_eps};
}

bool run_decode(const ExecCtx& ctx, F32Cube y, const KdaDecode& in, const KdaStatePool& pool,
                F32Cube conv, const SeqBatch& seqs) {
  if (!supported(in, y, pool, conv)) {
    return false;
  }
  const std::int64_t items = y.size(0) * y.size(1);
  if (items == 0) {
    return true;
  }
  TDM_CHECK(items <= INT32_MAX / 4, items);
  DecodeArgs x = decode_args(y, in, pool, conv, seqs);
  if (!ctx.host_reads()) {  // memory of the device's own
    x.prefetch_slots = std::min(pool.num_slots, conv.size(0));
  }
  const int columns = choose_decode_columns(items, device_of(ctx).info());
  if (columns < 4 && projects(ctx, in)) {
    columns == 1 ? launch_decode<true, 1>(ctx, x, items) : launch_decode<true, 2>(ctx, x, items);
    return true;
  }
  const ArenaScope scope(*ctx.workspace);
  const F32Mat f{ctx.workspace->take<float>(y.size(0) * in.f_b->out).data(),
                 {y.size(0), in.f_b->out}};
  ctx.ops->gemm.linear(ctx, f, in.f_a, *in.f_b, false);
  x.f = {f.data(), f.stride(0), kHeadDim};
  const auto launch_columns = columns == 1   ? launch_decode<false, 1>
                              : columns == 2 ? launch_decode<false, 2>
                                             : launch_decode<false, 4>;
  launch_columns(ctx, x, items);
  return true;
}

}  // namespace
}  // namespace kda_fused

void add_kda_decode_ops(KdaOps& ops) {
  ops.decode = kda_fused::run_decode;
}

}  // namespace tandem::cuda
