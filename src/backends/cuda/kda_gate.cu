// kda_gate.cu — log decay and write strength of KDA, with gradients.   Contract: ops/kda.h
// Oracle: ops/ref/kda_ref.h
// Traffic   each operand once; memory bound.   Numerics  fp32, full-precision exp. The gradients of
// a_log and dt_bias are summed over blocks of 64 rows in order, then over the blocks in order.
// Launch    map_rows.cuh; backward: one block a head and 64 rows. Graph-safe.
#include <cmath>

#include "backends/cuda/families.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/map_rows.cuh"
#include "backends/cuda/reduce.cuh"
#include "backends/cuda/row_sums.h"
#include "backends/cuda/sigmoid.cuh"
#include "ops/check_views.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kRowsPerBlock = 64;

__device__ __forceinline__ float softplus(float x) {
  return x > 20.0F ? x : log1pf(expf(x));
}

struct Gate {  // x: f, dt_bias
  const float* a_log;
  KdaGateParams p;
  __device__ void operator()(const float (&x)[2], float (&y)[1], std::int64_t head) const {
    const float a = expf(a_log[head]);
    const float z = x[0] + x[1];
    y[0] = p.bounded ? p.lower_bound * sigmoid(a * z) : -(a * softplus(z));
  }
};

void gate(const ExecCtx& ctx, F32Cube g, ConstF32Cube f, ConstF32Vec a_log, ConstF32Vec dt_bias,
          KdaGateParams params) {
  const std::int64_t keys = f.size(2);
  const Cube<const float> bias{dt_bias.data(), 0, keys};
  const ConstF32Mat bias_rows(dt_bias.data(), {f.size(1), keys});
  const bool aligned = whole_quads(g) && whole_quads(f) && whole_quads(bias_rows);
  launch_map<2, 1>(ctx, "kda_gate", aligned, {{device_cube(f), bias}, {device_cube(g)}},
                   {f.size(0), f.size(1), keys}, Gate{a_log.data(), params});
}

struct GateBwd {
  Cube<float> d_f;
  float* d_a_log;    // [blocks of rows, H]
  float* d_dt_bias;  // [blocks of rows, H, K]
  Cube<const float> d_g, f;
  const float* a_log;
  const float* dt_bias;
  KdaGateParams p;
  std::int64_t rows, heads, keys;
};

/// Gradients of one element: of z = f + dt_bias, and of a_log.
struct ElementGrad {
  float d_z;
  float d_a_log;
};
__device__ ElementGrad element_grad(float d_g, float z, float a, const KdaGateParams& p) {
  if (p.bounded) {
    const SigmoidPair s = sigmoid_pair(a * z);
    const float d_z = d_g * p.lower_bound * (s.value * s.complement * a);
    return {d_z, d_z * z};
  }
  return {-(d_g * a * sigmoid(z)), -(d_g * a * softplus(z))};
}

__global__ void __launch_bounds__(kThreads) gate_bwd_rows(const __grid_constant__ GateBwd args) {
  begin_kernel();
  __shared__ float scratch[kThreads / kWarp];
  const std::int64_t block = blockIdx.x;
  const std::int64_t head = blockIdx.y;
  const std::int64_t end = min((block + 1) * kRowsPerBlock, args.rows);
  const float a = expf(args.a_log[head]);
  float d_a_log = 0.0F;
  for (std::int64_t k = threadIdx.x; k < args.keys; k += kThreads) {
    const float bias = args.dt_bias[head * args.keys + k];
    float d_bias = 0.0F;
    for (std::int64_t t = block * kRowsPerBlock; t < end; ++t) {
      const ElementGrad grad =
          element_grad(args.d_g.row(t, head)[k], args.f.row(t, head)[k] + bias, a, args.p);
      args.d_f.row(t, head)[k] = grad.d_z;
      d_bias += grad.d_z;
      d_a_log += grad.d_a_log;
    }
    args.d_dt_bias[(block * args.heads + head) * args.keys + k] = d_bias;
  }
  const float total = block_sum<kThreads>(d_a_log, scratch);
  if (threadIdx.x == 0) {
    args.d_a_log[block * args.heads + head] = total;
  }
}

void gate_bwd(const ExecCtx& ctx, F32Cube d_f, F32Vec d_a_log, F32Vec d_dt_bias, ConstF32Cube d_g,
              ConstF32Cube f, ConstF32Vec a_log, ConstF32Vec dt_bias, KdaGateParams params) {
  const std::int64_t rows = f.size(0);
  const std::int64_t heads = f.size(1);
  const std::int64_t keys = f.size(2);
  if (rows == 0 || heads == 0 || keys == 0) {
    return;
  }
  TDM_CHECK(heads <= kMaxGridYZ, heads);
  const std::int64_t blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  const ArenaScope scope(*ctx.workspace);
  float* const a_parts = ctx.workspace->take<float>(blocks * heads).data();
  float* const bias_parts = ctx.workspace->take<float>(blocks * heads * keys).data();
  const GateBwd args{device_cube(d_f),
                     a_parts,
                     bias_parts,
                     device_cube(d_g),
                     device_cube(f),
                     a_log.data(),
                     dt_bias.data(),
                     params,
                     rows,
                     heads,
                     keys};
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(heads));
  launch(ctx, "kda_gate_bwd", gate_bwd_rows, {grid, kThreads}, args);
  add_row_sum(ctx, "kda_gate_bwd", d_a_log.data(), a_parts, blocks, heads);
  add_row_sum(ctx, "kda_gate_bwd", d_dt_bias.data(), bias_parts, blocks, heads * keys);
}

struct Beta {
  __device__ void operator()(const float (&x)[1], float (&y)[1], std::int64_t) const {
    y[0] = sigmoid(x[0]);
  }
};

void beta(const ExecCtx& ctx, F32Mat out, ConstF32Mat b) {
  TDM_CHECK(rows_contiguous(out) && rows_contiguous(b), out.stride(1), b.stride(1));
  launch_map<1, 1>(ctx, "kda_beta", whole_quads(out) && whole_quads(b),
                   {{one_slice(b)}, {one_slice(out)}}, {b.size(0), 1, b.size(1)}, Beta{});
}

struct BetaBwd {  // x: d_beta, beta
  __device__ void operator()(const float (&x)[2], float (&y)[1], std::int64_t) const {
    y[0] = x[0] * x[1] * (1.0F - x[1]);
  }
};

void beta_bwd(const ExecCtx& ctx, F32Mat d_b, ConstF32Mat d_beta, ConstF32Mat value) {
  TDM_CHECK(rows_contiguous(d_b) && rows_contiguous(d_beta) && rows_contiguous(value),
            d_b.stride(1), d_beta.stride(1), value.stride(1));
  const bool aligned = whole_quads(d_b) && whole_quads(d_beta) && whole_quads(value);
  launch_map<2, 1>(ctx, "kda_beta_bwd", aligned,
                   {{one_slice(d_beta), one_slice(value)}, {one_slice(d_b)}},
                   {value.size(0), 1, value.size(1)}, BetaBwd{});
}

}  // namespace

void add_kda_gate_ops(KdaOps& ops) {
  ops.gate = gate;
  ops.gate_bwd = gate_bwd;
  ops.beta = beta;
  ops.beta_bwd = beta_bwd;
}

}  // namespace tandem::cuda
