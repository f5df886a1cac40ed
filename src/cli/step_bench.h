// step_bench.h — one pass of a model at a given batch and context, without what came before it:
// caches are filled with random numbers, and the pass is repeated. A decode step (one new token a
// sequence) is recorded and repeated where the device can.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "cli/pass_profile.h"
#include "cli/roofs.h"
#include "engine/batch.h"
#include "engine/cache/cache_manager.h"
#include "engine/sampler.h"
#include "models/model.h"
#include "ops/exec_ctx.h"

namespace tandem::cli {

struct StepFigures {
  double seconds = 0;        // median of a step, sampling included
  std::int64_t num_ops = 0;  // kernels and copies of the recording; 0 where there is none
  double weight_bytes = 0;   // of the experts, those that this very step was routed to
  double cache_bytes = 0;    // latent rows read; states read and written
};

class StepBench {
 public:
  /// `batch` sequences of `context` cached tokens, each with `new_tokens` more.
  StepBench(const ExecCtx& ctx, const Model& model, const CacheSpec& spec, std::int64_t batch,
            std::int64_t context, std::int64_t new_tokens = 1);

  [[nodiscard]] StepFigures run(int num_steps);
  /// Of `rounds` passes, each traced. Errors: throws Error when a trace cannot be had.
  [[nodiscard]] PassProfile profile(const Roofs& roofs, int rounds);

 private:
  void fill_caches();
  [[nodiscard]] ModelBatch build();
  void step_ops(const ExecCtx& ctx, const ModelBatch& batch, RoutedExperts* routed);
  [[nodiscard]] std::unique_ptr<Recording> record(const ExecCtx& ctx, const ModelBatch& batch);
  [[nodiscard]] double seconds_of(const std::function<void()>& step, int num_steps);
  /// Distinct experts of every layer that a pass chooses.
  [[nodiscard]] std::vector<std::int64_t> distinct_experts(const ModelBatch& batch);
  [[nodiscard]] double weight_bytes(std::int64_t experts) const;

  const ExecCtx& ctx_;
  const Model& model_;
  CacheSpec spec_;
  std::int64_t batch_;
  std::int64_t context_;
  std::int64_t new_tokens_;
  CacheManager cache_;
  BatchBuilder builder_;
  Sampler sampler_;
  Storage logits_;
  std::vector<Sequence> sequences_;
};

}  // namespace tandem::cli
