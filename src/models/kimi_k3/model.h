// model.h — Kimi K3's text model. Differs from a plain pre-norm transformer in: KDA mixers (3 of 4
// layers) and NoPE MLA with an output gate; Attention Residuals instead of a residual stream (a
// layer reads a softmax mix over depth, its output only adds to the prefix sum of the current
// block); a dense first layer, then LatentMoE. One forward serves prefill, decode and training.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "models/kimi_k3/config.h"
#include "models/model.h"
#include "models/registry.h"
#include "nn/attn_res.h"
#include "nn/kda.h"
#include "nn/mla.h"
#include "nn/mlp.h"
#include "nn/moe.h"
#include "nn/rms_norm.h"

namespace tandem::kimi_k3 {

struct Layer {
  nn::RmsNorm input_layernorm;
  nn::RmsNorm post_attention_layernorm;
  nn::AttnRes self_attention_res;
  nn::AttnRes mlp_res;
  // Exactly one mixer and one FFN are set.
  std::unique_ptr<nn::Kda> kda;
  std::unique_ptr<nn::Mla> mla;
  std::unique_ptr<nn::Mlp> mlp;
  std::unique_ptr<nn::LatentMoe> moe;
  std::size_t cache_index = 0;  // among the layers with the same mixer
  std::int64_t moe_index = 0;   // among the MoE layers
};

/// What a test or a debugger may look at, layer by layer; each [T, D].
struct HiddenStates {
  std::vector<ConstF32Mat> mixer_in;  // AttnRes aggregate before the mixer
  std::vector<ConstF32Mat> ffn_in;    // AttnRes aggregate before the FFN
  std::vector<ConstF32Mat> prefix;    // P after the layer
};

class KimiK3 final : public Model {
 public:
  /// Errors: a Failure naming the folder, tensor and what was expected: missing, leftover,
  /// mis-shaped, bad scales.
  static Expected<std::unique_ptr<KimiK3>> load(const ExecCtx& ctx, const std::string& dir,
                                                LoadOptions options);

  [[nodiscard]] const Config& config() const { return config_; }
  [[nodiscard]] const CacheSpec& cache_spec() const override { return cache_spec_; }
  [[nodiscard]] std::int64_t vocab_size() const override { return config_.vocab_size; }
  [[nodiscard]] std::int64_t moe_layers() const override { return config_.num_moe_layers(); }
  [[nodiscard]] std::int64_t experts_per_token() const override {
    return config_.num_experts_per_token;
  }
  [[nodiscard]] ModelFootprint footprint() const override;

  void forward(const ExecCtx& ctx, F32Mat logits, const ModelBatch& batch,
               const CacheBuffers& cache, RoutedExperts* routed) const override;

  [[nodiscard]] nn::ParameterStore& parameters() override { return store_; }
  void refresh(const ExecCtx& ctx) override;
  ConstF32Mat forward_train(const ExecCtx& ctx, const TrainBatch& batch, Arena& keep) override;
  void head(const ExecCtx& ctx, F32Mat logits, ConstF32Mat hidden) const override;
  void head_backward(const ExecCtx& ctx, F32Mat d_hidden, ConstF32Mat d_logits,
                     ConstF32Mat hidden) override;
  void backward(const ExecCtx& ctx, ConstF32Mat d_hidden, const TrainBatch& batch) override;

  /// Of the last forward_train().
  [[nodiscard]] HiddenStates hidden_states() const;

 private:
  friend class WeightLoader;

  /// Activations of one layer that outlive it: sources of later aggregates, and what the backward
  /// reads.
  struct LayerSaved {
    ConstF32Mat prefix_in;   // P entering the layer
    ConstF32Mat mixer_in;    // aggregate before the mixer; in training
    ConstF32Mat prefix_mid;  // P after the mixer
    ConstF32Mat ffn_in;      // aggregate before the FFN; in training
    ConstF32Mat prefix_out;  // P after the FFN
    std::optional<nn::Kda::Saved> kda;
    std::optional<nn::Mla::Saved> mla;
    std::optional<nn::Mlp::Saved> mlp;
    std::optional<nn::LatentMoe::Saved> moe;
  };
  struct TrainSaved {
    std::vector<LayerSaved> layers;
    std::vector<ConstF32Mat> bank;
    ConstF32Mat final_in;  // last aggregate, before the final norm
  };
  struct Pass;  // the inputs and running state of one forward (model.cpp)

  explicit KimiK3(Config config) : config_(std::move(config)) {}
  ConstF32Mat run_layers(const ExecCtx& ctx, Pass& pass) const;
  void run_layer(const ExecCtx& ctx, const Layer& layer, std::int64_t index, Pass& pass) const;
  // y = base + what the sub-layer gives; base may be empty or y.
  void run_mixer(const ExecCtx& ctx, const Layer& layer, F32Mat y, ConstF32Mat base, ConstF32Mat x,
                 Pass& pass, LayerSaved& saved) const;
  void run_ffn(const ExecCtx& ctx, const Layer& layer, F32Mat y, ConstF32Mat base, ConstF32Mat x,
               Pass& pass, LayerSaved& saved) const;

  Config config_;
  CacheSpec cache_spec_;
  nn::ParameterStore store_;
  std::vector<Layer> layers_;
  nn::Parameter* embed_master_ = nullptr;  // trainable only
  Storage embed_storage_;                  // inference only, in the checkpoint's dtype
  WeightRef embed_;
  nn::RmsNorm norm_;
  nn::AttnRes output_attn_res_;
  nn::Linear lm_head_;
  TrainSaved saved_;
};

}  // namespace tandem::kimi_k3
