// kda_ref.h — oracle of the KDA family: plain loops in any scalar type, forward and backward.
// Source: kimi-k3.md 4.4-4.7, 13.   Nothing here is fast and nothing is clever.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/checked_cast.h"
#include "ops/kda.h"
#include "tensor/view.h"

namespace tandem::ref {

template <typename T>
[[nodiscard]] T gate_sigmoid(T x) {
  return T{1} / (T{1} + std::exp(-x));
}

template <typename T>
[[nodiscard]] T gate_softplus(T x) {
  return x > T{20} ? x : std::log1p(std::exp(x));
}

/// One (sequence, head): contiguous rows q, k, g [T, K], v [T, V], beta [T].
template <typename T>
struct KdaHead {
  std::int64_t rows = 0;
  std::int64_t keys = 0;
  std::int64_t values = 0;
  std::vector<T> q, k, v, g, beta;
};

template <typename T>
struct KdaHeadGrads {
  std::vector<T> d_q, d_k, d_v, d_g, d_beta;
};

template <typename T>
[[nodiscard]] T kda_gate_ref(T f, T a_log, T dt_bias, bool bounded, T lower_bound) {
  const T a = std::exp(a_log);
  return bounded ? lower_bound * gate_sigmoid(a * (f + dt_bias)) : -a * gate_softplus(f + dt_bias);
}

/// Gradients of one gate element: {d_f, d_a_log, d_dt_bias}.
template <typename T>
struct KdaGateGrad {
  T d_f, d_a_log, d_dt_bias;
};

template <typename T>
[[nodiscard]] KdaGateGrad<T> kda_gate_bwd_ref(T d_g, T f, T a_log, T dt_bias, bool bounded,
                                              T lower_bound) {
  const T a = std::exp(a_log);
  const T z = f + dt_bias;
  if (bounded) {
    const T s = gate_sigmoid(a * z);
    const T c = d_g * lower_bound * s * (T{1} - s);
    return {c * a, c * a * z, c * a};
  }
  const T d_z = -d_g * a * gate_sigmoid(z);
  return {d_z, -d_g * a * gate_softplus(z), d_z};
}

/// The recurrence of 4.5. `state` [K, V] is read and left at the last row; returns o [T, V].
/// `decayed`, when given, receives the decayed state S~_t of every row, [T, K, V].
template <typename T>
[[nodiscard]] std::vector<T> kda_recurrent_ref(const KdaHead<T>& in, std::vector<T>& state,
                                               std::vector<T>* decayed = nullptr,
                                               std::vector<T>* written = nullptr) {
  const std::int64_t K = in.keys;
  const std::int64_t V = in.values;
  std::vector<T> o(usize(in.rows * V), T{0});
  for (std::int64_t t = 0; t < in.rows; ++t) {
    for (std::int64_t k = 0; k < K; ++k) {
      for (std::int64_t v = 0; v < V; ++v) {
        state[usize(k * V + v)] *= std::exp(in.g[usize(t * K + k)]);
      }
    }
    if (decayed != nullptr) {
      decayed->insert(decayed->end(), state.begin(), state.end());
    }
    for (std::int64_t v = 0; v < V; ++v) {
      T r = in.v[usize(t * V + v)];
      for (std::int64_t k = 0; k < K; ++k) {
        r -= state[usize(k * V + v)] * in.k[usize(t * K + k)];
      }
      const T u = in.beta[usize(t)] * r;
      if (written != nullptr) {
        written->push_back(u);
      }
      for (std::int64_t k = 0; k < K; ++k) {
        state[usize(k * V + v)] += in.k[usize(t * K + k)] * u;
        o[usize(t * V + v)] += state[usize(k * V + v)] * in.q[usize(t * K + k)];
      }
    }
  }
  return o;
}

/// Gradients of kda_recurrent_ref from a zero start state, given d_o [T, V].   Source: 13.
template <typename T>
[[nodiscard]] KdaHeadGrads<T> kda_recurrent_bwd_ref(const KdaHead<T>& in,
                                                    const std::vector<T>& d_o) {
  const std::int64_t K = in.keys;
  const std::int64_t V = in.values;
  std::vector<T> state(usize(K * V), T{0});
  std::vector<T> decayed;
  std::vector<T> written;
  (void)kda_recurrent_ref(in, state, &decayed, &written);
  KdaHeadGrads<T> out{std::vector<T>(in.q.size(), T{0}), std::vector<T>(in.k.size(), T{0}),
                      std::vector<T>(in.v.size(), T{0}), std::vector<T>(in.g.size(), T{0}),
                      std::vector<T>(in.beta.size(), T{0})};
  std::vector<T> d_state(usize(K * V), T{0});
  for (std::int64_t t = in.rows - 1; t >= 0; --t) {
    const T* q = &in.q[usize(t * K)];
    const T* key = &in.k[usize(t * K)];
    const T* s_decayed = &decayed[usize(t * K * V)];
    const T* u = &written[usize(t * V)];
    const T beta = in.beta[usize(t)];
    for (std::int64_t k = 0; k < K; ++k) {
      for (std::int64_t v = 0; v < V; ++v) {
        const T o_bar = d_o[usize(t * V + v)];
        d_state[usize(k * V + v)] += q[k] * o_bar;
        out.d_q[usize(t * K + k)] += (s_decayed[k * V + v] + key[k] * u[v]) * o_bar;
      }
    }
    for (std::int64_t v = 0; v < V; ++v) {
      T u_bar = T{0};
      T r = in.v[usize(t * V + v)];
      for (std::int64_t k = 0; k < K; ++k) {
        u_bar += d_state[usize(k * V + v)] * key[k];
        r -= s_decayed[k * V + v] * key[k];
      }
      out.d_beta[usize(t)] += u_bar * r;
      const T r_bar = beta * u_bar;
      out.d_v[usize(t * V + v)] = r_bar;
      for (std::int64_t k = 0; k < K; ++k) {
        T& d_s = d_state[usize(k * V + v)];
        out.d_k[usize(t * K + k)] += d_s * u[v] - s_decayed[k * V + v] * r_bar;
        d_s -= key[k] * r_bar;
        out.d_g[usize(t * K + k)] += d_s * s_decayed[k * V + v];
        d_s *= std::exp(in.g[usize(t * K + k)]);
      }
    }
  }
  return out;
}

/// The chunkwise form of 4.7 with chunks of `chunk` rows, every exponent a difference <= 0.
template <typename T>
[[nodiscard]] std::vector<T> kda_chunk_ref(const KdaHead<T>& in, std::vector<T>& state,
                                           std::int64_t chunk) {
  const std::int64_t K = in.keys;
  const std::int64_t V = in.values;
  std::vector<T> o(usize(in.rows * V), T{0});
  for (std::int64_t start = 0; start < in.rows; start += chunk) {
    const std::int64_t n = std::min(chunk, in.rows - start);
    const auto at = [&](const std::vector<T>& x, std::int64_t i, std::int64_t k) {
      return x[usize((start + i) * K + k)];
    };
    std::vector<T> sum(usize(n * K));  // G, inclusive
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t k = 0; k < K; ++k) {
        sum[usize(i * K + k)] = at(in.g, i, k) + (i > 0 ? sum[usize((i - 1) * K + k)] : T{0});
      }
    }
    const auto decayed_dot = [&](const std::vector<T>& left, std::int64_t i, std::int64_t j) {
      T dot = T{0};
      for (std::int64_t k = 0; k < K; ++k) {
        dot += at(left, i, k) * at(in.k, j, k) *
               std::exp(sum[usize(i * K + k)] - sum[usize(j * K + k)]);
      }
      return dot;
    };
    std::vector<T> delta(usize(n * V));
    for (std::int64_t v = 0; v < V; ++v) {
      for (std::int64_t i = 0; i < n; ++i) {
        T r = in.v[usize((start + i) * V + v)];
        T read = T{0};
        for (std::int64_t k = 0; k < K; ++k) {
          const T carried = std::exp(sum[usize(i * K + k)]) * state[usize(k * V + v)];
          r -= at(in.k, i, k) * carried;
          read += at(in.q, i, k) * carried;
        }
        for (std::int64_t j = 0; j < i; ++j) {
          r -= decayed_dot(in.k, i, j) * delta[usize(j * V + v)];
        }
        delta[usize(i * V + v)] = in.beta[usize(start + i)] * r;
        for (std::int64_t j = 0; j <= i; ++j) {
          read += decayed_dot(in.q, i, j) * delta[usize(j * V + v)];
        }
        o[usize((start + i) * V + v)] = read;
      }
      for (std::int64_t k = 0; k < K; ++k) {
        const T last = sum[usize((n - 1) * K + k)];
        T s = std::exp(last) * state[usize(k * V + v)];
        for (std::int64_t j = 0; j < n; ++j) {
          s += at(in.k, j, k) * std::exp(last - sum[usize(j * K + k)]) * delta[usize(j * V + v)];
        }
        state[usize(k * V + v)] = s;
      }
    }
  }
  return o;
}

}  // namespace tandem::ref
