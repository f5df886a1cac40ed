// kda_gate.cu — log decay and write strength of KDA, with gradients.   Contract: ops/kda.h
// Oracle: ops/ref/kda_ref.h
// Traffic   each operand once; memory bound.   Numerics  fp32, full-precision exp. The gradients of
// a_log and dt_bias are summed over blocks of 64 rows in order, then over the blocks in order.
// Launch    a warp a row and head; backward: one block a head and 64 rows. Graph-safe.
#include <algorithm>
#include <cmath>

#include "backends/cuda/families.h"
#include "backends/cuda/kda/kda_gate.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/map_rows.cuh"
#include "backends/cuda/reduce.cuh"
#include "backends/cuda/row_group.cuh"
#include "backends/cuda/row_sums.h"
#include "backends/cuda/sigmoid.cuh"
#include "ops/check_views.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 128;
constexpr std::int64_t kRowsPerBlock = 64;

struct GateArgs {
  Cube<float> g;
  Mat<float> beta;
  Cube<const float> f;
  Mat<const float> b;
  const float* a_log;
  const float* dt_bias;
  KdaGateParams p;
  std::int64_t rows, heads, keys;
};

/// A warp a head of a row.
template <bool kAligned>
__global__ void __launch_bounds__(kRowThreads) gate_rows(const __grid_constant__ GateArgs args) {
  begin_kernel();
  const std::int64_t head =
      static_cast<std::int64_t>(blockIdx.x) * WarpGroup::kPerBlock + WarpGroup::index();
  if (head >= args.heads) {
    return;
  }
  const float a = decay_rate(args.a_log[head]);
  const float* const bias = args.dt_bias + head * args.keys;
  for (std::int64_t t = blockIdx.y; t < args.rows; t += gridDim.y) {
    if (WarpGroup::rank() == 0) {
      args.beta.row(t)[head] = sigmoid(args.b.row(t)[head]);
    }
    for (std::int64_t at = quad_start<WarpGroup>(0); at < args.keys; at += kWarp * kQuad) {
      const Quad f = load_quad<kAligned>(args.f.row(t, head), at, args.keys);
      const Quad by = load_quad<kAligned>(bias, at, args.keys);
      Quad g;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        g.v[i] = log_decay(f.v[i] + by.v[i], a, args.p);
      }
      store_quad<kAligned>(args.g.row(t, head), at, args.keys, g);
    }
  }
}

void gate(const ExecCtx& ctx, F32Cube g, F32Mat beta, ConstF32Cube f, ConstF32Mat b,
          ConstF32Vec a_log, ConstF32Vec dt_bias, KdaGateParams params) {
  TDM_CHECK(rows_contiguous(beta) && rows_contiguous(b), beta.stride(1), b.stride(1));
  if (f.size(0) == 0 || f.size(1) == 0) {
    return;
  }
  const GateArgs args{device_cube(g), device_mat(beta), device_cube(f), device_mat(b), a_log.data(),
                      dt_bias.data(), params,           f.size(0),      f.size(1),     f.size(2)};
  const ConstF32Mat bias_rows(dt_bias.data(), {f.size(1), f.size(2)});
  const bool aligned = whole_quads(g) && whole_quads(f) && whole_quads(bias_rows);
  const dim3 grid(
      static_cast<unsigned>((args.heads + WarpGroup::kPerBlock - 1) / WarpGroup::kPerBlock),
      static_cast<unsigned>(std::min(args.rows, kMaxGridYZ)));
  launch(ctx, "kda_gate", aligned ? gate_rows<true> : gate_rows<false>, {grid, kRowThreads}, args);
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
  const float a = decay_rate(args.a_log[head]);
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
  ops.beta_bwd = beta_bwd;
}

}  // namespace tandem::cuda
