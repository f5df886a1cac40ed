// kda-inl.h — the one sweep over a block of state columns that every recurrent KDA path uses:
// decode, prefill, the training forward and the recomputation of its backward.
//
// State block: S [K][columns], columns contiguous, NV vectors wide. Per element and token:
//   s~ = s * e;   r -= s~ * k   (decay, predict);   s = s~ + k * u;   o += s * q   (write, read)
// as single fused multiply-adds. Sums over k run in two chains, even k and odd k, each in
// increasing order, added at the end: half the latency of one chain, and one order for every shape
// and call. write/read of token t and decay/predict of token t + 1 share one pass, so an element is
// loaded and stored once per token; unfused passes do the same operations in the same order, hence
// the same bits.

#if defined(TANDEM_BACKENDS_CPU_KDA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_BACKENDS_CPU_KDA_INL_H_
#undef TANDEM_BACKENDS_CPU_KDA_INL_H_
#else
#define TANDEM_BACKENDS_CPU_KDA_INL_H_
#endif

#include <type_traits>

#include "backends/cpu/attn_math-inl.h"
#include "tensor/view.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {

inline constexpr std::int64_t kStateVecs = 4;  // vectors a state block is wide
inline constexpr std::int64_t kStateCols = kStateVecs * kLanes;

struct StateBlock {
  float* data;
  std::int64_t stride;  // floats from one key row to the next
};

/// What a token brings to the write/read half (k, q) and to the decay/predict half (e, k).
struct WriteRow {
  const float* k;
  const float* q;
};
struct DecayRow {
  const float* e;
  const float* k;
};

template <std::size_t NV, bool kWrite, bool kRead, bool kDecay>
HWY_INLINE void sweep_key(float* s, WriteRow w, DecayRow n, std::int64_t key,
                          const FloatVec (&u)[NV], FloatVec (&o)[NV], FloatVec (&r)[NV]) {
  const FloatTag d;
  FloatVec state[NV];
  for (std::size_t i = 0; i < NV; ++i) {
    state[i] = hn::LoadU(d, s + i * hn::MaxLanes(d));
  }
  if constexpr (kWrite) {
    const FloatVec k = hn::Set(d, w.k[key]);
    for (std::size_t i = 0; i < NV; ++i) {
      state[i] = hn::MulAdd(k, u[i], state[i]);
    }
  }
  if constexpr (kRead) {
    const FloatVec q = hn::Set(d, w.q[key]);
    for (std::size_t i = 0; i < NV; ++i) {
      o[i] = hn::MulAdd(q, state[i], o[i]);
    }
  }
  if constexpr (kDecay) {
    const FloatVec e = hn::Set(d, n.e[key]);
    const FloatVec k = hn::Set(d, n.k[key]);
    for (std::size_t i = 0; i < NV; ++i) {
      state[i] = hn::Mul(state[i], e);
      r[i] = hn::NegMulAdd(k, state[i], r[i]);
    }
  }
  for (std::size_t i = 0; i < NV; ++i) {
    hn::StoreU(state[i], d, s + i * hn::MaxLanes(d));
  }
}

/// One pass over the K rows of a state block. u: what token t writes; o: receives S^T q of token t;
/// r: comes in as v of token t + 1, leaves as v - S~^T k.
template <std::size_t NV, bool kWrite, bool kRead, bool kDecay>
HWY_INLINE void sweep_state(StateBlock s, std::int64_t keys, WriteRow w, DecayRow n,
                            const FloatVec (&u)[NV], FloatVec (&o)[NV], FloatVec (&r)[NV]) {
  const FloatTag d;
  FloatVec o_odd[NV];
  FloatVec r_odd[NV];
  for (std::size_t i = 0; i < NV; ++i) {
    o[i] = hn::Zero(d);
    o_odd[i] = hn::Zero(d);
    r_odd[i] = hn::Zero(d);
  }
  std::int64_t key = 0;
  float* row = s.data;
  for (; key + 2 <= keys; key += 2) {
    sweep_key<NV, kWrite, kRead, kDecay>(row, w, n, key, u, o, r);
    sweep_key<NV, kWrite, kRead, kDecay>(row + s.stride, w, n, key + 1, u, o_odd, r_odd);
    row += 2 * s.stride;
  }
  if (key < keys) {
    sweep_key<NV, kWrite, kRead, kDecay>(row, w, n, key, u, o, r);
  }
  for (std::size_t i = 0; i < NV; ++i) {
    o[i] = hn::Add(o[i], o_odd[i]);
    r[i] = hn::Add(r[i], r_odd[i]);
  }
}

/// Rows of one head: element c of row t is p[t * stride + c].
struct HeadRows {
  const float* p;
  std::int64_t stride;

  [[nodiscard]] const float* row(std::int64_t t) const { return p + t * stride; }
  [[nodiscard]] HeadRows from(std::int64_t t, std::int64_t column) const {
    return {row(t) + column, stride};
  }
};

/// The rows of one head that the recurrence reads; e = exp(g) instead of g.
struct TokenRows {
  HeadRows q, k, v, e, beta;
  std::int64_t count;  // tokens
  std::int64_t keys;
};

template <std::size_t NV>
HWY_INLINE void load_cols(const float* p, std::int64_t cols, FloatVec (&x)[NV]) {
  const FloatTag d;
  for (std::size_t i = 0; i + 1 < NV; ++i) {
    x[i] = hn::LoadU(d, p + i * hn::MaxLanes(d));
  }
  constexpr std::int64_t kWhole = static_cast<std::int64_t>(NV - 1) * kLanes;
  x[NV - 1] = load_first(p + kWhole, cols - kWhole);
}

template <std::size_t NV>
HWY_INLINE void store_cols(const FloatVec (&x)[NV], float* p, std::int64_t cols) {
  const FloatTag d;
  for (std::size_t i = 0; i + 1 < NV; ++i) {
    hn::StoreU(x[i], d, p + i * hn::MaxLanes(d));
  }
  constexpr std::int64_t kWhole = static_cast<std::int64_t>(NV - 1) * kLanes;
  store_first(x[NV - 1], p + kWhole, cols - kWhole);
}

/// u = beta * r.
template <std::size_t NV>
HWY_INLINE void scale_residual(float beta, const FloatVec (&r)[NV], FloatVec (&u)[NV]) {
  const FloatVec b = hn::Set(FloatTag(), beta);
  for (std::size_t i = 0; i < NV; ++i) {
    u[i] = hn::Mul(b, r[i]);
  }
}

/// The recurrence over `x.count` tokens on `cols` columns (more than (NV - 1) vectors, at most NV).
/// x.v and o point at the block's first column.
template <std::size_t NV>
void recur_block(StateBlock s, const TokenRows& x, float* o, std::int64_t o_stride,
                 std::int64_t cols) {
  FloatVec u[NV];
  FloatVec out[NV];
  FloatVec r[NV];
  load_cols<NV>(x.v.row(0), cols, r);
  load_cols<NV>(x.v.row(0), cols, u);
  sweep_state<NV, false, false, true>(s, x.keys, {}, {x.e.row(0), x.k.row(0)}, u, out, r);
  for (std::int64_t t = 0; t < x.count; ++t) {
    scale_residual<NV>(*x.beta.row(t), r, u);
    const WriteRow write{x.k.row(t), x.q.row(t)};
    if (t + 1 < x.count) {
      load_cols<NV>(x.v.row(t + 1), cols, r);
      const DecayRow next{x.e.row(t + 1), x.k.row(t + 1)};
      sweep_state<NV, true, true, true>(s, x.keys, write, next, u, out, r);
    } else {
      sweep_state<NV, true, true, false>(s, x.keys, write, {}, u, out, r);
    }
    store_cols<NV>(out, o + t * o_stride, cols);
  }
}

/// fn(std::integral_constant<std::size_t, NV>) with NV the vectors that `cols` columns fill.
template <class Fn>
HWY_INLINE void with_vec_count(std::int64_t cols, const Fn& fn) {
  switch ((cols + kLanes - 1) / kLanes) {
    case 1:
      return fn(std::integral_constant<std::size_t, 1>());
    case 2:
      return fn(std::integral_constant<std::size_t, 2>());
    case 3:
      return fn(std::integral_constant<std::size_t, 3>());
    default:
      return fn(std::integral_constant<std::size_t, 4>());
  }
}

/// e[t, c] = exp(g[t, c]) for `count` rows of `keys` channels, row stride round_up(keys, kLanes).
HWY_INLINE void exp_rows(HeadRows g, std::int64_t count, std::int64_t keys, float* e) {
  const FloatTag d;
  const std::int64_t stride = round_up(keys, kLanes);
  for (std::int64_t t = 0; t < count; ++t) {
    const float* row = g.row(t);
    for (std::int64_t c = 0; c < keys; c += kLanes) {
      hn::StoreU(vexp(FloatTag(), load_first(row + c, keys - c)), d, e + t * stride + c);
    }
  }
}

HWY_INLINE HeadRows head_rows(ConstF32Cube x, std::int64_t t, std::int64_t h) {
  return {x.data() + t * x.stride(0) + h * x.stride(1), x.stride(0)};
}
HWY_INLINE HeadRows head_rows(ConstF32Mat x, std::int64_t t, std::int64_t h) {
  return {x.data() + t * x.stride(0) + h * x.stride(1), x.stride(0)};
}

}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
