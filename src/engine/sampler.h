// sampler.h — one new token for each row of logits, and its log-probability.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/scheduler/scheduler.h"
#include "ops/exec_ctx.h"
#include "ops/sample.h"
#include "tensor/view.h"

namespace tandem {

/// Greedy below this: dividing logits by less than 1e-6 leaves nothing else.
inline constexpr float kGreedyTemperature = 1e-6F;

struct SampledToken {
  std::int32_t token = -1;  // -1: the row has logits that are not finite
  float logprob = 0;        // of the softmax at the row's temperature (1 when greedy), no filter
};

class Sampler {
 public:
  explicit Sampler(std::int64_t max_rows);

  /// Row i of logits [R, V] gives the next token of targets[i].seq. A token depends on its own row,
  /// parameters and key only. The result is valid until the next call. No allocation.
  [[nodiscard]] std::span<const SampledToken> sample(const ExecCtx& ctx, ConstF32Mat logits,
                                                     std::span<const SampleTarget> targets);

 private:
  std::vector<SampleRow> rows_;
  std::vector<std::int32_t> ids_;
  std::vector<float> temperatures_;
  std::vector<float> logprobs_;
  std::vector<SampledToken> sampled_;
};

}  // namespace tandem
