// kda_cases.h — random KDA problems and their oracle, shared by the KDA tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "ops/kda.h"
#include "ops/ref/kda_ref.h"
#include "support/op_test.h"

namespace tandem::test {

struct KdaDims {
  std::int64_t heads = 2;
  std::int64_t keys = 16;
  std::int64_t values = 16;
};

/// A batch of sequences. q, k, v are column slices of one wide matrix, as the fused projection
/// leaves them; q is L2-normalised and scaled, k L2-normalised.
struct KdaCase {
  KdaDims dims;
  std::vector<std::int32_t> cu_seqlens{0};
  std::vector<std::int32_t> slots;  // empty: training
  std::int64_t wide = 0;
  Tensor qkv, g, beta;

  /// max_decay: g is uniform in (-max_decay, 0).
  KdaCase(KdaDims sizes, const std::vector<std::int64_t>& lengths, std::uint64_t seed,
          double max_decay = 2.0)
      : dims(sizes),
        wide(sizes.heads * (2 * sizes.keys + sizes.values) + 3),
        qkv(0),
        g(0),
        beta(0) {
    for (const std::int64_t length : lengths) {
      cu_seqlens.push_back(checked_cast<std::int32_t>(cu_seqlens.back() + length));
    }
    qkv = Tensor::normal(rows() * wide, seed);
    g = Tensor(rows() * dims.heads * dims.keys);
    beta = Tensor(rows() * dims.heads);
    Rng rng(mix_key({seed, 77}));
    for (float& x : g) {
      x = static_cast<float>(-max_decay * rng.uniform());
    }
    for (float& x : beta) {
      x = static_cast<float>(rng.uniform());
    }
    normalise(0, 1.0 / std::sqrt(static_cast<double>(dims.keys)));
    normalise(dims.heads * dims.keys, 1.0);
  }

  [[nodiscard]] std::int64_t rows() const { return cu_seqlens.back(); }
  [[nodiscard]] std::int64_t num_seqs() const { return isize(cu_seqlens) - 1; }
  [[nodiscard]] F32Cube slice(std::int64_t column, std::int64_t channels) {
    return {qkv.data() + column, {rows(), dims.heads, channels}, {wide, channels, 1}};
  }
  [[nodiscard]] F32Cube q() { return slice(0, dims.keys); }
  [[nodiscard]] F32Cube k() { return slice(dims.heads * dims.keys, dims.keys); }
  [[nodiscard]] F32Cube v() { return slice(2 * dims.heads * dims.keys, dims.values); }
  [[nodiscard]] F32Cube g_cube() { return g.cube(rows(), dims.heads, dims.keys); }
  [[nodiscard]] KdaInputs inputs() {
    return {q(), k(), v(), g_cube(), beta.mat(rows(), dims.heads)};
  }
  /// Rows [begin, begin + count) of the batch.
  [[nodiscard]] KdaInputs inputs(std::int64_t begin, std::int64_t count) {
    return {q().rows(begin, count), k().rows(begin, count), v().rows(begin, count),
            g_cube().rows(begin, count), beta.mat(rows(), dims.heads).rows(begin, count)};
  }
  [[nodiscard]] SeqBatch seqs() const {
    return {{cu_seqlens.data(), {isize(cu_seqlens)}}, {slots.data(), {isize(slots)}}};
  }
  /// Slot b for sequence b.
  void give_slots() {
    slots.resize(usize(num_seqs()));
    std::iota(slots.begin(), slots.end(), 0);
  }
  [[nodiscard]] std::int64_t state_floats() const {
    return num_seqs() * dims.heads * dims.keys * dims.values;
  }
  [[nodiscard]] KdaStatePool pool(Tensor& states) const {
    return {states.data(), states.numel() / (dims.heads * dims.keys * dims.values), dims.heads,
            dims.keys, dims.values};
  }

  [[nodiscard]] ref::KdaHead<double> head(std::int64_t b, std::int64_t h) {
    const std::int64_t begin = cu_seqlens[usize(b)];
    const std::int64_t count = cu_seqlens[usize(b + 1)] - begin;
    ref::KdaHead<double> out{count, dims.keys, dims.values, {}, {}, {}, {}, {}};
    const KdaInputs in = inputs();
    for (std::int64_t t = begin; t < begin + count; ++t) {
      for (std::int64_t c = 0; c < dims.keys; ++c) {
        out.q.push_back(static_cast<double>(in.q(t, h, c)));
        out.k.push_back(static_cast<double>(in.k(t, h, c)));
        out.g.push_back(static_cast<double>(in.g(t, h, c)));
      }
      for (std::int64_t c = 0; c < dims.values; ++c) {
        out.v.push_back(static_cast<double>(in.v(t, h, c)));
      }
      out.beta.push_back(static_cast<double>(in.beta(t, h)));
    }
    return out;
  }

 private:
  void normalise(std::int64_t column, double scale) {
    const F32Cube x = slice(column, dims.keys);
    for (std::int64_t t = 0; t < rows(); ++t) {
      for (std::int64_t h = 0; h < dims.heads; ++h) {
        double sum = 1e-6;
        for (std::int64_t c = 0; c < dims.keys; ++c) {
          sum += static_cast<double>(x(t, h, c)) * static_cast<double>(x(t, h, c));
        }
        for (std::int64_t c = 0; c < dims.keys; ++c) {
          x(t, h, c) = static_cast<float>(static_cast<double>(x(t, h, c)) * scale / std::sqrt(sum));
        }
      }
    }
  }
};

struct KdaExpected {
  std::vector<double> o;      // [T, H, V]
  std::vector<double> state;  // [B, H, K, V], after the last row
};

/// start: states before the first row in the layout of `state`; empty means zero.
inline KdaExpected kda_expected(KdaCase& c, const std::vector<double>& start = {}) {
  const auto [heads, keys, values] = c.dims;
  KdaExpected out{std::vector<double>(usize(c.rows() * heads * values)),
                  start.empty() ? std::vector<double>(usize(c.state_floats())) : start};
  for (std::int64_t b = 0; b < c.num_seqs(); ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto at = out.state.begin() + (b * heads + h) * keys * values;
      std::vector<double> state(at, at + keys * values);
      const ref::KdaHead<double> in = c.head(b, h);
      const std::vector<double> o = ref::kda_recurrent_ref(in, state);
      std::copy(state.begin(), state.end(), at);
      for (std::int64_t t = 0; t < in.rows; ++t) {
        const std::int64_t row = c.cu_seqlens[usize(b)] + t;
        std::copy(o.begin() + t * values, o.begin() + (t + 1) * values,
                  out.o.begin() + (row * heads + h) * values);
      }
    }
  }
  return out;
}

/// Bound on the fp32 error of o and of the state. (I - beta k k^T) diag(e^g) has norm <= 1 for
/// |k| <= 1, beta <= 1, g <= 0, so the errors of the tokens add up without growth. A token's error
/// is that of one residual: K products of state and key, |k|_1 <= K^1/2, plus exp and two
/// element-wise roundings. Reading multiplies by |q|_1 <= 1.
inline double kda_tolerance(KdaCase& c, const KdaExpected& expected, double start = 0) {
  const std::int64_t longest = [&] {
    std::int64_t n = 1;
    for (std::int64_t b = 0; b < c.num_seqs(); ++b) {
      n = std::max(n, c.seqs().length(b));
    }
    return n;
  }();
  const double state = std::max({start, max_abs(expected.state), max_abs(expected.o)});
  const double magnitude = max_abs(c.qkv) + std::sqrt(static_cast<double>(c.dims.keys)) * state;
  return static_cast<double>(longest) * sum_tolerance(c.dims.keys + 8, magnitude);
}

}  // namespace tandem::test
