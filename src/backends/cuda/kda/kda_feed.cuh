// kda_feed.cuh — how the tokens of a block of kda_recurrent.cu get to shared memory.
#pragma once

#include <cmath>
#include <cstdint>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/kda/choose_kda.h"
#include "backends/cuda/kda/kda_step.cuh"
#include "backends/cuda/ptx/cp_async.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"

namespace tandem::cuda::kda_recurrence {

constexpr int kStages = 3;  // chunks of the ring

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

  float* data;

  __device__ float* q() const { return data; }
  __device__ float* k() const { return q() + kKeys; }
  __device__ float* e() const { return q() + 2 * kKeys; }  // g until exponentiate()
  __device__ float* v() const { return q() + 3 * kKeys; }
  __device__ float* beta() const { return q() + 3 * kKeys + kValues; }
};

/// Chunk n lies in stage n % kStages.
template <int kQuads, int kColumns>
struct Ring {
  float* data;
  int chunk;
  __device__ Token<kQuads, kColumns> token(int n, int r) const {
    return {data + (n % kStages * chunk + r) * Token<kQuads, kColumns>::kFloats};
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
  using OfToken = Token<kQuads, kColumns>;
  if (x.keys < OfToken::kKeys || at.columns < OfToken::kValues) {  // what is never copied: zeros
    for (int i = lane; i < kStages * x.chunk * OfToken::kFloats; i += kWarp) {
      ring.data[i] = 0.0F;
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

}  // namespace tandem::cuda::kda_recurrence
