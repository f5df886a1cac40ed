#include "train/sft.h"

#include <chrono>
#include <cmath>
#include <numeric>

#include "core/checked_cast.h"

namespace tandem {

SftTrainer::SftTrainer(const ExecCtx& ctx, Model& model, const SftConfig& config,
                       std::vector<EncodedDemonstration> data)
    : ctx_(ctx),
      model_(model),
      config_(config),
      data_(std::move(data)),
      stream_(isize(data_), config.data.rollout_shuffle,
              static_cast<std::uint64_t>(config.train.seed)),
      optimizer_(model.parameters(), config.optimizer, config.train.train_iters),
      pass_(model, *ctx.device) {}

void SftTrainer::resume_after(std::int64_t step) {
  step_ = step;
  model_.refresh(ctx_);
}

SftStep SftTrainer::step() {
  const auto start = std::chrono::steady_clock::now();
  const std::int64_t batch_size = config_.train.global_batch_size;
  std::vector<TrainSequence> sequences;
  for (std::int64_t i = 0; i < batch_size; ++i) {
    const EncodedDemonstration& demonstration = data_[usize(stream_.at(step_ * batch_size + i))];
    sequences.push_back({demonstration.tokens, demonstration.num_prompt});
  }
  const std::vector<MicroBatch> batches =
      pack_sequences(sequences, config_.train.max_tokens_per_microbatch);
  std::int64_t num_targets =
      0;  // of the whole step, before the first backward: no cut may change the gradient
  for (const MicroBatch& batch : batches) {
    num_targets += isize(batch.targets);
  }

  SftStep result;
  model_.parameters().zero_grads();
  const float weight = -1.0F / static_cast<float>(num_targets);
  for (const MicroBatch& batch : batches) {
    const TokenPass::Result forward = pass_.forward(ctx_, batch, 1.0F);
    result.loss -= std::accumulate(forward.logprobs.begin(), forward.logprobs.end(), 0.0);
    result.num_tokens += isize(batch.token_ids);
    pass_.backward(ctx_, std::vector<float>(forward.logprobs.size(), weight), {});
  }
  result.loss /= static_cast<double>(num_targets);
  if (!std::isfinite(result.loss)) {
    throw_error("step {}: the loss is {}; lower optimizer.lr or start from another checkpoint",
                step_ + 1, result.loss);
  }
  result.optimizer = optimizer_.step(ctx_);
  model_.refresh(ctx_);
  result.step = ++step_;
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace tandem
