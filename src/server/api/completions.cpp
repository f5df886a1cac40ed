#include "server/api/completions.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "server/api/form_json.h"
#include "server/api/generation.h"
#include "text/utf8.h"

namespace tandem::server {
namespace {

constexpr std::size_t kMaxPrompts = 2048;

struct CompletionRequest {
  std::vector<PromptPlan> prompts;
  StreamFields stream;
  bool echo = false;
  bool wants_logprobs = false;
  bool returns_token_ids = false;
};

std::int64_t count_characters(std::string_view text) {
  return std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U; });
}

/// The lists of a "logprobs" object.
class LogprobLists {
 public:
  explicit LogprobLists(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  void add(const TokenEntry& token, std::int64_t& offset, bool has_logprob = true) {
    const std::string text = token_text(tokenizer_, token.id);
    tokens_.push_back(text);
    token_logprobs_.push_back(has_logprob ? OrderedJson(json_logprob(token.logprob))
                                          : OrderedJson(nullptr));
    OrderedJson top = OrderedJson::object();
    for (const TokenLogprob& other : token.top) {
      top[token_text(tokenizer_, other.token)] = json_logprob(other.logprob);
    }
    top_logprobs_.push_back(has_logprob ? std::move(top) : OrderedJson(nullptr));
    text_offset_.push_back(offset);
    offset += count_characters(tokenizer_.token_bytes(token.id));
  }
  [[nodiscard]] OrderedJson take() {
    return {{"tokens", std::move(tokens_)},
            {"token_logprobs", std::move(token_logprobs_)},
            {"top_logprobs", std::move(top_logprobs_)},
            {"text_offset", std::move(text_offset_)}};
  }

 private:
  const Tokenizer& tokenizer_;
  OrderedJson tokens_ = OrderedJson::array();
  OrderedJson token_logprobs_ = OrderedJson::array();
  OrderedJson top_logprobs_ = OrderedJson::array();
  OrderedJson text_offset_ = OrderedJson::array();
};

class CompletionForm final : public ResponseForm {
 public:
  explicit CompletionForm(const CompletionRequest& request)
      : stream_(request.stream),
        echo_(request.echo),
        wants_logprobs_(request.wants_logprobs),
        returns_token_ids_(request.returns_token_ids) {}

  [[nodiscard]] std::string whole(const GenerationState& state) override;
  void advance(const GenerationState& state, const Sample& sample, const Delta& delta,
               const Send& send) override;
  void end(const GenerationState& state, const Send& send) override;

 private:
  struct Progress {  // of a sample's stream
    bool has_begun = false;
    std::size_t ids_sent = 0;
    std::int64_t offset = 0;
  };
  [[nodiscard]] std::string prompt_text(const GenerationState& state, const Sample& sample) const;
  void add_prompt(const GenerationState& state, const Sample& sample, LogprobLists& lists,
                  std::int64_t& offset) const;

  StreamFields stream_;
  bool echo_;
  bool wants_logprobs_;
  bool returns_token_ids_;
  std::vector<Progress> progress_;
};

std::string CompletionForm::prompt_text(const GenerationState& state, const Sample& sample) const {
  return echo_ ? to_valid_utf8(state.service.tokenizer.decode(state.prompt_of(sample).ids))
               : std::string();
}

void CompletionForm::add_prompt(const GenerationState& state, const Sample& sample,
                                LogprobLists& lists, std::int64_t& offset) const {
  const std::vector<std::int32_t>& ids = state.prompt_of(sample).ids;
  const RequestOutput& output = sample.output;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    TokenEntry entry{ids[i]};
    const bool has_logprob =
        i < output.prompt_logprobs.size() && std::isfinite(output.prompt_logprobs[i]);
    entry.logprob = has_logprob ? output.prompt_logprobs[i] : 0;
    if (i < output.prompt_top_logprobs.size()) {
      entry.top = output.prompt_top_logprobs[i];
    }
    lists.add(entry, offset, has_logprob);
  }
}

std::string CompletionForm::whole(const GenerationState& state) {
  OrderedJson answer = answer_head(state, "text_completion");
  OrderedJson choices = OrderedJson::array();
  for (const Sample& sample : state.samples) {
    OrderedJson choice{{"index", sample.index},
                       {"text", prompt_text(state, sample) + sample.total.content},
                       {"logprobs", nullptr},
                       {"finish_reason", sample.finish_reason},
                       {"matched_stop", matched_stop(sample)}};
    if (wants_logprobs_) {
      LogprobLists lists(state.service.tokenizer);
      std::int64_t offset = 0;
      if (echo_) {
        add_prompt(state, sample, lists, offset);
      }
      for (const TokenEntry& token : sample.total.content_tokens) {
        lists.add(token, offset);
      }
      choice["logprobs"] = lists.take();
    }
    if (returns_token_ids_) {
      choice["token_ids"] = sample.total.ids;
      choice["prompt_token_ids"] = state.prompt_of(sample).ids;
    }
    choices.push_back(std::move(choice));
  }
  answer["choices"] = std::move(choices);
  answer["usage"] = usage_json(state);
  add_version(answer, state);
  return to_line(answer);
}

void CompletionForm::advance(const GenerationState& state, const Sample& sample, const Delta& delta,
                             const Send& send) {
  progress_.resize(state.samples.size());
  Progress& progress = progress_[static_cast<std::size_t>(sample.index)];
  const bool has_entries = wants_logprobs_ && !delta.content_tokens.empty();
  if (delta.content.empty() && !has_entries && !sample.is_finished) {
    return;
  }
  OrderedJson choice{{"index", sample.index},
                     {"text", delta.content},
                     {"logprobs", nullptr},
                     {"finish_reason", nullptr}};
  LogprobLists lists(state.service.tokenizer);
  if (!std::exchange(progress.has_begun, true)) {
    choice["text"] = prompt_text(state, sample) + delta.content;
    if (returns_token_ids_) {
      choice["prompt_token_ids"] = state.prompt_of(sample).ids;
    }
    progress.offset = echo_ ? count_characters(prompt_text(state, sample)) : 0;
  }
  if (wants_logprobs_) {
    for (const TokenEntry& token : delta.content_tokens) {
      lists.add(token, progress.offset);
    }
    choice["logprobs"] = lists.take();
  }
  if (returns_token_ids_) {
    choice["token_ids"] = std::vector<std::int32_t>(
        sample.total.ids.begin() + static_cast<std::ptrdiff_t>(progress.ids_sent),
        sample.total.ids.end());
    progress.ids_sent = sample.total.ids.size();
  }
  if (sample.is_finished) {
    choice["finish_reason"] = sample.finish_reason;
    choice["matched_stop"] = matched_stop(sample);
  }
  send(choice_event(state, "text_completion", stream_, std::move(choice)));
}

void CompletionForm::end(const GenerationState& state, const Send& send) {
  if (stream_.include_usage) {
    send(usage_event(state, "text_completion"));
  }
}

std::vector<std::vector<std::int32_t>> read_prompts(const Service& service,
                                                    const FieldReader& fields) {
  std::vector<std::vector<std::int32_t>> prompts;
  const Json* prompt = fields.find("prompt");
  if (prompt == nullptr) {
    fields.reject("prompt", "prompt is missing: expected a string, a list of them, or token ids");
    return prompts;
  }
  const bool allow_special = fields.boolean("parse_special", true);
  const auto encode = [&](const Json& text) {
    const std::array<Segment, 1> segment{Segment{text.get<std::string>(), allow_special}};
    return service.tokenizer.encode_segments(segment);
  };
  if (prompt->is_string()) {
    prompts.push_back(encode(*prompt));
  } else if (prompt->is_array() && !prompt->empty() && prompt->size() <= kMaxPrompts &&
             std::ranges::all_of(*prompt, [](const Json& item) { return item.is_string(); })) {
    std::ranges::transform(*prompt, std::back_inserter(prompts), encode);
  } else if (prompt->is_array() && !prompt->empty() && prompt->size() <= kMaxPrompts &&
             std::ranges::all_of(*prompt, [](const Json& item) { return item.is_array(); })) {
    for (std::size_t i = 0; i < prompt->size(); ++i) {
      prompts.push_back(read_token_ids((*prompt)[i], fmt::format("prompt[{}]", i),
                                       service.limits.vocab_size, fields.problem()));
    }
  } else if (prompt->is_array() && !prompt->empty() && prompt->front().is_number()) {
    prompts.push_back(fields.token_ids("prompt", service.limits.vocab_size));
  } else {
    fields.reject("prompt",
                  fmt::format("prompt: expected a string, a list of at most {} strings, a list of "
                              "token ids or a list of such lists, and no mix of them",
                              kMaxPrompts));
  }
  for (std::size_t i = 0; i < prompts.size() && !fields.problem(); ++i) {
    if (prompts[i].empty()) {
      const std::string path = prompts.size() == 1 ? "prompt" : fmt::format("prompt[{}]", i);
      fields.problem().reject(path, path + ": the prompt is empty");
    }
  }
  return prompts;
}

CompletionRequest read_completion(const Service& service, const FieldReader& fields) {
  CompletionRequest request;
  check_model_name(service, fields);
  Sampling sampling = read_sampling(fields, Endpoint::kCompletions, service.limits);
  sampling.request.priority =
      static_cast<std::int32_t>(fields.integer("priority", 0, {-1000000, 1000000}));
  sampling.request.cache_salt =
      fields.string(fields.has("cache_salt") ? "cache_salt" : "extra_key");
  request.stream = read_stream_fields(fields);
  request.echo = fields.boolean("echo", false);
  request.wants_logprobs = sampling.request.want_logprobs;
  request.returns_token_ids = fields.boolean("return_token_ids", false);
  if (sampling.max_new_tokens == 0 && !request.echo) {
    fields.reject("max_tokens", "max_tokens is 0: expected at least 1, or echo: true");
  }
  if (request.echo && request.wants_logprobs) {
    sampling.request.prompt_logprobs_from = 0;
    if (request.stream.stream) {
      fields.reject("echo", "echo with logprobs is not supported for streams");
    }
  }
  const std::string rid = fields.string("rid");
  for (auto& ids : read_prompts(service, fields)) {
    PromptPlan plan;
    plan.max_new_tokens = fit_to_context(sampling, static_cast<std::int64_t>(ids.size()),
                                         service.limits, "prompt", fields.problem());
    plan.ids = std::move(ids);
    plan.sampling = sampling;
    plan.rid = rid;
    request.prompts.push_back(std::move(plan));
  }
  return request;
}

}  // namespace

void handle_completions(Service& service, const std::shared_ptr<Exchange>& exchange) {
  Problem problem;
  const Json body = parse_body(exchange->request(), false, problem);
  CompletionRequest request;
  if (!problem) {
    request = read_completion(service, FieldReader(body, problem));
  }
  if (problem) {
    exchange->respond(error_response(problem.error()));
    return;
  }
  auto form = std::make_unique<CompletionForm>(request);
  GenerationPlan plan{std::move(request.prompts), request.stream.stream};
  std::make_shared<Generation>(service, exchange, std::move(form), std::move(plan),
                               "cmpl-" + random_id())
      ->start();
}

}  // namespace tandem::server
