// simd_math-inl.h — exp, sigmoid, tanh, log1p, softplus and silu on vectors of float. Compiled once
// per target: include after hwy/highway.h. Coefficients are Chebyshev fits of our own. Every lane
// gets the same operations, so a value does not depend on its position in a row.
//
// Errors, measured by tests/ops/simd_math_test.cpp on every target: exp, tanh, log1p and softplus
// <= 1.5 ulp, sigmoid <= 2, the members of a SigmoidPair <= 2.5, silu <= 3 (subnormal results: in
// units of the smallest subnormal). NaN gives NaN, +-inf the limits.
#if defined(TDM_CPU_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TDM_CPU_SIMD_MATH_INL_H_
#undef TDM_CPU_SIMD_MATH_INL_H_
#else
#define TDM_CPU_SIMD_MATH_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// 2^n for a vector of integers n in [-126, 127].
template <class D, class VI>
HWY_INLINE hn::Vec<D> pow2(D d, VI n) {
  const hn::RebindToSigned<D> di;
  return hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(n, hn::Set(di, 127))));
}

/// e^x. Above 88.73 inf, below -104 zero.
template <class D>
HWY_INLINE hn::Vec<D> vexp(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  // x = n ln2 + r, |r| <= ln2/2; ln2 in two parts, the first short enough that n * part is exact.
  const auto clamped = hn::Min(hn::Max(x, hn::Set(d, -104.0F)), hn::Set(d, 89.0F));
  const auto n = hn::Round(hn::Mul(clamped, hn::Set(d, 1.44269504F)));
  auto r = hn::NegMulAdd(n, hn::Set(d, 0.693359375F), clamped);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4F), r);
  auto p = hn::MulAdd(hn::Set(d, 0.0013926184F), r, hn::Set(d, 0.0083631789F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.041666556F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.16666576F));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5F));
  const auto e = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0F));
  // n is in [-150, 128]: two factors, so that subnormal results and n = 128 come out right.
  const auto ni = hn::ConvertTo(di, n);
  const auto half = hn::ShiftRight<1>(ni);
  const auto scaled = hn::Mul(hn::Mul(e, pow2(d, half)), pow2(d, hn::Sub(ni, half)));
  return hn::IfThenElse(hn::IsNaN(x), x, scaled);
}

/// sigmoid(x) and 1 - sigmoid(x), both without cancellation.
template <class D>
struct SigmoidPair {
  hn::Vec<D> value;
  hn::Vec<D> complement;
};
template <class D>
HWY_INLINE SigmoidPair<D> vsigmoid_pair(D d, hn::Vec<D> x) {
  const auto e = vexp(d, hn::Neg(hn::Abs(x)));  // <= 1: no overflow on either side
  const auto large = hn::Div(hn::Set(d, 1.0F), hn::Add(hn::Set(d, 1.0F), e));
  const auto small = hn::Mul(e, large);
  const auto negative = hn::Lt(x, hn::Zero(d));
  return {hn::IfThenElse(negative, small, large), hn::IfThenElse(negative, large, small)};
}

template <class D>
HWY_INLINE hn::Vec<D> vsigmoid(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0F);
  const auto e = vexp(d, hn::Neg(hn::Abs(x)));
  return hn::Div(hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one), hn::Add(one, e));
}

/// x * sigmoid(x), for finite x.
template <class D>
HWY_INLINE hn::Vec<D> vsilu(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, 1.0F);
  const auto e = vexp(d, hn::Neg(hn::Abs(x)));
  const auto top = hn::Mul(x, hn::IfThenElse(hn::Lt(x, hn::Zero(d)), e, one));
  return hn::Div(top, hn::Add(one, e));
}

template <class D>
HWY_INLINE hn::Vec<D> vtanh(D d, hn::Vec<D> x) {
  const auto a = hn::Abs(x);
  // |x| < 0.64: odd polynomial; else 1 - 2 / (e^2|x| + 1), where the difference loses nothing.
  const auto z = hn::Mul(x, x);
  auto p = hn::MulAdd(hn::Set(d, -0.0059886351F), z, hn::Set(d, 0.020921027F));
  p = hn::MulAdd(p, z, hn::Set(d, -0.053834449F));
  p = hn::MulAdd(p, z, hn::Set(d, 0.13332659F));
  p = hn::MulAdd(p, z, hn::Set(d, -0.33333328F));
  const auto near = hn::MulAdd(hn::Mul(p, z), x, x);
  const auto e = vexp(d, hn::Add(a, a));
  const auto far =
      hn::Sub(hn::Set(d, 1.0F), hn::Div(hn::Set(d, 2.0F), hn::Add(e, hn::Set(d, 1.0F))));
  return hn::IfThenElse(hn::Lt(a, hn::Set(d, 0.64F)), near, hn::CopySign(far, x));
}

/// ln(1 + x) for x > -1.
template <class D>
HWY_INLINE hn::Vec<D> vlog1p(D d, hn::Vec<D> x) {
  const hn::RebindToSigned<D> di;
  const auto one = hn::Set(d, 1.0F);
  const auto u = hn::Add(one, x);
  // What rounding u lost (exact for x <= 1, below an ulp of the result above it).
  const auto lost =
      hn::IfThenElse(hn::Lt(x, one), hn::Sub(x, hn::Sub(u, one)), hn::Sub(one, hn::Sub(u, x)));
  // u = m 2^k with m in [sqrt(1/2), sqrt(2)): subtract the bits of sqrt(1/2), split, add them back.
  const auto bits = hn::Sub(hn::BitCast(di, u), hn::Set(di, 0x3F3504F3));
  const auto k = hn::ConvertTo(d, hn::ShiftRight<23>(bits));
  const auto m =
      hn::BitCast(d, hn::Add(hn::And(bits, hn::Set(di, 0x007FFFFF)), hn::Set(di, 0x3F3504F3)));
  const auto f = hn::Sub(m, one);
  auto p = hn::MulAdd(hn::Set(d, -0.079027526F), f, hn::Set(d, 0.12622334F));
  p = hn::MulAdd(p, f, hn::Set(d, -0.12998188F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.14214495F));
  p = hn::MulAdd(p, f, hn::Set(d, -0.16641282F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.20001045F));
  p = hn::MulAdd(p, f, hn::Set(d, -0.25000307F));
  p = hn::MulAdd(p, f, hn::Set(d, 0.33333331F));
  const auto f2 = hn::Mul(f, f);
  auto tail = hn::MulAdd(hn::Mul(p, f), f2, hn::Mul(hn::Set(d, -0.5F), f2));
  tail = hn::Add(tail, hn::Div(lost, u));
  tail = hn::MulAdd(k, hn::Set(d, -2.12194440e-4F), tail);
  const auto log = hn::MulAdd(k, hn::Set(d, 0.693359375F), hn::Add(f, tail));
  const auto special = hn::Or(hn::IsNaN(x), hn::Eq(x, hn::Inf(d)));
  return hn::IfThenElse(special, x, log);
}

/// ln(1 + e^x), without overflow.
template <class D>
HWY_INLINE hn::Vec<D> vsoftplus(D d, hn::Vec<D> x) {
  const auto positive = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), hn::Zero(d), x);  // NaN stays
  return hn::Add(positive, vlog1p(d, vexp(d, hn::Neg(hn::Abs(x)))));
}

}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
