#include "engine/engine.h"

#include <algorithm>
#include <chrono>

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
      sampler_(batch_.max_seqs(), *ctx.device),
      logits_(batch_.max_seqs() * model.vocab_size() * 4, *ctx.device),
      routed_(batch_.max_rows() * model.moe_layers() * model.experts_per_token() * 4, *ctx.device),
      routed_on_host_(usize(routed_.size_bytes()) / sizeof(std::int32_t)),
      routed_width_(model.moe_layers() * model.experts_per_token()),
      weight_version_(options.first_weight_version) {
  if (plan_.device) {
    ctx_.workspace = &workspace_;
  }
  events_.reserve(usize(options.num_seats()));
  decode_targets_.reserve(usize(options.num_seats()));
}

Engine::~Engine() = default;

std::span<const StepEvent> Engine::step() {
  events_.assign(early_events_.begin(), early_events_.end());
  early_events_.clear();
  end_late_requests();
  if (paused_) {
    return events_;
  }
  const auto start = std::chrono::steady_clock::now();
  const std::span<const ScheduledChunk> chunks = scheduler_.plan();
  if (chunks.empty()) {
    return events_;
  }
  std::int64_t num_rows = 0;
  std::int64_t num_decodes = 0;
  for (const ScheduledChunk& chunk : chunks) {
    num_rows += chunk.count;
    num_decodes += chunk.seq->in_decode() ? 1 : 0;
  }
  try {
    const std::span<const SampleTarget> targets = records_decodes() && num_decodes == isize(chunks)
                                                      ? decode_step(chunks)
                                                      : mixed_step(chunks);
    const std::span<const SampledToken> sampled = sampler_.collect();
    for (std::size_t i = 0; i < targets.size(); ++i) {
      accept(*targets[i].seq, sampled[i]);
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
  return events_;
}

F32Mat Engine::logits(std::int64_t rows) {
  return {logits_.as<float>().data(), {rows, model_.vocab_size()}};
}

std::span<const SampleTarget> Engine::mixed_step(std::span<const ScheduledChunk> chunks) {
  const bool keep_routed = wants_routed(chunks);
  run_model(batch_.build(chunks, cache_), keep_routed);
  keep_routed_experts(chunks, keep_routed);
  // commit() forgets the chunks and adds the followers of a finished prompt to the targets: they
  // read copies of their leader's logits, which lie below the rows the model wrote.
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
  if (!targets.empty()) {
    sampler_.run(ctx_, rows);
  }
  return targets;
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

std::optional<FinishReason> Engine::reason_to_finish(const Sequence& seq) const {
  const auto ends_in = [&](const std::vector<std::int32_t>& ids) {
    return std::ranges::find(ids, seq.all_tokens.back()) != ids.end();
  };
  // A stop on the last allowed token is reported as a stop.
  if (ends_in(seq.request.stop_ids) || (!seq.request.ignore_eos && ends_in(options_.eos_ids))) {
    return FinishReason::kStop;
  }
  if (seq.num_new_tokens() == seq.request.max_new_tokens) {
    return FinishReason::kLength;
  }
  return std::nullopt;
}

void Engine::accept(Sequence& seq, const SampledToken& sampled) {
  RequestOutput& output = seq.output;
  if (sampled.token < 0) {
    output.error = fmt::format("the model's logits at position {} are not finite", seq.length());
    finish(seq, FinishReason::kError);
    events_.push_back({seq.id(), -1, 0, FinishReason::kError});
    return;
  }
  TDM_CHECK(sampled.token < model_.vocab_size(), sampled.token, model_.vocab_size());
  scheduler_.confirm(seq);
  if (seq.num_new_tokens() == 0) {
    output.timing.first_token_s = seq.seconds_since_submit();
  }
  if (output.weight_spans.empty() || output.weight_version() != weight_version_) {
    output.weight_spans.push_back({seq.num_new_tokens(), weight_version_});
  }
  seq.all_tokens.push_back(sampled.token);
  if (seq.request.want_logprobs) {
    output.logprobs.push_back(sampled.logprob);
  }
  const std::optional<FinishReason> reason = reason_to_finish(seq);
  if (reason) {
    finish(seq, *reason);
  }
  events_.push_back({seq.id(), sampled.token, sampled.logprob, reason});
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
