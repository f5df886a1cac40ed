// attn_res_bwd.cu — Attention Residuals, backward.   Contract: ops/attn_res.h
// Oracle: ops/ref/attn_res_ref.h
// Traffic   each source twice (the second time from L2), its gradient read and written once.
// Numerics  fp32; the gradient of c = w u: a block adds its 8 rows in order into a partial row in
//           the workspace, row_sums.h adds these.
// Launch    a block for 8 rows; graph-safe.
#include "backends/cuda/attn_res.cuh"
#include "backends/cuda/attn_res_bwd.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/row_sums.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr std::int64_t kRowsPerBlock = 8;

struct BwdArgs {
  Sources sources;
  Mat<float> d_sources[kMaxSources];
  Mat<const float> d_out;
  const float* w;
  const float* u;
  float* d_c;  // [blocks, D]
  std::int64_t rows, dim;
  float eps;
};

/// d_source_i += p_i d_out + a_i c - b_i x_i, and d_c += a_i x_i.
struct Factors {
  float p[kMaxSources];
  float a[kMaxSources];
  float b[kMaxSources];
};

/// Of each source: x.x, x.c and x.d_out, by warp.
struct SharedSums {
  float squares[kWarps][kMaxSources];
  float dot[kWarps][kMaxSources];
  float d_p[kWarps][kMaxSources];
};

__device__ void put_sums(SharedSums& sums, const BwdArgs& args, std::int64_t t, int source) {
  const float* const x = args.sources.at[source].row(t);
  const float* const d_out = args.d_out.row(t);
  float squares = 0.0F;
  float dot = 0.0F;
  float d_p = 0.0F;
  for (std::int64_t j = threadIdx.x; j < args.dim; j += kThreads) {
    squares = fmaf(x[j], x[j], squares);
    dot = fmaf(x[j], args.w[j] * args.u[j], dot);
    d_p = fmaf(x[j], d_out[j], d_p);
  }
  squares = warp_sum(squares);
  dot = warp_sum(dot);
  d_p = warp_sum(d_p);
  if (threadIdx.x % kWarp == 0) {
    const unsigned warp = threadIdx.x / kWarp;
    sums.squares[warp][source] = squares;
    sums.dot[warp][source] = dot;
    sums.d_p[warp][source] = d_p;
  }
}

/// By one warp, a lane a source.
__device__ void put_factors(Factors& factors, const SharedSums& sums, const BwdArgs& args) {
  const int lane = static_cast<int>(threadIdx.x);
  const bool used = lane < args.sources.count;
  float squares = 0.0F;
  float dot = 0.0F;
  float d_p = 0.0F;
  for (int warp = 0; warp < kWarps && used; ++warp) {
    squares += sums.squares[warp][lane];
    dot += sums.dot[warp][lane];
    d_p += sums.d_p[warp][lane];
  }
  const SourceWeight weight = softmax_weights(squares, dot, args.dim, args.eps, used);
  const float mean = warp_sum(used ? weight.p * d_p : 0.0F);
  if (used) {
    const float a = weight.p * (d_p - mean) * weight.r;
    factors.p[lane] = weight.p;
    factors.a[lane] = a;
    factors.b[lane] = a * (weight.s * weight.r / static_cast<float>(args.dim));
  }
}

__device__ void add_gradients(const BwdArgs& args, const Factors& factors, std::int64_t t,
                              float* d_c, bool first) {
  for (std::int64_t j = threadIdx.x; j < args.dim; j += kThreads) {
    const float d_out = args.d_out.row(t)[j];
    const float c = args.w[j] * args.u[j];
    float d_query = first ? 0.0F : d_c[j];
    for (int i = 0; i < args.sources.count; ++i) {
      const float x = args.sources.at[i].row(t)[j];
      const float grad = fmaf(-factors.b[i], x, fmaf(factors.p[i], d_out, factors.a[i] * c));
      args.d_sources[i].row(t)[j] += grad;
      d_query = fmaf(factors.a[i], x, d_query);
    }
    d_c[j] = d_query;
  }
}

__global__ void __launch_bounds__(kThreads) bwd_rows(const __grid_constant__ BwdArgs args) {
  begin_kernel();
  __shared__ SharedSums sums;
  __shared__ Factors factors;
  const std::int64_t begin = blockIdx.x * kRowsPerBlock;
  const std::int64_t end = min(begin + kRowsPerBlock, args.rows);
  float* const d_c = args.d_c + blockIdx.x * args.dim;
  for (std::int64_t t = begin; t < end; ++t) {
    for (int i = 0; i < args.sources.count; ++i) {
      put_sums(sums, args, t, i);
    }
    __syncthreads();  // the sums are written, and the last row's factors are read
    if (threadIdx.x < kWarp) {
      put_factors(factors, sums, args);
    }
    __syncthreads();  // the factors are written, and the sums are read
    add_gradients(args, factors, t, d_c, t == begin);
  }
}

/// d_w += d_c u and d_u += d_c w.
__global__ void __launch_bounds__(kThreads)
    add_query_grads(float* d_w, float* d_u, const float* d_c, const float* w, const float* u,
                    std::int64_t dim) {
  begin_kernel();
  const std::int64_t j = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j < dim) {
    d_w[j] = fmaf(d_c[j], u[j], d_w[j]);
    d_u[j] = fmaf(d_c[j], w[j], d_u[j]);
  }
}

}  // namespace

void attn_res_bwd(const ExecCtx& ctx, std::span<const F32Mat> d_sources, F32Vec d_w, F32Vec d_u,
                  ConstF32Mat d_out, std::span<const ConstF32Mat> sources, ConstF32Vec w,
                  ConstF32Vec u, float eps) {
  if (d_out.empty()) {
    return;
  }
  const char* const op = "attn_res_bwd";
  const std::int64_t dim = d_out.size(1);
  const std::int64_t blocks = (d_out.size(0) + kRowsPerBlock - 1) / kRowsPerBlock;
  const ArenaScope scope(*ctx.workspace);
  BwdArgs args{.sources = {},
               .d_sources = {},
               .d_out = device_mat(d_out),
               .w = w.data(),
               .u = u.data(),
               .d_c = ctx.workspace->take<float>(blocks * dim).data(),
               .rows = d_out.size(0),
               .dim = dim,
               .eps = eps};
  for (std::size_t i = 0; i < sources.size(); ++i) {
    args.sources.at[i] = device_mat(sources[i]);
    args.d_sources[i] = device_mat(d_sources[i]);
  }
  args.sources.count = static_cast<int>(sources.size());
  launch(ctx, op, bwd_rows, {static_cast<unsigned>(blocks), kThreads}, args);
  const float* const d_c = row_sum(ctx, op, args.d_c, blocks, dim);
  const auto grid = static_cast<unsigned>((dim + kThreads - 1) / kThreads);
  launch(ctx, op, add_query_grads, {grid, kThreads}, d_w.data(), d_u.data(), d_c, w.data(),
         u.data(), dim);
}

}  // namespace tandem::cuda
