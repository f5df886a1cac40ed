// token_pass.h — one micro-batch through the model: log-probabilities and entropies of its targets,
// then the gradients that a loss puts on them. SFT and RL differ only in those gradients.
#pragma once

#include <span>
#include <vector>

#include "core/arena.h"
#include "models/model.h"
#include "train/packing.h"

namespace tandem {

class TokenPass {
 public:
  /// `model` must be loaded trainable and outlive this.
  explicit TokenPass(Model& model) : model_(model) {}

  struct Result {
    std::vector<float> logprobs;   // [R] natural log, full vocabulary, at the given temperature
    std::vector<float> entropies;  // [R]
  };
  /// Forward; keeps what backward() needs. `routed` (may be null): expert ids [T, moe_layers *
  /// top_k] to record or replay.
  Result forward(const ExecCtx& ctx, const MicroBatch& batch, float temperature,
                 RoutedExperts* routed = nullptr);

  /// Accumulates parameter gradients of a loss with the given derivatives, for the last forward().
  /// Shapes: d_logprobs [R]; d_entropies [R] or empty.
  void backward(const ExecCtx& ctx, std::span<const float> d_logprobs,
                std::span<const float> d_entropies);

 private:
  // Rows whose logits exist at one time: 1,024 rows of K3's vocabulary are 0.7 GB.
  static constexpr std::int64_t kHeadRows = 1024;

  Model& model_;
  Arena activations_{std::size_t{64} << 20};
  const MicroBatch* batch_ =
      nullptr;  // of the last forward(); owned by the caller until backward() returns
  RoutedExperts* routed_ = nullptr;
  float temperature_ = 1.0F;
  ConstF32Mat hidden_;
};

}  // namespace tandem
