#include "server/api/sampling.h"

#include <charconv>
#include <limits>

#include <fmt/format.h>

#include "text/stop_strings.h"

namespace tandem::server {
namespace {

constexpr double kAnyNumber = std::numeric_limits<double>::max();
constexpr std::int64_t kAnyInt = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMaxSamples = 128;
constexpr std::int64_t kMaxTopLogprobs = 20;

float number(const FieldReader& fields, std::string_view key, double missing, NumberRange range) {
  return static_cast<float>(fields.number(key, missing, range));
}

void read_distribution(const FieldReader& fields, SamplingParams& params) {
  params.temperature = number(fields, "temperature", 1, {0, 1e6});
  params.top_p = number(fields, "top_p", 1, {0, 1});
  if (params.top_p == 0) {  // what some clients send for "the likeliest token"
    params.top_p = 1;
    params.temperature = 0;
  }
  params.top_k = static_cast<std::int32_t>(
      fields.integer("top_k", 0, {-1, std::numeric_limits<std::int32_t>::max()}));
  params.top_k = params.top_k == -1 ? 0 : params.top_k;
  params.min_p = number(fields, "min_p", 0, {0, 1});
}

void read_logit_bias(const FieldReader& fields, std::int64_t vocab_size, LogitRules& rules) {
  const Json* biases = fields.object("logit_bias");
  if (biases == nullptr) {
    return;
  }
  for (const auto& [key, value] : biases->items()) {
    std::int64_t id = -1;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    const std::string path = fields.path_of("logit_bias") + "." + key;
    if (error != std::errc() || end != key.data() + key.size() || id < 0 || id >= vocab_size) {
      fields.problem().reject(
          path, fmt::format("{}: expected a token id in [0, {}) as the key", path, vocab_size));
      return;
    }
    const double bias = FieldReader(*biases, fields.problem(), fields.path_of("logit_bias") + ".")
                            .number(key, 0, {-100, 100});
    rules.logit_bias.push_back({static_cast<std::int32_t>(id), static_cast<float>(bias)});
  }
}

void read_rules(const FieldReader& fields, Endpoint endpoint, const ModelLimits& limits,
                Sampling& sampling) {
  LogitRules& rules = sampling.request.rules;
  rules.repetition_penalty =
      number(fields, "repetition_penalty", 1, {0, kAnyNumber, /*excludes_least=*/true});
  rules.frequency_penalty = number(fields, "frequency_penalty", 0, {-2, 2});
  rules.presence_penalty = number(fields, "presence_penalty", 0, {-2, 2});
  read_logit_bias(fields, limits.vocab_size, rules);
  const std::string_view key = endpoint == Endpoint::kGenerate || !fields.has("min_tokens")
                                   ? "min_new_tokens"
                                   : "min_tokens";
  rules.min_new_tokens = fields.integer(key, 0, {0, kAnyInt});
  if (sampling.max_new_tokens && rules.min_new_tokens > *sampling.max_new_tokens) {
    fields.reject(key,
                  fmt::format("{} is {}: expected at most the {} tokens asked for at most",
                              fields.path_of(key), rules.min_new_tokens, *sampling.max_new_tokens));
  }
}

void read_lengths(const FieldReader& fields, Endpoint endpoint, Sampling& sampling) {
  const IntRange range{0, kAnyInt};
  switch (endpoint) {
    case Endpoint::kCompletions:
      sampling.max_new_tokens = fields.integer("max_tokens", 16, range);
      break;
    case Endpoint::kChat:
      sampling.max_new_tokens = fields.maybe_integer("max_completion_tokens", {1, kAnyInt});
      if (!sampling.max_new_tokens) {
        sampling.max_new_tokens = fields.maybe_integer("max_tokens", {1, kAnyInt});
      }
      break;
    case Endpoint::kGenerate:
      sampling.max_new_tokens = fields.integer("max_new_tokens", 128, range);
      break;
  }
}

void read_stops(const FieldReader& fields, const ModelLimits& limits, Sampling& sampling) {
  sampling.stop = fields.strings("stop");
  if (const auto stops = StopStrings::create(sampling.stop); !stops) {
    fields.reject("stop", fields.path_of("stop") + ": " + stops.message());
  }
  sampling.request.stop_ids = fields.token_ids("stop_token_ids", limits.vocab_size);
  sampling.request.ignore_eos = fields.boolean("ignore_eos", false);
  sampling.keeps_stop =
      fields.boolean("no_stop_trim", false) || fields.boolean("include_stop_str_in_output", false);
  sampling.skips_special = fields.boolean("skip_special_tokens", true);
}

/// The schema's own text would be better, but the body is parsed: keys come sorted here. Chat's
/// response_format keeps their order (text/chat.h).
void read_grammar(const FieldReader& fields, Sampling& sampling) {
  const Json* schema = fields.find("json_schema");
  const std::string regex = fields.string("regex");
  const bool has_schema = schema != nullptr && !is_text(*schema, "");
  if (has_schema && !regex.empty()) {
    fields.reject("regex",
                  fields.path_of("regex") + ": expected at most one of json_schema, regex");
  } else if (has_schema) {
    sampling.grammar = {GrammarSource::Kind::kJsonSchema,
                        schema->is_string() ? schema->get<std::string>() : to_line(*schema), false,
                        false, fields.path_of("json_schema")};
  } else if (!regex.empty()) {
    sampling.grammar = {GrammarSource::Kind::kRegex, regex, false, false, fields.path_of("regex")};
  }
}

/// Fields that mean something we do not have: never ignored in silence.
void refuse_unsupported(const FieldReader& fields) {
  for (const std::string_view key :
       {"ebnf", "structural_tag", "stop_regex", "max_thinking_tokens", "suffix", "use_beam_search",
        "lora_path", "session_params", "custom_logit_processor"}) {
    const Json* value = fields.find(key);
    if (value != nullptr && !is_nothing(*value)) {
      fields.reject(key, fields.path_of(key) + " is not supported");
    }
  }
}

void read_logprob_mode(const FieldReader& fields, Endpoint endpoint, Sampling& sampling) {
  const bool is_native = endpoint == Endpoint::kGenerate;
  const std::string mode = fields.string("logprob_mode", is_native ? "scaled" : "raw");
  if (mode != "raw" && mode != "scaled") {
    fields.reject("logprob_mode", fmt::format("{} is \"{}\": expected \"raw\" or \"scaled\"",
                                              fields.path_of("logprob_mode"), mode));
  }
  sampling.request.logprob_mode = mode == "raw" ? LogprobMode::kRaw : LogprobMode::kScaled;
}

void read_openai_logprobs(const FieldReader& fields, Endpoint endpoint, Sampling& sampling) {
  Request& request = sampling.request;
  if (endpoint == Endpoint::kCompletions) {
    const auto count = fields.maybe_integer("logprobs", {0, kMaxTopLogprobs});
    request.want_logprobs = count.has_value();
    request.num_top_logprobs = count.value_or(0);
    return;
  }
  request.want_logprobs = fields.boolean("logprobs", false);
  request.num_top_logprobs = fields.integer("top_logprobs", 0, {0, kMaxTopLogprobs});
  if (request.num_top_logprobs > 0 && !request.want_logprobs) {
    fields.reject("top_logprobs", "top_logprobs needs logprobs: true");
  }
}

}  // namespace

Sampling read_sampling(const FieldReader& fields, Endpoint endpoint, const ModelLimits& limits) {
  Sampling sampling;
  read_distribution(fields, sampling.request.sampling);
  read_lengths(fields, endpoint, sampling);
  read_rules(fields, endpoint, limits, sampling);
  read_stops(fields, limits, sampling);
  read_grammar(fields, sampling);
  read_logprob_mode(fields, endpoint, sampling);
  refuse_unsupported(fields);
  sampling.n = fields.integer("n", 1, {1, kMaxSamples});
  if (const auto best_of = fields.maybe_integer("best_of"); best_of && *best_of != sampling.n) {
    fields.reject("best_of",
                  fmt::format("best_of is {}: other values than n ({}) are not supported", *best_of,
                              sampling.n));
  }
  const std::string_view seed_key = fields.has("sampling_seed") ? "sampling_seed" : "seed";
  if (const auto seed = fields.maybe_integer(seed_key)) {
    sampling.seed = static_cast<std::uint64_t>(*seed);
  }
  if (endpoint != Endpoint::kGenerate) {
    read_openai_logprobs(fields, endpoint, sampling);
    sampling.request.client = fields.string("user");
  }
  return sampling;
}

std::int64_t fit_to_context(const Sampling& sampling, std::int64_t prompt_size,
                            const ModelLimits& limits, const std::string& param, Problem& problem) {
  const std::int64_t room = limits.max_seq_len - prompt_size;
  if (room < 1) {
    problem.set({400, "context_length_exceeded",
                 fmt::format("This model's maximum context length is {} tokens, but the prompt has "
                             "{} tokens (and max_tokens asks for {})",
                             limits.max_seq_len, prompt_size,
                             sampling.max_new_tokens ? std::to_string(*sampling.max_new_tokens)
                                                     : std::string("what is left")),
                 param});
    return 1;
  }
  return std::min(sampling.max_new_tokens.value_or(room), room);
}

}  // namespace tandem::server
