// norm_ref.h — oracle of ops/norm.h: plain loops on a scalar type.
#pragma once

#include <cmath>

#include "ops/ref/views.h"

namespace tandem::ref {

/// (mean(x^2) + eps)^-1/2 of one row.
template <typename Real>
[[nodiscard]] Real rms_scale(ConstVec<Real> x, Scalar<Real> eps) {
  Real sum = 0;
  for (std::int64_t i = 0; i < x.size(0); ++i) {
    sum += x(i) * x(i);
  }
  return Real(1) / std::sqrt(sum / static_cast<Real>(x.size(0)) + eps);
}

template <typename Real>
[[nodiscard]] Real sigmoid(Real x) {
  return Real(1) / (Real(1) + std::exp(-x));
}

template <typename Real>
[[nodiscard]] TensorView<const Real, 1> row_of(TensorView<const Real, 2> m, std::int64_t t) {
  return {m.row(t), {m.size(1)}};
}

template <typename Real>
void rms_norm(Mat<Real> y, ConstMat<Real> x, ConstVec<Real> w, Scalar<Real> eps) {
  for (std::int64_t t = 0; t < x.size(0); ++t) {
    const Real scale = rms_scale<Real>(row_of<Real>(x, t), eps);
    for (std::int64_t i = 0; i < x.size(1); ++i) {
      y(t, i) = x(t, i) * scale * w(i);
    }
  }
}

/// d_x overwritten, d_w accumulated.
template <typename Real>
void rms_norm_bwd(Mat<Real> d_x, Vec<Real> d_w, ConstMat<Real> d_y, ConstMat<Real> x,
                  ConstVec<Real> w, Scalar<Real> eps) {
  const std::int64_t dim = x.size(1);
  for (std::int64_t t = 0; t < x.size(0); ++t) {
    const Real scale = rms_scale<Real>(row_of<Real>(x, t), eps);
    Real mean = 0;  // mean of d_n * n, n the normalised row
    for (std::int64_t i = 0; i < dim; ++i) {
      const Real n = x(t, i) * scale;
      mean += d_y(t, i) * w(i) * n / static_cast<Real>(dim);
      d_w(i) += d_y(t, i) * n;
    }
    for (std::int64_t i = 0; i < dim; ++i) {
      d_x(t, i) = scale * (d_y(t, i) * w(i) - x(t, i) * scale * mean);
    }
  }
}

template <typename Real>
void rms_norm_gated(Cube<Real> y, ConstCube<Real> o, ConstCube<Real> gate, ConstVec<Real> w,
                    Scalar<Real> eps) {
  for (std::int64_t t = 0; t < o.size(0); ++t) {
    for (std::int64_t h = 0; h < o.size(1); ++h) {
      const TensorView<const Real, 1> row(&o(t, h, 0), {o.size(2)});
      const Real scale = rms_scale<Real>(row, eps);
      for (std::int64_t i = 0; i < o.size(2); ++i) {
        y(t, h, i) = row(i) * scale * w(i) * sigmoid<Real>(gate(t, h, i));
      }
    }
  }
}

/// d_o, d_gate overwritten, d_w accumulated.
template <typename Real>
void rms_norm_gated_bwd(Cube<Real> d_o, Cube<Real> d_gate, Vec<Real> d_w, ConstCube<Real> d_y,
                        ConstCube<Real> o, ConstCube<Real> gate, ConstVec<Real> w,
                        Scalar<Real> eps) {
  const std::int64_t dim = o.size(2);
  for (std::int64_t t = 0; t < o.size(0); ++t) {
    for (std::int64_t h = 0; h < o.size(1); ++h) {
      const TensorView<const Real, 1> row(&o(t, h, 0), {dim});
      const Real scale = rms_scale<Real>(row, eps);
      Real mean = 0;
      for (std::int64_t i = 0; i < dim; ++i) {
        const Real n = row(i) * scale;
        const Real s = sigmoid<Real>(gate(t, h, i));
        mean += d_y(t, h, i) * w(i) * s * n / static_cast<Real>(dim);
        d_w(i) += d_y(t, h, i) * s * n;
        d_gate(t, h, i) = d_y(t, h, i) * w(i) * n * s * (Real(1) - s);
      }
      for (std::int64_t i = 0; i < dim; ++i) {
        const Real s = sigmoid<Real>(gate(t, h, i));
        d_o(t, h, i) = scale * (d_y(t, h, i) * w(i) * s - row(i) * scale * mean);
      }
    }
  }
}

template <typename Real>
void l2_norm(Cube<Real> y, ConstCube<Real> x, Scalar<Real> factor, Scalar<Real> eps) {
  for (std::int64_t t = 0; t < x.size(0); ++t) {
    for (std::int64_t h = 0; h < x.size(1); ++h) {
      Real sum = eps;
      for (std::int64_t i = 0; i < x.size(2); ++i) {
        sum += x(t, h, i) * x(t, h, i);
      }
      for (std::int64_t i = 0; i < x.size(2); ++i) {
        y(t, h, i) = factor * x(t, h, i) / std::sqrt(sum);
      }
    }
  }
}

template <typename Real>
void l2_norm_bwd(Cube<Real> d_x, ConstCube<Real> d_y, ConstCube<Real> x, Scalar<Real> factor,
                 Scalar<Real> eps) {
  for (std::int64_t t = 0; t < x.size(0); ++t) {
    for (std::int64_t h = 0; h < x.size(1); ++h) {
      Real sum = eps;
      Real dot = 0;
      for (std::int64_t i = 0; i < x.size(2); ++i) {
        sum += x(t, h, i) * x(t, h, i);
        dot += x(t, h, i) * d_y(t, h, i);
      }
      const Real rho = Real(1) / std::sqrt(sum);
      for (std::int64_t i = 0; i < x.size(2); ++i) {
        d_x(t, h, i) = factor * rho * (d_y(t, h, i) - x(t, h, i) * rho * rho * dot);
      }
    }
  }
}

}  // namespace tandem::ref
