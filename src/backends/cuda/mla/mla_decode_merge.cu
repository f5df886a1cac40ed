// mla_decode_merge.cu — merges the splits of mla_decode_kernel.cuh.   The law: mla_decode.h
// Math      w_i = 2^(m_i - max m);  o = sum w_i o_i / sum w_i s_i, in order of position
// Schedule  A block has one (row, head), four channels a thread, or with few rows a quarter of the
//           channels of one, and then all of a thread's loads in flight before the first is used.
// Launch    grid depends on shapes only; graph-safe.
#include <cmath>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/mla/mla_decode.cuh"
#include "backends/cuda/mla/mla_decode_launch.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMostSplits = split_law(1).most_splits;
static_assert(kMostSplits % 16 == 0 && kMostSplits <= kThreads &&
              split_law(kDecodeColumns + 1).most_splits <= kThreads);

template <int kChannels>
struct Channels {
  float at[kChannels];
};

template <int kChannels>
__device__ __forceinline__ Channels<kChannels> load_channels(const float* from) {
  if constexpr (kChannels == 4) {
    const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
    return {four.x, four.y, four.z, four.w};
  } else {
    static_assert(kChannels == 1);
    return {__ldcg(from)};
  }
}

/// kLoads splits of a thread's channels, from `first` on; zeros beyond the last.
template <int kLoads, int kChannels>
struct Batch {
  Channels<kChannels> part[kLoads];

  __device__ __forceinline__ void load(const float* from, std::int64_t stride, int first,
                                       int splits) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      part[i] = first + i < splits ? load_channels<kChannels>(from + (first + i) * stride)
                                   : Channels<kChannels>{};
    }
  }
  __device__ __forceinline__ void add_to(Channels<kChannels>& o, const float* weights) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float weight = weights[i];
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        o.at[c] = fmaf(weight, part[i].at[c], o.at[c]);
      }
    }
  }
};

template <int kLoads, int kChannels>
__global__ void __launch_bounds__(kThreads) merge_splits(const __grid_constant__ DecodeArgs x) {
  begin_kernel();
  __shared__ float2 sums[kMostSplits];
  __shared__ float weights[kMostSplits];
  const int row = static_cast<int>(blockIdx.x) / x.num_heads;
  const int head = static_cast<int>(blockIdx.x) % x.num_heads;
  const int thread = static_cast<int>(threadIdx.x);
  const int channel = (static_cast<int>(blockIdx.y) * kThreads + thread) * kChannels;
  const int t = x.first_row + row;
  const int splits = num_splits(x.num_heads, max(x.keys.of_row(t).visible, 0));
  if (splits <= 1) {
    return;  // the splits' kernel wrote the result
  }
  const float* const from = x.partial_o + x.partial(row, 0, head) * kDecodeLatent + channel;
  const std::int64_t stride = static_cast<std::int64_t>(x.num_heads) * kDecodeLatent;
  Batch<kLoads, kChannels> batch;
  batch.load(from, stride, 0, splits);
  if (thread < splits) {
    sums[thread] = x.partial_sum[x.partial(row, thread, head)];
  }
  __syncthreads();
  float top = -INFINITY;
  for (int i = 0; i < splits; ++i) {
    top = fmaxf(top, sums[i].x);
  }
  if (thread < kMostSplits) {
    weights[thread] = thread < splits ? exp2f(sums[thread].x - top) : 0.0F;
  }
  __syncthreads();
  float sum = 0.0F;
  for (int i = 0; i < splits; ++i) {
    sum = fmaf(weights[i], sums[i].y, sum);
  }
  Channels<kChannels> o{};
  batch.add_to(o, weights);
  for (int first = kLoads; first < splits; first += kLoads) {
    batch.load(from, stride, first, splits);
    batch.add_to(o, weights + first);
  }
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    x.o.row(t, head)[channel + c] = o.at[c] / sum;
  }
  if (x.lse.data != nullptr && channel == 0) {
    constexpr float kLn2 = 0.693147181F;
    x.lse.row(t)[head] = (top + log2f(sum)) * kLn2;
  }
}

using MergeKernel = void (*)(DecodeArgs);

/// Few rows: a channel a thread, so that more SMs have a part.
MergeKernel thin_kernel(int most_splits) {
  return most_splits <= 16   ? merge_splits<16, 1>
         : most_splits <= 32 ? merge_splits<32, 1>
         : most_splits <= 64 ? merge_splits<64, 1>
                             : merge_splits<kMostSplits, 1>;
}
MergeKernel wide_kernel(int most_splits) {
  return most_splits <= 8 ? merge_splits<8, 4> : merge_splits<16, 4>;
}

}  // namespace

void mla_decode_merge(const ExecCtx& ctx, const DecodeArgs& x) {
  constexpr int kThinBlocks = kDecodeLatent / kThreads;  // of a (row, head)
  const int outputs = x.num_rows * x.num_heads;
  const bool thin = outputs * kThinBlocks <= 4 * device_of(ctx).info().num_sms;
  const dim3 grid(static_cast<unsigned>(outputs), thin ? kThinBlocks : 1);
  launch(ctx, "mla_absorbed (merge)", thin ? thin_kernel(x.max_splits) : wide_kernel(x.max_splits),
         {grid, kThreads}, x);
}

}  // namespace tandem::cuda
