// sample.cu — token sampling.   Contract: ops/sample.h   Oracle: ops/ref/sample_ref.h
// Steps     1. the peak of every stretch of a row, many blocks a row; 2. one block a row: the row's
//           peak and the cuts of top_k and top_p (sample_filter.cu); 3. sums of the kept weights in
//           stretches of 512, many blocks a row; 4. one warp a row: the greedy choice, or one
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

/// Block (t, stretch): all weights at once, then a thread for each of the 8 chains.
__global__ void __launch_bounds__(kSumThreads) block_sum_kernel(const SampleArgs args) {
  begin_kernel();
  __shared__ float weights[kCdfBlock];
  const std::int64_t t = blockIdx.x;
  const RowHead head = args.heads[t];
  const SamplingParams params = args.rows[t].params;
  if (isnan(head.peak.max) || params.temperature == 0.0F) {
    return;
  }
  const TokenRow row = token_row(args, t, head.peak.max);
  const int begin = static_cast<int>(blockIdx.y) * kCdfBlock;
#pragma unroll
  for (int i = 0; i < kCdfBlock; i += kSumThreads) {
    const int at = i + static_cast<int>(threadIdx.x);
    weights[at] = begin + at < args.vocab ? kept_weight(row, head.bound, params.min_p, begin + at)
                                          : 0.0F;  // which changes no sum
  }
  __syncthreads();  // all weights are there
  if (threadIdx.x >= kWarp) {
    return;
  }
  double sum = 0.0;
#pragma unroll 8
  for (int i = static_cast<int>(threadIdx.x) % kChains; i < kCdfBlock; i += kChains) {
    sum += static_cast<double>(weights[i]);
  }
#pragma unroll
  for (int offset = 1; offset < kChains; offset *= 2) {  // neighbours first, as on the CPU
    sum += __shfl_xor_sync(kFullWarp, sum, offset);
  }
  if (threadIdx.x == 0) {
    args.block_sums[t * args.num_blocks + blockIdx.y] = sum;
  }
}

/// Turns the sums of a row's stretches into running sums; returns the last. One warp.
__device__ __forceinline__ double running_sums(double* sums, int count, int lane) {
  double total = 0.0;
  double next = lane < count ? sums[lane] : 0.0;
  for (int base = 0; base < count; base += kWarp) {
    const int at = base + lane;
    const double own = next;
    next = at + kWarp < count ? sums[at + kWarp] : 0.0;  // loaded while the sums are formed
    double through = 0.0;
#pragma unroll
    for (int j = 0; j < kWarp; ++j) {
      total += __shfl_sync(kFullWarp, own, j);
      through = j == lane ? total : through;
    }
    if (at < count) {
      sums[at] = through;
    }
  }
  __syncwarp();  // read by other lanes from here on
  return total;
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

struct Kept {
  TokenRow row;
  std::uint64_t bound;
  float min_p;
  __device__ float weight(int id) const {
    return id < row.vocab ? kept_weight(row, bound, min_p, id) : 0.0F;
  }
};

/// The id at which the running sum over ids first exceeds u times the whole. One warp.
__device__ std::int32_t draw(const Kept& kept, double* sums, int num_blocks, double u, int lane) {
  const double target = u * running_sums(sums, num_blocks, lane);
  const int stretch = stretch_of(sums, num_blocks, target, lane);
  const int begin = stretch * kCdfBlock;
  double total = stretch > 0 ? sums[stretch - 1] : 0.0;
  std::int32_t last = -1;
  float next = kept.weight(begin + lane);
  for (int base = begin; base < begin + kCdfBlock; base += kWarp) {
    const float own = next;
    next = kept.weight(base + kWarp + lane);  // loaded while the sums are formed
    double through = 0.0;
#pragma unroll
    for (int j = 0; j < kWarp; ++j) {
      total += static_cast<double>(__shfl_sync(kFullWarp, own, j));
      through = j == lane ? total : through;
    }
    const unsigned positive = __ballot_sync(kFullWarp, own > 0.0F);
    const unsigned hits = __ballot_sync(kFullWarp, own > 0.0F && through > target);
    if (hits != 0) {
      return base + __ffs(static_cast<int>(hits)) - 1;
    }
    last = positive != 0 ? base + kWarp - 1 - __clz(static_cast<int>(positive)) : last;
  }
  // The stretch's own order of summation differs by rounding: the draw falls on its end. An empty
  // last stretch (all dropped) leaves the last token before it.
  for (int base = begin - kWarp; last < 0 && base >= 0; base -= kWarp) {
    const unsigned positive = __ballot_sync(kFullWarp, kept.weight(base + lane) > 0.0F);
    last = positive != 0 ? base + kWarp - 1 - __clz(static_cast<int>(positive)) : -1;
  }
  return last;
}

/// One warp a row.
__global__ void __launch_bounds__(kWarp) draw_kernel(const SampleArgs args) {
  begin_kernel();
  const std::int64_t t = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  const RowHead head = args.heads[t];
  const SampleRow& row = args.rows[t];
  std::int32_t id = head.peak.id;
  if (isnan(head.peak.max)) {
    id = -1;
  } else if (row.params.temperature != 0.0F) {
    const Kept kept{token_row(args, t, head.peak.max), head.bound, row.params.min_p};
    const double u = Rng(row.key).uniform();
    id = draw(kept, args.block_sums + t * args.num_blocks, args.num_blocks, u, lane);
  }
  if (lane == 0) {
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
  launch(ctx, "sample: draw", draw_kernel, {grid_rows, kWarp}, args);
}

}  // namespace

SampleOps sample_ops() {
  return {.sample = sample};
}

}  // namespace tandem::cuda
