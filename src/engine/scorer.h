// scorer.h — log-probabilities of given tokens and of the most likely ones, from rows of logits, by
// the routine that the sampler reports with: equal logits give equal bits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/checked_cast.h"
#include "engine/request.h"
#include "ops/exec_ctx.h"
#include "tensor/storage.h"
#include "tensor/view.h"

namespace tandem {

/// What is wanted of one row.
struct ScoreRow {
  std::int32_t token = -1;   // its log-probability; -1: of none
  std::int64_t num_top = 0;  // alternatives, at most kMaxTopLogprobs
  float temperature = 1;
};

/// The alternatives are found on the device: a row of K3's logits is 640 KB, which would cross the
/// bus and be searched by the host while the device waits.
class Scorer {
 public:
  Scorer(std::int64_t max_rows, Device& device);
  /// Of device memory.
  [[nodiscard]] static std::int64_t bytes(std::int64_t max_rows);

  /// Scores row i of logits [num_rows, V] as rows[i] asks, and waits for the results, which stay
  /// until the next call.
  void run(const ExecCtx& ctx, ConstF32Mat logits, std::span<const ScoreRow> rows);
  /// NaN when the row holds one.
  [[nodiscard]] float logprob(std::int64_t i) const { return logprobs_[usize(i)]; }
  /// Most likely first, ties to the lower id; as many as asked for or the vocabulary has.
  [[nodiscard]] std::span<const TokenLogprob> top(std::int64_t i) const;

 private:
  /// Of all rows; the alternatives' arrays are [max_rows, kMaxTopLogprobs].
  struct Inputs {
    std::span<std::int32_t> tokens;
    std::span<float> temperatures;
    std::span<float> top_temperatures;
  };
  struct Results {
    std::span<float> logprobs;
    std::span<std::int32_t> top_ids;
    std::span<float> top_logprobs;
  };
  [[nodiscard]] Inputs inputs(std::byte* base) const;
  [[nodiscard]] Results results(std::byte* base) const;
  void score_top(const ExecCtx& ctx, ConstF32Mat row, std::int64_t i, std::int64_t count);

  Device& device_;
  std::int64_t max_rows_;
  Storage host_inputs_, host_results_;      // on the device itself where the host sees it
  Storage device_inputs_, device_results_;  // else these are
  std::vector<float> logprobs_;             // [max_rows]
  std::vector<TokenLogprob> top_;           // [max_rows, kMaxTopLogprobs]
  std::vector<std::int64_t> num_top_;       // [max_rows]
};

}  // namespace tandem
