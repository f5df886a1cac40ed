// sampler.h — one new token for each row of logits, and its log-probability.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/logit_changer.h"
#include "engine/scheduler/scheduler.h"
#include "ops/exec_ctx.h"
#include "ops/sample.h"
#include "tensor/storage.h"
#include "tensor/view.h"

namespace tandem {

/// Greedy below this: dividing logits by less than 1e-6 leaves nothing else.
inline constexpr float kGreedyTemperature = 1e-6F;

/// What a request's logits are divided by before they are reported.
[[nodiscard]] float reported_temperature(const Request& request);

struct SampledToken {
  std::int32_t token = -1;  // -1: the row has logits that are not finite, or no token may come next
  float logprob = 0;        // of the model's own logits at the reported temperature
  bool none_allowed = false;
};

/// Three steps, so that a device can repeat the middle one as it was recorded. No allocation.
class Sampler {
 public:
  Sampler(std::int64_t max_rows, std::int64_t vocab, Device& device);
  /// Of device memory.
  [[nodiscard]] static std::int64_t bytes(std::int64_t max_rows, std::int64_t vocab);

  /// Row i is drawn for targets[i].seq: a token depends on its own logits, parameters and key only.
  /// Rows from there to `num_rows` are padding.
  void prepare(std::span<const SampleTarget> targets, std::int64_t num_rows);
  /// Draws from logits [num_rows, V] as they are.
  void run(const ExecCtx& ctx, ConstF32Mat logits);
  /// Whether the logits of a target are to be changed first: then run_with_rules() is to be called,
  /// instead of run() or after it.
  [[nodiscard]] bool has_rules() const { return !changed_.empty(); }
  /// Draws from a copy of logits [num_targets, V] under the targets' rules. The device cannot
  /// repeat this as a recording: what goes there differs in size from step to step.
  void run_with_rules(const ExecCtx& ctx, ConstF32Mat logits);
  /// The tokens of the targets; valid until the next call.
  [[nodiscard]] std::span<const SampledToken> collect();

 private:
  /// Inputs of one row, then its results: the order in which they cross to a device and back.
  struct Inputs {
    std::span<SampleRow> rows;
    std::span<float> temperatures;
  };
  struct Results {
    std::span<std::int32_t> ids;
    std::span<float> logprobs;
  };
  [[nodiscard]] Inputs inputs(std::byte* base) const;
  [[nodiscard]] Results results(std::byte* base) const;
  /// Draws from `logits`; reports what the draws have in the model's own.
  void draw(const ExecCtx& ctx, ConstF32Mat logits, ConstF32Mat own);

  Device& device_;
  std::int64_t max_rows_;
  std::int64_t num_targets_ = 0;
  std::span<const SampleTarget> changed_;   // all targets when one of them has rules, else none
  Storage host_inputs_, host_results_;      // on the device itself where the host sees it
  Storage device_inputs_, device_results_;  // else these are
  LogitChanger changer_;
  std::vector<SampledToken> sampled_;
};

}  // namespace tandem
