// engine.h — the generation engine: requests in, tokens out. The only header a server, a trainer or
// a command needs, with request.h and options.h behind it.
//
// An Engine owns the cache memory, the queues and every request until its output is taken. It uses
// the model and the ExecCtx for the call only and belongs to one thread. A request's tokens and
// log-probabilities are a function of its own fields and the weights: not of the batch, the order
// of arrival, chunk and page sizes, preemption or grouping (given ops and a model whose rows do not
// depend on the batch).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/batch.h"
#include "engine/cache/cache_manager.h"
#include "engine/options.h"
#include "engine/request.h"
#include "engine/sampler.h"
#include "engine/scheduler/scheduler.h"
#include "engine/scorer.h"
#include "models/model.h"
#include "tensor/storage.h"

namespace tandem {

struct EngineStats {
  std::int64_t num_steps = 0;
  std::int64_t prefill_tokens = 0;  // rows computed, recomputation after preemption included
  std::int64_t decode_tokens = 0;
  double prefill_s = 0;  // a mixed step's time is split by its rows
  double decode_s = 0;
  std::int64_t num_preemptions = 0;
  std::int64_t num_forks = 0;
  std::int64_t num_running = 0;
  std::int64_t num_waiting = 0;
  std::int64_t num_free_pages = 0;
  std::int64_t num_free_slots = 0;  // of sequences

  PrefixHits prefix;                  // what admissions found; recomputations count again
  std::int64_t num_cached_pages = 0;  // that the prefix cache holds, beside the free ones
  std::int64_t num_checkpoints = 0;   // that it holds
  std::int64_t num_evicted_pages = 0;
  std::int64_t num_evicted_checkpoints = 0;
};

enum class PauseMode {
  kRetract,  // running requests give back their caches and wait, their tokens kept
  kInPlace,  // they keep them
};

class Engine {
 public:
  /// Allocates caches and workspace: on a device with memory of its own all that it will ever take
  /// there. `model` and what `ctx` points to outlive the engine.
  /// Errors: throws Error with the sentence of plan_serving() when the options do not fit.
  Engine(const Model& model, const ExecCtx& ctx, const EngineOptions& options);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  /// Queues a request. Errors: a sentence that names the field and what was expected; kOverloaded
  /// when max_queued wait already and none of them ranks lower. A request of lower priority that
  /// gives way finishes as kAborted.
  [[nodiscard]] Expected<RequestId> submit(Request request);
  /// Queues n samples of one prompt; sample i is what submit() gives with sequence_id + i. The
  /// prompt is computed once for as many of them as run together. Ids in order.
  [[nodiscard]] Expected<std::vector<RequestId>> submit_group(const Request& request,
                                                              std::int64_t n);

  /// Whether step() would do or tell anything. Not while paused, but for events.
  [[nodiscard]] bool has_work() const {
    return !early_events_.empty() || (!paused_ && scheduler_.has_work());
  }
  /// Ends requests whose time is over, then runs one step of at most max_batch_tokens rows; the
  /// latter not without work or while paused. The events stay valid until the next call. Errors:
  /// what the model or an op throws; every request then waits to be computed again, so that a later
  /// step repeats the failed one.
  std::span<const StepEvent> step();
  void run_until_idle();

  /// Ends an unfinished request as kAborted, with the tokens it has; false when there is nothing to
  /// end (finished, taken or unknown): aborting twice does no harm.
  bool abort(RequestId id);
  /// The output of a finished request, which the engine then forgets.
  [[nodiscard]] Expected<RequestOutput> take_output(RequestId id);

  /// All running requests give back their caches, keep their tokens, and are computed again from
  /// them when stepped. Frees all pages and slots.
  void preempt_all() { scheduler_.preempt_all(Scheduler::Prefix::kKeep); }
  /// Until resume(), steps compute nothing; requests may be submitted and aborted.
  void pause(PauseMode mode);
  void resume() { paused_ = false; }
  [[nodiscard]] bool paused() const { return paused_; }
  /// Empties the prefix cache. Errors: how many requests are running, as they use it.
  [[nodiscard]] Status flush_cache();
  // The prefix cache across a restart (engine/cache/prefix_snapshot.h). `key` says which weights,
  // device and program made it.
  SnapshotCounts save_prefix_cache(const SnapshotKey& key, SnapshotWriter& writer) {
    return cache_.save_tree(key, writer);
  }
  /// To be called before the first request.
  [[nodiscard]] Expected<LoadedSnapshot> load_prefix_cache(const SnapshotKey& key,
                                                           SnapshotReader& reader) {
    return cache_.load_tree(key, reader);
  }
  /// To be called between steps after the model's weights changed: drops everything computed with
  /// the older ones, the prefix cache too. Unfinished requests go on under the new ones. Without an
  /// argument the version rises by 1.
  void on_weights_changed(std::optional<std::int64_t> version = std::nullopt);
  /// The same where the model keeps its weights elsewhere from now on: what a device has recorded
  /// with the old addresses is recorded again.
  void on_weights_moved();
  [[nodiscard]] std::int64_t weight_version() const { return weight_version_; }

  [[nodiscard]] EngineStats stats() const;
  [[nodiscard]] const MemoryPlan& memory_plan() const { return plan_; }
  [[nodiscard]] const EngineOptions& options() const { return options_; }
  /// Every invariant of queues and caches; TDM_CHECK fails otherwise. For tests and idle moments.
  void check_integrity() const;

 private:
  [[nodiscard]] Status validate(const Request& request) const;
  RequestId enqueue(Request request, std::uint64_t group);
  void prepare_rules(Sequence& seq) const;
  [[nodiscard]] F32Mat logits(std::int64_t rows);
  void compute();
  std::span<const SampleTarget> mixed_step(std::span<const ScheduledChunk> chunks);
  std::span<const SampleTarget> decode_step(std::span<const ScheduledChunk> chunks);
  /// Whether the model's part of a step may be padded and launched as it was recorded: decodes
  /// that want a token each. Rules and alternatives come after it, as they are.
  [[nodiscard]] bool can_be_recorded(std::span<const ScheduledChunk> chunks) const;
  void run_model(const ModelBatch& batch, bool keep_routed);
  void score_prompts(std::span<const ScheduledChunk> chunks);
  void keep_scores(const ScheduledChunk& chunk, std::int64_t first_row);
  [[nodiscard]] bool score_alternatives(std::span<const SampleTarget> targets);
  [[nodiscard]] bool wants_routed(std::span<const ScheduledChunk> chunks) const;
  void keep_routed_experts(std::span<const ScheduledChunk> chunks, bool keep_routed);
  void accept(Sequence& seq, const SampledToken& sampled, std::span<const TokenLogprob> top);
  void append(Sequence& seq, const SampledToken& sampled, std::span<const TokenLogprob> top);
  void finish(Sequence& seq, FinishReason reason);
  void abort(Sequence& seq, AbortCause cause, std::string error);
  [[nodiscard]] Status make_room_in_queue(std::int64_t count, std::int32_t priority);
  void end_late_requests();
  void finish_without_token(Sequence& seq);
  [[nodiscard]] bool stops_at(const Sequence& seq, std::int32_t token) const;

  const Model& model_;
  ExecCtx ctx_;
  EngineOptions options_;
  MemoryPlan plan_;
  Arena workspace_;  // where memory is planned; else the context's is used
  CacheManager cache_;
  Scheduler scheduler_;
  BatchBuilder batch_;
  Sampler sampler_;
  Scorer scorer_;
  std::vector<ScoreRow> score_rows_;
  std::vector<SampleTarget> decode_targets_;
  Storage logits_;                            // [batch_.max_seqs(), V] fp32
  Storage routed_;                            // [batch_.max_rows(), moe_layers * top_k] int32
  std::vector<std::int32_t> routed_on_host_;  // its copy
  std::int64_t routed_width_;                 // moe_layers * top_k
  // Decode steps a device has recorded, by what they were recorded for; null: seen once, and run
  // as it came so that every buffer has its size before the recording.
  std::map<std::pair<BatchBucket, bool>, std::unique_ptr<Recording>> recordings_;
  std::unordered_map<std::uint64_t, std::unique_ptr<Sequence>> sequences_;  // by id, until taken
  std::vector<Sequence*> tokenless_;  // of this step: those that end without a token
  std::vector<TokenLogprob> event_alternatives_;
  std::vector<StepEvent> events_;
  std::vector<StepEvent> early_events_;  // of what ended between steps; told by the next
  std::int64_t num_deadlines_ = 0;       // unfinished requests that have one
  bool paused_ = false;
  EngineStats stats_;
  std::int64_t weight_version_;
  std::uint64_t next_id_ = 1;
};

}  // namespace tandem
