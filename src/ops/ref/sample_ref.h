// sample_ref.h — oracle of ops/sample.h: the filtered distribution of one row, by a full sort.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/sample.h"

namespace tandem::ref {

/// Probabilities after temperature, top_k, top_p and min_p, renormalised; 0 for dropped tokens.
/// temperature > 0; no NaN and no +inf among the logits.
template <typename Real>
[[nodiscard]] std::vector<Real> sampling_distribution(const std::vector<Real>& logits,
                                                      const SamplingParams& params) {
  const Real temperature = static_cast<Real>(params.temperature);
  const Real top = *std::max_element(logits.begin(), logits.end());
  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return logits[a] > logits[b]; });
  if (params.top_k > 0) {
    order.resize(std::min(order.size(), static_cast<std::size_t>(params.top_k)));
  }
  const auto weight = [&](std::size_t id) { return std::exp((logits[id] - top) / temperature); };
  Real kept_mass = 0;
  for (const std::size_t id : order) {
    kept_mass += weight(id);
  }
  std::size_t kept = order.size();
  if (params.top_p < 1) {
    Real mass = 0;
    for (kept = 0;
         kept < order.size() && (kept == 0 || mass < static_cast<Real>(params.top_p) * kept_mass);
         ++kept) {
      mass += weight(order[kept]);
    }
  }
  std::vector<Real> p(logits.size(), Real(0));
  Real total = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    if (weight(order[i]) >= static_cast<Real>(params.min_p)) {  // the largest weight is 1
      p[order[i]] = weight(order[i]);
      total += p[order[i]];
    }
  }
  for (Real& value : p) {
    value /= total;
  }
  return p;
}

/// The first id at which the running sum of p exceeds u.
template <typename Real>
[[nodiscard]] std::int32_t inverse_cdf(const std::vector<Real>& p, Real u) {
  Real sum = 0;
  std::int32_t last = -1;
  for (std::size_t v = 0; v < p.size(); ++v) {
    sum += p[v];
    if (p[v] > 0) {
      last = static_cast<std::int32_t>(v);
    }
    if (sum > u) {
      return last;
    }
  }
  return last;
}

}  // namespace tandem::ref
