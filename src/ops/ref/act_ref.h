// act_ref.h — oracle of ops/act.h: plain loops on a scalar type.
#pragma once

#include <cmath>

#include "ops/ref/views.h"

namespace tandem::ref {

template <typename Real>
struct Situ {
  Real beta = 4;
  Real linear_beta = 25;  // <= 0: the second factor is u itself

  [[nodiscard]] static Real sigmoid(Real x) { return Real(1) / (Real(1) + std::exp(-x)); }
  [[nodiscard]] Real value(Real g, Real u) const {
    const Real second = linear_beta > 0 ? linear_beta * std::tanh(u / linear_beta) : u;
    return beta * std::tanh(g / beta) * sigmoid(g) * second;
  }
  [[nodiscard]] Real d_gate(Real g, Real u) const {
    const Real t = std::tanh(g / beta);
    const Real s = sigmoid(g);
    const Real second = linear_beta > 0 ? linear_beta * std::tanh(u / linear_beta) : u;
    return second * ((Real(1) - t * t) * s + beta * t * s * (Real(1) - s));
  }
  [[nodiscard]] Real d_up(Real g, Real u) const {
    const Real w = linear_beta > 0 ? std::tanh(u / linear_beta) : Real(0);
    return beta * std::tanh(g / beta) * sigmoid(g) * (Real(1) - w * w);
  }
};

template <typename Real>
void situ(Mat<Real> y, ConstMat<Real> gate, ConstMat<Real> up, Situ<std::type_identity_t<Real>> f) {
  for (std::int64_t t = 0; t < gate.size(0); ++t) {
    for (std::int64_t i = 0; i < gate.size(1); ++i) {
      y(t, i) = f.value(gate(t, i), up(t, i));
    }
  }
}

template <typename Real>
void situ_bwd(Mat<Real> d_gate, Mat<Real> d_up, ConstMat<Real> d_y, ConstMat<Real> gate,
              ConstMat<Real> up, Situ<std::type_identity_t<Real>> f) {
  for (std::int64_t t = 0; t < gate.size(0); ++t) {
    for (std::int64_t i = 0; i < gate.size(1); ++i) {
      d_gate(t, i) = d_y(t, i) * f.d_gate(gate(t, i), up(t, i));
      d_up(t, i) = d_y(t, i) * f.d_up(gate(t, i), up(t, i));
    }
  }
}

template <typename Real>
void sigmoid_gate(Mat<Real> y, ConstMat<Real> o, ConstMat<Real> gate) {
  for (std::int64_t t = 0; t < o.size(0); ++t) {
    for (std::int64_t i = 0; i < o.size(1); ++i) {
      y(t, i) = o(t, i) * Situ<Real>::sigmoid(gate(t, i));
    }
  }
}

template <typename Real>
void sigmoid_gate_bwd(Mat<Real> d_o, Mat<Real> d_gate, ConstMat<Real> d_y, ConstMat<Real> o,
                      ConstMat<Real> gate) {
  for (std::int64_t t = 0; t < o.size(0); ++t) {
    for (std::int64_t i = 0; i < o.size(1); ++i) {
      const Real s = Situ<Real>::sigmoid(gate(t, i));
      d_o(t, i) = d_y(t, i) * s;
      d_gate(t, i) = d_y(t, i) * o(t, i) * s * (Real(1) - s);
    }
  }
}

}  // namespace tandem::ref
