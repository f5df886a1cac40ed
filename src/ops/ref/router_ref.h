// router_ref.h — oracle of the router ops of ops/moe.h: plain loops on a scalar type.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/moe.h"
#include "ops/ref/views.h"

namespace tandem::ref {

/// Weights of the given ids from the present logits.
template <typename Real>
void route_replay(Mat<Real> weights, Mat<Real> scores, ConstMat<Real> logits, ConstI32Mat ids,
                  RouterParams params) {
  for (std::int64_t t = 0; t < logits.size(0); ++t) {
    for (std::int64_t e = 0; e < logits.size(1); ++e) {
      scores(t, e) = Real(1) / (Real(1) + std::exp(-logits(t, e)));
    }
    Real sum = Real(1e-20);
    for (std::int64_t a = 0; a < ids.size(1); ++a) {
      sum += scores(t, ids(t, a));
    }
    for (std::int64_t a = 0; a < ids.size(1); ++a) {
      const Real divisor = params.renormalize ? sum : Real(1);
      weights(t, a) = scores(t, ids(t, a)) / divisor * static_cast<Real>(params.scaling_factor);
    }
  }
}

template <typename Real>
void route(I32Mat ids, Mat<Real> weights, Mat<Real> scores, ConstMat<Real> logits,
           ConstVec<Real> bias, RouterParams params) {
  for (std::int64_t t = 0; t < logits.size(0); ++t) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(logits.size(1)));
    std::iota(order.begin(), order.end(), 0);
    const auto rank = [&](std::int32_t e) {
      return Real(1) / (Real(1) + std::exp(-logits(t, e))) + bias(e);
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return rank(a) > rank(b); });
    std::copy_n(order.begin(), ids.size(1), ids.row(t));
  }
  route_replay<Real>(weights, scores, logits, ids, params);
}

/// d_logits overwritten.
template <typename Real>
void route_bwd(Mat<Real> d_logits, ConstMat<Real> d_weights, ConstI32Mat ids, ConstMat<Real> scores,
               RouterParams params) {
  const Real factor = static_cast<Real>(params.scaling_factor);
  for (std::int64_t t = 0; t < scores.size(0); ++t) {
    for (std::int64_t e = 0; e < scores.size(1); ++e) {
      d_logits(t, e) = 0;
    }
    Real sum = Real(1e-20);
    Real mean = 0;
    for (std::int64_t a = 0; a < ids.size(1); ++a) {
      sum += scores(t, ids(t, a));
    }
    for (std::int64_t a = 0; a < ids.size(1); ++a) {
      mean += scores(t, ids(t, a)) / sum * d_weights(t, a);
    }
    for (std::int64_t a = 0; a < ids.size(1); ++a) {
      const Real s = scores(t, ids(t, a));
      const Real d_s =
          params.renormalize ? (d_weights(t, a) - mean) / sum * factor : d_weights(t, a) * factor;
      d_logits(t, ids(t, a)) += d_s * s * (Real(1) - s);
    }
  }
}

}  // namespace tandem::ref
