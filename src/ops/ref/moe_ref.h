// moe_ref.h — oracle of the experts of ops/moe.h: one (token, slot) pair after the other, plain
// loops, templated on the scalar.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "core/checked_cast.h"
#include "ops/act.h"

namespace tandem::ref {

/// Dense values of one expert: w1 = gate and w3 = up [F, DX], w2 = down [DX, F].
template <typename Scalar>
struct Expert {
  std::vector<Scalar> w1, w3, w2;
};

template <typename Scalar>
struct ExpertsProblem {
  std::int64_t tokens = 0, slots = 0, dim = 0, width = 0;
  std::vector<Scalar> x;                // [T, DX]
  std::vector<std::int32_t> ids;        // [T, A]
  std::vector<Scalar> weights;          // [T, A]
  std::vector<Expert<Scalar>> experts;  // [E]
  SituParams act;
};

/// SiTU and its two partial derivatives.
template <typename Scalar>
struct SituValue {
  Scalar y, d_gate, d_up;
};

template <typename Scalar>
SituValue<Scalar> situ_value(Scalar gate, Scalar up, SituParams params) {
  const Scalar beta = static_cast<Scalar>(params.beta);
  const Scalar lambda = static_cast<Scalar>(params.linear_beta);
  const Scalar tanh_gate = std::tanh(gate / beta);
  const Scalar sigmoid = Scalar(1) / (Scalar(1) + std::exp(-gate));
  const Scalar a = beta * tanh_gate * sigmoid;
  const Scalar d_a = (Scalar(1) - tanh_gate * tanh_gate) * sigmoid +
                     beta * tanh_gate * sigmoid * (Scalar(1) - sigmoid);
  Scalar b = up;
  Scalar d_b = Scalar(1);
  if (lambda > 0) {
    const Scalar tanh_up = std::tanh(up / lambda);
    b = lambda * tanh_up;
    d_b = Scalar(1) - tanh_up * tanh_up;
  }
  return {a * b, d_a * b, a * d_b};
}

/// out = m [rows, cols] v.
template <typename Scalar>
std::vector<Scalar> times(const std::vector<Scalar>& m, const Scalar* v, std::int64_t rows,
                          std::int64_t cols) {
  std::vector<Scalar> out(usize(rows));
  for (std::int64_t r = 0; r < rows; ++r) {
    Scalar sum = 0;
    for (std::int64_t c = 0; c < cols; ++c) {
      sum = std::fma(v[c], m[usize(r * cols + c)], sum);
    }
    out[usize(r)] = sum;
  }
  return out;
}

/// One pair's gate, up, activation and expert output.
template <typename Scalar>
struct PairValues {
  std::vector<Scalar> gate, up, activated, out;
};

template <typename Scalar>
PairValues<Scalar> pair_values(const ExpertsProblem<Scalar>& p, std::int64_t token,
                               std::int64_t slot) {
  const Expert<Scalar>& e = p.experts[usize(p.ids[usize(token * p.slots + slot)])];
  const Scalar* x = p.x.data() + token * p.dim;
  PairValues<Scalar> v{times(e.w1, x, p.width, p.dim), times(e.w3, x, p.width, p.dim), {}, {}};
  for (std::size_t f = 0; f < v.gate.size(); ++f) {
    v.activated.push_back(situ_value(v.gate[f], v.up[f], p.act).y);
  }
  v.out = times(e.w2, v.activated.data(), p.dim, p.width);
  return v;
}

/// out [T, DX].
template <typename Scalar>
std::vector<Scalar> experts(const ExpertsProblem<Scalar>& p) {
  std::vector<Scalar> out(usize(p.tokens * p.dim), Scalar(0));
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    for (std::int64_t a = 0; a < p.slots; ++a) {
      const std::vector<Scalar> pair = pair_values(p, t, a).out;
      for (std::int64_t d = 0; d < p.dim; ++d) {
        Scalar& sum = out[usize(t * p.dim + d)];
        sum = std::fma(p.weights[usize(t * p.slots + a)], pair[usize(d)], sum);
      }
    }
  }
  return out;
}

template <typename Scalar>
struct ExpertsGradients {
  std::vector<Scalar> d_x, d_weights;
  std::vector<Expert<Scalar>> d_experts;  // starting from 0
};

/// target [rows, cols] += a b^T.
template <typename Scalar>
void add_outer(std::vector<Scalar>& target, const std::vector<Scalar>& a, const Scalar* b) {
  const std::size_t cols = target.size() / a.size();
  for (std::size_t r = 0; r < a.size(); ++r) {
    for (std::size_t c = 0; c < cols; ++c) {
      target[r * cols + c] = std::fma(a[r], b[c], target[r * cols + c]);
    }
  }
}

/// target += m^T v.
template <typename Scalar>
void add_transposed(Scalar* target, const std::vector<Scalar>& m, const std::vector<Scalar>& v) {
  const std::size_t cols = m.size() / v.size();
  for (std::size_t r = 0; r < v.size(); ++r) {
    for (std::size_t c = 0; c < cols; ++c) {
      target[c] = std::fma(v[r], m[r * cols + c], target[c]);
    }
  }
}

template <typename Scalar>
ExpertsGradients<Scalar> experts_bwd(const ExpertsProblem<Scalar>& p,
                                     const std::vector<Scalar>& d_out) {
  ExpertsGradients<Scalar> g;
  g.d_x.assign(p.x.size(), Scalar(0));
  g.d_weights.assign(p.weights.size(), Scalar(0));
  for (const Expert<Scalar>& e : p.experts) {
    g.d_experts.push_back({std::vector<Scalar>(e.w1.size()), std::vector<Scalar>(e.w3.size()),
                           std::vector<Scalar>(e.w2.size())});
  }
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    for (std::int64_t a = 0; a < p.slots; ++a) {
      const std::size_t slot = usize(t * p.slots + a);
      const std::size_t id = usize(p.ids[slot]);
      const PairValues<Scalar> v = pair_values(p, t, a);
      const Scalar* d = d_out.data() + t * p.dim;
      std::vector<Scalar> d_pair(usize(p.dim));
      for (std::size_t i = 0; i < d_pair.size(); ++i) {
        g.d_weights[slot] = std::fma(d[i], v.out[i], g.d_weights[slot]);
        d_pair[i] = p.weights[slot] * d[i];
      }
      std::vector<Scalar> d_act(usize(p.width), Scalar(0));
      add_transposed(d_act.data(), p.experts[id].w2, d_pair);
      std::vector<Scalar> d_gate(usize(p.width));
      std::vector<Scalar> d_up(usize(p.width));
      for (std::size_t f = 0; f < d_act.size(); ++f) {
        const SituValue<Scalar> s = situ_value(v.gate[f], v.up[f], p.act);
        d_gate[f] = d_act[f] * s.d_gate;
        d_up[f] = d_act[f] * s.d_up;
      }
      add_outer(g.d_experts[id].w2, d_pair, v.activated.data());
      add_outer(g.d_experts[id].w1, d_gate, p.x.data() + t * p.dim);
      add_outer(g.d_experts[id].w3, d_up, p.x.data() + t * p.dim);
      add_transposed(g.d_x.data() + t * p.dim, p.experts[id].w1, d_gate);
      add_transposed(g.d_x.data() + t * p.dim, p.experts[id].w3, d_up);
    }
  }
  return g;
}

}  // namespace tandem::ref
