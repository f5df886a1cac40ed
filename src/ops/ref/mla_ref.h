// mla_ref.h — oracle of the MLA family: plain loops in any scalar type, forward and backward.
// Source: kimi-k3.md 5.1, 5.2.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/checked_cast.h"

namespace tandem::ref {

/// Softmax attention of one query over `visible` keys: o [DV], returns the log of the softmax sum.
/// key(j) and value(j) give pointers to the rows.
template <typename T, typename KeyFn, typename ValueFn>
T attend_ref(T* o, const T* q, std::int64_t dk, std::int64_t dv, std::int64_t visible, T scale,
             const KeyFn& key, const ValueFn& value) {
  std::vector<T> s(usize(visible));
  T top = -std::numeric_limits<T>::infinity();
  for (std::int64_t j = 0; j < visible; ++j) {
    T dot = T{0};
    for (std::int64_t d = 0; d < dk; ++d) {
      dot += q[d] * key(j)[d];
    }
    s[usize(j)] = scale * dot;
    top = std::max(top, s[usize(j)]);
  }
  T sum = T{0};
  for (T& x : s) {
    x = std::exp(x - top);
    sum += x;
  }
  std::fill(o, o + dv, T{0});
  for (std::int64_t j = 0; j < visible; ++j) {
    for (std::int64_t d = 0; d < dv; ++d) {
      o[d] += s[usize(j)] / sum * value(j)[d];
    }
  }
  return top + std::log(sum);
}

/// One sequence, absorbed form: rows q [n, H, D], keys kv [S, D] in order of position, values the
/// first DL columns of kv. Query row i sees S - (n - 1 - i) keys.
template <typename T>
struct MlaSeq {
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  std::int64_t latent = 0;
  std::int64_t num_keys = 0;
  std::vector<T> q, kv;
  T scale = T{1};

  [[nodiscard]] std::int64_t visible(std::int64_t row) const { return num_keys - (rows - 1 - row); }
};

template <typename T>
struct MlaSeqOut {
  std::vector<T> o, lse;
};

template <typename T>
[[nodiscard]] MlaSeqOut<T> mla_absorbed_ref(const MlaSeq<T>& in) {
  MlaSeqOut<T> out{std::vector<T>(usize(in.rows * in.heads * in.latent)),
                   std::vector<T>(usize(in.rows * in.heads))};
  const auto row = [&](std::int64_t j) { return &in.kv[usize(j * in.dim)]; };
  for (std::int64_t i = 0; i < in.rows * in.heads; ++i) {
    out.lse[usize(i)] = attend_ref(&out.o[usize(i * in.latent)], &in.q[usize(i * in.dim)], in.dim,
                                   in.latent, in.visible(i / in.heads), in.scale, row, row);
  }
  return out;
}

template <typename T>
struct MlaSeqGrads {
  std::vector<T> d_q, d_kv;
};

template <typename T>
[[nodiscard]] MlaSeqGrads<T> mla_absorbed_bwd_ref(const MlaSeq<T>& in, const std::vector<T>& d_o) {
  const MlaSeqOut<T> fwd = mla_absorbed_ref(in);
  MlaSeqGrads<T> out{std::vector<T>(in.q.size(), T{0}), std::vector<T>(in.kv.size(), T{0})};
  for (std::int64_t i = 0; i < in.rows * in.heads; ++i) {
    const T* q = &in.q[usize(i * in.dim)];
    const T* g = &d_o[usize(i * in.latent)];
    T inner = T{0};
    for (std::int64_t d = 0; d < in.latent; ++d) {
      inner += g[d] * fwd.o[usize(i * in.latent + d)];
    }
    for (std::int64_t j = 0; j < in.visible(i / in.heads); ++j) {
      const T* row = &in.kv[usize(j * in.dim)];
      T dot = T{0};
      T d_p = T{0};
      for (std::int64_t d = 0; d < in.dim; ++d) {
        dot += q[d] * row[d];
      }
      for (std::int64_t d = 0; d < in.latent; ++d) {
        d_p += g[d] * row[d];
      }
      const T p = std::exp(in.scale * dot - fwd.lse[usize(i)]);
      const T d_s = p * (d_p - inner) * in.scale;
      for (std::int64_t d = 0; d < in.dim; ++d) {
        out.d_q[usize(i * in.dim + d)] += d_s * row[d];
        out.d_kv[usize(j * in.dim + d)] += d_s * q[d] + (d < in.latent ? p * g[d] : T{0});
      }
    }
  }
  return out;
}

/// One sequence, expanded form (5.1): q [n, H, DN+DR], k_nope [n, H, DN], k_shared [n, DR],
/// v [n, H, DV]; returns o [n, H, DV].
template <typename T>
struct MlaExpanded {
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t nope = 0;
  std::int64_t shared = 0;
  std::int64_t values = 0;
  std::vector<T> q, k_nope, k_shared, v;
  T scale = T{1};
};

template <typename T>
[[nodiscard]] std::vector<T> mla_expanded_ref(const MlaExpanded<T>& in) {
  const std::int64_t dim = in.nope + in.shared;
  std::vector<T> o(in.v.size());
  std::vector<T> keys(usize(in.rows * dim));
  for (std::int64_t h = 0; h < in.heads; ++h) {
    for (std::int64_t j = 0; j < in.rows; ++j) {
      const T* nope = &in.k_nope[usize((j * in.heads + h) * in.nope)];
      std::copy(nope, nope + in.nope, &keys[usize(j * dim)]);
      std::copy(in.k_shared.begin() + j * in.shared, in.k_shared.begin() + (j + 1) * in.shared,
                &keys[usize(j * dim)] + in.nope);
    }
    for (std::int64_t i = 0; i < in.rows; ++i) {
      const std::int64_t at = i * in.heads + h;
      (void)attend_ref(
          &o[usize(at * in.values)], &in.q[usize(at * dim)], dim, in.values, i + 1, in.scale,
          [&](std::int64_t j) { return &keys[usize(j * dim)]; },
          [&](std::int64_t j) { return &in.v[usize((j * in.heads + h) * in.values)]; });
    }
  }
  return o;
}

}  // namespace tandem::ref
