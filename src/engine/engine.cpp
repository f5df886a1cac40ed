#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "core/arena.h"
#include "engine/warm_up.h"

namespace tandem {

Engine::Engine(const Model& model, const ExecCtx& ctx, const EngineOptions& options)
    : model_(model),
      ctx_(ctx),
      options_(options),
      plan_(plan_serving(model, ctx, options).value_or_throw()),
      workspace_(plan_.device ? Arena::fixed(usize(plan_.workspace_bytes), *ctx.device) : Arena()),
      cache_(cache_spec_for(model, options.kv_cache_dtype).value_or_throw(), plan_.num_pages,
             plan_.page_size, plan_.num_slots, *ctx.device, plan_.prefix_limits()),
      scheduler_(cache_, options_),
      batch_(options.max_batch_tokens, options.num_seats(), cache_.pages_for(options.max_seq_len),
             *ctx.device),
      sampler_(batch_.max_seqs(), model.vocab_size(), *ctx.device),
      scorer_(batch_.max_seqs(), *ctx.device),
      logits_(batch_.max_seqs() * model.vocab_size() * 4, *ctx.device),
      routed_(batch_.max_rows() * model.moe_layers() * model.experts_per_token() * 4, *ctx.device),
      routed_on_host_(usize(routed_.size_bytes()) / sizeof(std::int32_t)),
      routed_width_(model.moe_layers() * model.experts_per_token()),
      weight_version_(options.first_weight_version) {
  if (plan_.device) {
    ctx_.workspace = &workspace_;
  }
  events_.reserve(usize(options.num_seats()));
  tokenless_.reserve(usize(options.num_seats()));
  event_alternatives_.reserve(usize(options.num_seats() * kMaxTopLogprobs));  // never moves
  score_rows_.reserve(usize(batch_.max_seqs()));
  decode_targets_.reserve(usize(options.num_seats()));
}

Engine::~Engine() = default;

std::span<const StepEvent> Engine::step() {
  end_late_requests();
  events_.assign(early_events_.begin(), early_events_.end());
  if (!paused_) {
    compute();
  }
  early_events_.clear();  // not before: a step that failed has told nobody
  return events_;
}

void Engine::compute() {
  event_alternatives_.clear();
  tokenless_.clear();
  const auto start = std::chrono::steady_clock::now();
  const std::span<const ScheduledChunk> chunks = scheduler_.plan();
  if (chunks.empty()) {
    return;
  }
  std::int64_t num_rows = 0;
  std::int64_t num_decodes = 0;
  for (const ScheduledChunk& chunk : chunks) {
    num_rows += chunk.count;
    num_decodes += chunk.seq->in_decode() ? 1 : 0;
  }
  try {
    const std::span<const SampleTarget> targets =
        can_be_recorded(chunks) ? decode_step(chunks) : mixed_step(chunks);
    const std::span<const SampledToken> sampled = sampler_.collect();
    const bool alternatives = score_alternatives(targets);
    for (std::int64_t i = 0; i < isize(targets); ++i) {
      accept(*targets[usize(i)].seq, sampled[usize(i)],
             alternatives ? scorer_.top(i) : std::span<const TokenLogprob>());
    }
    for (Sequence* seq : tokenless_) {
      finish_without_token(*seq);
    }
  } catch (...) {
    // Some caches may have advanced, some not.
    scheduler_.preempt_all(Scheduler::Prefix::kDrop);
    throw;
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  const double decode_share = static_cast<double>(num_decodes) / static_cast<double>(num_rows);
  stats_.decode_s += elapsed.count() * decode_share;
  stats_.prefill_s += elapsed.count() * (1.0 - decode_share);
  stats_.decode_tokens += num_decodes;
  stats_.prefill_tokens += num_rows - num_decodes;
  ++stats_.num_steps;
}

F32Mat Engine::logits(std::int64_t rows) {
  return {logits_.as<float>().data(), {rows, model_.vocab_size()}};
}

std::span<const SampleTarget> Engine::mixed_step(std::span<const ScheduledChunk> chunks) {
  const bool keep_routed = wants_routed(chunks);
  run_model(batch_.build(chunks, cache_), keep_routed);
  keep_routed_experts(chunks, keep_routed);
  score_prompts(chunks);
  // commit() forgets the chunks and adds the followers of a finished prompt to the targets. In
  // order, each target's logits move up to its row, over scored ones; followers then get copies of
  // their leader's.
  const std::span<const SampleTarget> targets = scheduler_.commit();
  const F32Mat rows = logits(isize(targets));
  for (std::int64_t row = 0; row < isize(targets); ++row) {
    const std::int64_t source = targets[usize(row)].logits_row;
    if (source != row) {
      ctx_.device->copy(rows.row(row), rows.row(source),
                        usize(model_.vocab_size()) * sizeof(float));
    }
  }
  sampler_.prepare(targets, isize(targets));
  if (sampler_.has_rules()) {
    sampler_.run_with_rules(ctx_, rows);
  } else if (!targets.empty()) {
    sampler_.run(ctx_, rows);
  }
  return targets;
}

bool Engine::can_be_recorded(std::span<const ScheduledChunk> chunks) const {
  // A device with memory of its own records.
  return !ctx_.device->host_visible() &&
         std::ranges::all_of(chunks, [](const ScheduledChunk& chunk) {
           return chunk.seq->in_decode() && chunk.samples();
         });
}

std::span<const SampleTarget> Engine::decode_step(std::span<const ScheduledChunk> chunks) {
  const bool keep_routed = wants_routed(chunks);
  const BatchBucket bucket = batch_.bucket_of(chunks);
  const ModelBatch batch = batch_.build(chunks, cache_, bucket);
  decode_targets_.clear();
  for (const ScheduledChunk& chunk : chunks) {
    decode_targets_.push_back({chunk.seq, isize(decode_targets_)});
  }
  sampler_.prepare(decode_targets_, bucket.num_seqs);
  const auto ops = [this, batch, bucket, keep_routed] {
    run_model(batch, keep_routed);
    sampler_.run(ctx_, logits(bucket.num_seqs));
  };
  const auto [entry, is_new] = recordings_.try_emplace({bucket, keep_routed});
  if (is_new) {
    ops();
  } else {
    if (entry->second == nullptr) {
      entry->second = ctx_.device->record(ops);
    }
    entry->second->launch();
  }
  if (sampler_.has_rules()) {
    // The recording stays what it is for steps without rules; its draws are made again here.
    sampler_.run_with_rules(ctx_, logits(isize(decode_targets_)));
  }
  keep_routed_experts(chunks, keep_routed);
  return scheduler_.commit();
}

void Engine::run_model(const ModelBatch& batch, bool keep_routed) {
  RoutedExperts routed{
      .ids = {routed_.as<std::int32_t>().data(), {batch.token_ids.size(0), routed_width_}}};
  const ArenaScope scope(*ctx_.workspace);
  model_.forward(ctx_, logits(batch.logit_rows.size(0)), batch, cache_.buffers(),
                 keep_routed ? &routed : nullptr);
}

bool Engine::wants_routed(std::span<const ScheduledChunk> chunks) const {
  return routed_width_ > 0 && std::ranges::any_of(chunks, [](const ScheduledChunk& chunk) {
           return chunk.seq->request.want_routed_experts;
         });
}

void Engine::keep_routed_experts(std::span<const ScheduledChunk> chunks, bool keep_routed) {
  if (!keep_routed) {
    return;
  }
  std::int64_t num_rows = 0;
  for (const ScheduledChunk& chunk : chunks) {
    num_rows += chunk.count;
  }
  ctx_.device->download(routed_on_host_.data(), routed_.data(),
                        usize(num_rows * routed_width_) * sizeof(std::int32_t));
  const std::int32_t* source = routed_on_host_.data();
  for (const ScheduledChunk& chunk : chunks) {
    const std::int64_t count = chunk.count * routed_width_;
    if (chunk.seq->request.want_routed_experts) {
      const std::int64_t begin = chunk.begin * routed_width_;
      std::vector<std::int32_t>& ids = chunk.seq->output.routed_experts;
      ids.resize(std::max(ids.size(), usize(begin + count)));
      std::copy_n(source, count, ids.begin() + begin);
    }
    source += count;
  }
}

void Engine::score_prompts(std::span<const ScheduledChunk> chunks) {
  score_rows_.clear();
  bool any = false;
  for (const ScheduledChunk& chunk : chunks) {
    const Request& request = chunk.seq->request;
    for (std::int64_t i = 0; i < chunk.num_scored; ++i) {
      score_rows_.push_back({chunk.seq->all_tokens[usize(chunk.first_scored() + i + 1)],
                             request.num_top_logprobs, reported_temperature(request)});
      any = true;
    }
    if (chunk.samples()) {
      score_rows_.emplace_back();
    }
  }
  if (any) {
    scorer_.run(ctx_, logits(isize(score_rows_)), score_rows_);
  }
  std::int64_t row = 0;
  for (const ScheduledChunk& chunk : chunks) {
    keep_scores(chunk, row);
    row += chunk.num_scored + (chunk.samples() ? 1 : 0);
    const bool ends = !chunk.seq->output.error.empty() || chunk.end() == chunk.seq->length();
    if (!chunk.samples() && ends) {
      tokenless_.push_back(chunk.seq);
    }
  }
}

void Engine::keep_scores(const ScheduledChunk& chunk, std::int64_t first_row) {
  RequestOutput& output = chunk.seq->output;
  for (std::int64_t i = 0; i < chunk.num_scored; ++i) {
    const float logprob = scorer_.logprob(first_row + i);
    if (std::isnan(logprob) && output.error.empty()) {
      output.error = fmt::format("the model's logits at position {} are not finite",
                                 chunk.first_scored() + i + 1);
    }
    output.prompt_logprobs.push_back(logprob);
    if (chunk.seq->request.num_top_logprobs > 0) {
      const auto top = scorer_.top(first_row + i);
      output.prompt_top_logprobs.emplace_back(top.begin(), top.end());
    }
  }
}

bool Engine::score_alternatives(std::span<const SampleTarget> targets) {
  score_rows_.clear();
  for (const SampleTarget& target : targets) {
    const Request& request = target.seq->request;
    score_rows_.push_back({-1, request.num_top_logprobs, reported_temperature(request)});
  }
  const bool any =
      std::ranges::any_of(score_rows_, [](const ScoreRow& row) { return row.num_top > 0; });
  if (any) {
    scorer_.run(ctx_, logits(isize(targets)), score_rows_);
  }
  return any;
}

bool Engine::stops_at(const Sequence& seq, std::int32_t token) const {
  const auto holds = [&](const std::vector<std::int32_t>& ids) {
    return std::ranges::find(ids, token) != ids.end();
  };
  return holds(seq.request.stop_ids) || (!seq.request.ignore_eos && holds(options_.eos_ids));
}

void Engine::accept(Sequence& seq, const SampledToken& sampled, std::span<const TokenLogprob> top) {
  std::string& error = seq.output.error;  // a row of its prompt may have failed
  if (error.empty() && sampled.token < 0) {
    error = sampled.none_allowed
                ? fmt::format("the grammar allows no token at position {}", seq.length())
                : fmt::format("the model's logits at position {} are not finite", seq.length());
  }
  if (!error.empty()) {
    finish_without_token(seq);
    return;
  }
  TDM_CHECK(sampled.token < model_.vocab_size(), sampled.token, model_.vocab_size());
  const bool stops = stops_at(seq, sampled.token);
  TokenConstraint* const constraint = seq.request.constraint.get();
  // The token that ends a response is none of its text.
  if (!stops && constraint != nullptr && !constraint->accept(sampled.token)) {
    error = fmt::format("the grammar refuses token {} at position {}", sampled.token, seq.length());
    finish_without_token(seq);
    return;
  }
  scheduler_.confirm(seq);
  append(seq, sampled, top);
  std::optional<FinishReason> reason;
  // A stop on the last allowed token is reported as a stop.
  if (stops || (constraint != nullptr && constraint->is_complete())) {
    reason = FinishReason::kStop;
  } else if (seq.num_new_tokens() == seq.request.max_new_tokens) {
    reason = FinishReason::kLength;
  }
  if (reason) {
    finish(seq, *reason);
  }
  const std::size_t begin = event_alternatives_.size();
  event_alternatives_.insert(event_alternatives_.end(), top.begin(), top.end());
  events_.push_back({seq.id(), sampled.token, sampled.logprob, reason,
                     std::span(event_alternatives_).subspan(begin)});
}

void Engine::append(Sequence& seq, const SampledToken& sampled, std::span<const TokenLogprob> top) {
  RequestOutput& output = seq.output;
  if (seq.num_new_tokens() == 0) {
    output.timing.first_token_s = seq.seconds_since_submit();
  }
  if (output.weight_spans.empty() || output.weight_version() != weight_version_) {
    output.weight_spans.push_back({seq.num_new_tokens(), weight_version_});
  }
  seq.all_tokens.push_back(sampled.token);
  if (has_penalties(seq.request.rules)) {
    seq.counts.add_response(sampled.token);
  }
  if (seq.request.want_logprobs) {
    output.logprobs.push_back(sampled.logprob);
  }
  if (seq.request.num_top_logprobs > 0) {
    output.top_logprobs.emplace_back(top.begin(), top.end());
  }
}

/// A prompt that was only to be scored, or an error.
void Engine::finish_without_token(Sequence& seq) {
  const bool failed = !seq.output.error.empty();
  if (!failed && seq.request.want_routed_experts) {
    // The last token is fed for nothing but to have one way through the scheduler.
    seq.output.routed_experts.resize(usize((seq.length() - 1) * routed_width_));
  }
  finish(seq, failed ? FinishReason::kError : FinishReason::kLength);
  events_.push_back({seq.id(), -1, 0, seq.output.finish_reason});
}

void Engine::run_until_idle() {
  while (has_work()) {
    step();
  }
}

EngineStats Engine::stats() const {
  EngineStats stats = stats_;
  stats.num_preemptions = scheduler_.num_preemptions();
  stats.num_forks = scheduler_.num_forks();
  stats.num_running = scheduler_.num_running();
  stats.num_waiting = scheduler_.num_waiting();
  stats.num_free_pages = cache_.num_free_pages();
  stats.num_free_slots = cache_.num_free_slots();
  stats.prefix = scheduler_.prefix_hits();
  stats.num_cached_pages = cache_.tree().num_pages();
  stats.num_checkpoints = cache_.tree().num_checkpoints();
  stats.num_evicted_pages = cache_.tree().num_evicted_pages();
  stats.num_evicted_checkpoints = cache_.tree().num_evicted_checkpoints();
  return stats;
}

void Engine::check_integrity() const {
  scheduler_.check_integrity();
  const auto unfinished = std::ranges::count_if(
      sequences_, [](const auto& entry) { return entry.second->state != SeqState::kFinished; });
  TDM_CHECK(unfinished == scheduler_.num_running() + scheduler_.num_waiting(), unfinished);
  const auto deadlines = std::ranges::count_if(sequences_, [](const auto& entry) {
    return entry.second->state != SeqState::kFinished && entry.second->has_deadline();
  });
  TDM_CHECK(deadlines == num_deadlines_, deadlines, num_deadlines_);
}

}  // namespace tandem
