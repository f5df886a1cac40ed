// loss.cu — log-probability and entropy of one token a row.   Contract: ops/loss.h
// Oracle    ops/ref/loss_ref.h
// Math      z = (logit - max) / T, S = sum e^z, B = sum e^z z:
//           logprob = z_target - ln S,  H = ln S - B / S
// Traffic   two reads of the logits (one from memory, one mostly from L2); the backward three and a
//           write. Memory bound at many rows, one SM's 50-100 GB/s at few.
// Launch    one block a row; graph-safe.   Numerics  the maximum is exact; fp32 sums of the at most
//           ~160 elements a thread has, in double over the block: a fixed order that depends on the
//           vocabulary alone. A logit of -inf has probability 0; a NaN shows in every result.
#include <cmath>
#include <cstdint>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/families.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/reduce.cuh"
#include "core/checked_cast.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 1024;

struct Scratch {
  float maxima[kThreads / kWarp];
  double sums[kThreads / kWarp];
};

/// What a row's softmax needs; the same bits in every thread.
struct RowSoftmax {
  float max;
  float inv_t;
  double sum;       // S
  double weighted;  // B

  __device__ float log_sum() const { return static_cast<float>(log(sum)); }
  __device__ float entropy() const { return static_cast<float>(log(sum) - weighted / sum); }
};

/// The largest element (-inf for an empty row; a NaN is passed over, S shows it).
__device__ __forceinline__ float row_max(const float* x, std::int64_t n, float* scratch) {
  float top = -INFINITY;
#pragma unroll 8
  for (std::int64_t i = threadIdx.x; i < n; i += kThreads) {
    top = fmaxf(top, x[i]);
  }
  top = warp_max(top);
  if (threadIdx.x % kWarp == 0) {
    scratch[threadIdx.x / kWarp] = top;
  }
  __syncthreads();
  return warp_max(scratch[threadIdx.x % kWarp]);  // as many warps as a warp has lanes
}
static_assert(kThreads == kWarp * kWarp);

__device__ __forceinline__ RowSoftmax row_softmax(const float* logits, std::int64_t n,
                                                  float temperature, Scratch& scratch) {
  RowSoftmax row{row_max(logits, n, scratch.maxima), 1.0F / temperature, 0.0, 0.0};
  float sum = 0.0F;
  float weighted = 0.0F;
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < n; i += kThreads) {
    const float z = (logits[i] - row.max) * row.inv_t;
    const float e = expf(z);
    sum += e;
    // e z -> 0 as z -> -inf; a NaN must stay, so the test is for "is zero", not "is positive".
    weighted += e == 0.0F ? 0.0F : e * z;
  }
  row.sum = block_sum<kThreads>(static_cast<double>(sum), scratch.sums);
  row.weighted = block_sum<kThreads>(static_cast<double>(weighted), scratch.sums);
  return row;
}

struct LogProbArgs {
  float* logprob;               // [T]
  float* entropy;               // [T] or null
  Mat<const float> logits;      // [T, V]
  const std::int32_t* targets;  // [T]
  const float* temperature;     // [T]
  std::int64_t vocab;
};

__global__ void __launch_bounds__(kThreads) log_prob_kernel(const LogProbArgs args) {
  begin_kernel();
  __shared__ Scratch scratch;
  const std::int64_t t = blockIdx.x;
  const std::int32_t target = args.targets[t];
  float logprob = 0.0F;
  float entropy = 0.0F;
  if (target >= 0) {
    const float* const logits = args.logits.row(t);
    const RowSoftmax row = row_softmax(logits, args.vocab, args.temperature[t], scratch);
    logprob = (logits[target] - row.max) * row.inv_t - row.log_sum();
    entropy = row.entropy();
  }
  if (threadIdx.x == 0) {
    args.logprob[t] = logprob;
    if (args.entropy != nullptr) {
      args.entropy[t] = entropy;
    }
  }
}

struct LogProbBwdArgs {
  Mat<float> d_logits;          // [T, V], may be logits
  const float* d_logprob;       // [T]
  const float* d_entropy;       // [T] or null
  Mat<const float> logits;      // [T, V]
  const std::int32_t* targets;  // [T]
  const float* temperature;     // [T]
  std::int64_t vocab;
};

/// d_logit = (d_logprob (hit - p) - d_entropy p (ln p + H)) / T
__global__ void __launch_bounds__(kThreads) log_prob_bwd_kernel(const LogProbBwdArgs args) {
  begin_kernel();
  __shared__ Scratch scratch;
  const std::int64_t t = blockIdx.x;
  const std::int32_t target = args.targets[t];
  float* const d_row = args.d_logits.row(t);
  if (target < 0) {
    for (std::int64_t i = threadIdx.x; i < args.vocab; i += kThreads) {
      d_row[i] = 0.0F;
    }
    return;
  }
  const float* const logits = args.logits.row(t);
  // Ends in a barrier: no thread writes d_row, which may be the logits, before all have read them.
  const RowSoftmax row = row_softmax(logits, args.vocab, args.temperature[t], scratch);
  const float log_sum = row.log_sum();
  const float entropy = row.entropy();
  const float d_logprob = args.d_logprob[t];
  const float d_entropy = args.d_entropy != nullptr ? args.d_entropy[t] : 0.0F;
  for (std::int64_t i = threadIdx.x; i < args.vocab; i += kThreads) {
    const float log_p = (logits[i] - row.max) * row.inv_t - log_sum;
    const float p = expf(log_p);
    const float slope = fmaf(d_entropy, log_p + entropy, d_logprob);
    // p (ln p + H) -> 0 as p -> 0, where ln p may be -inf.
    const float grad = p == 0.0F ? 0.0F : p * slope;
    const float hit = i == target ? d_logprob * row.inv_t : 0.0F;
    d_row[i] = hit - grad * row.inv_t;
  }
}

void log_prob(const ExecCtx& ctx, F32Vec logprob, F32Vec entropy, ConstF32Mat logits,
              ConstI32Vec targets, ConstF32Vec temperature) {
  if (logits.size(0) == 0) {
    return;
  }
  const LogProbArgs args{logprob.data(),     entropy.empty() ? nullptr : entropy.data(),
                         device_mat(logits), targets.data(),
                         temperature.data(), logits.size(1)};
  launch(ctx, "log_prob", log_prob_kernel, {checked_cast<unsigned>(logits.size(0)), kThreads},
         args);
}

void log_prob_bwd(const ExecCtx& ctx, F32Mat d_logits, ConstF32Vec d_logprob, ConstF32Vec d_entropy,
                  ConstF32Mat logits, ConstI32Vec targets, ConstF32Vec temperature) {
  if (logits.size(0) == 0) {
    return;
  }
  const LogProbBwdArgs args{
      device_mat(d_logits), d_logprob.data(), d_entropy.empty() ? nullptr : d_entropy.data(),
      device_mat(logits),   targets.data(),   temperature.data(),
      logits.size(1)};
  launch(ctx, "log_prob_bwd", log_prob_bwd_kernel,
         {checked_cast<unsigned>(logits.size(0)), kThreads}, args);
}

}  // namespace

LossOps loss_ops() {
  return {.log_prob = log_prob, .log_prob_bwd = log_prob_bwd};
}

}  // namespace tandem::cuda
