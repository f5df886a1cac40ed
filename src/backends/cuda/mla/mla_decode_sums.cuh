// mla_decode_sums.cuh — the multiplying threads of mla_decode_kernel.cuh: which columns each has,
// maxima and sums over the rows of a product, and where the results of an item go.
//
// A thread's own columns are those of its warpgroup, columns / 16 pairs: x[j][e] is column 8 j + 2
// pair + e of the warpgroup's.
#pragma once

#include <cmath>
#include <cstdint>

#include "backends/cuda/mla/mla_decode.cuh"

namespace tandem::cuda {

inline constexpr int kLatentBlocks = kDecodeLatent / 64 / 2;  // of a warpgroup

/// A thread's place among the math threads.
struct MathThread {
  int group;   // warpgroup
  int thread;  // in it
  int warp;    // in it
  int row;     // of a product: 16 warp + row and + 8
  int pair;    // columns 8 j + 2 pair and + 1

  __device__ MathThread()
      : group(static_cast<int>(threadIdx.x) / kDecodeGroupThreads),
        thread(static_cast<int>(threadIdx.x) % kDecodeGroupThreads),
        warp(thread / kWarp),
        row(thread % kWarp / 4),
        pair(thread % 4) {}
};

__device__ __forceinline__ void math_barrier_all() {
  __syncwarp();
  ptx::named_barrier_sync(kDecodeMathBarrier, kDecodeMathThreads);
}
__device__ __forceinline__ void math_barrier_group(const MathThread& me) {
  __syncwarp();
  ptx::named_barrier_sync(kDecodeGroupBarrier + me.group, kDecodeGroupThreads);
}

/// x[j][e] of the lanes with the same columns become one, in all of them.
template <int kOwn, typename Combine>
__device__ __forceinline__ void over_rows(float (&x)[kOwn][2], const Combine& combine) {
#pragma unroll
  for (int offset = 4; offset < kWarp; offset *= 2) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      x[j][0] = combine(x[j][0], __shfl_xor_sync(kFullWarp, x[j][0], offset));
      x[j][1] = combine(x[j][1], __shfl_xor_sync(kFullWarp, x[j][1], offset));
    }
  }
}

/// The same over the four warps of the warpgroup, which all call it.
template <int kColumns, typename Combine>
__device__ __forceinline__ void over_warps(const DecodeBlock& block, const MathThread& me,
                                           float (&x)[kColumns / 16][2], const Combine& combine) {
  constexpr int kOwn = kColumns / 16;
  auto* const partials = block.array<float2>(block.at.partials) + me.group * 4 * kOwn * 4;
  if (me.row == 0) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      partials[(me.warp * kOwn + j) * 4 + me.pair] = {x[j][0], x[j][1]};
    }
  }
  math_barrier_group(me);
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    float2 total = partials[j * 4 + me.pair];
#pragma unroll
    for (int warp = 1; warp < 4; ++warp) {
      const float2 next = partials[(warp * kOwn + j) * 4 + me.pair];
      total = {combine(total.x, next.x), combine(total.y, next.y)};
    }
    x[j][0] = total.x;
    x[j][1] = total.y;
  }
}

/// Of a thread's columns: the maximum so far, the same in all threads of a column, and this
/// thread's share of the sum.
template <int kOwn>
struct ColumnSums {
  float top[kOwn][2];
  float sum[kOwn][2];

  __device__ ColumnSums() {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        top[j][e] = -INFINITY;
        sum[j][e] = 0.0F;
      }
    }
  }
};

__device__ __forceinline__ float larger(float a, float b) {
  return fmaxf(a, b);
}
__device__ __forceinline__ float plus(float a, float b) {
  return a + b;
}

/// Maximum and sum of every column into shared memory, for all math threads.
template <int kColumns>
__device__ __forceinline__ void finish_sums(const DecodeBlock& block, const MathThread& me,
                                            ColumnSums<kColumns / 16>& sums) {
  constexpr int kOwn = kColumns / 16;
  over_rows(sums.sum, plus);
  over_warps<kColumns>(block, me, sums.sum, plus);
  if (me.warp == 0 && me.row == 0) {
    auto* const to = block.array<float2>(block.at.sums) + me.group * kOwn * 8;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        to[j * 8 + me.pair * 2 + e] = {sums.top[j][e], sums.sum[j][e]};
      }
    }
  }
  math_barrier_all();  // for all columns
}

/// Where a column's results go.
struct ColumnTarget {
  float* o = nullptr;  // of latent channel 0; null: nowhere
  float sum;           // what o is divided by, if it is final
  bool final;

  __device__ ColumnTarget(const DecodeBlock& block, const DecodeItem& item, int columns,
                          int column) {
    const DecodeArgs& x = block.x;
    const int c = block.rank * columns + column;
    const int row = item.first_row + c / x.num_heads;
    const int head = c % x.num_heads;
    const int splits =
        row <= item.last_row ? num_splits(x.num_heads, block.plan().visible[row]) : 0;
    if (item.split >= splits) {
      return;
    }
    final = splits == 1;
    sum = block.array<float2>(block.at.sums)[column].y;
    o = final ? x.o.row(x.first_row + row, head)
              : x.partial_o + x.partial(row, item.split, head) * kDecodeLatent;
  }
};

template <int kColumns>
__device__ __forceinline__ void store_values(const DecodeBlock& block, const MathThread& me,
                                             const DecodeItem& item,
                                             const float (&o)[kLatentBlocks][kColumns / 8][4]) {
  const int channel = me.group * kLatentBlocks * 64 + me.warp * 16 + me.row;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const ColumnTarget target(block, item, kColumns, j * 8 + me.pair * 2 + e);
      if (target.o == nullptr) {
        continue;
      }
#pragma unroll
      for (int m = 0; m < kLatentBlocks; ++m) {
        float* const to = target.o + channel + m * 64;
        if (target.final) {
          to[0] = o[m][j][e] / target.sum;
          to[8] = o[m][j][2 + e] / target.sum;
        } else {
          to[0] = o[m][j][e];
          to[8] = o[m][j][2 + e];
        }
      }
    }
  }
}

/// A thread a column.
template <int kColumns>
__device__ __forceinline__ void store_sums(const DecodeBlock& block, const DecodeItem& item) {
  constexpr float kLn2 = 0.693147181F;
  const DecodeArgs& x = block.x;
  const int column = static_cast<int>(threadIdx.x);
  const int c = block.rank * kColumns + column;
  const int row = item.first_row + c / x.num_heads;
  const int head = c % x.num_heads;
  if (column >= kColumns || row > item.last_row) {
    return;
  }
  const int splits = num_splits(x.num_heads, block.plan().visible[row]);
  const float2 sums = block.array<float2>(block.at.sums)[column];
  if (item.split < splits && splits > 1) {
    x.partial_sum[x.partial(row, item.split, head)] = sums;
  } else if (splits == 1 && item.split == 0 && x.lse.data != nullptr) {
    x.lse.row(x.first_row + row)[head] = (sums.x + log2f(sums.y)) * kLn2;
  }
}

}  // namespace tandem::cuda
