// kda_bwd-inl.h — the reverse recurrence of KDA over one row and a group of state columns.
// Math: kimi-k3.md 13, first bullet. The state gradient and the states are transposed, [V, K] with
// k contiguous: see kda_bwd.cpp.

#if defined(TANDEM_BACKENDS_CPU_KDA_BWD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TANDEM_BACKENDS_CPU_KDA_BWD_INL_H_
#undef TANDEM_BACKENDS_CPU_KDA_BWD_INL_H_
#else
#define TANDEM_BACKENDS_CPU_KDA_BWD_INL_H_
#endif

#include <algorithm>

#include "backends/cpu/kda-inl.h"
#include "ops/kda.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {

inline constexpr std::int64_t kRows = kKdaCheckpointRows;
// Vectors of keys that one pass over the columns carries; 4 sums each must stay in registers.
inline constexpr std::int64_t kKeyVecs = kLanes >= 16 ? 2 : 1;
// Floats of the states of one column group over the rows of a block.
inline constexpr std::int64_t kGroupFloats = 32 * 1024 / 4;

struct BwdCall {
  const KdaGrads& grads;
  ConstF32Cube d_o;
  const KdaInputs& in;
  const SeqBatch& seqs;
  const float* checkpoints;
  const std::int64_t* first_checkpoint;  // [B]

  [[nodiscard]] std::int64_t heads() const { return d_o.size(1); }
  [[nodiscard]] std::int64_t keys() const { return in.q.size(2); }
  [[nodiscard]] std::int64_t values() const { return d_o.size(2); }
  [[nodiscard]] std::int64_t key_stride() const { return round_up(keys(), kLanes); }
  // Whole vectors, and whole groups of 4 columns for sum_lanes_4.
  [[nodiscard]] std::int64_t value_stride() const {
    return round_up(values(), std::max<std::int64_t>(kLanes, 4));
  }
  // Columns of a group: at least 8, so that the start and end of a row's sums stay a small part.
  [[nodiscard]] std::int64_t group_cols() const {
    const std::int64_t fitting = kGroupFloats / (kRows * key_stride()) / 4 * 4;
    return std::clamp<std::int64_t>(fitting, 8, round_up(values(), 8));
  }
};

/// Scratch of a thread. Rows are padded with zeros, so loops run over whole vectors.
struct BwdScratch {
  float* q;        // [kRows, KP], KP = key_stride
  float* k;        // [kRows, KP]
  float* e;        // [kRows, KP]
  float* d_q;      // [kRows, KP] sums over the column groups so far
  float* d_k;      // [kRows, KP]
  float* d_g;      // [kRows, KP]
  float* d_beta;   // [kRows]
  float* d_o;      // [kRows, VP], VP = value_stride
  float* r;        // [kRows, VP]
  float* u;        // [kRows, VP]
  float* r_bar;    // [VP]
  float* state;    // [K, VP] as column blocks: the forward layout
  float* start;    // [group_cols, KP] the checkpoint, transposed
  float* decayed;  // [kRows, group_cols, KP]
  float* d_state;  // [VP, KP]

  BwdScratch(float* base, const BwdCall& call) {
    const std::int64_t kp = call.key_stride();
    const std::int64_t vp = call.value_stride();
    const auto take = [&](std::int64_t count) {
      float* at = base;
      base += round_up(count, 16);
      return at;
    };
    for (float** part : {&q, &k, &e, &d_q, &d_k, &d_g}) {
      *part = take(kRows * kp);
    }
    d_beta = take(kRows);
    for (float** part : {&d_o, &r, &u}) {
      *part = take(kRows * vp);
    }
    r_bar = take(vp);
    state = take(kp * vp);
    start = take(call.group_cols() * kp);
    decayed = take(kRows * call.group_cols() * kp);
    d_state = take(kp * vp);
  }
  static std::int64_t floats(const BwdCall& call) {
    const std::int64_t kp = call.key_stride();
    const std::int64_t vp = call.value_stride();
    constexpr std::int64_t kParts = 15;
    return 6 * kRows * kp + kRows + 3 * kRows * vp + vp + 2 * kp * vp +
           (kRows + 1) * call.group_cols() * kp + kParts * 16;
  }
};

/// State columns [begin, end); a multiple of 4, the last ones may be padding.
struct ColGroup {
  std::int64_t begin, end;
};

/// One block of rows of one (sequence, head).
struct RowBlock {
  std::int64_t t;  // first row in the batch
  std::int64_t count;
  std::int64_t head;
  const float* checkpoint;  // [K, V]
};

/// d_state += q d_o^T, then r_bar receives u_bar = d_state^T k.
inline void read_gradient(const BwdCall& call, ColGroup cols, const BwdScratch& scratch,
                          std::int64_t row) {
  const FloatTag d;
  const std::int64_t kp = call.key_stride();
  const float* q = scratch.q + row * kp;
  const float* k = scratch.k + row * kp;
  const float* d_o = scratch.d_o + row * call.value_stride();
  for (std::int64_t v = cols.begin; v < cols.end; v += 4) {
    FloatVec dot[4];
    FloatVec grad[4];
    for (std::int64_t i = 0; i < 4; ++i) {
      dot[i] = hn::Zero(d);
      grad[i] = hn::Set(d, d_o[v + i]);
    }
    for (std::int64_t c = 0; c < kp; c += kLanes) {
      const FloatVec qc = hn::Load(d, q + c);
      const FloatVec kc = hn::Load(d, k + c);
      for (std::int64_t i = 0; i < 4; ++i) {
        float* at = scratch.d_state + (v + i) * kp + c;
        const FloatVec s = hn::MulAdd(qc, grad[i], hn::Load(d, at));
        hn::Store(s, d, at);
        dot[i] = hn::MulAdd(s, kc, dot[i]);
      }
    }
    sum_lanes_4(dot[0], dot[1], dot[2], dot[3], scratch.r_bar + v);
  }
}

/// From u_bar: d_beta, r_bar = beta u_bar = d_v. Returns u . d_o of the group. Works on 4 lanes,
/// the size in which read_gradient has just stored u_bar: a wider load would wait for those stores
/// to reach the cache.
inline float write_gradient(const BwdCall& call, const RowBlock& block, ColGroup cols,
                            const BwdScratch& scratch, std::int64_t row) {
  const hn::CappedTag<float, 4> d;
  constexpr auto kStep = static_cast<std::int64_t>(hn::MaxLanes(hn::CappedTag<float, 4>()));
  const std::int64_t vp = call.value_stride();
  const auto beta = hn::Set(d, call.in.beta(block.t + row, block.head));
  auto d_beta = hn::Zero(d);
  auto read = hn::Zero(d);
  for (std::int64_t v = cols.begin; v < cols.end; v += kStep) {
    const auto u_bar = hn::Load(d, scratch.r_bar + v);
    d_beta = hn::MulAdd(u_bar, hn::Load(d, scratch.r + row * vp + v), d_beta);
    read = hn::MulAdd(hn::Load(d, scratch.u + row * vp + v),
                      hn::Load(d, scratch.d_o + row * vp + v), read);
    hn::Store(hn::Mul(beta, u_bar), d, scratch.r_bar + v);
  }
  scratch.d_beta[row] += hn::GetLane(hn::SumOfLanes(d, d_beta));
  return hn::GetLane(hn::SumOfLanes(d, read));
}

/// The group's part of d_q, d_k, d_g of the row on NC vectors of keys from `c`, and
/// d_state <- e (d_state - k r_bar^T).
template <std::int64_t NC>
void key_gradients(const BwdCall& call, ColGroup cols, const BwdScratch& scratch, std::int64_t row,
                   std::int64_t c, float read) {
  const FloatTag d;
  const std::int64_t kp = call.key_stride();
  constexpr std::size_t kCount = usize(NC);
  FloatVec key[kCount];
  FloatVec decay[kCount];
  FloatVec d_q[kCount];
  FloatVec d_k[kCount];
  FloatVec d_k_minus[kCount];
  FloatVec d_g[kCount];
  const std::int64_t at_row = row * kp + c;
  for (std::int64_t i = 0; i < NC; ++i) {
    key[i] = hn::Load(d, scratch.k + at_row + i * kLanes);
    decay[i] = hn::Load(d, scratch.e + at_row + i * kLanes);
    // S q_bar includes this row's own write.
    d_q[i] = hn::MulAdd(key[i], hn::Set(d, read), hn::Load(d, scratch.d_q + at_row + i * kLanes));
    d_k[i] = hn::Load(d, scratch.d_k + at_row + i * kLanes);
    d_g[i] = hn::Load(d, scratch.d_g + at_row + i * kLanes);
    d_k_minus[i] = hn::Zero(d);
  }
  const std::int64_t width = cols.end - cols.begin;
  const float* decayed = scratch.decayed + row * width * kp + c;
  float* d_state = scratch.d_state + cols.begin * kp + c;
  const float* d_o_row = scratch.d_o + row * call.value_stride() + cols.begin;
  const float* u_row = scratch.u + row * call.value_stride() + cols.begin;
  const float* r_bar_row = scratch.r_bar + cols.begin;
  for (std::int64_t v = 0; v < width; ++v) {
    const FloatVec d_o = hn::Set(d, d_o_row[v]);
    const FloatVec u = hn::Set(d, u_row[v]);
    const FloatVec r_bar = hn::Set(d, r_bar_row[v]);
    for (std::int64_t i = 0; i < NC; ++i) {
      float* at = d_state + v * kp + i * kLanes;
      const FloatVec grad = hn::Load(d, at);
      const FloatVec s = hn::Load(d, decayed + v * kp + i * kLanes);
      d_q[i] = hn::MulAdd(s, d_o, d_q[i]);
      d_k[i] = hn::MulAdd(grad, u, d_k[i]);
      d_k_minus[i] = hn::MulAdd(s, r_bar, d_k_minus[i]);
      const FloatVec z = hn::NegMulAdd(key[i], r_bar, grad);
      d_g[i] = hn::MulAdd(z, s, d_g[i]);
      hn::Store(hn::Mul(decay[i], z), d, at);
    }
  }
  for (std::int64_t i = 0; i < NC; ++i) {
    hn::Store(d_q[i], d, scratch.d_q + at_row + i * kLanes);
    hn::Store(hn::Sub(d_k[i], d_k_minus[i]), d, scratch.d_k + at_row + i * kLanes);
    hn::Store(d_g[i], d, scratch.d_g + at_row + i * kLanes);
  }
}

inline void split_gradients(const BwdCall& call, const RowBlock& block, ColGroup cols,
                            const BwdScratch& scratch, std::int64_t row) {
  read_gradient(call, cols, scratch, row);
  const float read = write_gradient(call, block, cols, scratch, row);
  const std::int64_t kp = call.key_stride();
  std::int64_t c = 0;
  for (; c + kKeyVecs * kLanes <= kp; c += kKeyVecs * kLanes) {
    key_gradients<kKeyVecs>(call, cols, scratch, row, c, read);
  }
  for (; c < kp; c += kLanes) {
    key_gradients<1>(call, cols, scratch, row, c, read);
  }
}

/// The three steps above in one pass over the columns, for keys that fill exactly NC vectors: the
/// state gradient stays in registers from its first use to its last.
template <std::int64_t NC>
void fused_gradients(const BwdCall& call, const RowBlock& block, ColGroup cols,
                     const BwdScratch& scratch, std::int64_t row) {
  const FloatTag d;
  const hn::CappedTag<float, 4> d4;
  constexpr auto kStep = static_cast<std::int64_t>(hn::MaxLanes(hn::CappedTag<float, 4>()));
  constexpr std::int64_t kp = NC * kLanes;
  constexpr std::size_t kCount = usize(NC);
  FloatVec q[kCount];
  FloatVec key[kCount];
  FloatVec decay[kCount];
  FloatVec d_q[kCount];
  FloatVec d_k[kCount];
  FloatVec d_g[kCount];
  for (std::int64_t c = 0; c < NC; ++c) {
    q[c] = hn::Load(d, scratch.q + row * kp + c * kLanes);
    key[c] = hn::Load(d, scratch.k + row * kp + c * kLanes);
    decay[c] = hn::Load(d, scratch.e + row * kp + c * kLanes);
    d_q[c] = hn::Load(d, scratch.d_q + row * kp + c * kLanes);
    d_k[c] = hn::Load(d, scratch.d_k + row * kp + c * kLanes);
    d_g[c] = hn::Load(d, scratch.d_g + row * kp + c * kLanes);
  }
  const auto beta = hn::Set(d4, call.in.beta(block.t + row, block.head));
  auto d_beta = hn::Zero(d4);
  auto read = hn::Zero(d4);
  const std::int64_t at_row = row * call.value_stride();
  const float* decayed = scratch.decayed + row * (cols.end - cols.begin) * kp;
  for (std::int64_t v = cols.begin; v < cols.end; v += 4, decayed += 4 * kp) {
    const float* d_o = scratch.d_o + at_row + v;
    const float* u = scratch.u + at_row + v;
    const float* r = scratch.r + at_row + v;
    float* r_bar = scratch.r_bar + v;
    float* state = scratch.d_state + v * kp;
    FloatVec grad[4][kCount];
    FloatVec dot[4];
    for (std::int64_t i = 0; i < 4; ++i) {
      const FloatVec o_bar = hn::Set(d, d_o[i]);
      dot[i] = hn::Zero(d);
      for (std::int64_t c = 0; c < NC; ++c) {
        grad[i][c] = hn::MulAdd(q[c], o_bar, hn::Load(d, state + i * kp + c * kLanes));
        dot[i] = hn::MulAdd(grad[i][c], key[c], dot[i]);
      }
    }
    sum_lanes_4(dot[0], dot[1], dot[2], dot[3], r_bar);
    for (std::int64_t i = 0; i < 4; i += kStep) {
      const auto u_bar = hn::Load(d4, r_bar + i);
      d_beta = hn::MulAdd(u_bar, hn::Load(d4, r + i), d_beta);
      read = hn::MulAdd(hn::Load(d4, u + i), hn::Load(d4, d_o + i), read);
      hn::Store(hn::Mul(beta, u_bar), d4, r_bar + i);
    }
    for (std::int64_t i = 0; i < 4; ++i) {
      const FloatVec o_bar = hn::Set(d, d_o[i]);
      const FloatVec u_i = hn::Set(d, u[i]);
      const FloatVec r_i = hn::Set(d, r_bar[i]);
      for (std::int64_t c = 0; c < NC; ++c) {
        const FloatVec s = hn::Load(d, decayed + i * kp + c * kLanes);
        d_q[c] = hn::MulAdd(s, o_bar, d_q[c]);
        d_k[c] = hn::NegMulAdd(s, r_i, hn::MulAdd(grad[i][c], u_i, d_k[c]));
        const FloatVec z = hn::NegMulAdd(key[c], r_i, grad[i][c]);
        d_g[c] = hn::MulAdd(z, s, d_g[c]);
        hn::Store(hn::Mul(decay[c], z), d, state + i * kp + c * kLanes);
      }
    }
  }
  scratch.d_beta[row] += hn::GetLane(hn::SumOfLanes(d4, d_beta));
  const FloatVec own = hn::Set(d, hn::GetLane(hn::SumOfLanes(d4, read)));
  for (std::int64_t c = 0; c < NC; ++c) {
    // S q_bar includes this row's own write.
    hn::Store(hn::MulAdd(key[c], own, d_q[c]), d, scratch.d_q + row * kp + c * kLanes);
    hn::Store(d_k[c], d, scratch.d_k + row * kp + c * kLanes);
    hn::Store(d_g[c], d, scratch.d_g + row * kp + c * kLanes);
  }
}

}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
