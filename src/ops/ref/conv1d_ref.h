// conv1d_ref.h — oracle of ops/conv1d.h: plain loops on a scalar type.
#pragma once

#include <cmath>
#include <vector>

#include "ops/ref/views.h"
#include "ops/seq_batch.h"

namespace tandem::ref {

/// The pre-activation of row i of a sequence whose inputs are `x` [n, C] after `past` [W-1, C].
template <typename Real>
[[nodiscard]] Real conv_sum(ConstMat<Real> x, ConstMat<Real> past, ConstMat<Real> w, std::int64_t i,
                            std::int64_t c) {
  const std::int64_t taps = w.size(1);
  Real sum = 0;
  for (std::int64_t j = 0; j < taps; ++j) {
    const std::int64_t at = i - (taps - 1) + j;
    sum += w(c, j) * (at >= 0 ? x(at, c) : past(at + taps - 1, c));
  }
  return sum;
}

template <typename Real>
void conv1d(Mat<Real> y, ConstMat<Real> x, ConstMat<Real> w, Cube<Real> state,
            const SeqBatch& seqs) {
  const std::int64_t past_rows = w.size(1) - 1;
  const std::int64_t channels = x.size(1);
  for (std::int64_t b = 0; b < seqs.num_seqs(); ++b) {
    const std::int64_t n = seqs.length(b);
    const TensorView<const Real, 2> rows = TensorView<const Real, 2>(x).rows(seqs.begin(b), n);
    const std::int64_t slot = seqs.keeps_state() ? seqs.state_slots(b) : 0;
    std::vector<Real> past(static_cast<std::size_t>(past_rows * channels), Real(0));
    const TensorView<Real, 2> past_view(past.data(), {past_rows, channels});
    for (std::int64_t r = 0; r < past_rows && seqs.keeps_state() && slot >= 0; ++r) {
      for (std::int64_t c = 0; c < channels; ++c) {
        past_view(r, c) = state(slot, r, c);
      }
    }
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t c = 0; c < channels; ++c) {
        const Real z = conv_sum<Real>(rows, past_view, w, i, c);
        y(seqs.begin(b) + i, c) = slot < 0 ? Real(0) : z / (Real(1) + std::exp(-z));
      }
    }
    for (std::int64_t r = 0; r < past_rows && seqs.keeps_state() && slot >= 0; ++r) {
      const std::int64_t at = n - past_rows + r;  // the last W-1 of (past, rows)
      for (std::int64_t c = 0; c < channels; ++c) {
        state(slot, r, c) = at >= 0 ? rows(at, c) : past_view(at + past_rows, c);
      }
    }
  }
}

/// Sequences start from zeros. d_x overwritten, d_w accumulated.
template <typename Real>
void conv1d_bwd(Mat<Real> d_x, Mat<Real> d_w, ConstMat<Real> d_y, ConstMat<Real> x,
                ConstMat<Real> w, const SeqBatch& seqs) {
  const std::int64_t taps = w.size(1);
  const std::int64_t channels = x.size(1);
  std::vector<Real> zeros(static_cast<std::size_t>((taps - 1) * channels), Real(0));
  const TensorView<Real, 2> past(zeros.data(), {taps - 1, channels});
  for (std::int64_t t = 0; t < x.size(0); ++t) {
    for (std::int64_t c = 0; c < channels; ++c) {
      d_x(t, c) = Real(0);
    }
  }
  for (std::int64_t b = 0; b < seqs.num_seqs(); ++b) {
    const std::int64_t first = seqs.begin(b);
    const std::int64_t n = seqs.length(b);
    const TensorView<const Real, 2> rows = TensorView<const Real, 2>(x).rows(first, n);
    for (std::int64_t i = 0; i < n; ++i) {
      for (std::int64_t c = 0; c < channels; ++c) {
        const Real z = conv_sum<Real>(rows, past, w, i, c);
        const Real s = Real(1) / (Real(1) + std::exp(-z));
        const Real d_z = d_y(first + i, c) * s * (Real(1) + z * (Real(1) - s));
        for (std::int64_t j = 0; j < taps; ++j) {
          const std::int64_t at = i - (taps - 1) + j;
          if (at >= 0) {
            d_x(first + at, c) += w(c, j) * d_z;
            d_w(c, j) += rows(at, c) * d_z;
          }
        }
      }
    }
  }
}

}  // namespace tandem::ref
