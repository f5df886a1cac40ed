// mla_decode_merge.cu — merges the splits of mla_decode_kernel.cuh.   The law: mla_decode.h
// Math      w_i = 2^(m_i - max m);  o = sum w_i o_i / sum w_i s_i, in order of position
// Schedule  A block has a quarter of the channels of one (row, head), a channel a thread, and
//           all of a thread's loads in flight before the first is used.
// Launch    grid depends on shapes only; graph-safe.
#include <cmath>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/mla_decode.cuh"
#include "backends/cuda/mla_decode_launch.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kMostSplits = split_law(1).most_splits;
static_assert(kMostSplits <= kThreads && split_law(kDecodeColumns + 1).most_splits <= kThreads);

template <int kLoads>
__global__ void __launch_bounds__(kThreads) merge_splits(const __grid_constant__ DecodeArgs x) {
  begin_kernel();
  __shared__ float2 sums[kMostSplits];
  __shared__ float weights[kMostSplits];
  const int row = static_cast<int>(blockIdx.x) / x.num_heads;
  const int head = static_cast<int>(blockIdx.x) % x.num_heads;
  const int thread = static_cast<int>(threadIdx.x);
  const int channel = static_cast<int>(blockIdx.y) * kThreads + thread;
  const int t = x.first_row + row;
  const int splits = num_splits(x.num_heads, max(x.keys.of_row(t).visible, 0));
  if (splits <= 1) {
    return;  // the splits' kernel wrote the result
  }
  const float* const from = x.partial_o + x.partial(row, 0, head) * kDecodeLatent + channel;
  const std::int64_t stride = static_cast<std::int64_t>(x.num_heads) * kDecodeLatent;
  float part[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    part[i] = i < splits ? __ldcg(from + i * stride) : 0.0F;
  }
  if (thread < splits) {
    sums[thread] = x.partial_sum[x.partial(row, thread, head)];
  }
  __syncthreads();
  float top = -INFINITY;
  for (int i = 0; i < splits; ++i) {
    top = fmaxf(top, sums[i].x);
  }
  if (thread < splits) {
    weights[thread] = exp2f(sums[thread].x - top);
  }
  __syncthreads();
  float sum = 0.0F;
  for (int i = 0; i < splits; ++i) {
    sum = fmaf(weights[i], sums[i].y, sum);
  }
  float o = 0.0F;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    o = i < splits ? fmaf(weights[i], part[i], o) : o;
  }
  x.o.row(t, head)[channel] = o / sum;
  if (x.lse.data != nullptr && channel == 0) {
    constexpr float kLn2 = 0.693147181F;
    x.lse.row(t)[head] = (top + log2f(sum)) * kLn2;
  }
}

}  // namespace

void mla_decode_merge(const ExecCtx& ctx, const DecodeArgs& x) {
  const dim3 grid(static_cast<unsigned>(x.num_rows * x.num_heads), kDecodeLatent / kThreads);
  const auto kernel = x.max_splits <= 16   ? merge_splits<16>
                      : x.max_splits <= 32 ? merge_splits<32>
                      : x.max_splits <= 64 ? merge_splits<64>
                                           : merge_splits<kMostSplits>;
  launch(ctx, "mla_absorbed (merge)", kernel, {grid, kThreads}, x);
}

}  // namespace tandem::cuda
