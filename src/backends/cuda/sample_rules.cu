// sample_rules.cu — rules on logits, and the most likely tokens.   Contract: ops/sample.h
// Oracle    ops/ref/sample_ref.h
// Steps     adjust: one block a changed row: the seen tokens, then the biases, then the mask, a
//           barrier between them; a token stands once in a list, so no two threads share a logit.
//           top: one block a row; K rounds, each the best rank below the last one's.
// Traffic   adjust: the lists, V / 8 bytes of mask, and the forbidden logits once (read and
//           written). top: the row once from memory, then K - 1 times from L2: about 10 us a round
//           at V = 163,840. For the few rows that ask, and still less than to send a row to the
//           host.
// Numerics  one rounding an operation, in the contract's order: the bits of cpu/sample_rules.cpp.
//           Ranks are compared as integers.
// Launch    nothing depends on the data; graph-safe.
#include <cmath>
#include <cstdint>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/families.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/reduce.cuh"
#include "backends/cuda/sample_rows.cuh"
#include "core/checked_cast.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kMaskBits = 32;

struct AdjustArgs {
  Mat<float> logits;               // [T, V]
  const LogitRow* rows;            // [N]
  const SeenToken* seen;           // of all rows
  const LogitBias* biases;         // of all rows
  Mat<const std::uint32_t> masks;  // [M, ceil(V / 32)]
  std::int32_t vocab;              // V
};

__device__ __forceinline__ float penalized(float logit, const SeenToken& seen,
                                           const LogitRow& row) {
  logit = logit > 0.0F ? logit / row.repetition_penalty : logit * row.repetition_penalty;
  logit = fmaf(-static_cast<float>(seen.num_in_response), row.frequency_penalty, logit);
  return logit - (seen.num_in_response > 0 ? row.presence_penalty : 0.0F);
}

/// Block n: changes.rows[n].
__global__ void __launch_bounds__(kThreads) adjust_logits_kernel(const AdjustArgs args) {
  begin_kernel();
  const LogitRow row = args.rows[blockIdx.x];
  float* const logits = args.logits.row(row.row);
  const int first = static_cast<int>(threadIdx.x);
  for (int i = row.seen_begin + first; i < row.seen_end; i += kThreads) {
    const SeenToken seen = args.seen[i];
    logits[seen.token] = penalized(logits[seen.token], seen, row);
  }
  __syncthreads();  // a bias comes after the penalties of its token
  for (int i = row.bias_begin + first; i < row.bias_end; i += kThreads) {
    const LogitBias bias = args.biases[i];
    logits[bias.token] += bias.bias;
  }
  __syncthreads();  // the mask comes last
  if (row.mask < 0) {
    return;
  }
  const std::uint32_t* const mask = args.masks.row(row.mask);
#pragma unroll 4
  for (int id = first; id < args.vocab; id += kThreads) {
    // A warp shares a word, for kThreads is a multiple of kMaskBits.
    const bool allowed = ((mask[id / kMaskBits] >> (id % kMaskBits)) & 1U) != 0;
    if (!allowed && logits[id] < INFINITY) {  // not for a NaN
      logits[id] = -INFINITY;
    }
  }
}

void adjust_logits(const ExecCtx& ctx, F32Mat logits, const LogitChanges& changes) {
  if (changes.rows.empty()) {
    return;
  }
  const AdjustArgs args{device_mat(logits),        changes.rows.data(),
                        changes.seen.data(),       changes.biases.data(),
                        device_mat(changes.masks), checked_cast<std::int32_t>(logits.size(1))};
  launch(ctx, "adjust_logits", adjust_logits_kernel,
         {checked_cast<unsigned>(changes.rows.size()), kThreads}, args);
}

struct TopArgs {
  Mat<std::int32_t> ids;    // [T, K]
  Mat<const float> logits;  // [T, V]
  std::int32_t vocab;       // V
  std::int32_t count;       // K
};

__device__ __forceinline__ std::uint64_t larger(std::uint64_t a, std::uint64_t b) {
  return a > b ? a : b;
}

__device__ __forceinline__ std::uint64_t warp_largest(std::uint64_t rank) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    rank = larger(rank, __shfl_xor_sync(kFullWarp, rank, offset));
  }
  return rank;
}

/// The largest rank of the row below `bound`, in every thread. A whole block.
__device__ __forceinline__ std::uint64_t next_rank(const float* logits, std::int32_t vocab,
                                                   std::uint64_t bound, std::uint64_t* scratch) {
  std::uint64_t best = 0;
#pragma unroll 8
  for (int id = static_cast<int>(threadIdx.x); id < vocab; id += kThreads) {
    const float logit = logits[id];
    const std::uint64_t rank = rank_of(isnan(logit) ? -INFINITY : logit, id);
    best = rank < bound ? larger(best, rank) : best;
  }
  best = warp_largest(best);
  if (threadIdx.x % kWarp == 0) {
    scratch[threadIdx.x / kWarp] = best;
  }
  __syncthreads();  // every warp's best is in
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarp; ++warp) {
    best = larger(best, scratch[warp]);
  }
  __syncthreads();  // read by all before the next round writes
  return best;
}

/// Block t: row t.
__global__ void __launch_bounds__(kThreads) top_tokens_kernel(const TopArgs args) {
  begin_kernel();
  __shared__ std::uint64_t scratch[kThreads / kWarp];
  const float* const logits = args.logits.row(blockIdx.x);
  std::int32_t* const ids = args.ids.row(blockIdx.x);
  std::uint64_t rank = UINT64_MAX;
  for (int i = 0; i < args.count; ++i) {
    rank = next_rank(logits, args.vocab, rank, scratch);
    if (threadIdx.x == 0) {
      ids[i] = static_cast<std::int32_t>(~static_cast<std::uint32_t>(rank));
    }
  }
}

void top_tokens(const ExecCtx& ctx, I32Mat ids, ConstF32Mat logits) {
  if (ids.empty()) {
    return;
  }
  const TopArgs args{device_mat(ids), device_mat(logits),
                     checked_cast<std::int32_t>(logits.size(1)),
                     checked_cast<std::int32_t>(ids.size(1))};
  launch(ctx, "top_tokens", top_tokens_kernel, {checked_cast<unsigned>(logits.size(0)), kThreads},
         args);
}

}  // namespace

void add_sample_rule_ops(SampleOps& ops) {
  ops.adjust_logits = adjust_logits;
  ops.top_tokens = top_tokens;
}

}  // namespace tandem::cuda
