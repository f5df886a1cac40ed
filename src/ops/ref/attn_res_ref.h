// attn_res_ref.h — oracle of ops/attn_res.h: plain loops on a scalar type.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "ops/ref/views.h"

namespace tandem::ref {

/// Per source of one row: r = (mean x^2 + eps)^-1/2, s = r x.(w u), p = softmax(s).
template <typename Real>
struct AttnResRow {
  std::vector<Real> r;
  std::vector<Real> s;
  std::vector<Real> p;

  AttnResRow(std::span<const TensorView<const Real, 2>> sources, ConstVec<Real> w, ConstVec<Real> u,
             Real eps, std::int64_t t) {
    const std::int64_t dim = w.size(0);
    for (const auto& source : sources) {
      Real sum = 0;
      Real dot = 0;
      for (std::int64_t j = 0; j < dim; ++j) {
        sum += source(t, j) * source(t, j);
        dot += source(t, j) * w(j) * u(j);
      }
      r.push_back(Real(1) / std::sqrt(sum / static_cast<Real>(dim) + eps));
      s.push_back(r.back() * dot);
    }
    const Real top = *std::max_element(s.begin(), s.end());
    Real total = 0;
    for (const Real score : s) {
      p.push_back(std::exp(score - top));
      total += p.back();
    }
    for (Real& weight : p) {
      weight /= total;
    }
  }
};

template <typename Real>
void attn_res(Mat<Real> out, std::span<const TensorView<const Real, 2>> sources, ConstVec<Real> w,
              ConstVec<Real> u, Scalar<Real> eps) {
  for (std::int64_t t = 0; t < out.size(0); ++t) {
    const AttnResRow<Real> row(sources, w, u, eps, t);
    for (std::int64_t j = 0; j < out.size(1); ++j) {
      out(t, j) = 0;
      for (std::size_t i = 0; i < sources.size(); ++i) {
        out(t, j) += row.p[i] * sources[i](t, j);
      }
    }
  }
}

/// d_sources, d_w and d_u are accumulated.
template <typename Real>
void attn_res_bwd(std::span<const TensorView<Real, 2>> d_sources, Vec<Real> d_w, Vec<Real> d_u,
                  ConstMat<Real> d_out, std::span<const TensorView<const Real, 2>> sources,
                  ConstVec<Real> w, ConstVec<Real> u, Scalar<Real> eps) {
  const std::int64_t dim = d_out.size(1);
  for (std::int64_t t = 0; t < d_out.size(0); ++t) {
    const AttnResRow<Real> row(sources, w, u, eps, t);
    std::vector<Real> d_p(sources.size(), Real(0));
    Real mean = 0;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      for (std::int64_t j = 0; j < dim; ++j) {
        d_p[i] += sources[i](t, j) * d_out(t, j);
      }
      mean += row.p[i] * d_p[i];
    }
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const Real d_s = row.p[i] * (d_p[i] - mean);
      for (std::int64_t j = 0; j < dim; ++j) {
        const Real x = sources[i](t, j);
        const Real c = w(j) * u(j);
        d_sources[i](t, j) +=
            row.p[i] * d_out(t, j) +
            d_s * row.r[i] * (c - row.s[i] * row.r[i] / static_cast<Real>(dim) * x);
        d_w(j) += d_s * row.r[i] * x * u(j);
        d_u(j) += d_s * row.r[i] * x * w(j);
      }
    }
  }
}

}  // namespace tandem::ref
