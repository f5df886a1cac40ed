// kda_gate.cpp — log decay and write strength of KDA, with gradients.   Contract: ops/kda.h
// Oracle: ops/ref/kda_ref.h.   Element-wise; the two parameter gradients are summed over fixed
// blocks of rows, blocks added in order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/kda_gate.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <algorithm>
#include <cmath>
#include <span>

#include "backends/cpu/attn_math-inl.h"
#include "backends/cpu/kda.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr std::int64_t kRowsPerBlock = 64;

std::int64_t num_blocks(std::int64_t rows) {
  return (rows + kRowsPerBlock - 1) / kRowsPerBlock;
}

FloatVec gate_value(FloatVec z, FloatVec a, KdaGateParams params) {
  if (params.bounded) {
    return hn::Mul(hn::Set(FloatTag(), params.lower_bound), vsigmoid(FloatTag(), hn::Mul(a, z)));
  }
  return hn::Neg(hn::Mul(a, vsoftplus(FloatTag(), z)));
}

void gate_row(float* g, const float* f, const float* bias, float a, std::int64_t keys,
              KdaGateParams params) {
  const FloatVec av = hn::Set(FloatTag(), a);
  for (std::int64_t c = 0; c < keys; c += kLanes) {
    const FloatVec z = hn::Add(load_first(f + c, keys - c), load_first(bias + c, keys - c));
    store_first(gate_value(z, av, params), g + c, keys - c);
  }
}

// [T, H] is 1/K of the gate's size; rows are gathered lane by lane, so any stride goes.
void beta_rows(F32Mat out, ConstF32Mat b) {
  alignas(64) float lanes[kLanes] = {};
  for (std::int64_t t = 0; t < b.size(0); ++t) {
    for (std::int64_t h = 0; h < b.size(1); h += kLanes) {
      const std::int64_t n = std::min(kLanes, b.size(1) - h);
      for (std::int64_t i = 0; i < n; ++i) {
        lanes[i] = b(t, h + i);
      }
      hn::Store(vsigmoid(FloatTag(), hn::Load(FloatTag(), lanes)), FloatTag(), lanes);
      for (std::int64_t i = 0; i < n; ++i) {
        out(t, h + i) = lanes[i];
      }
    }
  }
}

void gate(const ExecCtx& ctx, F32Cube g, F32Mat beta, ConstF32Cube f, ConstF32Mat b,
          ConstF32Vec a_log, ConstF32Vec dt_bias, KdaGateParams params) {
  beta_rows(beta, b);
  const std::int64_t rows = f.size(0);
  const std::int64_t keys = f.size(2);
  ctx.pool->parallel_for(num_blocks(rows), [&](std::int64_t block, int) HWY_ATTR {
    const std::int64_t end = std::min(rows, (block + 1) * kRowsPerBlock);
    for (std::int64_t h = 0; h < f.size(1); ++h) {
      const float a = std::exp(a_log(h));
      for (std::int64_t t = block * kRowsPerBlock; t < end; ++t) {
        gate_row(&g(t, h, 0), &f(t, h, 0), dt_bias.data() + h * keys, a, keys, params);
      }
    }
  });
}

/// One row: d_f, d_dt_bias += d_f; returns the row's lanes of d_a_log.
FloatVec gate_bwd_row(float* d_f, float* d_bias, const float* d_g, const float* f,
                      const float* bias, float a, std::int64_t keys, KdaGateParams params) {
  const FloatTag d;
  const FloatVec av = hn::Set(d, a);
  FloatVec d_a_log = hn::Zero(d);
  for (std::int64_t c = 0; c < keys; c += kLanes) {
    const std::int64_t n = keys - c;
    const FloatVec grad = load_first(d_g + c, n);
    const FloatVec z = hn::Add(load_first(f + c, n), load_first(bias + c, n));
    FloatVec d_z;
    if (params.bounded) {
      const FloatVec az = hn::Mul(av, z);
      const auto sigma = vsigmoid_pair(d, az);
      const FloatVec slope = hn::Mul(sigma.value, sigma.complement);
      d_z = hn::Mul(hn::Mul(grad, hn::Set(d, params.lower_bound)), hn::Mul(slope, av));
      d_a_log = hn::MulAdd(d_z, z, d_a_log);
    } else {
      d_z = hn::Neg(hn::Mul(hn::Mul(grad, av), vsigmoid(FloatTag(), z)));
      d_a_log = hn::MulAdd(grad, gate_value(z, av, params), d_a_log);
    }
    store_first(d_z, d_f + c, n);
    store_first(hn::Add(load_first(d_bias + c, n), d_z), d_bias + c, n);
  }
  return d_a_log;
}

void gate_bwd(const ExecCtx& ctx, F32Cube d_f, F32Vec d_a_log, F32Vec d_dt_bias, ConstF32Cube d_g,
              ConstF32Cube f, ConstF32Vec a_log, ConstF32Vec dt_bias, KdaGateParams params) {
  const std::int64_t rows = f.size(0);
  const std::int64_t heads = f.size(1);
  const std::int64_t keys = f.size(2);
  const ArenaScope scope(*ctx.workspace);
  const std::int64_t blocks = num_blocks(rows);
  const std::span<float> bias_parts = ctx.workspace->take<float>(blocks * heads * keys);
  const std::span<float> a_parts = ctx.workspace->take<float>(blocks * heads);
  std::fill(bias_parts.begin(), bias_parts.end(), 0.0F);
  ctx.pool->parallel_for(blocks, [&](std::int64_t block, int) HWY_ATTR {
    const std::int64_t end = std::min(rows, (block + 1) * kRowsPerBlock);
    for (std::int64_t h = 0; h < heads; ++h) {
      const float a = std::exp(a_log(h));
      float* d_bias = bias_parts.data() + (block * heads + h) * keys;
      FloatVec sum = hn::Zero(FloatTag());
      for (std::int64_t t = block * kRowsPerBlock; t < end; ++t) {
        sum = hn::Add(sum, gate_bwd_row(&d_f(t, h, 0), d_bias, &d_g(t, h, 0), &f(t, h, 0),
                                        dt_bias.data() + h * keys, a, keys, params));
      }
      a_parts[usize(block * heads + h)] = sum_lanes(sum);
    }
  });
  for (std::int64_t block = 0; block < blocks; ++block) {
    for (std::int64_t i = 0; i < heads * keys; ++i) {
      d_dt_bias(i) += bias_parts[usize(block * heads * keys + i)];
    }
    for (std::int64_t h = 0; h < heads; ++h) {
      d_a_log(h) += a_parts[usize(block * heads + h)];
    }
  }
}

void beta_bwd(const ExecCtx&, F32Mat d_b, ConstF32Mat d_beta, ConstF32Mat value) {
  for (std::int64_t t = 0; t < value.size(0); ++t) {
    for (std::int64_t h = 0; h < value.size(1); ++h) {
      d_b(t, h) = d_beta(t, h) * value(t, h) * (1.0F - value(t, h));
    }
  }
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(gate);
HWY_EXPORT(gate_bwd);
HWY_EXPORT(beta_bwd);

void cpu::kda_gate(const ExecCtx& ctx, F32Cube g, F32Mat beta, ConstF32Cube f, ConstF32Mat b,
                   ConstF32Vec a_log, ConstF32Vec dt_bias, KdaGateParams params) {
  HWY_DYNAMIC_DISPATCH(gate)(ctx, g, beta, f, b, a_log, dt_bias, params);
}
void cpu::kda_gate_bwd(const ExecCtx& ctx, F32Cube d_f, F32Vec d_a_log, F32Vec d_dt_bias,
                       ConstF32Cube d_g, ConstF32Cube f, ConstF32Vec a_log, ConstF32Vec dt_bias,
                       KdaGateParams params) {
  HWY_DYNAMIC_DISPATCH(gate_bwd)
  (ctx, d_f, d_a_log, d_dt_bias, d_g, f, a_log, dt_bias, params);
}
void cpu::kda_beta_bwd(const ExecCtx& ctx, F32Mat d_b, ConstF32Mat d_beta, ConstF32Mat value) {
  HWY_DYNAMIC_DISPATCH(beta_bwd)(ctx, d_b, d_beta, value);
}

}  // namespace tandem
#endif
