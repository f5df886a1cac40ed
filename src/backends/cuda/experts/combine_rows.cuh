// combine_rows.cuh — rows of pairs back to rows of tokens, however a pair's row is found, and the
// RMSNorm of a token's row.
// Traffic   every row of a pair once; memory bound. A token's row stays in registers from its sum
//           to its norm (up to 8,192 columns; of longer ones the norm is a launch of its own).
// Numerics  one fp32 chain in slot order, normed or not. The norm's sum: a thread's quads in order,
//           lanes, then warps.
// Launch    without the norm: one thread an element of a token's row, grid-stride over tokens; with
//           it: a block a row. How a row is cut depends on its width alone. Graph-safe.
#pragma once

#include <algorithm>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/norm.cuh"
#include "backends/cuda/quad.cuh"
#include "backends/cuda/reduce.cuh"
#include "ops/norm.h"
#include "ops/op_table.h"

namespace tandem::cuda {

inline constexpr int kCombineThreads = 256;
inline constexpr int kLongRowThreads = 512;
inline constexpr int kStagedSlots = 32;  // rows and weights in shared memory at a time

/// Shapes: out, norm.y [T, D]; rows [.., D]: a pair's row; weights [T, A], or a default view:
/// all 1. `out` may be a default view where the norm is wanted.
struct Combination {
  F32Mat out;
  RowNorm norm;
  ConstF32Mat rows;
  ConstF32Mat weights;
  std::int64_t slots;
};

struct CombineArgs {
  Mat<float> out;  // data null: not wanted
  Mat<const float> rows;
  Mat<const float> weights;  // data null: all 1
  std::int64_t tokens;
  std::int64_t cols;
  std::int64_t slots;

  __device__ __forceinline__ float weight(std::int64_t t, std::int64_t a) const {
    return weights.data == nullptr ? 1.0F : weights.row(t)[a];
  }
};

struct CombineNorm {
  Mat<float> y;
  const float* w;
  float eps;
};

/// out[t] = the chain fma(weights[t, a], rows[row_of(t, a)], sum) over slots a from 0; pairs whose
/// row is below 0 are left out.
template <typename RowOf>
__global__ void __launch_bounds__(kCombineThreads)
    combine_rows(const CombineArgs args, const RowOf row_of) {
  begin_kernel();
  const std::int64_t col = std::int64_t{blockIdx.x} * kCombineThreads + threadIdx.x;
  if (col >= args.cols) {
    return;
  }
  for (std::int64_t t = blockIdx.y; t < args.tokens; t += gridDim.y) {
    float sum = 0.0F;
#pragma unroll 4
    for (std::int64_t a = 0; a < args.slots; ++a) {
      const std::int64_t row = row_of(t, a);
      if (row >= 0) {
        sum = fmaf(args.weight(t, a), args.rows.row(row)[col], sum);
      }
    }
    args.out.row(t)[col] = sum;
  }
}

/// A slot that is left out has the weight -0 and a row of +0: no sum's bits change.
struct alignas(16) StagedSlot {
  std::int64_t offset;  // of the row; below 0: left out
  float weight;
};

/// Quad q of the calling thread, of a block of kThreads a row.
template <int kThreads>
__device__ __forceinline__ std::int64_t column_of(int q) {
  return (std::int64_t{q} * kThreads + threadIdx.x) * kQuad;
}

/// sum = combine_rows()'s chain over the staged slots [0, count), where staged[count ..] are left
/// out. kBatch slots' loads are under way at a time: no branch comes between them.
template <int kThreads, int kHeld, bool kAligned>
__device__ __forceinline__ void add_staged(Quad (&sum)[kHeld], const StagedSlot* staged, int count,
                                           const float* rows, std::int64_t cols) {
  constexpr int kBatch = 8 / kHeld;
  static_assert(kStagedSlots % kBatch == 0);
  for (int first = 0; first < count; first += kBatch) {
    Quad x[kBatch][kHeld];
    float weight[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const StagedSlot slot = staged[first + i];
      weight[i] = slot.weight;
#pragma unroll
      for (int q = 0; q < kHeld; ++q) {
        x[i][q] = load_quad<kAligned>(rows + slot.offset, column_of<kThreads>(q),
                                      slot.offset >= 0 ? cols : 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int q = 0; q < kHeld; ++q) {
#pragma unroll
        for (int k = 0; k < kQuad; ++k) {
          sum[q].v[k] = fmaf(weight[i], x[i][q].v[k], sum[q].v[k]);
        }
      }
    }
  }
}

/// combine_rows() and norm.y[t] = the RMSNorm of its row. A block a token; a thread holds kHeld
/// quads.
template <int kThreads, int kHeld, bool kAligned, typename RowOf>
__global__ void __launch_bounds__(kThreads, 1)  // registers for a batch of loads, not more blocks
    combine_and_norm(const CombineArgs args, const CombineNorm norm, const RowOf row_of) {
  __shared__ StagedSlot staged[kStagedSlots];
  __shared__ float warp_sums[kThreads / kWarp];
  Quad w[kHeld];
#pragma unroll
  for (int q = 0; q < kHeld; ++q) {
    w[q] = load_quad<kAligned>(norm.w, column_of<kThreads>(q), args.cols);
  }
  begin_kernel();
  const std::int64_t t = blockIdx.x;
  Quad sum[kHeld] = {};
  for (std::int64_t first = 0; first < args.slots; first += kStagedSlots) {
    if (first > 0) {
      __syncthreads();  // the slots before are read by all
    }
    if (threadIdx.x < kStagedSlots) {
      const std::int64_t a = first + threadIdx.x;
      const std::int64_t row = a < args.slots ? row_of(t, a) : -1;
      staged[threadIdx.x] = {row >= 0 ? row * args.rows.stride : -1,
                             row >= 0 ? args.weight(t, a) : -0.0F};
    }
    __syncthreads();  // the slots are written
    const auto count = static_cast<int>(min(args.slots - first, std::int64_t{kStagedSlots}));
    add_staged<kThreads, kHeld, kAligned>(sum, staged, count, args.rows.data, args.cols);
  }
  float squares = 0.0F;
#pragma unroll
  for (int q = 0; q < kHeld; ++q) {
    squares = add_squares(squares, sum[q]);
    if (args.out.data != nullptr) {
      store_quad<kAligned>(args.out.row(t), column_of<kThreads>(q), args.cols, sum[q]);
    }
  }
  const float scale = rms_scale(block_sum<kThreads>(squares, warp_sums), args.cols, norm.eps);
#pragma unroll
  for (int q = 0; q < kHeld; ++q) {
    Quad y;
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      y.v[k] = sum[q].v[k] * scale * w[q].v[k];
    }
    store_quad<kAligned>(norm.y.row(t), column_of<kThreads>(q), args.cols, y);
  }
}

template <int kThreads, int kHeld, typename RowOf>
void launch_combine_and_norm(const ExecCtx& ctx, bool aligned, const CombineArgs& args,
                             const CombineNorm& norm, const RowOf& row_of) {
  const auto kernel = aligned ? combine_and_norm<kThreads, kHeld, true, RowOf>
                              : combine_and_norm<kThreads, kHeld, false, RowOf>;
  launch(ctx, "combine_slots", kernel, {static_cast<unsigned>(args.tokens), kThreads}, args, norm,
         row_of);
}

template <typename RowOf>
void launch_combine(const ExecCtx& ctx, const Combination& to, const RowOf& row_of) {
  constexpr std::int64_t kShort = std::int64_t{kCombineThreads} * kQuad;
  constexpr std::int64_t kLong = std::int64_t{kLongRowThreads} * kQuad;
  const F32Mat& result = to.out.size(1) > 0 ? to.out : to.norm.y;
  CombineArgs args{device_mat(to.out), device_mat(to.rows), device_mat(to.weights),
                   result.size(0),     result.size(1),      to.slots};
  if (result.empty()) {
    return;
  }
  if (to.norm.wanted() && args.cols <= 4 * kLong) {
    const bool aligned = whole_quads(result) && whole_quads(to.norm.y) && whole_quads(to.norm.w) &&
                         whole_quads(to.rows);
    const CombineNorm norm{device_mat(to.norm.y), to.norm.w.data(), to.norm.eps};
    if (args.cols <= kShort) {
      launch_combine_and_norm<kCombineThreads, 1>(ctx, aligned, args, norm, row_of);
    } else if (args.cols <= 2 * kLong) {
      launch_combine_and_norm<kLongRowThreads, 2>(ctx, aligned, args, norm, row_of);
    } else {
      launch_combine_and_norm<kLongRowThreads, 4>(ctx, aligned, args, norm, row_of);
    }
    return;
  }
  args.out = device_mat(result);
  const dim3 grid(static_cast<unsigned>((args.cols + kCombineThreads - 1) / kCombineThreads),
                  static_cast<unsigned>(std::min<std::int64_t>(args.tokens, 65535)));
  launch(ctx, "combine_slots", combine_rows<RowOf>, {grid, kCombineThreads}, args, row_of);
  if (to.norm.wanted()) {  // in place where `out` is not wanted: a thread reads what it overwrites
    ctx.ops->norm.rms_norm(ctx, to.norm.y, result, to.norm.w, to.norm.eps);
  }
}

}  // namespace tandem::cuda
