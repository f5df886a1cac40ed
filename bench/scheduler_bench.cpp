// What a decode step costs besides the model: scheduler, caches, batch arrays, sampling of a tiny
// vocabulary and bookkeeping, with a model that computes nothing.
//
//   build/bench/bench/scheduler_bench
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <fmt/format.h>

#include "backends/cpu/cpu_backend.h"
#include "core/arena.h"
#include "core/checked_cast.h"
#include "core/thread_pool.h"
#include "engine/engine.h"

namespace tandem {
namespace {

constexpr std::int64_t kPrompt = 128;
constexpr std::int64_t kTokens = 1000;

class InstantModel final : public Model {
 public:
  InstantModel() {
    spec_.state_layers = {
        {.num_heads = 1, .key_dim = 1, .value_dim = 1, .conv_rows = 1, .conv_channels = 1}};
    spec_.latent_widths = {1};
  }
  [[nodiscard]] const CacheSpec& cache_spec() const override { return spec_; }
  [[nodiscard]] std::int64_t vocab_size() const override { return 8; }
  [[nodiscard]] std::int64_t moe_layers() const override { return 0; }
  [[nodiscard]] std::int64_t experts_per_token() const override { return 0; }
  [[nodiscard]] ModelFootprint footprint() const override { return {}; }
  void forward(const ExecCtx&, F32Mat logits, const ModelBatch&, const CacheBuffers&,
               RoutedExperts*) const override {
    std::fill_n(logits.data(), logits.size(0) * logits.size(1), 0.0F);
  }

  [[nodiscard]] nn::ParameterStore& parameters() override { return not_trained(); }
  void refresh(const ExecCtx&) override { not_trained(); }
  ConstF32Mat forward_train(const ExecCtx&, const TrainBatch&, Arena&) override {
    not_trained();
    return {};
  }
  void head(const ExecCtx&, F32Mat, ConstF32Mat) const override { not_trained(); }
  void head_backward(const ExecCtx&, F32Mat, ConstF32Mat, ConstF32Mat) override { not_trained(); }
  void backward(const ExecCtx&, ConstF32Mat, const TrainBatch&) override { not_trained(); }

 private:
  [[noreturn]] static nn::ParameterStore& not_trained() {
    throw Error("the bench trains no model");
  }

  CacheSpec spec_;
};

/// Median microseconds of the steps in which all `batch` sequences decode.
double step_us(std::int64_t batch, bool prefix_cache) {
  const InstantModel model{};
  ThreadPool pool(1);
  Arena arena;
  const ExecCtx ctx{&cpu_backend(), &pool, &arena, nullptr, &host_device()};
  EngineOptions options;
  options.max_running_seqs = batch;
  options.max_batch_tokens = batch * kPrompt;
  options.prefix_cache = prefix_cache;
  Engine engine(model, ctx, options);
  for (std::int64_t i = 0; i < batch; ++i) {
    Request request;
    request.prompt.assign(usize(kPrompt), static_cast<std::int32_t>(i % model.vocab_size()));
    request.max_new_tokens = kTokens;
    request.want_logprobs = true;
    request.sequence_id = static_cast<std::uint64_t>(i);
    (void)engine.submit(request).value_or_throw();
  }
  std::vector<double> times;
  while (engine.has_work()) {
    const std::int64_t before = engine.stats().decode_tokens;
    const auto start = std::chrono::steady_clock::now();
    engine.step();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    if (engine.stats().decode_tokens - before == batch) {
      times.push_back(time.count());
    }
  }
  std::ranges::nth_element(times, times.begin() + isize(times) / 2);
  return times[times.size() / 2];
}

}  // namespace
}  // namespace tandem

int main() {
  for (const std::int64_t batch : {1, 8, 64}) {
    fmt::print("batch {:>3}: {:6.2f} us a step, {:6.2f} us without the prefix cache\n", batch,
               tandem::step_us(batch, true), tandem::step_us(batch, false));
  }
  return 0;
}
