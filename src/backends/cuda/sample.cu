// sample.cu — token sampling.   Contract: ops/sample.h   Oracle: ops/ref/sample_ref.h
// Steps     1. the peak of every stretch of a row, many blocks a row; 2. one block a row: the row's
//           peak and the cuts of top_k and top_p (sample_filter.cu); 3. sums of the kept weights in
//           stretches of 512, many blocks a row; 4. one block a row: the greedy choice, or one
//           uniform number from the row's key and the inverse CDF over ids in increasing order.
// Traffic   three reads of the row without filters (one from memory, the rest from L2).
// Numerics  weights and their sums in double are, operation for operation, those of cpu/sample.cpp.
//           Only the sum that top_p is compared with is formed otherwise (exactly, in fixed point).
// Launch    each row takes its own path in the kernels: nothing depends on the data; graph-safe.
#include <cmath>
#include <cstdint>

#include "backends/cuda/families.h"
#include "backends/cuda/gemm/layout.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/reduce.cuh"
#include "backends/cuda/sample_rows.cuh"
#include "core/checked_cast.h"
#include "core/rng.h"

namespace tandem::cuda {
namespace {

constexpr std::int64_t kMaxVocab = std::int64_t{1} << 20;  // of sample_filter.cu's masses
constexpr int kPeakThreads = 256;
constexpr int kChains = 8;  // interleaved sums of a stretch
constexpr int kSumThreads = 128;

/// Block (t, chunk).
__global__ void __launch_bounds__(kPeakThreads) chunk_peak_kernel(const SampleArgs args) {
  begin_kernel();
  __shared__ Peak warp_peaks[kPeakThreads / kWarp];
  const std::int64_t t = blockIdx.x;
  const float* const logits = args.logits.row(t);
  const int begin = static_cast<int>(blockIdx.y) * kChunk;
  const int end = min(args.vocab, begin + kChunk);
  Peak best{-INFINITY, INT32_MAX};
  bool bad = false;
#pragma unroll 8
  for (int id = begin + static_cast<int>(threadIdx.x); id < end; id += kPeakThreads) {
    const float logit = logits[id];
    bad = bad || isnan(logit);
    best = logit > best.max ? Peak{logit, id} : best;
  }
  best = warp_best(best);
  if (threadIdx.x % kWarp == 0) {
    warp_peaks[threadIdx.x / kWarp] = best;
  }
  bad = __syncthreads_or(bad ? 1 : 0) != 0;  // and every warp's peak is in
  if (threadIdx.x == 0) {
    for (const Peak& peak : warp_peaks) {
      best = better(best, peak);
    }
    args.peaks[t * args.num_chunks + blockIdx.y] = {bad ? NAN : best.max, best.id};
  }
}

__device__ __forceinline__ KeptRow kept_row(const SampleArgs& args, std::int64_t t,
                                            const RowHead& head, const SamplingParams& params) {
  return {token_row(args, t, head.peak.max, params.temperature), head.bound, params.min_p};
}

/// All weights of a stretch, at once, in double. A whole block.
__device__ __forceinline__ void stretch_weights(double* weights, const KeptRow& kept, int stretch) {
  constexpr int kEach = kCdfBlock / kSumThreads;
  const int first = static_cast<int>(threadIdx.x);
  const int begin = stretch * kCdfBlock;
  float logits[kEach];  // all loads are under way before the first is used
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    logits[i] = kept.logit(begin + first + i * kSumThreads);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = first + i * kSumThreads;
    weights[at] = static_cast<double>(kept.weight(logits[i], begin + at));
  }
  __syncthreads();  // all weights are there
}

/// Block (t, stretch): all weights, then a thread for each of the 8 chains.
__global__ void __launch_bounds__(kSumThreads) block_sum_kernel(const SampleArgs args) {
  begin_kernel();
  __shared__ double weights[kCdfBlock];
  const std::int64_t t = blockIdx.x;
  const RowHead head = args.heads[t];
  const SamplingParams params = args.rows[t].params;
  if (isnan(head.peak.max) || params.temperature == 0.0F) {
    return;
  }
  const KeptRow kept = kept_row(args, t, head, params);
  stretch_weights(weights, kept, static_cast<int>(blockIdx.y));
  if (threadIdx.x >= kWarp) {
    return;
  }
  double sum = 0.0;
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x) % kChains; i < kCdfBlock; i += kChains) {
    sum += weights[i];
  }
#pragma unroll
  for (int offset = 1; offset < kChains; offset *= 2) {  // neighbours first, as on the CPU
    sum += __shfl_xor_sync(kFullWarp, sum, offset);
  }
  if (threadIdx.x == 0) {
    args.block_sums[t * args.num_blocks + blockIdx.y] = sum;
  }
}

/// What a draw adds up. Its sums are chains of dependent additions in the CPU's order, so all that
/// is added is brought here first.
struct DrawShared {
  double sums[kMaxVocab / kCdfBlock];  // of the stretches; then the running sums
  double weights[kCdfBlock];           // of the stretch that is drawn from
  int stretch;
};

/// Turns the sums of a row's stretches into running sums. One thread.
__device__ __forceinline__ void add_up(double* sums, int count) {
  double total = 0.0;
#pragma unroll 16
  for (int i = 0; i < count; ++i) {
    total += sums[i];
    sums[i] = total;
  }
}

/// The first stretch whose running sum exceeds the target, else the last one: running sums do not
/// fall, so those that do not exceed it come first. One warp.
__device__ __forceinline__ int stretch_of(const double* running, int count, double target,
                                          int lane) {
  unsigned before = 0;
#pragma unroll 4
  for (int at = lane; at < count; at += kWarp) {
    before += running[at] <= target ? 1U : 0U;
  }
  return min(static_cast<int>(__reduce_add_sync(kFullWarp, before)), count - 1);
}

/// How many weights of the stretch come before the running sum, `total` at its begin, exceeds the
/// target; kCdfBlock when it never does. A weight of 0 moves no sum, so the one that does is not.
/// Every lane adds up the same.
__device__ __forceinline__ int place_of(const double* weights, double total, double target) {
  constexpr int kAtOnce = 32;
  int before = 0;
  for (int base = 0; base < kCdfBlock && total <= target; base += kAtOnce) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      total += weights[base + i];
      before += total <= target ? 1 : 0;
    }
  }
  return before;
}

/// The last kept token before `end`, which lies on a stretch's end; -1: none. One warp.
__device__ std::int32_t last_kept(const KeptRow& kept, int end, int lane) {
  for (int base = end - kWarp; base >= 0; base -= kWarp) {
    const float weight = kept.weight(kept.logit(base + lane), base + lane);
    const unsigned positive = __ballot_sync(kFullWarp, weight > 0.0F);
    if (positive != 0) {
      return base + kWarp - 1 - __clz(static_cast<int>(positive));
    }
  }
  return -1;
}

/// The id at which the running sum over ids first exceeds u times the whole, in the first warp.
/// A whole block.
__device__ __forceinline__ std::int32_t draw(DrawShared& shared, const KeptRow& kept,
                                             int num_blocks, double u) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool first_warp = threadIdx.x < kWarp;
  double target = 0.0;
  if (first_warp) {
    if (lane == 0) {
      add_up(shared.sums, num_blocks);
    }
    __syncwarp();  // the running sums are there
    target = u * shared.sums[num_blocks - 1];
    const int stretch = stretch_of(shared.sums, num_blocks, target, lane);
    if (lane == 0) {
      shared.stretch = stretch;
    }
  }
  __syncthreads();  // the stretch is known
  const int stretch = shared.stretch;
  stretch_weights(shared.weights, kept, stretch);
  if (!first_warp) {
    return -1;
  }
  const double total = stretch > 0 ? shared.sums[stretch - 1] : 0.0;
  const int place = place_of(shared.weights, total, target);
  // At kCdfBlock the stretch's own order of summation differs by rounding: the draw falls on its
  // end. An empty last stretch (all dropped) leaves the last token before it.
  return place < kCdfBlock ? stretch * kCdfBlock + place
                           : last_kept(kept, (stretch + 1) * kCdfBlock, lane);
}

/// One block a row.
__global__ void __launch_bounds__(kSumThreads) draw_kernel(const SampleArgs args) {
  begin_kernel();
  __shared__ DrawShared shared;
  const std::int64_t t = blockIdx.x;
  const RowHead head = args.heads[t];
  const SampleRow row = args.rows[t];
  const double* const sums = args.block_sums + t * args.num_blocks;
  for (int i = static_cast<int>(threadIdx.x); i < args.num_blocks; i += kSumThreads) {
    shared.sums[i] = sums[i];  // of no meaning, and not used, where nothing is to be drawn
  }
  __syncthreads();  // the sums are there
  std::int32_t id = head.peak.id;
  if (isnan(head.peak.max)) {
    id = -1;
  } else if (row.params.temperature != 0.0F) {
    const KeptRow kept = kept_row(args, t, head, row.params);
    id = draw(shared, kept, args.num_blocks, Rng(row.key).uniform());
  }
  if (threadIdx.x == 0) {
    args.ids[t] = id;
  }
}

void sample(const ExecCtx& ctx, std::span<std::int32_t> ids, ConstF32Mat logits,
            std::span<const SampleRow> rows) {
  const std::int64_t num_rows = logits.size(0);
  const std::int64_t vocab = logits.size(1);
  TDM_CHECK(vocab <= kMaxVocab, vocab);
  if (num_rows == 0) {
    return;
  }
  const std::int64_t num_chunks = tiles_of(vocab, kChunk);
  const std::int64_t num_blocks = tiles_of(vocab, kCdfBlock);
  const ArenaScope scope(*ctx.workspace);
  const SampleArgs args{ids.data(),
                        device_mat(logits),
                        rows.data(),
                        ctx.workspace->take<Peak>(num_rows * num_chunks).data(),
                        ctx.workspace->take<RowHead>(num_rows).data(),
                        ctx.workspace->take<double>(num_rows * num_blocks).data(),
                        checked_cast<std::int32_t>(vocab),
                        checked_cast<std::int32_t>(num_chunks),
                        checked_cast<std::int32_t>(num_blocks)};
  const auto grid_rows = checked_cast<unsigned>(num_rows);
  const auto grid = [&](std::int64_t count) {
    return dim3(grid_rows, checked_cast<unsigned>(count));
  };
  if (vocab > 0) {
    launch(ctx, "sample: peaks", chunk_peak_kernel, {grid(num_chunks), kPeakThreads}, args);
  }
  launch_row_heads(ctx, args, num_rows);  // an empty row's peak is -inf: id -1
  if (vocab > 0) {
    launch(ctx, "sample: sums", block_sum_kernel, {grid(num_blocks), kSumThreads}, args);
  }
  launch(ctx, "sample: draw", draw_kernel, {grid_rows, kSumThreads}, args);
}

}  // namespace

SampleOps sample_ops() {
  SampleOps ops;
  ops.sample = sample;
  return ops;
}

}  // namespace tandem::cuda
