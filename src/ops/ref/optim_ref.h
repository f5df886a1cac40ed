// optim_ref.h — oracle of ops/optim.h: plain loops on a scalar type.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/optim.h"
#include "ops/ref/views.h"

namespace tandem::ref {

template <typename Real>
void adamw(Vec<Real> w, Vec<Real> m, Vec<Real> v, ConstVec<Real> g, const AdamWParams& p) {
  const Real beta1 = static_cast<Real>(p.beta1);
  const Real beta2 = static_cast<Real>(p.beta2);
  const Real step = static_cast<Real>(p.step);
  for (std::int64_t i = 0; i < w.size(0); ++i) {
    const Real grad = g(i) * static_cast<Real>(p.grad_scale);
    m(i) = beta1 * m(i) + (Real(1) - beta1) * grad;
    v(i) = beta2 * v(i) + (Real(1) - beta2) * grad * grad;
    const Real m_hat = m(i) / (Real(1) - std::pow(beta1, step));
    const Real v_hat = v(i) / (Real(1) - std::pow(beta2, step));
    w(i) -= static_cast<Real>(p.lr) * (m_hat / (std::sqrt(v_hat) + static_cast<Real>(p.eps)) +
                                       static_cast<Real>(p.weight_decay) * w(i));
  }
}

/// Five Newton-Schulz steps on x / |x|_F; x [N, K] with N <= K, in place.
template <typename Real>
void orthogonalise(Mat<Real> x) {
  const std::int64_t rows = x.size(0);
  const std::int64_t cols = x.size(1);
  const std::size_t n = static_cast<std::size_t>(rows);
  Real norm = 0;
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    norm += x.data()[i] * x.data()[i];
  }
  norm = std::sqrt(norm);
  for (std::int64_t i = 0; i < x.numel(); ++i) {
    x.data()[i] = norm > 0 ? x.data()[i] / norm : Real(0);
  }
  for (int step = 0; step < 5; ++step) {
    std::vector<Real> a_data(n * n, Real(0));
    std::vector<Real> poly_data(n * n, Real(0));
    const TensorView<Real, 2> a(a_data.data(), {rows, rows});
    const TensorView<Real, 2> poly(poly_data.data(), {rows, rows});
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < rows; ++j) {
        for (std::int64_t k = 0; k < cols; ++k) {
          a(i, j) += x(i, k) * x(j, k);
        }
      }
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < rows; ++j) {
        poly(i, j) = Real(-4.7750) * a(i, j);
        for (std::int64_t k = 0; k < rows; ++k) {
          poly(i, j) += Real(2.0315) * a(i, k) * a(k, j);
        }
      }
    }
    const std::vector<Real> old(x.data(), x.data() + x.numel());
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < cols; ++j) {
        x(i, j) *= Real(3.4445);
        for (std::int64_t k = 0; k < rows; ++k) {
          x(i, j) += poly(i, k) * old[static_cast<std::size_t>(k * cols + j)];
        }
      }
    }
  }
}

/// w, momentum, g contiguous.
template <typename Real>
void muon(Mat<Real> w, Mat<Real> momentum, ConstMat<Real> g, const MuonParams& p) {
  const std::int64_t rows = w.size(0);
  const std::int64_t cols = w.size(1);
  const bool tall = rows > cols;
  std::vector<Real> x_data(static_cast<std::size_t>(w.numel()));
  const TensorView<Real, 2> x(x_data.data(), {std::min(rows, cols), std::max(rows, cols)});
  const Real mu = static_cast<Real>(p.momentum);
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      const Real grad = g(i, j) * static_cast<Real>(p.grad_scale);
      momentum(i, j) = mu * momentum(i, j) + grad;
      (tall ? x(j, i) : x(i, j)) = grad + mu * momentum(i, j);
    }
  }
  orthogonalise<Real>(x);
  const Real scale =
      static_cast<Real>(p.update_scale) * std::sqrt(static_cast<Real>(std::max(rows, cols)));
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      const Real o = tall ? x(j, i) : x(i, j);
      w(i, j) -=
          static_cast<Real>(p.lr) * (scale * o + static_cast<Real>(p.weight_decay) * w(i, j));
    }
  }
}

}  // namespace tandem::ref
