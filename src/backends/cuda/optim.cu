// optim.cu — AdamW and the gradient norm.   Contract: ops/optim.h   Oracle: ops/ref/optim_ref.h
// Traffic   AdamW 28 bytes an element, the norm 4: memory bound.
// Numerics  AdamW with the CPU's fused multiply-adds; squares in double, per block of 16,384
//           elements and then over the blocks, in an order that depends on the length alone.
// Launch    grid-stride; sum_squares ends in a download (it is a training op).
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "backends/cuda/families.h"
#include "backends/cuda/gemm/layout.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/optim_kernels.h"
#include "backends/cuda/reduce.cuh"
#include "core/checked_cast.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kFinalThreads = 1024;
constexpr std::int64_t kSquaresBlock = 16384;
constexpr std::int64_t kMaxGrid = std::int64_t{1} << 20;

struct AdamWArgs {
  float* w;        // [n]
  float* m;        // [n]
  float* v;        // [n]
  const float* g;  // [n]
  std::int64_t n;
  AdamWParams p;
  float m_factor;  // 1 / (1 - beta1^step)
  float v_factor;  // 1 / (1 - beta2^step)
};

__global__ void __launch_bounds__(kThreads) adamw_kernel(const AdamWArgs args) {
  begin_kernel();
  const AdamWParams& p = args.p;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < args.n;
       i += stride) {
    const float grad = args.g[i] * p.grad_scale;
    const float m = fmaf(p.beta1, args.m[i], (1.0F - p.beta1) * grad);
    const float v = fmaf(p.beta2, args.v[i], (1.0F - p.beta2) * grad * grad);
    const float ratio = m * args.m_factor / (sqrtf(v * args.v_factor) + p.eps);
    const float weight = args.w[i];
    args.m[i] = m;
    args.v[i] = v;
    args.w[i] = fmaf(-p.lr, fmaf(p.weight_decay, weight, ratio), weight);
  }
}

void adamw(const ExecCtx& ctx, std::span<float> w, std::span<float> m, std::span<float> v,
           std::span<const float> g, const AdamWParams& params) {
  if (w.empty()) {
    return;
  }
  const double step = static_cast<double>(params.step);
  const auto correction = [step](float beta) {
    return static_cast<float>(1.0 / (1.0 - std::pow(static_cast<double>(beta), step)));
  };
  const AdamWArgs args{w.data(),
                       m.data(),
                       v.data(),
                       g.data(),
                       isize(w),
                       params,
                       correction(params.beta1),
                       correction(params.beta2)};
  const std::int64_t blocks = std::min(tiles_of(isize(w), kThreads), kMaxGrid);
  launch(ctx, "adamw", adamw_kernel,
         {.grid = checked_cast<unsigned>(blocks), .block = kThreads, .writes_weights = true}, args);
}

/// partials[block] = the sum of squares of values[kSquaresBlock * block ...).
__global__ void __launch_bounds__(kThreads)
    squares_kernel(double* partials, const float* values, std::int64_t n) {
  begin_kernel();
  __shared__ double scratch[kThreads / kWarp];
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kSquaresBlock;
  const std::int64_t end = min(n, begin + kSquaresBlock);
  double sum = 0.0;
#pragma unroll 8
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const double value = static_cast<double>(values[i]);
    sum = fma(value, value, sum);
  }
  sum = block_sum<kThreads>(sum, scratch);
  if (threadIdx.x == 0) {
    partials[blockIdx.x] = sum;
  }
}

/// One block.
__global__ void __launch_bounds__(kFinalThreads)
    add_partials_kernel(double* total, const double* partials, std::int64_t count) {
  begin_kernel();
  __shared__ double scratch[kFinalThreads / kWarp];
  double sum = 0.0;
  for (std::int64_t i = threadIdx.x; i < count; i += kFinalThreads) {
    sum += partials[i];
  }
  sum = block_sum<kFinalThreads>(sum, scratch);
  if (threadIdx.x == 0) {
    *total = sum;
  }
}

double sum_squares(const ExecCtx& ctx, std::span<const float> values) {
  const ArenaScope scope(*ctx.workspace);
  double sum = 0.0;
  ctx.device->download(&sum, device_sum_squares(ctx, values), sizeof(sum));
  return sum;
}

}  // namespace

const double* device_sum_squares(const ExecCtx& ctx, std::span<const float> values) {
  const std::int64_t blocks = tiles_of(isize(values), kSquaresBlock);
  double* const total = ctx.workspace->take<double>(1).data();
  double* const partials = ctx.workspace->take<double>(blocks).data();
  if (blocks > 0) {
    launch(ctx, "sum_squares", squares_kernel, {checked_cast<unsigned>(blocks), kThreads}, partials,
           values.data(), isize(values));
  }
  launch(ctx, "sum_squares: total", add_partials_kernel, {1, kFinalThreads}, total, partials,
         blocks);
  return total;
}

OptimOps optim_ops() {
  return {.adamw = adamw, .muon = muon, .sum_squares = sum_squares};
}

}  // namespace tandem::cuda
