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
  /// `model` must be loaded trainable and outlive this; `device` is where it lives.
  explicit TokenPass(Model& model, Device& device = host_device())
      : model_(model), activations_(std::size_t{64} << 20, device) {}

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

  struct HeadRows {
    std::int64_t count;
    ConstI32Vec ids;  // rows of hidden_
    ConstI32Vec targets;
    ConstF32Vec temperatures;
  };
  [[nodiscard]] HeadRows head_rows(std::int64_t begin) const;
  void run_layers(const ExecCtx& ctx, RoutedExperts* routed);

  Model& model_;
  Arena activations_;  // holds all below, of the last forward()
  TrainBatch input_;
  RoutedExperts routed_;
  ConstI32Vec rows_;
  ConstI32Vec targets_;
  ConstF32Vec temperatures_;
  ConstF32Mat hidden_;
};

}  // namespace tandem
