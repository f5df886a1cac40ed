// rules_rig.h — what rules, constraints and scores of a request must give, computed from its plain
// tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "core/checked_cast.h"
#include "core/rng.h"
#include "engine/request.h"
#include "ops/exec_ctx.h"
#include "ops/loss.h"
#include "ops/ref/sample_ref.h"
#include "support/fake_model.h"

namespace tandem::test {

/// Allows about a third of the vocabulary, and at least one token; which ones is a hash of all that
/// was accepted.
class FakeConstraint final : public TokenConstraint {
 public:
  struct Options {
    std::int64_t active_from = 0;  // tokens before are free
    std::int64_t complete_at = std::numeric_limits<std::int64_t>::max();
    std::int64_t dead_at = std::numeric_limits<std::int64_t>::max();     // nothing is allowed then
    std::int64_t refuses_at = std::numeric_limits<std::int64_t>::max();  // what it had allowed
  };
  explicit FakeConstraint(std::uint64_t seed, Options options) : hash_(seed), options_(options) {}
  explicit FakeConstraint(std::uint64_t seed) : FakeConstraint(seed, Options{}) {}

  [[nodiscard]] bool is_active() const override { return num_accepted_ >= options_.active_from; }
  void fill_mask(std::span<std::uint32_t> bits) override {
    TDM_CHECK(is_active() && isize(bits) == (FakeModel::kVocab + 31) / 32);
    // Beyond the vocabulary too: nobody may look there.
    for (std::size_t word = 0; word < bits.size(); ++word) {
      bits[word] = 0;
      for (std::size_t bit = 0; bit < 32; ++bit) {
        const auto id = static_cast<std::int32_t>(word * 32 + bit);
        bits[word] |= static_cast<std::uint32_t>(id >= FakeModel::kVocab || allows(id)) << bit;
      }
    }
  }
  [[nodiscard]] bool accept(std::int32_t id) override {
    if ((is_active() && !allows(id)) || num_accepted_ == options_.refuses_at) {
      return false;
    }
    hash_ = mix_key({hash_, static_cast<std::uint64_t>(id)});
    ++num_accepted_;
    return true;
  }
  [[nodiscard]] bool is_complete() const override { return num_accepted_ >= options_.complete_at; }
  [[nodiscard]] std::unique_ptr<TokenConstraint> clone() const override {
    return std::make_unique<FakeConstraint>(*this);
  }

  [[nodiscard]] bool allows(std::int32_t id) const {
    const auto sure = static_cast<std::int32_t>(hash_ % FakeModel::kVocab);
    return num_accepted_ < options_.dead_at &&
           (id == sure || mix_key({hash_, static_cast<std::uint64_t>(id), 1}) % 3 == 0);
  }

 private:
  std::uint64_t hash_;
  Options options_;
  std::int64_t num_accepted_ = 0;
};

/// A request owns its constraint: what is submitted is a copy.
[[nodiscard]] inline Request own_copy(const Request& request) {
  Request copy = request;
  if (request.constraint != nullptr) {
    copy.constraint = request.constraint->clone();
  }
  return copy;
}

[[nodiscard]] inline float expected_temperature(const Request& request) {
  const bool raw =
      request.logprob_mode == LogprobMode::kRaw || request.sampling.temperature < 1e-6F;
  return raw ? 1.0F : request.sampling.temperature;
}

/// A row of logits as the rules of `request` leave it. `tokens`: prompt and response so far.
[[nodiscard]] inline std::vector<float> logits_under_rules(const Request& request,
                                                           std::span<const std::int32_t> tokens,
                                                           const std::vector<std::int32_t>& eos_ids,
                                                           const FakeConstraint* constraint,
                                                           std::vector<float> logits) {
  const LogitRules& rules = request.rules;
  const auto response = tokens.subspan(request.prompt.size());
  const auto holds = [](const std::vector<std::int32_t>& ids, std::int32_t id) {
    return std::ranges::count(ids, id) > 0;
  };
  for (std::int32_t id = 0; id < FakeModel::kVocab; ++id) {
    float& z = logits[usize(id)];
    if (std::ranges::count(tokens, id) > 0) {
      z = z > 0 ? z / rules.repetition_penalty : z * rules.repetition_penalty;
    }
    const auto count = static_cast<float>(std::ranges::count(response, id));
    z = std::fma(-count, rules.frequency_penalty, z);
    z -= count > 0 ? rules.presence_penalty : 0.0F;
    for (const LogitBias& entry : rules.logit_bias) {
      z += entry.token == id ? entry.bias : 0.0F;
    }
    const bool stops = holds(request.stop_ids, id) || (!request.ignore_eos && holds(eos_ids, id));
    const bool too_early = isize(response) < rules.min_new_tokens && stops;
    const bool forbidden =
        constraint != nullptr && constraint->is_active() && !constraint->allows(id);
    if ((too_early || forbidden) && !std::isnan(z)) {
      z = -std::numeric_limits<float>::infinity();
    }
  }
  return logits;
}

/// Of one token, alone.
[[nodiscard]] inline float expected_logprob(const ExecCtx& ctx, std::vector<float> logits,
                                            std::int32_t token, float temperature) {
  float logprob = 0;
  ops::log_prob(ctx, {&logprob, {1}}, {}, {logits.data(), {1, isize(logits)}}, {&token, {1}},
                {&temperature, {1}});
  return logprob;
}

[[nodiscard]] inline std::vector<TokenLogprob> expected_top(const ExecCtx& ctx,
                                                            const std::vector<float>& logits,
                                                            const Request& request) {
  std::vector<TokenLogprob> top;
  const std::vector<std::int32_t> ranking = ref::ranking<float>(logits);
  for (std::int64_t i = 0; i < request.num_top_logprobs; ++i) {
    const std::int32_t id = ranking[usize(i)];
    top.push_back({id, expected_logprob(ctx, logits, id, expected_temperature(request))});
  }
  return top;
}

/// Fills the prompt's part of `output`.
inline void expect_prompt_scores(const ExecCtx& ctx, const FakeModel& model, const Request& request,
                                 RequestOutput& output) {
  if (request.prompt_logprobs_from < 0) {
    return;
  }
  for (std::int64_t i = request.prompt_logprobs_from; i < isize(request.prompt); ++i) {
    const bool any = i > 0;
    const std::vector<float> logits =
        any ? model.expected_logits(std::span(request.prompt).first(usize(i)))
            : std::vector<float>();
    output.prompt_logprobs.push_back(
        any ? expected_logprob(ctx, logits, request.prompt[usize(i)], expected_temperature(request))
            : std::numeric_limits<float>::quiet_NaN());
    if (request.num_top_logprobs > 0) {
      output.prompt_top_logprobs.push_back(any ? expected_top(ctx, logits, request)
                                               : std::vector<TokenLogprob>());
    }
  }
}

[[nodiscard]] inline bool same_logprobs(const std::vector<float>& a, const std::vector<float>& b) {
  return std::ranges::equal(
      a, b, [](float x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}
[[nodiscard]] inline bool same_top(const std::vector<std::vector<TokenLogprob>>& a,
                                   const std::vector<std::vector<TokenLogprob>>& b) {
  return std::ranges::equal(a, b, [](const auto& x, const auto& y) {
    return std::ranges::equal(x, y, [](const TokenLogprob& s, const TokenLogprob& t) {
      return s.token == t.token && s.logprob == t.logprob;
    });
  });
}

}  // namespace tandem::test
