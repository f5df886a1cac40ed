#include "cli/step_bench.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <span>
#include <utility>

#include "core/checked_cast.h"
#include "core/rng.h"
#include "core/timing.h"

namespace tandem::cli {
namespace {

constexpr std::int64_t kPageSize = 64;

std::int64_t pages_of(std::int64_t tokens) {
  return (tokens + kPageSize - 1) / kPageSize;
}

/// Repeats `pattern` over all of a buffer.
void fill(Device& device, void* data, std::int64_t bytes, std::span<const std::byte> pattern) {
  for (std::int64_t begin = 0; begin < bytes; begin += isize(pattern)) {
    const std::int64_t count = std::min(isize(pattern), bytes - begin);
    device.upload(static_cast<std::byte*>(data) + begin, pattern.data(), usize(count));
  }
}

}  // namespace

StepBench::StepBench(const ExecCtx& ctx, const Model& model, const CacheSpec& spec,
                     std::int64_t batch, std::int64_t context, std::int64_t new_tokens)
    : ctx_(ctx),
      model_(model),
      spec_(spec),
      batch_(batch),
      context_(context),
      new_tokens_(new_tokens),
      cache_(spec, batch * pages_of(context + new_tokens), kPageSize, batch, *ctx.device),
      builder_(batch * new_tokens, batch, pages_of(context + new_tokens), *ctx.device),
      sampler_(batch, model.vocab_size(), *ctx.device),
      logits_(batch * model.vocab_size() * 4, *ctx.device),
      sequences_(usize(batch)) {
  fill_caches();
  Rng rng(7);
  for (std::int64_t b = 0; b < batch; ++b) {
    Sequence& seq = sequences_[usize(b)];
    TDM_CHECK(cache_.open(seq.cache, context + new_tokens), b, context);
    seq.all_tokens.resize(usize(context + new_tokens));
    std::ranges::generate(seq.all_tokens, [&] {
      return static_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(model.vocab_size())));
    });
    seq.request.sampling.temperature = 1.0F;
    seq.request.sequence_id = static_cast<std::uint64_t>(b);
  }
}

void StepBench::fill_caches() {
  std::vector<float> values(std::size_t{1} << 22);
  Rng rng(11);
  // Some 0.1 each.
  std::ranges::generate(values, [&] { return static_cast<float>(0.2 * (rng.uniform() - 0.5)); });
  const CacheBuffers& buffers = cache_.buffers();
  std::vector<std::byte> pattern;
  for (const LatentRows& rows : buffers.latent_layers) {
    pattern.resize(usize(isize(values) * element_bytes(rows.format)));
    encode_latent(pattern.data(), rows.format, values);
    fill(*ctx_.device, rows.data, rows.num_rows * rows.row_bytes, pattern);
  }
  for (std::size_t i = 0; i < buffers.state_layers.size(); ++i) {
    fill(*ctx_.device, buffers.state_layers[i].states,
         batch_ * spec_.state_layers[i].state_floats() * 4, std::as_bytes(std::span(values)));
  }
}

ModelBatch StepBench::build() {
  std::vector<ScheduledChunk> chunks;
  std::vector<SampleTarget> targets;
  for (Sequence& seq : sequences_) {
    chunks.push_back({&seq, context_, new_tokens_});
    targets.push_back({&seq, isize(targets)});
  }
  sampler_.prepare(targets, batch_);
  return builder_.build(chunks, cache_);
}

void StepBench::step_ops(const ExecCtx& ctx, const ModelBatch& batch, RoutedExperts* routed) {
  const F32Mat logits(logits_.as<float>().data(), {batch_, model_.vocab_size()});
  const ArenaScope scope(*ctx.workspace);
  model_.forward(ctx, logits, batch, cache_.buffers(), routed);
  sampler_.run(ctx, logits);
}

/// Passes over prompts run as they come, as in the engine.
std::unique_ptr<Recording> StepBench::record(const ExecCtx& ctx, const ModelBatch& batch) {
  return new_tokens_ == 1 ? ctx.device->record([&] { step_ops(ctx, batch, nullptr); }) : nullptr;
}

std::vector<std::int64_t> StepBench::distinct_experts(const ModelBatch& batch) {
  const std::int64_t layers = model_.moe_layers();
  const std::int64_t top_k = model_.experts_per_token();
  const std::int64_t rows = batch.token_ids.size(0);
  Storage ids(rows * layers * top_k * 4, *ctx_.device);
  RoutedExperts routed{.ids = {ids.as<std::int32_t>().data(), {rows, layers * top_k}}};
  step_ops(ctx_, batch, layers > 0 ? &routed : nullptr);
  std::vector<std::int32_t> on_host(usize(rows * layers * top_k));
  ctx_.device->download(on_host.data(), ids.data(), usize(ids.size_bytes()));
  std::vector<std::set<std::int32_t>> hit(usize(layers));
  for (std::int64_t i = 0; i < isize(on_host); ++i) {
    hit[usize(i / top_k % layers)].insert(on_host[usize(i)]);
  }
  std::vector<std::int64_t> counts;
  std::ranges::transform(hit, std::back_inserter(counts),
                         [](const std::set<std::int32_t>& ids_hit) { return isize(ids_hit); });
  return counts;
}

double StepBench::weight_bytes(std::int64_t experts) const {
  const ModelFootprint footprint = model_.footprint();
  const std::int64_t layers = model_.moe_layers();
  const auto of_all =
      static_cast<double>(std::max<std::int64_t>(layers * footprint.num_experts, 1));
  const double expert_bytes = static_cast<double>(footprint.expert_bytes) / of_all;
  const double dense = static_cast<double>(footprint.decode_read_bytes) -
                       expert_bytes * static_cast<double>(layers * model_.experts_per_token());
  return dense + expert_bytes * static_cast<double>(experts);
}

/// Median of a few samples, each the mean of `num_steps`.
double StepBench::seconds_of(const std::function<void()>& step, int num_steps) {
  constexpr int kSamples = 5;
  std::vector<double> seconds;
  step();
  ctx_.device->synchronize();
  for (int sample = 0; sample < kSamples; ++sample) {
    const auto start = Clock::now();
    for (int i = 0; i < num_steps; ++i) {
      step();
    }
    ctx_.device->synchronize();
    seconds.push_back(seconds_since(start) / num_steps);
  }
  return median(seconds);
}

StepFigures StepBench::run(int num_steps) {
  const ModelBatch batch = build();
  const std::vector<std::int64_t> experts = distinct_experts(batch);
  step_ops(ctx_, batch, nullptr);  // every buffer has its size, every kernel is loaded
  const auto recording = record(ctx_, batch);
  const double seconds = seconds_of(
      [&] { recording ? recording->launch() : step_ops(ctx_, batch, nullptr); }, num_steps);
  return {.seconds = seconds,
          .num_ops = recording ? recording->num_ops() : 0,
          .weight_bytes =
              weight_bytes(std::accumulate(experts.begin(), experts.end(), std::int64_t{0})),
          .cache_bytes = static_cast<double>(
              batch_ * (2 * spec_.bytes_per_sequence() + context_ * spec_.bytes_per_token()))};
}

PassProfile StepBench::profile(const Roofs& roofs, int rounds) {
  const ModelBatch batch = build();
  const PassData data{
      .experts = distinct_experts(batch),
      .keys = batch_ * (context_ + new_tokens_),
      .pairs = batch_ * (new_tokens_ * context_ + new_tokens_ * (new_tokens_ + 1) / 2)};
  step_ops(ctx_, batch, nullptr);
  const auto untraced_recording = record(ctx_, batch);
  const double untraced = seconds_of(
      [&] { untraced_recording ? untraced_recording->launch() : step_ops(ctx_, batch, nullptr); },
      new_tokens_ == 1 ? rounds : 1);

  Profiler profiler(*ctx_.device);
  ExecCtx observed = ctx_;
  observed.profiler = &profiler;
  // CUPTI is there before the graph that it shall look into.
  static_cast<void>(ctx_.device->trace([&] { step_ops(ctx_, batch, nullptr); }));
  const auto recording = record(observed, batch);
  std::vector<std::vector<TraceEvent>> traces;
  std::vector<Profiler::Call> calls;
  for (int i = 0; i < rounds; ++i) {
    if (!recording) {
      profiler.clear();
    }
    traces.push_back(ctx_.device->trace(
        [&] { recording ? recording->launch() : step_ops(observed, batch, nullptr); }));
    if (calls.empty()) {
      calls = profiler.calls();
    }
    for (std::size_t c = 0; c < calls.size(); ++c) {  // where nothing is traced, the fastest
      calls[c].seconds = std::min(calls[c].seconds, profiler.calls()[c].seconds);
    }
  }
  PassProfile profile = make_profile(calls, data, roofs, traces);
  profile.untraced_us = 1e6 * untraced;
  return profile;
}

}  // namespace tandem::cli
