#include "engine/sampler.h"

#include <cmath>

#include "core/rng.h"
#include "ops/loss.h"

namespace tandem {

Sampler::Sampler(std::int64_t max_rows)
    : rows_(usize(max_rows)),
      ids_(usize(max_rows)),
      temperatures_(usize(max_rows)),
      logprobs_(usize(max_rows)),
      sampled_(usize(max_rows)) {}

std::span<const SampledToken> Sampler::sample(const ExecCtx& ctx, ConstF32Mat logits,
                                              std::span<const SampleTarget> targets) {
  const std::int64_t n = isize(targets);
  TDM_CHECK(n <= isize(rows_) && logits.size(0) == n, n, rows_.size(), logits.size(0));
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const Sequence& seq = *targets[i].seq;
    const auto position = static_cast<std::uint64_t>(seq.length());
    rows_[i] = {seq.request.sampling,
                mix_key({seq.request.seed, seq.request.sequence_id, position})};
    const bool greedy = rows_[i].params.temperature < kGreedyTemperature;
    rows_[i].params.temperature = greedy ? 0.0F : rows_[i].params.temperature;
    temperatures_[i] = greedy ? 1.0F : rows_[i].params.temperature;
  }
  ops::sample(ctx, std::span(ids_).first(usize(n)), logits, std::span(rows_).first(usize(n)));
  // Always computed, also when nobody asks for it: the trainer's routine on the very logits the
  // token was drawn from, and the test that the row holds no NaN.
  ops::log_prob(ctx, {logprobs_.data(), {n}}, {}, logits, {ids_.data(), {n}},
                {temperatures_.data(), {n}});
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const bool valid = ids_[i] >= 0 && std::isfinite(logprobs_[i]);
    sampled_[i] = valid ? SampledToken{ids_[i], logprobs_[i]} : SampledToken{};
  }
  return std::span(sampled_).first(usize(n));
}

}  // namespace tandem
