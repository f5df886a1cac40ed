// sample_ref.h — oracle of ops/sample.h: logits under rules, the filtered distribution of one row
// and the ranking of its tokens, by a full sort.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "ops/ref/views.h"
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

/// adjust_logits on all rows it names.
template <typename Real>
void adjust_logits(Mat<Real> logits, const LogitChanges& changes) {
  constexpr Real kInf = std::numeric_limits<Real>::infinity();
  for (const LogitRow& row : changes.rows) {
    Real* const z = logits.row(row.row);
    for (std::int32_t i = row.seen_begin; i < row.seen_end; ++i) {
      const SeenToken& seen = changes.seen[static_cast<std::size_t>(i)];
      const Real penalty = static_cast<Real>(row.repetition_penalty);
      const Real repeated = z[seen.token] > 0 ? z[seen.token] / penalty : z[seen.token] * penalty;
      z[seen.token] = std::fma(-static_cast<Real>(seen.num_in_response),
                               static_cast<Real>(row.frequency_penalty), repeated);
      z[seen.token] -= seen.num_in_response > 0 ? static_cast<Real>(row.presence_penalty) : Real(0);
    }
    for (std::int32_t i = row.bias_begin; i < row.bias_end; ++i) {
      const LogitBias& bias = changes.biases[static_cast<std::size_t>(i)];
      z[bias.token] += static_cast<Real>(bias.bias);
    }
    for (std::int64_t v = 0; row.mask >= 0 && v < logits.size(1); ++v) {
      const bool allowed = ((changes.masks(row.mask, v / 32) >> (v % 32)) & 1U) != 0;
      const bool unusable = std::isnan(z[v]) || z[v] == kInf;
      z[v] = allowed || unusable ? z[v] : -kInf;
    }
  }
}

/// The ids of a row by falling logit, ties to the lower id; NaN counts as -inf.
template <typename Real>
[[nodiscard]] std::vector<std::int32_t> ranking(const std::vector<Real>& logits) {
  const auto value = [&](std::int32_t id) {
    const Real logit = logits[static_cast<std::size_t>(id)];
    return std::isnan(logit) ? -std::numeric_limits<Real>::infinity() : logit;
  };
  std::vector<std::int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
    return value(a) > value(b) || (value(a) == value(b) && a < b);
  });
  return order;
}

}  // namespace tandem::ref
