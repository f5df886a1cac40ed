// step_bench.h — one decode step of a model at a given batch and context, without the prompts:
// caches are filled with random numbers, and the step is recorded and repeated.
#pragma once

#include <cstdint>
#include <vector>

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
  StepBench(const ExecCtx& ctx, const Model& model, const CacheSpec& spec, std::int64_t batch,
            std::int64_t context);

  [[nodiscard]] StepFigures run(int num_steps);

 private:
  void fill_caches();
  void step_ops(const ModelBatch& batch, RoutedExperts* routed);
  [[nodiscard]] double weight_bytes(const ModelBatch& batch);

  const ExecCtx& ctx_;
  const Model& model_;
  CacheSpec spec_;
  std::int64_t batch_;
  std::int64_t context_;
  CacheManager cache_;
  BatchBuilder builder_;
  Sampler sampler_;
  Storage logits_;
  std::vector<Sequence> sequences_;
};

/// Bytes per second of copying 2 GiB inside the device, read and written: the roof of a step.
[[nodiscard]] double copy_bandwidth(Device& device);

}  // namespace tandem::cli
