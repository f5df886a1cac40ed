// rollout.h — sampled trajectories: problems in, graded samples out.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "rl/prompts.h"
#include "rl/reward.h"
#include "rl/run_store.h"
#include "text/tokenizer.h"

namespace tandem {

/// One sampled response. Invariant: rollout_logprobs has one entry a response token, tokens =
/// prompt + response.
struct Sample {
  std::int64_t group_index = 0;
  std::int64_t sample_index = 0;  // inside the group
  const Problem* problem = nullptr;
  std::vector<std::int32_t> tokens;
  std::int64_t num_prompt = 0;
  std::vector<float> rollout_logprobs;
  std::vector<std::int32_t>
      routed_experts;    // [tokens - 1, moe_layers * top_k], only when asked for
  std::string response;  // without special tokens
  RewardResult grade;
  bool is_truncated = false;
  bool is_removed = false;  // the engine failed: not the policy's fault
  std::int64_t weight_version = 0;

  [[nodiscard]] std::int64_t num_response() const {
    return static_cast<std::int64_t>(rollout_logprobs.size());
  }
};

struct RolloutOptions {
  std::int64_t samples_per_prompt = 1;
  SamplingParams sampling;
  std::int64_t max_response_len = 0;  // tokens
  RewardType reward = RewardType::kGsm8k;
  bool want_routed_experts = false;
  std::uint64_t seed = 0;        // with (group, sample, position) it decides every draw
  std::int64_t first_group = 0;  // group_index of the first problem
};

/// `finished` of `total` samples are done.
using RolloutProgress = std::function<void(std::int64_t finished, std::int64_t total)>;

/// Samples in (group, sample) order, each graded as it finishes.   Errors: throws Error when the
/// engine refuses a prompt (longer than its max_seq_len), or when every response failed: the
/// weights have diverged.
std::vector<Sample> generate_samples(Engine& engine, const Tokenizer& tokenizer,
                                     std::span<const Problem* const> problems,
                                     const RolloutOptions& options,
                                     const RolloutProgress& progress = {});

/// The row of the run store.
[[nodiscard]] SampleRecord to_record(const Sample& sample);

/// Mean reward of the samples that were not removed.
[[nodiscard]] double accuracy(std::span<const Sample> samples);

}  // namespace tandem
