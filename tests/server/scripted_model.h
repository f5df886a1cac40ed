// scripted_model.h — a model that says what a test wants: the token after each position of a
// response is given.
#pragma once

#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "models/model.h"

namespace tandem::test {

/// Shared with the test, which changes it while nothing runs.
struct Script {
  std::int64_t prompt_size = 1;
  std::vector<std::int32_t> response;  // then `last` for ever
  std::int32_t last = 0;
  std::chrono::milliseconds step_time{0};
};

class ScriptedModel final : public Model {
 public:
  ScriptedModel(std::int64_t vocab, std::shared_ptr<const Script> script)
      : vocab_(vocab), script_(std::move(script)) {
    spec_.state_layers = {
        {.num_heads = 1, .key_dim = 1, .value_dim = 1, .conv_rows = 1, .conv_channels = 1}};
    spec_.latent_widths = {1};
  }
  [[nodiscard]] const CacheSpec& cache_spec() const override { return spec_; }
  [[nodiscard]] std::int64_t vocab_size() const override { return vocab_; }
  [[nodiscard]] std::int64_t moe_layers() const override { return 0; }
  [[nodiscard]] std::int64_t experts_per_token() const override { return 0; }
  [[nodiscard]] ModelFootprint footprint() const override { return {.weight_bytes = 1}; }

  void forward(const ExecCtx&, F32Mat logits, const ModelBatch& batch, const CacheBuffers&,
               RoutedExperts*) const override {
    std::this_thread::sleep_for(script_->step_time);
    std::int64_t next = 0;
    for (std::int64_t b = 0; b < batch.seqs.num_seqs(); ++b) {
      for (std::int64_t t = batch.seqs.begin(b); t < batch.seqs.begin(b + 1); ++t) {
        if (next < batch.logit_rows.size(0) && batch.logit_rows(next) == t) {
          const std::int64_t length = batch.kv_lens(b) - (batch.seqs.begin(b + 1) - t) + 1;
          write_logits(logits.row(next++), length - script_->prompt_size);
        }
      }
    }
  }

  [[nodiscard]] nn::ParameterStore& parameters() override { throw std::logic_error("serves only"); }
  void refresh(const ExecCtx&) override {}
  ConstF32Mat forward_train(const ExecCtx&, const TrainBatch&, Arena&) override { return {}; }
  void head(const ExecCtx&, F32Mat, ConstF32Mat) const override {}
  void head_backward(const ExecCtx&, F32Mat, ConstF32Mat, ConstF32Mat) override {}
  void backward(const ExecCtx&, ConstF32Mat, const TrainBatch&) override {}

 private:
  void write_logits(float* row, std::int64_t index) const {
    for (std::int64_t v = 0; v < vocab_; ++v) {
      row[v] = static_cast<float>(-v) * 0.01F;
    }
    const bool is_scripted =
        index >= 0 && index < static_cast<std::int64_t>(script_->response.size());
    const std::int32_t id =
        is_scripted ? script_->response[static_cast<std::size_t>(index)] : script_->last;
    row[id] = 20;
  }

  std::int64_t vocab_;
  std::shared_ptr<const Script> script_;
  CacheSpec spec_;
};

}  // namespace tandem::test
