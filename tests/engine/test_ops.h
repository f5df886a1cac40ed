// test_ops.h — the two ops the engine itself calls, as short as they can be: engine tests are about
// bookkeeping and need a sampler that is deterministic and sensitive, not a fast one.
#pragma once

#include <cmath>

#include "core/checked_cast.h"
#include "core/rng.h"
#include "ops/op_table.h"

namespace tandem::test {

/// Gumbel-max at the row's temperature; no filters.
inline void plain_sample(const ExecCtx&, std::span<std::int32_t> ids, ConstF32Mat logits,
                         std::span<const SampleRow> rows) {
  for (std::size_t t = 0; t < rows.size(); ++t) {
    const double temperature = static_cast<double>(rows[t].params.temperature);
    Rng rng(rows[t].key);
    double best = 0;
    ids[t] = -1;
    for (std::int64_t v = 0; v < logits.size(1); ++v) {
      const double logit = static_cast<double>(logits(static_cast<std::int64_t>(t), v));
      const double score = temperature == 0
                               ? logit
                               : logit / temperature - std::log(-std::log(rng.uniform() + 1e-12));
      if (std::isfinite(logit) && (ids[t] < 0 || score > best)) {
        best = score;
        ids[t] = static_cast<std::int32_t>(v);
      }
    }
  }
}

inline void plain_log_prob(const ExecCtx&, F32Vec logprob, F32Vec, ConstF32Mat logits,
                           ConstI32Vec targets, ConstF32Vec temperature) {
  for (std::int64_t t = 0; t < logits.size(0); ++t) {
    if (targets(t) < 0) {
      logprob(t) = 0;
      continue;
    }
    double sum = 0;
    for (std::int64_t v = 0; v < logits.size(1); ++v) {
      sum += std::exp(static_cast<double>(logits(t, v) / temperature(t)));
    }
    logprob(t) = static_cast<float>(static_cast<double>(logits(t, targets(t)) / temperature(t)) -
                                    std::log(sum));
  }
}

[[nodiscard]] inline const OpTable& test_ops() {
  static const OpTable table = [] {
    OpTable ops{};
    ops.name = "engine tests";
    ops.sample.sample = plain_sample;
    ops.loss.log_prob = plain_log_prob;
    return ops;
  }();
  return table;
}

}  // namespace tandem::test
