#include "cli/step_bench.h"

#include <algorithm>
#include <set>
#include <span>
#include <utility>

#include "core/checked_cast.h"
#include "core/rng.h"
#include "core/timing.h"

namespace tandem::cli {
namespace {

constexpr std::int64_t kPageSize = 64;

std::int64_t pages_of(std::int64_t context) {
  return (context + kPageSize) / kPageSize;
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
                     std::int64_t batch, std::int64_t context)
    : ctx_(ctx),
      model_(model),
      spec_(spec),
      batch_(batch),
      context_(context),
      cache_(spec, batch * pages_of(context), kPageSize, batch, *ctx.device),
      builder_(batch, batch, pages_of(context), *ctx.device),
      sampler_(batch, *ctx.device),
      logits_(batch * model.vocab_size() * 4, *ctx.device),
      sequences_(usize(batch)) {
  fill_caches();
  Rng rng(7);
  for (std::int64_t b = 0; b < batch; ++b) {
    Sequence& seq = sequences_[usize(b)];
    TDM_CHECK(cache_.open(seq.cache, context + 1), b, context);
    seq.all_tokens.resize(usize(context + 1));
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

void StepBench::step_ops(const ModelBatch& batch, RoutedExperts* routed) {
  const F32Mat logits(logits_.as<float>().data(), {batch_, model_.vocab_size()});
  const ArenaScope scope(*ctx_.workspace);
  model_.forward(ctx_, logits, batch, cache_.buffers(), routed);
  sampler_.run(ctx_, logits);
}

/// Runs a step and counts the distinct experts of every layer.
double StepBench::weight_bytes(const ModelBatch& batch) {
  const ModelFootprint footprint = model_.footprint();
  const std::int64_t layers = model_.moe_layers();
  const std::int64_t top_k = model_.experts_per_token();
  Storage ids(batch_ * layers * top_k * 4, *ctx_.device);
  RoutedExperts routed{.ids = {ids.as<std::int32_t>().data(), {batch_, layers * top_k}}};
  step_ops(batch, &routed);
  std::vector<std::int32_t> on_host(usize(batch_ * layers * top_k));
  ctx_.device->download(on_host.data(), ids.data(), usize(ids.size_bytes()));
  std::set<std::pair<std::int64_t, std::int32_t>> hit;
  for (std::int64_t i = 0; i < isize(on_host); ++i) {
    hit.emplace(i / top_k % layers, on_host[usize(i)]);
  }
  const double experts =
      static_cast<double>(std::max<std::int64_t>(layers * footprint.num_experts, 1));
  const double expert_bytes = static_cast<double>(footprint.expert_bytes) / experts;
  const double dense = static_cast<double>(footprint.decode_read_bytes) -
                       expert_bytes * static_cast<double>(layers * top_k);
  return dense + expert_bytes * static_cast<double>(hit.size());
}

StepFigures StepBench::run(int num_steps) {
  std::vector<ScheduledChunk> chunks;
  std::vector<SampleTarget> targets;
  for (Sequence& seq : sequences_) {
    chunks.push_back({&seq, context_, 1});
    targets.push_back({&seq, isize(targets)});
  }
  const ModelBatch batch = builder_.build(chunks, cache_);
  sampler_.prepare(targets, batch_);
  const double weight_bytes_read = weight_bytes(batch);
  step_ops(batch, nullptr);  // every buffer has its size, every kernel is loaded
  const auto recording = ctx_.device->record([&] { step_ops(batch, nullptr); });
  const auto step = [&] { recording ? recording->launch() : step_ops(batch, nullptr); };
  step();
  ctx_.device->synchronize();
  constexpr int kSamples = 5;
  std::vector<double> seconds;
  for (int sample = 0; sample < kSamples; ++sample) {
    const auto start = Clock::now();
    for (int i = 0; i < num_steps; ++i) {
      step();
    }
    ctx_.device->synchronize();
    seconds.push_back(seconds_since(start) / num_steps);
  }
  return {.seconds = median(seconds),
          .num_ops = recording ? recording->num_ops() : 0,
          .weight_bytes = weight_bytes_read,
          .cache_bytes = static_cast<double>(
              batch_ * (2 * spec_.bytes_per_sequence() + context_ * spec_.bytes_per_token()))};
}

double copy_bandwidth(Device& device) {
  const std::int64_t bytes = std::int64_t{2} << 30;
  Storage from(bytes, device);
  Storage to(bytes, device);
  fill(device, from.data(), bytes, std::vector<std::byte>(1 << 22, std::byte{0x3F}));
  std::vector<double> seconds;
  for (int i = 0; i < 7; ++i) {
    device.synchronize();
    const auto start = Clock::now();
    device.copy(to.data(), from.data(), usize(bytes));
    device.synchronize();
    seconds.push_back(seconds_since(start));
  }
  return 2.0 * static_cast<double>(bytes) / median(seconds);
}

}  // namespace tandem::cli
