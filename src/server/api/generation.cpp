#include "server/api/generation.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/checked_cast.h"
#include "core/log.h"

namespace tandem::server {
namespace {

SampleText make_text(const Service& service, const PromptPlan& plan) {
  std::unique_ptr<ResponseParser> parser;
  if (plan.is_chat) {
    parser = make_response_parser(service.tokenizer, plan.thinking);
  } else {
    parser = std::make_unique<PlainParser>(
        service.tokenizer, plan.sampling.skips_special ? SpecialText::kSkip : SpecialText::kKeep);
  }
  // Checked when the request was read.
  auto stops = StopStrings::create(plan.sampling.stop).value_or_throw();
  return {std::move(parser), std::move(stops), plan.sampling.keeps_stop};
}

/// What the engine's own ending of a request is to a client that has nothing of the answer yet.
std::optional<ApiError> error_of(const RequestOutput& output) {
  switch (output.abort_cause) {
    case AbortCause::kNone:
    case AbortCause::kCaller:
      return std::nullopt;
    case AbortCause::kQueueFull:
      return ApiError{429, "queue_full", output.error, "", 1};
    case AbortCause::kQueueTimeout:
      return ApiError{503, "queue_timeout", output.error, "", 1};
    case AbortCause::kTimeout:
      return ApiError{503, "request_timeout", output.error};
  }
  return std::nullopt;
}

bool contains(std::span<const std::int32_t> ids, std::int32_t id) {
  return std::ranges::find(ids, id) != ids.end();
}

}  // namespace

Generation::Generation(Service& service, std::shared_ptr<Exchange> exchange,
                       std::unique_ptr<ResponseForm> form, GenerationPlan plan, std::string id)
    : service_(service),
      exchange_(std::move(exchange)),
      form_(std::move(form)),
      state_{service, std::move(plan), {}, std::move(id), unix_time()} {
  for (std::size_t p = 0; p < state_.plan.prompts.size(); ++p) {
    const PromptPlan& prompt = state_.plan.prompts[p];
    for (std::int64_t i = 0; i < prompt.sampling.n; ++i) {
      state_.samples.emplace_back(isize(state_.samples), p, make_text(service, prompt));
    }
  }
  constraints_.resize(state_.plan.prompts.size());
  send_ = [raw = exchange_.get()](const std::string& event) { raw->send_event(event); };
}

void Generation::start() {
  service_.metrics.count_request();
  exchange_->on_closed([self = shared_from_this()] { self->on_client_gone(); });
  prepare_grammars(0);
}

void Generation::prepare_grammars(std::size_t next_prompt) {
  while (next_prompt < constraints_.size() &&
         state_.plan.prompts[next_prompt].sampling.grammar.kind == GrammarSource::Kind::kNone) {
    ++next_prompt;
  }
  if (next_prompt == constraints_.size()) {
    submit();
    return;
  }
  const PromptPlan& prompt = state_.plan.prompts[next_prompt];
  const Grammars::Place place{prompt.is_chat, prompt.thinking};
  const auto done = [weak = weak_from_this(), next_prompt](Grammars::Result result) {
    const auto self = weak.lock();
    if (!self) {
      return;
    }
    self->exchange_->post([self, next_prompt, result = std::move(result)] {
      if (self->is_over_) {
        return;
      }
      if (!result) {
        const std::string& param = self->state_.plan.prompts[next_prompt].sampling.grammar.param;
        self->fail_with({400, "invalid_request_error", param + ": " + result.message(), param});
        return;
      }
      self->constraints_[next_prompt] = *result;
      self->prepare_grammars(next_prompt + 1);
    });
  };
  service_.grammars.get(prompt.sampling.grammar, place, done);
}

Job Generation::make_job() {
  Job job;
  job.mailbox = mailbox_;
  for (std::size_t p = 0; p < state_.plan.prompts.size(); ++p) {
    const PromptPlan& plan = state_.plan.prompts[p];
    Request request = plan.sampling.request;
    request.prompt = plan.ids;
    // A prompt that is only scored still draws a token, which is dropped.
    request.max_new_tokens = std::max<std::int64_t>(plan.max_new_tokens, 1);
    request.seed = plan.sampling.seed.value_or(random_seed());
    request.rules.min_new_tokens = std::min(request.rules.min_new_tokens, request.max_new_tokens);
    request.queue_timeout_s = service_.options.queue_timeout_s;
    request.timeout_s = service_.options.request_timeout_s;
    if (constraints_[p] != nullptr) {
      request.constraint = constraints_[p]->clone();
    }
    job.prompts.push_back({std::move(request), plan.sampling.n, plan.rid});
  }
  return job;
}

void Generation::submit() {
  const auto weak = weak_from_this();
  mailbox_ = std::make_shared<Mailbox>([weak] {
    if (const auto self = weak.lock()) {
      self->exchange_->post([self] { self->on_mail(); });
    }
  });
  Job job = make_job();
  job.on_admitted = [weak](std::optional<ApiError> error) {
    if (const auto self = weak.lock()) {
      self->exchange_->post([self, error = std::move(error)] { self->on_admitted(error); });
    }
  };
  job_ = service_.loop.submit(std::move(job));
}

void Generation::on_admitted(const std::optional<ApiError>& error) {
  if (is_over_) {
    return;
  }
  if (error) {
    fail_with(*error);
    return;
  }
  if (state_.plan.stream) {
    exchange_->start_events({});
    form_->begin(state_, send_);
  }
}

void Generation::on_mail() {
  for (Update& update : mailbox_->take()) {
    if (!is_over_) {
      handle(std::move(update));
    }
  }
}

bool Generation::is_stop_token(const Sample& sample, std::int32_t id) const {
  const Request& request = state_.prompt_of(sample).sampling.request;
  return contains(request.stop_ids, id) ||
         (!request.ignore_eos && contains(service_.loop.options().eos_ids, id));
}

void Generation::take_token(Sample& sample, const Update& update, Delta& delta) {
  const PromptPlan& plan = state_.prompt_of(sample);
  TokenEntry entry{update.token, update.logprob, update.top_logprobs};
  sample.tokens.push_back(entry);
  const bool ends = update.output && update.output->finish_reason == FinishReason::kStop &&
                    is_stop_token(sample, update.token);
  if (ends) {
    sample.stop_token = update.token;
  }
  if (ends && !plan.sampling.keeps_stop) {
    sample.text.count_stop_token(update.token);
    return;
  }
  delta = sample.text.push(std::move(entry));
  sample.is_cut =
      sample.text.is_stopped() || (plan.single_call && sample.text.num_complete_calls() > 0);
  if (sample.is_cut && !update.output) {
    service_.loop.abort(*job_, sample.index);
  }
}

void Generation::finish_sample(Sample& sample, RequestOutput output, Delta& delta) {
  delta.append(sample.text.finish());
  sample.is_cut = sample.is_cut || sample.text.is_stopped();
  sample.output = std::move(output);
  sample.is_finished = true;
  ++num_finished_;
  const FinishReason reason = sample.output.finish_reason;
  const bool is_stop = sample.is_cut || reason == FinishReason::kStop;
  sample.finish_reason = is_stop && state_.prompt_of(sample).max_new_tokens > 0 ? "stop"
                         : reason == FinishReason::kAborted                     ? "abort"
                                                                                : "length";
  record(sample);
}

void Generation::handle(Update update) {
  Sample& sample = state_.samples[usize(update.sample)];
  if (sample.is_finished) {
    return;
  }
  Delta delta;
  const bool has_room = isize(sample.tokens) < state_.prompt_of(sample).max_new_tokens;
  if (update.token >= 0 && has_room && !sample.is_cut) {
    take_token(sample, update, delta);
  }
  if (update.output) {
    if (update.output->finish_reason == FinishReason::kError) {
      log_warn("request.failed", "request={} error={}", exchange_->request().id,
               update.output->error);
      fail_with({500, "internal_error",
                 fmt::format("request {}: {}", exchange_->request().id, update.output->error)});
      return;
    }
    if (const auto error = error_of(*update.output); error && sample.tokens.empty()) {
      fail_with(*error);
      return;
    }
    finish_sample(sample, *std::move(update.output), delta);
  }
  if (state_.plan.stream) {
    sample.total.append(delta);
    form_->advance(state_, sample, delta, send_);
  } else {
    sample.total.append(std::move(delta));
  }
  if (num_finished_ == state_.samples.size()) {
    answer();
  }
}

void Generation::answer() {
  is_over_ = true;
  state_.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  if (state_.plan.stream) {
    form_->end(state_, send_);
    send_("[DONE]");
    exchange_->end_events();
  } else {
    exchange_->respond({200, form_->whole(state_)});
  }
}

void Generation::fail_with(const ApiError& error) {
  is_over_ = true;
  if (job_) {
    service_.loop.abort(*job_);
    record_lost("error");
  }
  // One of the two is ignored, by whether the stream has begun.
  exchange_->respond(error_response(error));
  send_(error_body(error));
  send_("[DONE]");
  exchange_->end_events();
}

void Generation::on_client_gone() {
  if (std::exchange(is_over_, true)) {
    return;
  }
  log_debug("request.client_gone", "request={}", exchange_->request().id);
  if (job_) {
    service_.loop.abort(*job_);
  }
  record_lost("abort");
}

void Generation::record_lost(const char* finish_reason) {
  for (const Sample& sample : state_.samples) {
    if (!sample.is_finished) {
      SampleRecord lost;
      lost.completion_tokens = isize(sample.tokens);
      lost.finish_reason = finish_reason;
      service_.metrics.observe(lost);
    }
  }
}

void Generation::record(const Sample& sample) {
  SampleRecord finished;
  const bool is_first =
      sample.index == 0 || state_.samples[usize(sample.index - 1)].prompt != sample.prompt;
  finished.prompt_tokens = is_first ? isize(state_.prompt_of(sample).ids) : 0;
  finished.cached_tokens = is_first ? sample.output.cached_tokens : 0;
  finished.completion_tokens = isize(sample.tokens);
  finished.finish_reason = sample.finish_reason;
  finished.timing = sample.output.timing;
  finished.num_preemptions = sample.output.num_preemptions;
  service_.metrics.observe(finished);
}

Usage usage_of(const GenerationState& state) {
  Usage usage;
  for (const Sample& sample : state.samples) {
    const bool is_first =
        sample.index == 0 || state.samples[usize(sample.index - 1)].prompt != sample.prompt;
    if (is_first) {
      usage.prompt_tokens += isize(state.prompt_of(sample).ids);
      usage.cached_tokens += sample.output.cached_tokens;
    }
    usage.completion_tokens += isize(sample.tokens);
    usage.reasoning_tokens += sample.text.num_reasoning_tokens();
  }
  return usage;
}

OrderedJson usage_json(const GenerationState& state) {
  const Usage usage = usage_of(state);
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}},
          {"completion_tokens_details", {{"reasoning_tokens", usage.reasoning_tokens}}}};
}

std::string weight_version_of(const GenerationState& state, const Sample& sample) {
  const std::int64_t version = sample.output.weight_version();
  return version < 0 ? state.service.loop.weight_label() : state.service.loop.weight_label(version);
}

}  // namespace tandem::server
