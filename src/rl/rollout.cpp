#include "rl/rollout.h"

#include <unordered_map>

#include "core/checked_cast.h"

namespace tandem {
namespace {

void fill(Sample& sample, RequestOutput output, const Tokenizer& tokenizer, RewardType reward) {
  sample.is_removed = output.finish_reason == FinishReason::kError ||
                      output.finish_reason == FinishReason::kAborted;
  sample.is_truncated = output.finish_reason == FinishReason::kLength;
  sample.weight_version = output.weight_version();
  sample.tokens = sample.problem->prompt;
  sample.num_prompt = isize(sample.tokens);
  sample.tokens.insert(sample.tokens.end(), output.tokens.begin(), output.tokens.end());
  sample.rollout_logprobs = std::move(output.logprobs);
  sample.routed_experts = std::move(output.routed_experts);
  sample.response = tokenizer.decode(output.tokens, SpecialText::kSkip);
  sample.grade = grade(reward, sample.response, sample.problem->gold,
                       output.finish_reason == FinishReason::kStop);
}

}  // namespace

std::vector<Sample> generate_samples(Engine& engine, const Tokenizer& tokenizer,
                                     std::span<const Problem* const> problems,
                                     const RolloutOptions& options,
                                     const RolloutProgress& progress) {
  const std::int64_t n = options.samples_per_prompt;
  std::vector<Sample> samples(problems.size() * usize(n));
  std::unordered_map<RequestId, std::size_t> index_of;
  for (std::size_t p = 0; p < problems.size(); ++p) {
    const std::int64_t group = options.first_group + static_cast<std::int64_t>(p);
    Request request;
    request.prompt = problems[p]->prompt;
    request.sampling = options.sampling;
    request.max_new_tokens = options.max_response_len;
    request.seed = options.seed;
    request.sequence_id = static_cast<std::uint64_t>(group * n);
    request.want_logprobs = true;
    request.want_routed_experts = options.want_routed_experts;
    const auto ids = engine.submit_group(request, n).value_or_throw();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::size_t index = p * usize(n) + i;
      index_of[ids[i]] = index;
      samples[index].group_index = group;
      samples[index].sample_index = static_cast<std::int64_t>(i);
      samples[index].problem = problems[p];
    }
  }
  std::int64_t finished = 0;
  std::int64_t num_failed = 0;
  std::string first_error;
  while (engine.has_work()) {
    for (const StepEvent& event : engine.step()) {
      if (event.finish) {
        RequestOutput output = engine.take_output(event.id).value_or_throw();
        if (output.finish_reason == FinishReason::kError && num_failed++ == 0) {
          first_error = output.error;
        }
        fill(samples[index_of.at(event.id)], std::move(output), tokenizer, options.reward);
        ++finished;
      }
    }
    if (progress) {
      progress(finished, isize(samples));
    }
  }
  if (num_failed > 0 && num_failed == isize(samples)) {
    throw_error(
        "none of {} responses could be computed: {}; lower optimizer.lr or start from "
        "another checkpoint",
        num_failed, first_error);
  }
  return samples;
}

SampleRecord to_record(const Sample& sample) {
  SampleRecord record;
  record.group_index = sample.group_index;
  record.sample_index = sample.sample_index;
  record.prompt = sample.problem->question;
  record.response = sample.response;
  record.label = sample.problem->label;
  record.tokens = sample.tokens;
  record.logprobs = sample.rollout_logprobs;
  record.loss_mask.assign(sample.rollout_logprobs.size(), 1);
  if (!sample.is_removed) {
    record.reward = sample.grade.reward;
  }
  record.status = sample.is_removed ? "failed" : sample.is_truncated ? "truncated" : "completed";
  record.grade = to_string(sample.grade.status);
  record.weight_version = sample.weight_version;
  return record;
}

double accuracy(std::span<const Sample> samples) {
  double sum = 0;
  std::int64_t count = 0;
  for (const Sample& sample : samples) {
    if (!sample.is_removed) {
      sum += sample.grade.reward;
      ++count;
    }
  }
  return count == 0 ? 0.0 : sum / static_cast<double>(count);
}

}  // namespace tandem
