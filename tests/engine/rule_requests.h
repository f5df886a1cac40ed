// rule_requests.h — requests with rules, constraints and scores of every kind, and what is expected
// of them on any device.
#pragma once

#include <memory>
#include <vector>

#include "engine_rig.h"

namespace tandem::test {

[[nodiscard]] inline std::shared_ptr<FakeConstraint> constrained(
    std::uint64_t seed, FakeConstraint::Options options = {}) {
  return std::make_shared<FakeConstraint>(seed, options);
}

/// `count` requests in which every rule and report occurs alone, with others and not at all.
[[nodiscard]] inline std::vector<Request> requests_with_rules(std::int64_t count) {
  std::vector<Request> requests = mixed_requests(count);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    Request& request = requests[i];
    Rng rng(mix_key({i, 0x7D1E5}));
    LogitRules& rules = request.rules;
    if (i % 3 == 0) {
      continue;
    }
    rules.repetition_penalty = rng.below(2) == 0 ? 1.0F : 1.5F;
    rules.frequency_penalty = rng.below(2) == 0 ? 0.0F : 0.75F;
    rules.presence_penalty = rng.below(2) == 0 ? 0.0F : -0.5F;
    if (rng.below(2) == 0) {
      rules.logit_bias = {{5, 3.5F}, {static_cast<std::int32_t>(rng.below(5)), -100.0F}, {36, 2}};
    }
    if (rng.below(2) == 0) {
      request.stop_ids = {3, 11, 5};
      rules.min_new_tokens = request.max_new_tokens / 2;
    }
    if (rng.below(2) == 0) {
      request.constraint = constrained(i, {.active_from = static_cast<std::int64_t>(rng.below(4))});
    }
    request.num_top_logprobs = rng.below(2) == 0 ? 0 : static_cast<std::int64_t>(rng.below(21));
    request.logprob_mode = rng.below(2) == 0 ? LogprobMode::kScaled : LogprobMode::kRaw;
  }
  return requests;
}

inline void expect_all_with_rules(Rig& rig, Engine& engine, const std::vector<Request>& requests,
                                  std::int64_t preempt_every = 0) {
  std::vector<RequestId> ids;
  ids.reserve(requests.size());
  for (const Request& request : requests) {
    ids.push_back(engine.submit(own_copy(request)).value_or_throw());
  }
  for (std::int64_t step = 1; engine.has_work(); ++step) {
    engine.step();
    engine.check_integrity();
    if (preempt_every > 0 && step % preempt_every == 0) {
      engine.preempt_all();
    }
  }
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const RequestOutput output = engine.take_output(ids[i]).value_or_throw();
    EXPECT_TRUE(same_output(output, expected_output(rig, requests[i], engine.options().eos_ids)))
        << "request " << i;
  }
  expect_idle_and_empty(engine);
}

[[nodiscard]] inline Request score_only(const Request& request) {
  Request scoring = request;
  scoring.max_new_tokens = 0;
  return scoring;
}

/// Every kind of prompt score beside plain requests.
[[nodiscard]] inline std::vector<Request> scored_requests(std::int64_t count) {
  std::vector<Request> requests = mixed_requests(count);
  for (std::size_t i = 0; i < requests.size(); ++i) {
    Request& request = requests[i];
    if (i % 4 == 3) {
      continue;
    }
    Rng rng(mix_key({i, 0x5C02E}));
    request.prompt_logprobs_from = static_cast<std::int64_t>(rng.below(request.prompt.size() + 1));
    request.num_top_logprobs = i % 2 == 0 ? 0 : static_cast<std::int64_t>(rng.below(6));
    request.logprob_mode = i % 5 == 0 ? LogprobMode::kRaw : LogprobMode::kScaled;
    if (i % 3 == 0) {
      request = score_only(request);
    }
  }
  return requests;
}

/// Constraints that end in nothing, or go back on what they allowed, beside one that does not.
inline void expect_dead_ends(Rig& rig) {
  const auto engine = rig.engine(small_options());
  Request dead = make_request(5, 12, 1);
  dead.constraint = constrained(1, {.dead_at = 3});
  Request refused = make_request(5, 12, 1);
  refused.constraint = constrained(1, {.refuses_at = 2});
  Request other = make_request(6, 12, 2);
  other.constraint = constrained(2);
  const RequestId dead_id = engine->submit(dead).value_or_throw();
  const RequestId refused_id = engine->submit(refused).value_or_throw();
  const RequestId other_id = engine->submit(own_copy(other)).value_or_throw();
  engine->run_until_idle();
  RequestOutput output = engine->take_output(dead_id).value_or_throw();
  EXPECT_EQ(output.finish_reason, FinishReason::kError);
  EXPECT_EQ(output.error, "the grammar allows no token at position 8");
  EXPECT_EQ(output.tokens.size(), 3U);
  output = engine->take_output(refused_id).value_or_throw();
  EXPECT_EQ(output.finish_reason, FinishReason::kError);
  EXPECT_EQ(output.error.find("the grammar refuses token"), 0U) << output.error;
  EXPECT_TRUE(
      same_output(engine->take_output(other_id).value_or_throw(), expected_output(rig, other)));
  expect_idle_and_empty(*engine);
}

}  // namespace tandem::test
