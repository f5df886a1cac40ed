// replaceable_model.h — a model whose weights can be exchanged as a whole: the Engine keeps one
// reference for its life.
#pragma once

#include <memory>
#include <utility>

#include "core/error.h"
#include "models/model.h"

namespace tandem::server {

/// Serves only; belongs to the engine's thread.
class ReplaceableModel final : public Model {
 public:
  explicit ReplaceableModel(std::unique_ptr<Model> model) : model_(std::move(model)) {}

  /// Errors: a Failure that names what differs, and the old one stays; caches and logits of the
  /// engine were made for its shape.
  Status replace(std::unique_ptr<Model> model);

  [[nodiscard]] const CacheSpec& cache_spec() const override { return model_->cache_spec(); }
  [[nodiscard]] std::int64_t vocab_size() const override { return model_->vocab_size(); }
  [[nodiscard]] std::int64_t moe_layers() const override { return model_->moe_layers(); }
  [[nodiscard]] std::int64_t experts_per_token() const override {
    return model_->experts_per_token();
  }
  [[nodiscard]] ModelFootprint footprint() const override { return model_->footprint(); }
  void forward(const ExecCtx& ctx, F32Mat logits, const ModelBatch& batch,
               const CacheBuffers& cache, RoutedExperts* routed) const override {
    model_->forward(ctx, logits, batch, cache, routed);
  }

  [[nodiscard]] nn::ParameterStore& parameters() override { return model_->parameters(); }
  void refresh(const ExecCtx& ctx) override { model_->refresh(ctx); }
  ConstF32Mat forward_train(const ExecCtx& ctx, const TrainBatch& batch, Arena& keep) override {
    return model_->forward_train(ctx, batch, keep);
  }
  void head(const ExecCtx& ctx, F32Mat logits, ConstF32Mat hidden) const override {
    model_->head(ctx, logits, hidden);
  }
  void head_backward(const ExecCtx& ctx, F32Mat d_hidden, ConstF32Mat d_logits,
                     ConstF32Mat hidden) override {
    model_->head_backward(ctx, d_hidden, d_logits, hidden);
  }
  void backward(const ExecCtx& ctx, ConstF32Mat d_hidden, const TrainBatch& batch) override {
    model_->backward(ctx, d_hidden, batch);
  }

 private:
  std::unique_ptr<Model> model_;
};

}  // namespace tandem::server
