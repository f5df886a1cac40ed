// kda_bwd.cu — gradients of the KDA recurrence.   Contract: ops/kda.h   Oracle: ops/ref/kda_ref.h
// Math: kimi-k3.md 13, first bullet.
// Schedule  A block takes (sequence, head) items; for each 16 rows, last first, its warps take the
//           value columns in turn. A warp holds one column, a lane the keys lane, lane + 32, ...
//           The states of the 16 rows are rebuilt from the checkpoint into registers, then the rows
//           are visited backwards with the column of the state gradient.
// Sums      over k: a warp sum. Over v (d_q, d_k, d_g, d_beta): a warp adds its columns in rising
//           order, then the warps' sums are added in order of warp. No atomics; the bits of an item
//           do not depend on the batch.
// Memory    a state gradient a block, [V, K], in the workspace (L2); sums over v in shared memory.
// Launch    as many blocks as the SMs hold, each walking over items; K <= 128; graph-safe.
#include <algorithm>
#include <cmath>

#include "backends/cuda/kda/kda_batch.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/runtime/cuda_device.h"
#include "core/check.h"

namespace tandem::cuda {
namespace {

constexpr int kRows = static_cast<int>(kKdaCheckpointRows);
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kSums = 3;  // d_q, d_k, d_g

struct Backward {
  Cube<float> d_q, d_k, d_v, d_g;
  Cube<float> d_beta;
  Cube<const float> d_o, q, k, v, g;
  Cube<const float> beta;
  const std::int32_t* cu_seqlens;
  const float* checkpoints;
  float* d_states;  // [blocks, V, 32 * keys a lane]
  int num_items;
  int num_heads;
  int keys;
  int values;
};

/// Keys are padded with zeros to 32 * kPerLane.
template <int kPerLane>
struct Shared {
  static constexpr int kKeys = kWarp * kPerLane;
  static constexpr int kBlocksPerSm = kPerLane == 4 ? 1 : 2;  // that this struct leaves room for
  float q[kRows][kKeys];
  float k[kRows][kKeys];
  float e[kRows][kKeys];
  float sums[kWarps][kSums][kRows][kKeys];
  float d_beta[kWarps][kRows];
};

/// Rows of one block of one (sequence, head).
struct RowBlock {
  std::int64_t t;  // first row in the batch
  int count;
  int head;
  bool last;                // no later row of the sequence: its state gradient starts at 0
  const float* checkpoint;  // [K, V]
};

template <int kPerLane>
__device__ void load_rows(const Backward& x, const RowBlock& rows, Shared<kPerLane>& shared) {
  constexpr int kKeys = Shared<kPerLane>::kKeys;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kKeys; i += kThreads) {
    const int row = i / kKeys;
    const int key = i % kKeys;
    const bool there = row < rows.count && key < x.keys;
    const std::int64_t t = rows.t + row;
    shared.q[row][key] = there ? x.q.row(t, rows.head)[key] : 0.0F;
    shared.k[row][key] = there ? x.k.row(t, rows.head)[key] : 0.0F;
    shared.e[row][key] = there ? expf(x.g.row(t, rows.head)[key]) : 0.0F;
  }
  float* const sums = &shared.sums[0][0][0][0];
  for (int i = static_cast<int>(threadIdx.x); i < kWarps * kSums * kRows * kKeys; i += kThreads) {
    sums[i] = 0.0F;
  }
}

/// What lane t knows of row t on one column: the other lanes get it by shuffles.
struct RowScalars {
  float v, d_o, beta;
  float r, u;  // residual and write, from rebuild()
  float d_v;
  float d_beta;  // sum over the warp's columns so far
};

/// The decayed states of the rows on the warp's column, and the lanes' r and u.
template <int kPerLane>
__device__ __forceinline__ void rebuild(const Backward& x, const RowBlock& rows, int column,
                                        const Shared<kPerLane>& shared, RowScalars& mine,
                                        float (&decayed)[kRows][kPerLane]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float s[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int key = lane + i * kWarp;
    s[i] =
        key < x.keys ? rows.checkpoint[static_cast<std::int64_t>(key) * x.values + column] : 0.0F;
  }
#pragma unroll
  for (int t = 0; t < kRows; ++t) {
    if (t < rows.count) {
      float dot = 0.0F;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        decayed[t][i] = s[i] * shared.e[t][lane + i * kWarp];
        dot = fmaf(decayed[t][i], shared.k[t][lane + i * kWarp], dot);
      }
      const float r = __shfl_sync(kFullWarp, mine.v, t) - warp_sum(dot);
      const float u = __shfl_sync(kFullWarp, mine.beta, t) * r;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        s[i] = fmaf(shared.k[t][lane + i * kWarp], u, decayed[t][i]);
      }
      if (lane == t) {
        mine.r = r;
        mine.u = u;
      }
    }
  }
}

/// Row t backwards: `grad` is the column of the state gradient. Adds to the warp's sums over v.
template <int kPerLane>
__device__ __forceinline__ void row_back(int t, Shared<kPerLane>& shared, RowScalars& mine,
                                         const float (&decayed)[kPerLane],
                                         float (&grad)[kPerLane]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  auto& sums = shared.sums[threadIdx.x / kWarp];
  const float d_o = __shfl_sync(kFullWarp, mine.d_o, t);
  const float u = __shfl_sync(kFullWarp, mine.u, t);
  float dot = 0.0F;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    grad[i] = fmaf(shared.q[t][lane + i * kWarp], d_o, grad[i]);
    dot = fmaf(grad[i], shared.k[t][lane + i * kWarp], dot);
  }
  const float d_u = warp_sum(dot);
  const float d_r = __shfl_sync(kFullWarp, mine.beta, t) * d_u;
  if (lane == t) {
    mine.d_v = d_r;
    mine.d_beta = fmaf(d_u, mine.r, mine.d_beta);
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int key = lane + i * kWarp;
    const float k = shared.k[t][key];
    const float s = decayed[i];
    sums[0][t][key] = fmaf(fmaf(k, u, s), d_o, sums[0][t][key]);
    sums[1][t][key] = fmaf(grad[i], u, fmaf(-s, d_r, sums[1][t][key]));
    grad[i] = fmaf(-k, d_r, grad[i]);
    sums[2][t][key] = fmaf(grad[i], s, sums[2][t][key]);
    grad[i] *= shared.e[t][key];
  }
}

/// One column of the block of rows; returns lane t's sum of d_beta of row t.
template <int kPerLane>
__device__ __forceinline__ float column_back(const Backward& x, const RowBlock& rows, int column,
                                             Shared<kPerLane>& shared, float d_beta) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool has_row = lane < rows.count;
  const std::int64_t t = rows.t + (has_row ? lane : 0);
  RowScalars mine{};
  mine.v = x.v.row(t, rows.head)[column];
  mine.d_o = x.d_o.row(t, rows.head)[column];
  mine.beta = *x.beta.row(t, rows.head);
  mine.d_beta = d_beta;
  float decayed[kRows][kPerLane];
  rebuild(x, rows, column, shared, mine, decayed);

  float grad[kPerLane];
  float* const saved =
      x.d_states +
      (static_cast<std::int64_t>(blockIdx.x) * x.values + column) * Shared<kPerLane>::kKeys + lane;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    grad[i] = rows.last ? 0.0F : saved[i * kWarp];
  }
#pragma unroll
  for (int row = kRows - 1; row >= 0; --row) {
    if (row < rows.count) {
      row_back(row, shared, mine, decayed[row], grad);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    saved[i * kWarp] = grad[i];
  }
  if (has_row) {
    x.d_v.row(t, rows.head)[column] = mine.d_v;
  }
  return mine.d_beta;
}

/// Adds the warps' sums in order and writes the gradients of the block's rows.
template <int kPerLane>
__device__ void store_rows(const Backward& x, const RowBlock& rows,
                           const Shared<kPerLane>& shared) {
  constexpr int kKeys = Shared<kPerLane>::kKeys;
  for (int i = static_cast<int>(threadIdx.x); i < rows.count * kKeys; i += kThreads) {
    const int row = i / kKeys;
    const int key = i % kKeys;
    if (key < x.keys) {
      float total[kSums] = {};
      for (int warp = 0; warp < kWarps; ++warp) {
#pragma unroll
        for (int sum = 0; sum < kSums; ++sum) {
          total[sum] += shared.sums[warp][sum][row][key];
        }
      }
      const std::int64_t t = rows.t + row;
      x.d_q.row(t, rows.head)[key] = total[0];
      x.d_k.row(t, rows.head)[key] = total[1];
      x.d_g.row(t, rows.head)[key] = total[2];
    }
  }
  const int row = static_cast<int>(threadIdx.x);
  if (row < rows.count) {
    float total = 0.0F;
    for (int warp = 0; warp < kWarps; ++warp) {
      total += shared.d_beta[warp][row];
    }
    *x.d_beta.row(rows.t + row, rows.head) = total;
  }
}

template <int kPerLane>
__global__ void __launch_bounds__(kThreads, Shared<kPerLane>::kBlocksPerSm) back(const Backward x) {
  begin_kernel();
  extern __shared__ float4 bytes[];
  auto& shared = *reinterpret_cast<Shared<kPerLane>*>(bytes);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t state_size = static_cast<std::int64_t>(x.keys) * x.values;
  for (int item = static_cast<int>(blockIdx.x); item < x.num_items;
       item += static_cast<int>(gridDim.x)) {
    const int seq = item / x.num_heads;
    const int head = item % x.num_heads;
    const int begin = x.cu_seqlens[seq];
    const int length = x.cu_seqlens[seq + 1] - begin;
    const std::int64_t first = first_checkpoint(x.cu_seqlens, seq);
    const int blocks = (length + kRows - 1) / kRows;
    for (int block = blocks - 1; block >= 0; --block) {
      const std::int64_t index = (first + block) * x.num_heads + head;
      const RowBlock rows{.t = begin + static_cast<std::int64_t>(block) * kRows,
                          .count = min(kRows, length - block * kRows),
                          .head = head,
                          .last = block == blocks - 1,
                          .checkpoint = x.checkpoints + index * state_size};
      __syncthreads();  // the previous block's sums have been read
      load_rows(x, rows, shared);
      __syncthreads();
      float d_beta = 0.0F;
      for (int column = warp; column < x.values; column += kWarps) {
        d_beta = column_back(x, rows, column, shared, d_beta);
      }
      if (lane < kRows) {
        shared.d_beta[warp][lane] = d_beta;
      }
      __syncthreads();
      store_rows(x, rows, shared);
    }
  }
}

template <int kPerLane>
void launch_back(const ExecCtx& ctx, Backward x) {
  CudaDevice& device = device_of(ctx);
  constexpr std::int64_t kBytes = sizeof(Shared<kPerLane>);
  TDM_CHECK(kBytes <= device.info().smem_per_block, kBytes, device.info().smem_per_block);
  const int blocks = std::min(x.num_items, Shared<kPerLane>::kBlocksPerSm * device.info().num_sms);
  x.d_states =
      ctx.workspace
          ->take<float>(static_cast<std::int64_t>(blocks) * x.values * Shared<kPerLane>::kKeys)
          .data();
  launch(ctx, "kda_recurrent_bwd", back<kPerLane>,
         {static_cast<unsigned>(blocks), kThreads, kBytes}, x);
}

}  // namespace

void kda_recurrent_bwd(const ExecCtx& ctx, const KdaGrads& grads, ConstF32Cube d_o,
                       const KdaInputs& in, const SeqBatch& seqs, const float* checkpoints) {
  const std::int64_t items = seqs.num_seqs() * d_o.size(1);
  if (items == 0 || d_o.size(0) == 0) {
    return;
  }
  TDM_CHECK(items <= INT32_MAX, items);
  const ArenaScope scope(*ctx.workspace);
  const Backward x{.d_q = device_cube(grads.d_q),
                   .d_k = device_cube(grads.d_k),
                   .d_v = device_cube(grads.d_v),
                   .d_g = device_cube(grads.d_g),
                   .d_beta = device_elements(grads.d_beta),
                   .d_o = device_cube(d_o),
                   .q = device_cube(in.q),
                   .k = device_cube(in.k),
                   .v = device_cube(in.v),
                   .g = device_cube(in.g),
                   .beta = device_elements(in.beta),
                   .cu_seqlens = seqs.cu_seqlens.data(),
                   .checkpoints = checkpoints,
                   .d_states = nullptr,
                   .num_items = static_cast<int>(items),
                   .num_heads = static_cast<int>(d_o.size(1)),
                   .keys = static_cast<int>(in.q.size(2)),
                   .values = static_cast<int>(d_o.size(2))};
  TDM_CHECK(x.keys <= 4 * kWarp, x.keys);
  if (x.keys <= kWarp) {
    launch_back<1>(ctx, x);
  } else if (x.keys <= 2 * kWarp) {
    launch_back<2>(ctx, x);
  } else {
    launch_back<4>(ctx, x);
  }
}

}  // namespace tandem::cuda
