// sample.h — token sampling. A row's draw depends on its own logits, parameters and key only.
// Source: spec/serving.md, rl.md 2.5.
#pragma once

#include <cstdint>
#include <span>

#include "ops/exec_ctx.h"
#include "tensor/view.h"

namespace tandem {

struct SamplingParams {
  float temperature = 1.0F;  // 0 = greedy (ties to the lower id)
  std::int32_t top_k = 0;    // 0 = off
  float top_p =
      1.0F;  // 1 = off; keeps the smallest set of most likely tokens whose mass reaches top_p
  float min_p = 0.0F;  // 0 = off; drops tokens below min_p * the largest probability
};

struct SampleRow {
  SamplingParams params;
  std::uint64_t key = 0;  // counter-based randomness: mix_key({seed, sequence, position})
};

struct SampleOps {
  void (*sample)(const ExecCtx&, std::span<std::int32_t> ids, ConstF32Mat logits,
                 std::span<const SampleRow> rows);
};

namespace ops {

/// Draws one id a row.   Shapes: ids [T]; logits [T, V]; rows [T].   The filters apply in the order
/// top_k, top_p, min_p on the softmax at `temperature`. A row whose logits hold no finite value
/// gives id -1.
void sample(const ExecCtx& ctx, std::span<std::int32_t> ids, ConstF32Mat logits,
            std::span<const SampleRow> rows);

}  // namespace ops
}  // namespace tandem
