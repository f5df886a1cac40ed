// mla_decode_math.cuh — the two multiplying warpgroups of mla_decode_kernel.cuh.
//
// Keys and latent channels are the M of the products, columns ((row, head) pairs) their N. For each
// tile of 64 keys, warpgroup w
//   scores   [64, columns]: multiplies half w of the channels; the halves meet through shared
//            memory, thread by thread, each warpgroup finishing half w of the columns
//   softmax  of its columns; weights in 16 bits and what o shrinks by into shared memory
//   sums     [256, columns] of latent channels 256 w ..., in registers for the whole item; the
//            operand is the key tile itself, read transposed
// Barriers  a tile: all (halves), warpgroup (maxima), all (weights). What a phase overwrites was
//           read before the barrier of the phase before it.
#pragma once

#include <cmath>
#include <cstdint>

#include "backends/cuda/mla/mla_decode_sums.cuh"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/stmatrix.cuh"
#include "backends/cuda/ptx/wgmma.cuh"

namespace tandem::cuda {

inline constexpr int kScoreSteps = kDecodeDim / 16 / 2;  // products of a warpgroup a tile

template <typename T>
__device__ __forceinline__ std::uint32_t pack_two(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack_two<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ std::uint32_t pack_two<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

__device__ __forceinline__ float4 load_four(const float* from, bool aligned) {
  return aligned ? __ldcg(reinterpret_cast<const float4*>(from))
                 : float4{from[0], from[1], from[2], from[3]};
}

/// The item's queries in 16 bits, and what each column sees; columns that do not exist are zeros
/// and see nothing. A thread has chunks of 8 channels, several in flight.
template <typename T, int kColumns>
__device__ __forceinline__ void load_queries(const DecodeBlock& block, const DecodeItem& item) {
  constexpr int kChunks = kDecodeDim / 8;  // of a column
  constexpr int kInFlight = 7;             // of 13 or 14 a thread for 48 columns
  const DecodeArgs& x = block.x;
  const int columns = (item.last_row - item.first_row + 1) * x.num_heads;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kColumns) {
    const int c = block.rank * kColumns + thread;
    block.array<int>(block.at.visible)[thread] =
        c < columns ? block.plan().visible[item.first_row + c / x.num_heads] : 0;
  }
  for (int base = thread; base < kColumns * kChunks; base += kInFlight * kDecodeMathThreads) {
    float4 data[kInFlight][2];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int index = base + i * kDecodeMathThreads;
      const int c = block.rank * kColumns + index / kChunks;
      data[i][0] = data[i][1] = float4{};
      if (index < kColumns * kChunks && c < columns) {
        const int t = x.first_row + item.first_row + c / x.num_heads;
        const int head = c % x.num_heads;
        const int channel = index % kChunks * 8;
        const float* const from = channel < kDecodeLatent
                                      ? x.q.row(t, head) + channel
                                      : x.q_shared.row(t, head) + (channel - kDecodeLatent);
        data[i][0] = load_four(from, x.aligned_q);
        data[i][1] = load_four(from + 4, x.aligned_q);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int index = base + i * kDecodeMathThreads;
      const int column = index / kChunks;
      const int chunk = index % kChunks;
      if (index < kColumns * kChunks) {
        char* const to = block.shared + block.at.q + chunk / 8 * (kColumns * 128) + column * 128 +
                         (chunk % 8 ^ column % 8) * 16;
        *reinterpret_cast<uint4*>(to) = {
            pack_two<T>(data[i][0].x, data[i][0].y), pack_two<T>(data[i][0].z, data[i][0].w),
            pack_two<T>(data[i][1].x, data[i][1].y), pack_two<T>(data[i][1].z, data[i][1].w)};
      }
    }
  }
}

/// Half `group` of the channels: boxes 0..3 and the first half of box 4, or boxes 5..8 and the
/// other half.
template <typename T, int kColumns>
__device__ __forceinline__ void multiply_scores(const DecodeBlock& block, const MathThread& me,
                                                const char* tile, float (&s)[kColumns / 8][4]) {
  constexpr int kQueryBox = kColumns * 128;
  const std::uint64_t keys = ptx::wgmma_operand(ptx::shared_address(tile));
  const std::uint64_t queries = ptx::wgmma_operand(ptx::shared_address(block.shared + block.at.q));
  const std::uint64_t keys_0 = ptx::wgmma_advance(keys, me.group * 5 * kDecodeBoxBytes);
  const std::uint64_t queries_0 = ptx::wgmma_advance(queries, me.group * 5 * kQueryBox);
  const std::uint64_t keys_4 = ptx::wgmma_advance(keys, 4 * kDecodeBoxBytes + me.group * 64);
  const std::uint64_t queries_4 = ptx::wgmma_advance(queries, 4 * kQueryBox + me.group * 64);
  ptx::keep_in_order(s);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kScoreSteps; ++i) {
    const int box = i / 4;
    const int step = i % 4 * 32;
    if (box < 4) {
      ptx::wgmma_k16<0>(s, T{}, ptx::wgmma_advance(keys_0, box * kDecodeBoxBytes + step),
                        ptx::wgmma_advance(queries_0, box * kQueryBox + step), i > 0 ? 1 : 0);
    } else {
      ptx::wgmma_k16<0>(s, T{}, ptx::wgmma_advance(keys_4, step),
                        ptx::wgmma_advance(queries_4, step), 1);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::keep_in_order(s);
}

/// own = scores of the warpgroup's columns: this half plus the other warpgroup's.
template <int kColumns>
__device__ __forceinline__ void add_halves(const DecodeBlock& block, const MathThread& me,
                                           const float (&s)[kColumns / 8][4],
                                           float (&own)[kColumns / 16][4]) {
  constexpr int kOwn = kColumns / 16;
  auto* const exchange = block.array<float4>(block.at.exchange);
  const bool upper = me.group == 1;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    exchange[(me.group * kOwn + j) * kDecodeGroupThreads + me.thread] =
        upper ? float4{s[j][0], s[j][1], s[j][2], s[j][3]}
              : float4{s[kOwn + j][0], s[kOwn + j][1], s[kOwn + j][2], s[kOwn + j][3]};
  }
  math_barrier_all();  // both have given
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const float4 other = exchange[((1 - me.group) * kOwn + j) * kDecodeGroupThreads + me.thread];
    own[j][0] = (upper ? s[kOwn + j][0] : s[j][0]) + other.x;
    own[j][1] = (upper ? s[kOwn + j][1] : s[j][1]) + other.y;
    own[j][2] = (upper ? s[kOwn + j][2] : s[j][2]) + other.z;
    own[j][3] = (upper ? s[kOwn + j][3] : s[j][3]) + other.w;
  }
}

/// Scores that a column does not see become -inf.
template <int kOwn>
__device__ __forceinline__ void mask(const DecodeBlock& block, const MathThread& me, int first,
                                     float (&s)[kOwn][4]) {
  const auto* const visible = block.array<int>(block.at.visible) + me.group * kOwn * 8;
  const int key = first + me.warp * 16 + me.row;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int left = visible[j * 8 + me.pair * 2];
    const int right = visible[j * 8 + me.pair * 2 + 1];
    s[j][0] = key < left ? s[j][0] : -INFINITY;
    s[j][1] = key < right ? s[j][1] : -INFINITY;
    s[j][2] = key + 8 < left ? s[j][2] : -INFINITY;
    s[j][3] = key + 8 < right ? s[j][3] : -INFINITY;
  }
}

/// Scaled scores become weights; these and the shrinks go to shared memory.
template <typename T, int kColumns>
__device__ __forceinline__ void softmax(const DecodeBlock& block, const MathThread& me,
                                        float (&s)[kColumns / 16][4],
                                        ColumnSums<kColumns / 16>& sums) {
  constexpr int kOwn = kColumns / 16;
  float top[kOwn][2];
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      top[j][e] = fmaxf(s[j][e], s[j][2 + e]);
    }
  }
  over_rows(top, larger);
  over_warps<kColumns>(block, me, top, larger);
  auto* const shrinks = block.array<float2>(block.at.shrink) + me.group * kOwn * 4;
  const int lane = me.thread % kWarp;
  const int chunk = me.warp * 2 + lane / 8 % 2;  // of 8 keys
  float shrink[kOwn][2];
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float next = fmaxf(sums.top[j][e], top[j][e]);
      const float zero = next == -INFINITY ? 0.0F : next;  // nothing seen yet: weights are 0
      shrink[j][e] = exp2f(sums.top[j][e] - zero);
      s[j][e] = exp2f(s[j][e] - zero);
      s[j][2 + e] = exp2f(s[j][2 + e] - zero);
      sums.sum[j][e] = fmaf(sums.sum[j][e], shrink[j][e], s[j][e] + s[j][2 + e]);
      sums.top[j][e] = next;
    }
  }
  if (me.warp == 0 && me.row == 0) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      shrinks[j * 4 + me.pair] = {shrink[j][0], shrink[j][1]};
    }
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int column = (me.group * kOwn + j) * 8 + lane % 8;
    ptx::stmatrix_x2_trans(block.shared + block.at.weights + column * 128 + (chunk ^ lane % 8) * 16,
                           pack_two<T>(s[j][0], s[j][1]), pack_two<T>(s[j][2], s[j][3]));
  }
}

/// o = o * shrink + tile^T weights, on the warpgroup's latent channels.
template <typename T, int kColumns>
__device__ __forceinline__ void add_values(const DecodeBlock& block, const MathThread& me,
                                           const char* tile,
                                           float (&o)[kLatentBlocks][kColumns / 8][4]) {
  const auto* const shrinks = block.array<float2>(block.at.shrink);
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float2 shrink = shrinks[j * 4 + me.pair];
    if (__any_sync(kFullWarp, shrink.x != 1.0F || shrink.y != 1.0F)) {
#pragma unroll
      for (int m = 0; m < kLatentBlocks; ++m) {
        o[m][j][0] *= shrink.x;
        o[m][j][1] *= shrink.y;
        o[m][j][2] *= shrink.x;
        o[m][j][3] *= shrink.y;
      }
    }
  }
  const std::uint64_t values =
      ptx::wgmma_operand(ptx::shared_address(tile) + me.group * kLatentBlocks * kDecodeBoxBytes);
  const std::uint64_t weights =
      ptx::wgmma_operand(ptx::shared_address(block.shared + block.at.weights));
#pragma unroll
  for (int m = 0; m < kLatentBlocks; ++m) {
    ptx::keep_in_order(o[m]);
  }
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDecodeTile / 16; ++step) {
#pragma unroll
    for (int m = 0; m < kLatentBlocks; ++m) {
      ptx::wgmma_k16<1>(o[m], T{},
                        ptx::wgmma_advance(values, m * kDecodeBoxBytes + step * 16 * 128),
                        ptx::wgmma_advance(weights, step * 32), 1);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int m = 0; m < kLatentBlocks; ++m) {
    ptx::keep_in_order(o[m]);
  }
}

/// The math threads have used the stage's tile. In a cluster, both CTAs' loaders wait for that.
template <bool kCluster>
__device__ __forceinline__ void release(const DecodeBlock& block, const MathThread& me, int stage) {
  const int lane = me.thread % kWarp;
  if constexpr (kCluster) {
    if (lane < 2) {
      ptx::mbarrier_arrive_at(block.empty(stage), static_cast<unsigned>(lane));
    }
  } else {
    if (lane == 0) {
      ptx::mbarrier_arrive(block.empty(stage));
    }
  }
}

template <typename T, int kColumns, bool kCluster>
__device__ __forceinline__ void multiply_tiles(const DecodeBlock& block) {
  constexpr int kOwn = kColumns / 16;
  const MathThread me;
  RingPlace place;
  for (int number = block.first; number < block.num_items; number += block.step) {
    const DecodeItem item = block.item(number);
    load_queries<T, kColumns>(block, item);
    ptx::async_proxy_fence();
    math_barrier_all();  // the queries are there
    float o[kLatentBlocks][kColumns / 8][4] = {};
    ColumnSums<kOwn> sums;
    for (int first = item.begin; first < item.end; first += kDecodeTile) {
      const char* const tile = block.tile(place.stage);
      ptx::mbarrier_wait(block.full(place.stage), place.parity);
      __syncwarp();
      float s[kOwn][4];
      {
        float halves[kColumns / 8][4];
        multiply_scores<T, kColumns>(block, me, tile, halves);
        add_halves<kColumns>(block, me, halves, s);
      }
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[j][i] *= block.x.scale_log2;
        }
      }
      if (first + kDecodeTile > item.unmasked) {
        mask(block, me, first, s);
      }
      softmax<T, kColumns>(block, me, s, sums);
      ptx::async_proxy_fence();
      math_barrier_all();  // weights and shrinks are there
      add_values<T, kColumns>(block, me, tile, o);
      release<kCluster>(block, me, place.stage);
      place.advance(block.at.stages);
    }
    finish_sums<kColumns>(block, me, sums);
    store_sums<kColumns>(block, item);
    store_values<kColumns>(block, me, item, o);
  }
}

}  // namespace tandem::cuda
