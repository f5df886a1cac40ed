// engine_requests.cpp — the request boundary of the engine: validating, queueing, handing out.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "engine/engine.h"

namespace tandem {

namespace {

Status validate_sampling(const SamplingParams& params) {
  if (!std::isfinite(params.temperature) || params.temperature < 0) {
    return fail("temperature is {}: expected a finite number >= 0", params.temperature);
  }
  if (params.top_k < 0) {
    return fail("top_k is {}: expected 0 (off) or a positive number of tokens", params.top_k);
  }
  if (!(params.top_p > 0 && params.top_p <= 1)) {
    return fail("top_p is {}: expected a number in (0, 1]", params.top_p);
  }
  if (!(params.min_p >= 0 && params.min_p <= 1)) {
    return fail("min_p is {}: expected a number in [0, 1]", params.min_p);
  }
  return Ok{};
}

Status validate_ids(std::string_view field, std::span<const std::int32_t> ids,
                    std::int64_t vocab_size) {
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || ids[i] >= vocab_size) {
      return fail("{}[{}] is {}: expected a token id in [0, {})", field, i, ids[i], vocab_size);
    }
  }
  return Ok{};
}

Status validate_limits(const Request& request) {
  for (const auto& [field, seconds] : {std::pair{"queue_timeout_s", request.queue_timeout_s},
                                       std::pair{"timeout_s", request.timeout_s}}) {
    if (!std::isfinite(seconds) || seconds < 0) {
      return fail("{} is {}: expected 0 (never) or a number of seconds", field, seconds);
    }
  }
  return Ok{};
}

Status validate_rules(const Request& request, std::int64_t vocab_size) {
  const LogitRules& rules = request.rules;
  if (!(rules.repetition_penalty > 0 && rules.repetition_penalty <= 2)) {
    return fail("repetition_penalty is {}: expected a number in (0, 2]", rules.repetition_penalty);
  }
  if (!(std::abs(rules.frequency_penalty) <= 2)) {
    return fail("frequency_penalty is {}: expected a number in [-2, 2]", rules.frequency_penalty);
  }
  if (!(std::abs(rules.presence_penalty) <= 2)) {
    return fail("presence_penalty is {}: expected a number in [-2, 2]", rules.presence_penalty);
  }
  if (rules.min_new_tokens < 0 || rules.min_new_tokens > request.max_new_tokens) {
    return fail("min_new_tokens is {}: expected 0 to max_new_tokens ({})", rules.min_new_tokens,
                request.max_new_tokens);
  }
  std::vector<std::int32_t> ids;
  for (const LogitBias& entry : rules.logit_bias) {
    ids.push_back(entry.token);
    if (!(std::abs(entry.bias) <= 100)) {
      return fail("logit_bias of token {} is {}: expected a number in [-100, 100]", entry.token,
                  entry.bias);
    }
  }
  if (Status valid = validate_ids("logit_bias", ids, vocab_size); !valid) {
    return valid;
  }
  std::ranges::sort(ids);
  if (const auto twice = std::ranges::adjacent_find(ids); twice != ids.end()) {
    return fail("logit_bias has token {} twice: expected each token once", *twice);
  }
  return Ok{};
}

Status validate_logprobs(const Request& request) {
  if (request.num_top_logprobs < 0 || request.num_top_logprobs > kMaxTopLogprobs) {
    return fail("num_top_logprobs is {}: expected 0 to {}", request.num_top_logprobs,
                kMaxTopLogprobs);
  }
  const std::int64_t from = request.prompt_logprobs_from;
  if (from < -1 || from > isize(request.prompt)) {
    return fail("prompt_logprobs_from is {}: expected -1 (none) or 0 to the prompt's {} tokens",
                from, request.prompt.size());
  }
  return Ok{};
}

/// Room for what is wanted of the prompt; its first token has no log-probability.
void prepare_prompt_scores(Sequence& seq) {
  const std::int64_t from = seq.request.prompt_logprobs_from;
  if (from < 0) {
    return;
  }
  const bool wants_top = seq.request.num_top_logprobs > 0;
  RequestOutput& output = seq.output;
  output.prompt_logprobs.reserve(usize(seq.prompt_size - from));
  output.prompt_top_logprobs.reserve(wants_top ? usize(seq.prompt_size - from) : 0);
  if (from == 0) {
    output.prompt_logprobs.push_back(std::numeric_limits<float>::quiet_NaN());
    output.prompt_top_logprobs.resize(wants_top ? 1 : 0);
  }
}

}  // namespace

std::string_view finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kAborted:
      return "aborted";
    case FinishReason::kError:
      return "error";
  }
  TDM_CHECK(false, static_cast<int>(reason));
  return "";
}

Status Engine::validate(const Request& request) const {
  if (request.prompt.empty()) {
    return fail("prompt is empty: expected at least one token");
  }
  if (Status ids = validate_ids("prompt", request.prompt, model_.vocab_size()); !ids) {
    return ids;
  }
  if (Status ids = validate_ids("stop_ids", request.stop_ids, model_.vocab_size()); !ids) {
    return ids;
  }
  if (request.max_new_tokens < (request.prompt_logprobs_from >= 0 ? 0 : 1)) {
    return fail("max_new_tokens is {}: expected at least 1, or 0 with prompt_logprobs_from >= 0",
                request.max_new_tokens);
  }
  // Compared without adding: max_new_tokens may be anything a client sends.
  const std::int64_t room = options_.max_seq_len - isize(request.prompt);
  if (room < 0 || request.max_new_tokens > room) {
    return fail(
        "max_new_tokens is {}: expected prompt ({} tokens) and response within max_seq_len "
        "{}, so at most {}",
        request.max_new_tokens, request.prompt.size(), options_.max_seq_len,
        std::max<std::int64_t>(room, 0));
  }
  if (Status limits = validate_limits(request); !limits) {
    return limits;
  }
  if (Status rules = validate_rules(request, model_.vocab_size()); !rules) {
    return rules;
  }
  if (Status logprobs = validate_logprobs(request); !logprobs) {
    return logprobs;
  }
  return validate_sampling(request.sampling);
}

Expected<RequestId> Engine::submit(Request request) {
  if (Status status = validate(request); !status) {
    return status.failure();
  }
  if (Status room = make_room_in_queue(1, request.priority); !room) {
    return room.failure();
  }
  return enqueue(std::move(request), 0);
}

Expected<std::vector<RequestId>> Engine::submit_group(const Request& request, std::int64_t n) {
  if (n < 1) {
    return fail("n is {}: expected at least 1 sample", n);
  }
  if (Status status = validate(request); !status) {
    return status.failure();
  }
  if (Status room = make_room_in_queue(n, request.priority); !room) {
    return room.failure();
  }
  std::vector<RequestId> ids;
  // A prompt that is only scored ends before it could be forked.
  const std::uint64_t group = request.max_new_tokens > 0 ? next_id_ : 0;
  for (std::int64_t i = 0; i < n; ++i) {
    Request sample = request;
    sample.sequence_id += static_cast<std::uint64_t>(i);
    if (request.constraint != nullptr) {
      sample.constraint = request.constraint->clone();
    }
    ids.push_back(enqueue(std::move(sample), group));
  }
  return ids;
}

RequestId Engine::enqueue(Request request, std::uint64_t group) {
  const RequestId id{next_id_++};
  auto seq = std::make_unique<Sequence>();
  seq->request = std::move(request);
  seq->output.id = id;
  seq->group = group;
  seq->prompt_size = isize(seq->request.prompt);
  seq->submitted_at = Sequence::Clock::now();
  // Everything a step appends to is reserved here, so that steps do not allocate.
  const std::int64_t max_tokens = seq->prompt_size + seq->request.max_new_tokens;
  seq->all_tokens = std::exchange(seq->request.prompt, {});
  seq->all_tokens.reserve(usize(max_tokens));
  if (seq->request.want_logprobs) {
    seq->output.logprobs.reserve(usize(seq->request.max_new_tokens));
  }
  if (seq->request.num_top_logprobs > 0) {
    seq->output.top_logprobs.reserve(usize(seq->request.max_new_tokens));
  }
  prepare_rules(*seq);
  prepare_prompt_scores(*seq);
  if (seq->request.want_routed_experts) {
    seq->output.routed_experts.reserve(usize((max_tokens - 1) * routed_width_));
  }
  seq->output.weight_spans.reserve(4);
  if (!seq->request.cache_salt.empty()) {
    seq->salt = std::make_shared<const std::string>(seq->request.cache_salt);
  }
  num_deadlines_ += seq->has_deadline() ? 1 : 0;
  scheduler_.add(*seq);
  sequences_.emplace(value_of(id), std::move(seq));
  return id;
}

void Engine::prepare_rules(Sequence& seq) const {
  const LogitRules& rules = seq.request.rules;
  if (has_penalties(rules)) {
    const std::int64_t most = seq.prompt_size + seq.request.max_new_tokens;
    seq.counts.reserve(std::min(most, model_.vocab_size()));
    if (rules.repetition_penalty != 1) {  // the others look at the response only
      seq.counts.add_prompt(seq.all_tokens);
    }
  }
  if (rules.min_new_tokens > 0) {
    seq.stop_ids = seq.request.stop_ids;
    if (!seq.request.ignore_eos) {
      seq.stop_ids.insert(seq.stop_ids.end(), options_.eos_ids.begin(), options_.eos_ids.end());
    }
  }
}

Expected<RequestOutput> Engine::take_output(RequestId id) {
  const auto found = sequences_.find(value_of(id));
  if (found == sequences_.end()) {
    return fail("request {}: unknown, or its output was taken", value_of(id));
  }
  Sequence& seq = *found->second;
  if (seq.state != SeqState::kFinished) {
    return fail("request {}: not finished, {} of {} new tokens", value_of(id), seq.num_new_tokens(),
                seq.request.max_new_tokens);
  }
  RequestOutput output = std::move(seq.output);
  output.tokens.assign(seq.all_tokens.begin() + seq.prompt_size, seq.all_tokens.end());
  sequences_.erase(found);
  return output;
}

}  // namespace tandem
