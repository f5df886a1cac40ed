// KDA and MLA of the CPU backend, forward and gradients, against values of an independent fp64
// program (tools/golden).
#include <vector>

#include "ops/golden_ops.h"
#include "ops/kda.h"
#include "ops/mla.h"
#include "ops/mla_cases.h"

namespace tandem::test {
namespace {

// --- KDA

/// The fixture's problem as a training batch, whose states start at 0 and are dropped. Rows before
/// it write the initial state: row i has the key e_i, beta 1, g 0 and the value S0[i], and nobody
/// reads it. Rows behind it read the final state: row i has the query e_i and writes nothing.
/// The gradient with respect to S0[i] is then that of the value of row i.
struct KdaProblem {
  GoldenOp op{"kda"};
  std::int64_t rows = op.extent("q", 0);
  std::int64_t heads = op.extent("q", 1);
  std::int64_t keys = op.extent("q", 2);
  std::int64_t values = op.extent("v", 2);
  std::int64_t all = keys + rows + keys;
  float scale = 1.0F / std::sqrt(static_cast<float>(keys));
  Tensor q = Tensor::filled(all * heads * keys, 0.0F);
  Tensor k = q;
  Tensor g = q;
  Tensor v = Tensor::filled(all * heads * values, 0.0F);
  Tensor beta = Tensor::filled(all * heads, 0.0F);
  std::vector<std::int32_t> cu{0, checked_cast<std::int32_t>(all)};

  KdaProblem() {
    place(q, keys, op.expected("q"));
    place(k, keys, op.expected("k"));
    place(g, keys, op.expected("g"));
    place(v, values, op.expected("v"));
    place(beta, 1, op.expected("beta"));
    for (float& x : q) {
      x *= scale;  // the op takes q scaled
    }
    const std::vector<float> state = op.expected("state");  // [H, K, V]
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < keys; ++i) {
        k[(i * heads + h) * keys + i] = 1.0F;
        beta[i * heads + h] = 1.0F;
        std::copy_n(state.begin() + (h * keys + i) * values, values,
                    v.begin() + (i * heads + h) * values);
        q[((keys + rows + i) * heads + h) * keys + i] = 1.0F;
      }
    }
  }
  /// Puts the fixture's rows behind the rows that write the state.
  void place(Tensor& to, std::int64_t width, const std::vector<float>& from) const {
    std::copy(from.begin(), from.end(), to.begin() + keys * heads * width);
  }
  /// The fixture's rows of a tensor of all rows.
  [[nodiscard]] std::span<const float> middle(const Tensor& t, std::int64_t width) const {
    return {t.begin() + keys * heads * width, usize(rows * heads * width)};
  }
  /// [K rows, H, V] as a state [H, K, V].
  [[nodiscard]] std::vector<float> as_state(const float* first_row) const {
    std::vector<float> state;
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t i = 0; i < keys; ++i) {
        const float* row = first_row + (i * heads + h) * values;
        state.insert(state.end(), row, row + values);
      }
    }
    return state;
  }
  [[nodiscard]] KdaInputs inputs() {
    return {q.cube(all, heads, keys), k.cube(all, heads, keys), v.cube(all, heads, values),
            g.cube(all, heads, keys), beta.mat(all, heads)};
  }
  [[nodiscard]] KdaInputs middle_inputs() {
    const KdaInputs in = inputs();
    return {in.q.rows(keys, rows), in.k.rows(keys, rows), in.v.rows(keys, rows),
            in.g.rows(keys, rows), in.beta.rows(keys, rows)};
  }
  [[nodiscard]] SeqBatch seqs() const { return {{cu.data(), {2}}, {}}; }
};

TEST(GoldenOps, KdaForwardBothFormsFromAndToASlot) {
  const TestContext ctx;
  KdaProblem p;
  const std::vector<std::int32_t> cu{0, checked_cast<std::int32_t>(p.rows)}, slot{0};
  for (const bool chunked : {false, true}) {
    Tensor o(p.rows * p.heads * p.values), state = p.op.tensor("state");
    const KdaStatePool pool{state.data(), 1, p.heads, p.keys, p.values};
    const SeqBatch seqs{{cu.data(), {2}}, {slot.data(), {1}}};
    const F32Cube out = o.cube(p.rows, p.heads, p.values);
    if (chunked) {
      ops::kda_chunk(*ctx, out, p.middle_inputs(), pool, seqs);
    } else {
      ops::kda_recurrent(*ctx, out, p.middle_inputs(), pool, seqs);
    }
    p.op.check("o", o);
    p.op.check("final_state", state);
  }
}

TEST(GoldenOps, KdaGradients) {
  const TestContext ctx;
  KdaProblem p;
  const std::int64_t n = p.all * p.heads;
  Tensor o(n * p.values);
  std::vector<float> checkpoints(usize(kda_num_checkpoints(*ctx, p.seqs(), p.seqs().num_rows()) *
                                       p.heads * p.keys * p.values));
  ops::kda_recurrent(*ctx, o.cube(p.all, p.heads, p.values), p.inputs(), {}, p.seqs(),
                     checkpoints.data());
  p.op.check("o", p.middle(o, p.values));
  const float* tail = o.begin() + (p.keys + p.rows) * p.heads * p.values;
  p.op.check("final_state", p.as_state(tail));

  Tensor d_o = Tensor::filled(n * p.values, 0.0F);
  p.place(d_o, p.values, p.op.expected("o_grad"));
  const std::vector<float> d_final = p.op.expected("final_state_grad");
  for (std::int64_t h = 0; h < p.heads; ++h) {
    for (std::int64_t i = 0; i < p.keys; ++i) {
      std::copy_n(d_final.begin() + (h * p.keys + i) * p.values, p.values,
                  d_o.begin() + ((p.keys + p.rows + i) * p.heads + h) * p.values);
    }
  }
  Tensor d_q(n * p.keys), d_k(n * p.keys), d_v(n * p.values), d_g(n * p.keys), d_beta(n);
  const auto cube = [&](Tensor& t, std::int64_t width) { return t.cube(p.all, p.heads, width); };
  ops::kda_recurrent_bwd(*ctx,
                         {cube(d_q, p.keys), cube(d_k, p.keys), cube(d_v, p.values),
                          cube(d_g, p.keys), d_beta.mat(p.all, p.heads)},
                         cube(d_o, p.values), p.inputs(), p.seqs(), checkpoints.data());
  for (float& x : d_q) {
    x *= p.scale;  // of the fixture's unscaled q
  }
  p.op.check("q_grad", p.middle(d_q, p.keys));
  p.op.check("k_grad", p.middle(d_k, p.keys));
  p.op.check("v_grad", p.middle(d_v, p.values));
  p.op.check("g_grad", p.middle(d_g, p.keys));
  p.op.check("beta_grad", p.middle(d_beta, 1));
  p.op.check("state_grad", p.as_state(d_v.begin()));
}

// --- MLA

constexpr std::int64_t kHeads = 2, kNope = 8, kRope = 4, kValue = 6, kLatent = 12, kKeys = 7;
constexpr std::int64_t kDim = kLatent + kRope;
const float kScale = 1.0F / std::sqrt(12.0F);

/// The up-projection [28, 12]: rows of head h are 8 of keys (w_uk), then 6 of values (w_uv).
struct UpProjection {
  std::vector<float> weight;
  [[nodiscard]] double uk(std::int64_t h, std::int64_t n, std::int64_t c) const {
    return double{weight[usize((h * (kNope + kValue) + n) * kLatent + c)]};
  }
  [[nodiscard]] double uv(std::int64_t h, std::int64_t n, std::int64_t c) const {
    return uk(h, kNope + n, c);
  }
};

/// `rows` query rows that see the fixture's 7 keys; the first ones may be padding in front of the
/// fixture's queries (mla_cached has 3 queries at positions 4 to 6).
struct MlaProblem {
  GoldenOp op;
  std::int64_t rows = 0;
  Tensor q{kKeys * kHeads * kDim};  // [q_lat | q_s], the last `rows` rows are the fixture's
  Tensor kv{kKeys * kDim};          // [c | k_s]
  UpProjection up;
  std::vector<float> q_in;

  explicit MlaProblem(const std::string& name) : op(name), rows(op.extent("q", 0)) {
    up.weight = op.expected("kv_b");
    q_in = op.expected("q");
    std::fill(q.begin(), q.end(), 0.0F);
    const std::vector<float> c = op.expected("c"), k_s = op.expected("k_s");
    for (std::int64_t j = 0; j < kKeys; ++j) {
      std::copy_n(c.begin() + j * kLatent, kLatent, kv.begin() + j * kDim);
      std::copy_n(k_s.begin() + j * kRope, kRope, kv.begin() + j * kDim + kLatent);
    }
    for (std::int64_t t = 0; t < rows; ++t) {
      for (std::int64_t h = 0; h < kHeads; ++h) {
        const float* from = query(t, h);
        float* to = q.begin() + row(t, h) * kDim;
        for (std::int64_t i = 0; i < kLatent; ++i) {
          double sum = 0;
          for (std::int64_t n = 0; n < kNope; ++n) {
            sum += up.uk(h, n, i) * double{from[n]};
          }
          to[i] = static_cast<float>(sum);
        }
        std::copy_n(from + kNope, kRope, to + kLatent);
      }
    }
  }
  [[nodiscard]] const float* query(std::int64_t t, std::int64_t h) const {
    return q_in.data() + (t * kHeads + h) * (kNope + kRope);
  }
  /// Flat (row, head) index of the fixture's query t among 7 rows.
  [[nodiscard]] std::int64_t row(std::int64_t t, std::int64_t h) const {
    return (kKeys - rows + t) * kHeads + h;
  }
  /// y[t, h] = w_uv o_lat of the fixture's rows; `o_lat` holds 7 rows.
  [[nodiscard]] std::vector<float> values_of(const Tensor& o_lat) const {
    std::vector<float> y;
    for (std::int64_t t = 0; t < rows; ++t) {
      for (std::int64_t h = 0; h < kHeads; ++h) {
        for (std::int64_t n = 0; n < kValue; ++n) {
          double sum = 0;
          for (std::int64_t c = 0; c < kLatent; ++c) {
            sum += up.uv(h, n, c) * double{o_lat[row(t, h) * kLatent + c]};
          }
          y.push_back(static_cast<float>(sum));
        }
      }
    }
    return y;
  }
};

TEST(GoldenOps, MlaAbsorbedOverPages) {
  const TestContext ctx;
  for (const char* name : {"mla", "mla_cached"}) {
    MlaProblem p(name);
    constexpr std::int64_t kPage = 2, kPages = 4;
    const std::vector<std::int32_t> table{2, 0, 3, 1}, kv_lens{kKeys};
    const std::vector<std::int32_t> cu{0, checked_cast<std::int32_t>(p.rows)};
    Tensor cache(kPages * kPage * kDim);
    std::vector<std::int32_t> slots;
    for (std::int32_t j = 0; j < kKeys; ++j) {
      slots.push_back(table[usize(j / 2)] * 2 + j % 2);
    }
    const LatentRows rows{cache.mat(kPages * kPage, kDim)};
    ops::mla_store(*ctx, rows, p.kv.mat(kKeys, kDim), {slots.data(), {kKeys}});
    Tensor o_lat(kKeys * kHeads * kLatent);
    const F32Cube all_q = p.q.cube(kKeys, kHeads, kDim);
    ops::mla_absorbed(*ctx, o_lat.cube(kKeys, kHeads, kLatent).rows(kKeys - p.rows, p.rows), {},
                      query_parts(all_q.rows(kKeys - p.rows, p.rows), kLatent),
                      {rows, {table.data(), {1, kPages}}, kPage},
                      {{cu.data(), {2}}, {kv_lens.data(), {1}}}, kScale);
    p.op.check("y", p.values_of(o_lat));
  }
}

TEST(GoldenOps, MlaExpanded) {
  const TestContext ctx;
  MlaProblem p("mla");
  Tensor k_nope(kKeys * kHeads * kNope), v(kKeys * kHeads * kValue), k_s = p.op.tensor("k_s");
  for (std::int64_t j = 0; j < kKeys; ++j) {
    for (std::int64_t h = 0; h < kHeads; ++h) {
      for (std::int64_t n = 0; n < kNope + kValue; ++n) {
        double sum = 0;
        for (std::int64_t c = 0; c < kLatent; ++c) {
          sum += p.up.uk(h, n, c) * double{p.kv[j * kDim + c]};
        }
        float& to = n < kNope ? k_nope[(j * kHeads + h) * kNope + n]
                              : v[(j * kHeads + h) * kValue + n - kNope];
        to = static_cast<float>(sum);
      }
    }
  }
  Tensor q = p.op.tensor("q"), o(kKeys * kHeads * kValue);
  const std::vector<std::int32_t> cu{0, kKeys};
  ops::mla_expanded(*ctx, o.cube(kKeys, kHeads, kValue), q.cube(kKeys, kHeads, kNope + kRope),
                    k_nope.cube(kKeys, kHeads, kNope), k_s.mat(kKeys, kRope),
                    v.cube(kKeys, kHeads, kValue), {cu.data(), {2}}, kScale);
  p.op.check("y", o);
}

/// The gradients of the fixture's inputs from those of [q_lat | q_s], [c | k_s] and o_lat: the
/// chain rule through the up-projection, in double.
struct MlaChain {
  std::vector<float> q_grad, c_grad, k_s_grad, kv_b_grad;

  MlaChain(const MlaProblem& p, const Tensor& o_lat, const Tensor& d_q, const Tensor& d_kv,
           const std::vector<float>& y_grad)
      : kv_b_grad(p.up.weight.size()) {
    for (std::int64_t t = 0; t < p.rows; ++t) {
      for (std::int64_t h = 0; h < kHeads; ++h) {
        const float* d = d_q.begin() + p.row(t, h) * kDim;
        for (std::int64_t n = 0; n < kNope; ++n) {
          double sum = 0;
          for (std::int64_t c = 0; c < kLatent; ++c) {
            sum += p.up.uk(h, n, c) * double{d[c]};
            weight_grad(h, n, c) += p.query(t, h)[n] * d[c];
          }
          q_grad.push_back(static_cast<float>(sum));
        }
        q_grad.insert(q_grad.end(), d + kLatent, d + kDim);
        for (std::int64_t n = 0; n < kValue; ++n) {
          for (std::int64_t c = 0; c < kLatent; ++c) {
            weight_grad(h, kNope + n, c) +=
                y_grad[usize((t * kHeads + h) * kValue + n)] * o_lat[p.row(t, h) * kLatent + c];
          }
        }
      }
    }
    for (std::int64_t j = 0; j < kKeys; ++j) {
      const float* d = d_kv.begin() + j * kDim;
      c_grad.insert(c_grad.end(), d, d + kLatent);
      k_s_grad.insert(k_s_grad.end(), d + kLatent, d + kDim);
    }
  }
  float& weight_grad(std::int64_t h, std::int64_t n, std::int64_t c) {
    return kv_b_grad[usize((h * (kNope + kValue) + n) * kLatent + c)];
  }
};

TEST(GoldenOps, MlaGradients) {
  const TestContext ctx;
  for (const char* name : {"mla", "mla_cached"}) {
    MlaProblem p(name);
    const std::vector<std::int32_t> cu{0, kKeys}, kv_lens{kKeys}, table{0};
    Tensor o_lat(kKeys * kHeads * kLatent), lse(kKeys * kHeads);
    const MlaQuery q = query_parts(p.q.cube(kKeys, kHeads, kDim), kLatent);
    const F32Mat kv = p.kv.mat(kKeys, kDim);
    ops::mla_absorbed(*ctx, o_lat.cube(kKeys, kHeads, kLatent), lse.mat(kKeys, kHeads), q,
                      {LatentRows(kv), {table.data(), {1, 1}}, kKeys},
                      {{cu.data(), {2}}, {kv_lens.data(), {1}}}, kScale);
    // d o_lat = w_uv^T d y; rows before the fixture's have no gradient.
    const std::vector<float> y_grad = p.op.expected("y_grad");
    Tensor d_o = Tensor::filled(o_lat.numel(), 0.0F);
    for (std::int64_t t = 0; t < p.rows; ++t) {
      for (std::int64_t h = 0; h < kHeads; ++h) {
        for (std::int64_t c = 0; c < kLatent; ++c) {
          double sum = 0;
          for (std::int64_t n = 0; n < kValue; ++n) {
            sum += p.up.uv(h, n, c) * double{y_grad[usize((t * kHeads + h) * kValue + n)]};
          }
          d_o[p.row(t, h) * kLatent + c] = static_cast<float>(sum);
        }
      }
    }
    Tensor d_q(p.q.numel()), d_kv(p.kv.numel());
    ops::mla_absorbed_bwd(*ctx, query_parts(d_q.cube(kKeys, kHeads, kDim), kLatent),
                          d_kv.mat(kKeys, kDim), d_o.cube(kKeys, kHeads, kLatent), q, kv,
                          o_lat.cube(kKeys, kHeads, kLatent), lse.mat(kKeys, kHeads),
                          {cu.data(), {2}}, kScale);
    const MlaChain chain(p, o_lat, d_q, d_kv, y_grad);
    p.op.check("q_grad", chain.q_grad);
    p.op.check("c_grad", chain.c_grad);
    p.op.check("k_s_grad", chain.k_s_grad);
    p.op.check("kv_b_grad", chain.kv_b_grad);
  }
}

}  // namespace
}  // namespace tandem::test
