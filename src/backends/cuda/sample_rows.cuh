// sample_rows.cuh — what the sampling kernels share: a row's tokens, their order and their weights.
#pragma once

#include <cmath>
#include <cstdint>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/order_key.cuh"
#include "backends/cuda/reduce.cuh"
#include "ops/exec_ctx.h"
#include "ops/sample.h"

namespace tandem::cuda {

/// The largest logit of a stretch of a row and the lowest id that has it; max is NaN when the
/// stretch holds a NaN.
struct Peak {
  float max;
  std::int32_t id;
};

/// What is known of a row before the draw.
struct RowHead {
  Peak peak;            // max is NaN: the row may not be sampled from
  std::uint64_t bound;  // tokens of a lower rank are dropped by top_k or top_p
};

struct SampleArgs {
  std::int32_t* ids;        // [T]
  Mat<const float> logits;  // [T, V]
  const SampleRow* rows;    // [T]
  Peak* peaks;              // [T, num_chunks]
  RowHead* heads;           // [T]
  double* block_sums;       // [T, num_blocks]
  std::int32_t vocab;       // V
  std::int32_t num_chunks;  // stretches of kChunk logits
  std::int32_t num_blocks;  // stretches of kCdfBlock logits
};

constexpr int kChunk = 4096;
constexpr int kCdfBlock = 512;  // as in cpu/sample.cpp: the sums are the same bits

__device__ __forceinline__ Peak better(Peak a, Peak b) {
  const bool keep = a.max > b.max || (a.max == b.max && a.id < b.id);
  return keep ? a : b;
}

/// Every lane gets the warp's best.
__device__ __forceinline__ Peak warp_best(Peak best) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Peak other{__shfl_xor_sync(kFullWarp, best.max, offset),
                     __shfl_xor_sync(kFullWarp, best.id, offset)};
    best = better(best, other);
  }
  return best;
}

/// The order of tokens, best last: logit rising, then id falling.
__device__ __forceinline__ std::uint64_t rank_of(float logit, std::int32_t id) {
  return (std::uint64_t{order_key(logit)} << 32) | ~static_cast<std::uint32_t>(id);
}
__device__ __forceinline__ float logit_of_rank(std::uint64_t rank) {
  return value_of_order_key(static_cast<std::uint32_t>(rank >> 32));
}

/// 2^n for n in [-126, 127].
__device__ __forceinline__ float power_of_two(std::int32_t n) {
  return __uint_as_float(static_cast<std::uint32_t>(n + 127) << 23);
}

/// e^x by the operations of cpu/simd_math-inl.h on targets with fma, so that a draw gives the same
/// token on either backend.
__device__ __forceinline__ float sample_exp(float x) {
  const float clamped = fminf(fmaxf(x, -104.0F), 89.0F);
  const float n = rintf(clamped * 1.44269504F);
  float r = fmaf(-n, 0.693359375F, clamped);
  r = fmaf(-n, -2.12194440e-4F, r);
  float p = fmaf(0.0013926184F, r, 0.0083631789F);
  p = fmaf(p, r, 0.041666556F);
  p = fmaf(p, r, 0.16666576F);
  p = fmaf(p, r, 0.5F);
  const float e = fmaf(p, r * r, r) + 1.0F;
  const std::int32_t exponent = static_cast<std::int32_t>(n);
  const std::int32_t half = exponent >> 1;
  return e * power_of_two(half) * power_of_two(exponent - half);
}

/// One row's tokens: weights are e^((logit - max) / T), so the largest is 1.
struct TokenRow {
  const float* logits;
  std::int32_t vocab;
  float max;
  float inv_t;

  __device__ float z(float logit) const { return (logit - max) * inv_t; }
  __device__ float weight(float logit) const { return sample_exp(z(logit)); }
};

__device__ __forceinline__ TokenRow token_row(const SampleArgs& args, std::int64_t t, float max,
                                              float temperature) {
  return {args.logits.row(t), args.vocab, max, 1.0F / temperature};
}

/// What the filters leave of a row.
struct KeptRow {
  TokenRow row;
  std::uint64_t bound;
  float min_p;

  /// Beyond the row -inf, whose weight is 0.
  __device__ float logit(std::int32_t id) const {
    return id < row.vocab ? row.logits[id] : -INFINITY;
  }
  /// Token `id`'s weight, 0 where a filter dropped it.
  __device__ float weight(float logit, std::int32_t id) const {
    const float weight = row.weight(logit);
    // "not below" rather than "at least": a min_p of NaN is off.
    return rank_of(logit, id) >= bound && !(weight < min_p) ? weight : 0.0F;
  }
};

/// From the chunks' peaks to every row's head: its peak, and where top_k and top_p cut it.
void launch_row_heads(const ExecCtx& ctx, const SampleArgs& args, std::int64_t rows);

}  // namespace tandem::cuda
