// conv1d.cuh — what the convolution's forward and backward share: the sequences of a batch, and the
// sum over the taps. A thread works on one channel.
#pragma once

#include <cstdint>
#include <span>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/runtime/cuda_device.h"
#include "ops/conv1d.h"
#include "ops/seq_batch.h"

namespace tandem::cuda {

constexpr int kConvThreads = 256;
constexpr std::int64_t kConvRows = 16;  // rows a block, where there are many

struct Sequences {
  const std::int32_t* cu_seqlens;  // [count + 1]
  std::int64_t count;
};

struct ConvInputs {
  Mat<const float> x;
  const float* filters[kMaxConvFilters];  // [width, W] each
  std::int64_t width;                     // channels of a filter
  Sequences seqs;
  std::int64_t rows, channels, taps;

  /// Channel c's taps.
  __device__ __forceinline__ const float* taps_of(std::int64_t c) const {
    const float* filter = filters[0];
#pragma unroll
    for (int i = 1; i < kMaxConvFilters; ++i) {
      filter = c >= i * width ? filters[i] - i * width * taps : filter;
    }
    return filter + c * taps;
  }
};

[[nodiscard]] inline ConvInputs conv_inputs(ConstF32Mat x, std::span<const ConstF32Mat> filters,
                                            const SeqBatch& seqs) {
  const ConstF32Mat& first = filters.front();
  ConvInputs in{device_mat(x), {},        first.size(0), {seqs.cu_seqlens.data(), seqs.num_seqs()},
                x.size(0),     x.size(1), first.size(1)};
  for (std::size_t i = 0; i < filters.size(); ++i) {
    in.filters[i] = filters[i].data();
  }
  return in;
}

/// Runs of rows along x, channels along y.
[[nodiscard]] inline dim3 conv_grid(const ConvInputs& in, std::int64_t rows_per_block) {
  return {static_cast<unsigned>((in.rows + rows_per_block - 1) / rows_per_block),
          static_cast<unsigned>((in.channels + kConvThreads - 1) / kConvThreads)};
}
__device__ __forceinline__ std::int64_t conv_channel() {
  return static_cast<std::int64_t>(blockIdx.y) * kConvThreads + threadIdx.x;
}

/// Rows [begin, end) of a sequence. Rows behind the last sequence form one without an index.
struct SeqCursor {
  std::int64_t index;
  std::int64_t begin;
  std::int64_t end;

  __device__ bool valid() const { return index >= 0; }
  __device__ bool ended(std::int64_t t) const { return t >= end; }
  /// The sequence of row t >= end.
  __device__ SeqCursor next(const Sequences& seqs, std::int64_t t) const {
    for (std::int64_t b = index + 1; b < seqs.count; ++b) {
      if (t < seqs.cu_seqlens[b + 1]) {
        return {b, seqs.cu_seqlens[b], seqs.cu_seqlens[b + 1]};
      }
    }
    return behind(t);
  }
  /// Everything from row t on.
  __device__ static SeqCursor behind(std::int64_t t) { return {-1, t, INT64_MAX}; }
};

/// The sequence of row t: the number of sequences that end at or before t. Called by all threads of
/// a block with the same t.
__device__ __forceinline__ SeqCursor find_sequence(const Sequences& seqs, std::int64_t t) {
  std::int64_t b = 0;
  for (std::int64_t base = 0; base < seqs.count; base += kConvThreads) {
    const std::int64_t i = base + threadIdx.x;
    b += __syncthreads_count(i < seqs.count && seqs.cu_seqlens[i + 1] <= t);
  }
  return b < seqs.count ? SeqCursor{b, seqs.cu_seqlens[b], seqs.cu_seqlens[b + 1]}
                        : SeqCursor::behind(t);
}

/// The taps of one channel, in registers where W is known to the compiler (kTaps > 0).
template <int kTaps>
struct Taps {
  float value[kTaps];
  __device__ Taps(const ConvInputs& in, std::int64_t c) {
    const float* const from = in.taps_of(c);
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      value[j] = from[j];
    }
  }
};
template <>
struct Taps<0> {
  const float* value;
  int count;
  __device__ Taps(const ConvInputs& in, std::int64_t c)
      : value(in.taps_of(c)), count(static_cast<int>(in.taps)) {}
};

/// The rows under a sequence's taps, for one channel: row `at` of the batch, or where that lies
/// before `begin`, one of the W-1 rows of `past`, or 0 without these.
struct TapRows {
  Mat<const float> x;
  std::int64_t begin;
  const float* past;  // null: zeros
  std::int64_t past_stride;
  std::int64_t past_rows;

  __device__ float get(std::int64_t at, std::int64_t c) const {
    const float* from = past == nullptr ? nullptr : past + (at - begin + past_rows) * past_stride;
    from = at >= begin ? x.row(at) + c : from;
    return from == nullptr ? 0.0F : *from;
  }
};

/// sum_j taps[j] x[j], oldest first.
template <int kTaps>
__device__ __forceinline__ float tap_sum(const float (&taps)[kTaps], const float* x) {
  float sum = 0.0F;
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    sum = fmaf(taps[j], x[j], sum);
  }
  return sum;
}

/// sum_j w[c, j] x[t - (W-1) + j, c], oldest first.
template <int kTaps>
__device__ __forceinline__ float tap_sum(const Taps<kTaps>& taps, const TapRows& rows,
                                         std::int64_t t, std::int64_t c) {
  float sum = 0.0F;
  if constexpr (kTaps > 0) {
    float x[kTaps];  // all loads are under way before the first is needed
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      x[j] = rows.get(t - (kTaps - 1) + j, c);
    }
    sum = tap_sum(taps.value, x);
  } else {
    for (int j = 0; j < taps.count; ++j) {
      sum = fmaf(taps.value[j], rows.get(t - (taps.count - 1) + j, c), sum);
    }
  }
  return sum;
}

}  // namespace tandem::cuda
