// loss_ref.h — oracle of ops/loss.h: plain loops on a scalar type.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/ref/views.h"

namespace tandem::ref {

/// log softmax(logits / temperature) of one row, and its entropy.
template <typename Real>
struct LogSoftmax {
  std::vector<Real> log_p;
  Real entropy = 0;

  LogSoftmax(ConstMat<Real> logits, std::int64_t t, Real temperature) {
    for (std::int64_t v = 0; v < logits.size(1); ++v) {
      log_p.push_back(logits(t, v) / temperature);
    }
    const Real top = *std::max_element(log_p.begin(), log_p.end());
    Real sum = 0;
    for (const Real z : log_p) {
      sum += std::exp(z - top);
    }
    for (Real& z : log_p) {
      z -= top + std::log(sum);
      const Real p = std::exp(z);
      entropy -= p > 0 ? p * z : Real(0);  // p log p -> 0 at p = 0
    }
  }
};

template <typename Real>
void log_prob(Vec<Real> logprob, Vec<Real> entropy, ConstMat<Real> logits, ConstI32Vec targets,
              ConstVec<Real> temperature) {
  for (std::int64_t t = 0; t < logits.size(0); ++t) {
    logprob(t) = 0;
    entropy(t) = 0;
    if (targets(t) >= 0) {
      const LogSoftmax<Real> row(logits, t, temperature(t));
      logprob(t) = row.log_p[static_cast<std::size_t>(targets(t))];
      entropy(t) = row.entropy;
    }
  }
}

/// d_logits overwritten.
template <typename Real>
void log_prob_bwd(Mat<Real> d_logits, ConstVec<Real> d_logprob, ConstVec<Real> d_entropy,
                  ConstMat<Real> logits, ConstI32Vec targets, ConstVec<Real> temperature) {
  for (std::int64_t t = 0; t < logits.size(0); ++t) {
    const LogSoftmax<Real> row(logits, t, temperature(t));
    for (std::int64_t v = 0; v < logits.size(1); ++v) {
      const Real log_p = row.log_p[static_cast<std::size_t>(v)];
      const Real p = std::exp(log_p);
      const Real hit = v == targets(t) ? Real(1) : Real(0);
      const Real d_h = p > 0 ? -p * (log_p + row.entropy) : Real(0);
      d_logits(t, v) = targets(t) < 0
                           ? Real(0)
                           : (d_logprob(t) * (hit - p) + d_entropy(t) * d_h) / temperature(t);
    }
  }
}

}  // namespace tandem::ref
