// sample.h — token sampling: rules that change logits, the draw, the most likely tokens. A row's
// result depends on its own logits, parameters and key only. Source: spec/serving.md, rl.md 2.5.
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

/// A token that the penalties of a row look at.
struct SeenToken {
  std::int32_t token = 0;
  std::int32_t num_in_response = 0;  // 0: it stands in the prompt only
};

struct LogitBias {
  std::int32_t token = 0;
  float bias = 0;  // added to the logit
};

/// How one row of logits is changed.
struct LogitRow {
  std::int32_t row = 0;  // of the logits
  float repetition_penalty = 1;
  float frequency_penalty = 0;
  float presence_penalty = 0;
  std::int32_t seen_begin = 0;  // its part of LogitChanges::seen; a token once
  std::int32_t seen_end = 0;
  std::int32_t bias_begin = 0;  // its part of LogitChanges::biases; a token once
  std::int32_t bias_end = 0;
  std::int32_t mask = -1;  // row of LogitChanges::masks; -1: no token is forbidden
};

/// Changes of some rows of logits, where the device sees them.
struct LogitChanges {
  std::span<const LogitRow> rows;  // [N], a row of the logits once
  std::span<const SeenToken> seen;
  std::span<const LogitBias> biases;
  TensorView<const std::uint32_t, 2> masks;  // [M, ceil(V / 32)]
};

struct SampleOps {
  void (*sample)(const ExecCtx&, std::span<std::int32_t> ids, ConstF32Mat logits,
                 std::span<const SampleRow> rows);
  void (*adjust_logits)(const ExecCtx&, F32Mat logits, const LogitChanges& changes);
  void (*top_tokens)(const ExecCtx&, I32Mat ids, ConstF32Mat logits);
};

namespace ops {

/// Draws one id a row.   Shapes: ids [T]; logits [T, V]; rows [T].   The filters apply in the order
/// top_k, top_p, min_p on the softmax at `temperature`. A row whose logits hold no finite value
/// gives id -1.
void sample(const ExecCtx& ctx, std::span<std::int32_t> ids, ConstF32Mat logits,
            std::span<const SampleRow> rows);

/// Changes the rows of logits [T, V] that `changes` names, in this order: for each seen token
/// z = z > 0 ? z / repetition : z * repetition, then z - num_in_response * frequency (rounded
/// once), then z - presence where num_in_response > 0; z + bias for each bias; -inf for each token
/// v whose bit (v % 32) of masks[mask][v / 32] is clear, unless its logit is NaN or +inf: what
/// makes a row unusable stays to be found. Determinism: the same bits on every backend.
/// Source: spec serving.md 3.2.
void adjust_logits(const ExecCtx& ctx, F32Mat logits, const LogitChanges& changes);

/// ids [T, K]: the K <= V largest of each row of logits [T, V], largest first, ties to the lower
/// id. A NaN counts as -inf.
void top_tokens(const ExecCtx& ctx, I32Mat ids, ConstF32Mat logits);

}  // namespace ops
}  // namespace tandem
