#include "engine/sampler.h"

#include <algorithm>
#include <cmath>

#include "core/rng.h"
#include "ops/loss.h"

namespace tandem {
namespace {

constexpr std::int64_t kInputBytes = sizeof(SampleRow) + sizeof(float);
constexpr std::int64_t kResultBytes = sizeof(std::int32_t) + sizeof(float);

}  // namespace

float reported_temperature(const Request& request) {
  const bool own = request.logprob_mode == LogprobMode::kRaw ||
                   request.sampling.temperature < kGreedyTemperature;
  return own ? 1.0F : request.sampling.temperature;
}

std::int64_t Sampler::bytes(std::int64_t max_rows, std::int64_t vocab) {
  return max_rows * (kInputBytes + kResultBytes) + LogitChanger::bytes(vocab);
}

Sampler::Sampler(std::int64_t max_rows, std::int64_t vocab, Device& device)
    : device_(device),
      max_rows_(max_rows),
      host_inputs_(max_rows * kInputBytes, device.host_visible() ? device : host_device()),
      host_results_(max_rows * kResultBytes, device.host_visible() ? device : host_device()),
      changer_(max_rows, vocab, device),
      sampled_(usize(max_rows)) {
  if (!device.host_visible()) {
    device_inputs_ = Storage(max_rows * kInputBytes, device);
    device_results_ = Storage(max_rows * kResultBytes, device);
  }
}

Sampler::Inputs Sampler::inputs(std::byte* base) const {
  auto* const rows = reinterpret_cast<SampleRow*>(base);
  return {{rows, usize(max_rows_)}, {reinterpret_cast<float*>(rows + max_rows_), usize(max_rows_)}};
}

Sampler::Results Sampler::results(std::byte* base) const {
  auto* const ids = reinterpret_cast<std::int32_t*>(base);
  return {{ids, usize(max_rows_)}, {reinterpret_cast<float*>(ids + max_rows_), usize(max_rows_)}};
}

void Sampler::prepare(std::span<const SampleTarget> targets, std::int64_t num_rows) {
  num_targets_ = isize(targets);
  TDM_CHECK(num_targets_ <= num_rows && num_rows <= max_rows_, num_targets_, num_rows, max_rows_);
  const bool any_rules = std::ranges::any_of(
      targets, [](const SampleTarget& target) { return target.seq->changes_logits(); });
  changed_ = any_rules ? targets : std::span<const SampleTarget>();
  const Inputs in = inputs(host_inputs_.data());
  for (std::size_t i = 0; i < usize(num_rows); ++i) {
    in.rows[i] = {};
    in.rows[i].params.temperature = 0.0F;
    in.temperatures[i] = 1.0F;
    if (i >= targets.size()) {
      continue;
    }
    const Sequence& seq = *targets[i].seq;
    const auto position = static_cast<std::uint64_t>(seq.length());
    in.rows[i] = {seq.request.sampling,
                  mix_key({seq.request.seed, seq.request.sequence_id, position})};
    in.temperatures[i] = reported_temperature(seq.request);
    if (in.rows[i].params.temperature < kGreedyTemperature) {
      in.rows[i].params.temperature = 0.0F;
    }
  }
  if (!device_.host_visible()) {
    device_.upload(device_inputs_.data(), host_inputs_.data(), usize(max_rows_ * kInputBytes));
  }
}

void Sampler::run(const ExecCtx& ctx, ConstF32Mat logits) {
  draw(ctx, logits, logits);
}

void Sampler::run_with_rules(const ExecCtx& ctx, ConstF32Mat logits) {
  TDM_CHECK(logits.contiguous() && logits.size(0) == num_targets_, logits.size(0), num_targets_);
  const ArenaScope scope(*ctx.workspace);
  const F32Mat copy(ctx.workspace->take<float>(logits.numel()).data(), logits.shape());
  device_.copy(copy.data(), logits.data(), usize(logits.numel()) * sizeof(float));
  changer_.apply(ctx, copy, changed_);
  draw(ctx, copy, logits);
}

void Sampler::draw(const ExecCtx& ctx, ConstF32Mat logits, ConstF32Mat own) {
  const bool shared = device_.host_visible();
  const Inputs in = inputs(shared ? host_inputs_.data() : device_inputs_.data());
  const Results out = results(shared ? host_results_.data() : device_results_.data());
  const std::int64_t n = logits.size(0);
  ops::sample(ctx, out.ids.first(usize(n)), logits, in.rows.first(usize(n)));
  // Always computed, also when nobody asks for it: the trainer's routine on the very logits the
  // model gave, and the test that the row holds no NaN.
  ops::log_prob(ctx, {out.logprobs.data(), {n}}, {}, own, {out.ids.data(), {n}},
                {in.temperatures.data(), {n}});
}

std::span<const SampledToken> Sampler::collect() {
  if (num_targets_ > 0 && !device_.host_visible()) {
    device_.download(host_results_.data(), device_results_.data(), usize(max_rows_ * kResultBytes));
  }
  const Results out = results(host_results_.data());
  for (std::size_t i = 0; i < usize(num_targets_); ++i) {
    const bool valid = out.ids[i] >= 0 && std::isfinite(out.logprobs[i]);
    sampled_[i] = valid ? SampledToken{out.ids[i], out.logprobs[i]} : SampledToken{};
    sampled_[i].none_allowed =
        !changed_.empty() && changer_.forbids_all(static_cast<std::int64_t>(i));
  }
  return std::span(sampled_).first(usize(num_targets_));
}

}  // namespace tandem
