// act.cpp — SiTU, the sigmoid gate, add and copy. Contract: ops/act.h. Oracle: ops/ref/act_ref.h.
//
// Element-wise: every element gets the same vector operations wherever it stands.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/act.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include "backends/cpu/families.h"
#include "backends/cpu/row_blocks.h"
#include "backends/cpu/simd_loops-inl.h"
#include "backends/cpu/simd_math-inl.h"
#include "core/checked_cast.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr double kSituNs = 2.0;  // rough times of one element
constexpr double kSituBwdNs = 3.0;
constexpr double kSigmoidNs = 1.0;
constexpr double kAddNs = 0.2;

/// fn(i, part, t) for every vector of every row.
template <typename Fn>
void for_each_row_vector(const ExecCtx& ctx, ConstF32Mat shape, double ns_per_element,
                         const Fn& fn) {
  const std::size_t n = usize(shape.size(1));
  const RowBlocks blocks = row_blocks(shape.size(0), ns_per_element * static_cast<double>(n));
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    for (std::int64_t t = begin; t < end; ++t) {
      for_each_vector(n, [&](std::size_t i, auto part) HWY_ATTR { fn(t, i, part); });
    }
  });
}

/// The two factors of SiTU and what their derivatives need.
struct SituFactors {
  FloatVec t;               // tanh(g / beta)
  SigmoidPair<FloatTag> s;  // sigmoid(g)
  FloatVec second;          // lambda tanh(u / lambda), or u
  FloatVec d_second;        // 1 - tanh^2(u / lambda), or 1
};

struct SituKernel {
  FloatVec beta;
  FloatVec inv_beta;
  FloatVec linear;
  FloatVec inv_linear;
  bool bounded_up;

  HWY_INLINE explicit SituKernel(SituParams p)
      : beta(hn::Set(FloatTag(), p.beta)),
        inv_beta(hn::Set(FloatTag(), 1.0F / p.beta)),
        linear(hn::Set(FloatTag(), p.linear_beta)),
        inv_linear(hn::Set(FloatTag(), p.linear_beta > 0 ? 1.0F / p.linear_beta : 0.0F)),
        bounded_up(p.linear_beta > 0) {}

  HWY_INLINE FloatVec value(FloatVec g, FloatVec u) const {
    const FloatTag d;
    const auto first = hn::Mul(hn::Mul(beta, vtanh(d, hn::Mul(g, inv_beta))), vsigmoid(d, g));
    if (!bounded_up) {
      return hn::Mul(first, u);
    }
    return hn::Mul(first, hn::Mul(linear, vtanh(d, hn::Mul(u, inv_linear))));
  }
  HWY_INLINE SituFactors factors(FloatVec g, FloatVec u) const {
    const FloatTag d;
    const auto one = hn::Set(d, 1.0F);
    SituFactors f{vtanh(d, hn::Mul(g, inv_beta)), vsigmoid_pair(d, g), u, one};
    if (bounded_up) {
      const auto w = vtanh(d, hn::Mul(u, inv_linear));
      f.second = hn::Mul(linear, w);
      f.d_second = hn::NegMulAdd(w, w, one);
    }
    return f;
  }
};

void situ(const ExecCtx& ctx, F32Mat y, ConstF32Mat gate, ConstF32Mat up, SituParams params) {
  const SituKernel kernel(params);
  for_each_row_vector(ctx, gate, kSituNs, [&](std::int64_t t, std::size_t i, auto part) HWY_ATTR {
    const auto g = part.load(gate.row(t) + i);
    const auto u = part.load(up.row(t) + i);
    part.store(kernel.value(g, u), y.row(t) + i);
  });
}

void situ_bwd(const ExecCtx& ctx, F32Mat d_gate, F32Mat d_up, ConstF32Mat d_y, ConstF32Mat gate,
              ConstF32Mat up, SituParams params) {
  const SituKernel kernel(params);
  const auto body = [&](std::int64_t t, std::size_t i, auto part) HWY_ATTR {
    const auto dy = part.load(d_y.row(t) + i);
    const auto f = kernel.factors(part.load(gate.row(t) + i), part.load(up.row(t) + i));
    // d first / d g = (1 - t^2) s + beta t s (1 - s)
    const auto beta_t = hn::Mul(kernel.beta, f.t);
    const auto slope =
        hn::MulAdd(beta_t, f.s.complement, hn::NegMulAdd(f.t, f.t, hn::Set(FloatTag(), 1.0F)));
    const auto dy_s = hn::Mul(dy, f.s.value);
    part.store(hn::Mul(hn::Mul(dy_s, f.second), slope), d_gate.row(t) + i);
    part.store(hn::Mul(hn::Mul(dy_s, beta_t), f.d_second), d_up.row(t) + i);
  };
  for_each_row_vector(ctx, gate, kSituBwdNs, body);
}

void sigmoid_gate(const ExecCtx& ctx, F32Mat y, ConstF32Mat o, ConstF32Mat gate) {
  for_each_row_vector(ctx, o, kSigmoidNs, [&](std::int64_t t, std::size_t i, auto part) HWY_ATTR {
    const auto s = vsigmoid(FloatTag(), part.load(gate.row(t) + i));
    part.store(hn::Mul(part.load(o.row(t) + i), s), y.row(t) + i);
  });
}

void sigmoid_gate_bwd(const ExecCtx& ctx, F32Mat d_o, F32Mat d_gate, ConstF32Mat d_y, ConstF32Mat o,
                      ConstF32Mat gate) {
  const auto body = [&](std::int64_t t, std::size_t i, auto part) HWY_ATTR {
    const auto s = vsigmoid_pair(FloatTag(), part.load(gate.row(t) + i));
    const auto dy_s = hn::Mul(part.load(d_y.row(t) + i), s.value);
    const auto d_g = hn::Mul(hn::Mul(dy_s, part.load(o.row(t) + i)), s.complement);
    part.store(dy_s, d_o.row(t) + i);
    part.store(d_g, d_gate.row(t) + i);
  };
  for_each_row_vector(ctx, o, kSigmoidNs, body);
}

void add(const ExecCtx& ctx, F32Mat y, ConstF32Mat a, ConstF32Mat b) {
  for_each_row_vector(ctx, a, kAddNs, [&](std::int64_t t, std::size_t i, auto part) HWY_ATTR {
    part.store(hn::Add(part.load(a.row(t) + i), part.load(b.row(t) + i)), y.row(t) + i);
  });
}

void copy(const ExecCtx& ctx, F32Cube y, ConstF32Cube x) {
  const double ns = kAddNs * static_cast<double>(x.size(1) * x.size(2));
  parallel_rows(
      ctx, row_blocks(x.size(0), ns), [&](std::int64_t begin, std::int64_t end, std::int64_t) {
        for (std::int64_t t = begin; t < end; ++t) {
          for (std::int64_t h = 0; h < x.size(1); ++h) {
            std::copy_n(x.row(t) + h * x.stride(1), x.size(2), y.row(t) + h * y.stride(1));
          }
        }
      });
}

ActOps act_ops() {
  return {
      .situ = situ,
      .situ_bwd = situ_bwd,
      .sigmoid_gate = sigmoid_gate,
      .sigmoid_gate_bwd = sigmoid_gate_bwd,
      .add = add,
      .copy = copy,
  };
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(act_ops);
ActOps cpu_act_ops() {
  return HWY_DYNAMIC_DISPATCH(act_ops)();
}

}  // namespace tandem
#endif  // HWY_ONCE
