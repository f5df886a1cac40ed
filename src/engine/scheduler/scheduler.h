// scheduler.h — which tokens of which sequences the next step computes.
//
// One step, in this order, within max_batch_tokens rows:
//   1. a waiting sequence of higher priority than a running one is admitted; where it does not fit,
//      running ones of lower priority are preempted for it;
//   2. every running sequence in decode gets one row; when pages run out, the running sequence that
//      ranks last (lowest priority, then newest) is preempted: it gives back all it holds, keeps
//      its tokens and is computed again later;
//   3. running prefills continue in rank order, each with one chunk, within max_prefill_tokens;
//   4. waiting sequences are admitted in the order of the WaitingQueue, while there is a seat, a
//      state slot, pages for all their tokens, and one more page for each running sequence (so that
//      an admission does not cause a preemption at once). Not in a step that preempted.
// Pages that only the prefix tree holds count as free: it is emptied before anyone is preempted.
// The running sequence that ranks first always advances: there is no livelock, as one sequence
// alone fits (EngineOptions).
//
// A sequence opens on the longest cached beginning of its tokens and prefills the rest, in chunks
// that end where a checkpoint is to be taken (CacheManager).
//
// A member of a group whose prompt an older member is computing is admitted as its follower: it
// takes a seat, a slot and its own last page, costs no rows, and is forked when the prompt is
// complete.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/cache/cache_manager.h"
#include "engine/options.h"
#include "engine/scheduler/waiting_queue.h"
#include "engine/sequence.h"

namespace tandem {

/// Rows of one sequence in a step: its tokens [begin, begin + count).
struct ScheduledChunk {
  Sequence* seq = nullptr;
  std::int64_t begin = 0;
  std::int64_t count = 0;
  std::int64_t num_scored = 0;  // of its rows, those whose logits score the prompt token after them

  [[nodiscard]] std::int64_t end() const { return begin + count; }
  /// Positions [first_scored(), first_scored() + num_scored) are scored.
  [[nodiscard]] std::int64_t first_scored() const {
    return std::min(end(), seq->prompt_size - 1) - num_scored;
  }
  /// The chunk ends at the last known token, so its last row gives the logits of the next one.
  [[nodiscard]] bool samples() const {
    return end() == seq->length() && seq->request.max_new_tokens > 0;
  }
};

/// A sequence that gets a new token in this step, and the row its logits are copied from: row i for
/// target i, in order.
struct SampleTarget {
  Sequence* seq = nullptr;
  std::int64_t logits_row = 0;
};

/// What admissions found in the prefix tree.
struct PrefixHits {
  std::int64_t num_lookups = 0;
  std::int64_t num_hits = 0;
  std::int64_t kv_tokens = 0;     // whose latent rows were there
  std::int64_t state_tokens = 0;  // of these, up to a checkpoint: what was not computed again
};

class Scheduler {
 public:
  /// `cache` outlives the scheduler, which does not own sequences either: a sequence given to add()
  /// must live until it is finished.
  Scheduler(CacheManager& cache, const EngineOptions& options);

  [[nodiscard]] bool has_work() const { return !running_.empty() || !waiting_.empty(); }
  [[nodiscard]] std::int64_t num_running() const { return isize(running_); }
  [[nodiscard]] std::int64_t num_waiting() const { return isize(waiting_); }
  [[nodiscard]] std::int64_t num_preemptions() const { return num_preemptions_; }
  [[nodiscard]] std::int64_t num_forks() const { return num_forks_; }
  [[nodiscard]] const PrefixHits& prefix_hits() const { return prefix_hits_; }
  /// Waiting sequences that give way to one of `priority` in a full queue, and the first to do so;
  /// null: none does.
  [[nodiscard]] std::int64_t num_waiting_below(std::int32_t priority) const {
    return waiting_.num_below(priority);
  }
  [[nodiscard]] Sequence* last_waiting_below(std::int32_t priority) const {
    return waiting_.last_below(priority);
  }

  /// Queues a sequence newer than all before it.
  void add(Sequence& seq);
  /// The chunks of the next step; empty only without work. Valid until the next call.
  [[nodiscard]] std::span<const ScheduledChunk> plan();
  /// After the model ran the planned chunks: the caches have advanced; followers are forked.
  /// Returns who gets a token: first the chunks that sample, in order, with the last row of logits
  /// that the model wrote for each; then the followers, with the row their leader's went to.
  [[nodiscard]] std::span<const SampleTarget> commit();
  /// A token was drawn for `seq` from finite logits and is not appended yet: what it computed may
  /// be shared.
  void confirm(Sequence& seq) { cache_.confirm(seq.cache, seq.all_tokens, seq.salt); }
  /// What becomes of the last checkpoint of a sequence that gives back its caches.
  enum class Prefix { kKeep, kDrop };
  /// Takes a waiting or running sequence out; it holds nothing afterwards.
  void finish(Sequence& seq, Prefix prefix);
  /// Every running sequence gives back its caches and waits, its tokens kept.
  void preempt_all(Prefix prefix);

  void check_integrity() const;

 private:
  struct Limits {
    std::int64_t batch_tokens = 0;
    std::int64_t prefill_tokens = 0;
    std::int64_t preempt_every = 0;
  };

  void plan_decodes();
  void plan_prefills();
  void admit_urgent();
  void admit();
  [[nodiscard]] bool try_admit(Sequence& seq);
  [[nodiscard]] bool preempting_helps(const Sequence& seq) const;
  void count_match(Sequence& seq, const PrefixMatch& match);
  void schedule(Sequence& seq, std::int64_t count);
  void schedule_prefill(Sequence& seq);
  void preempt(std::size_t index, Prefix prefix);
  void preempt_last() { preempt(running_.size() - 1, Prefix::kKeep); }
  void preempt_drawn();
  void give_back(Sequence& seq, Prefix prefix);
  [[nodiscard]] std::int64_t prefill_rows(const Sequence& seq) const;
  /// Rows of logits, of one a seat, beyond those used and one for each sequence that is still to be
  /// scheduled; followers take none.
  [[nodiscard]] std::int64_t spare_logits() const;
  void fork_followers(Sequence& leader, std::int64_t logits_row);
  void hand_over_prompt(Sequence& leader);
  [[nodiscard]] const Sequence* find_leader(const Sequence& seq) const;

  CacheManager& cache_;
  Limits limits_;
  std::int64_t num_seats_;
  std::vector<Sequence*> running_;  // as ranks_before()
  WaitingQueue waiting_;
  ClientShares clients_;
  std::vector<ScheduledChunk> chunks_;
  std::vector<SampleTarget> targets_;
  std::int64_t rows_left_ = 0;
  std::int64_t prompt_rows_left_ = 0;
  std::int64_t logits_used_ = 0;  // rows of logits of chunks_
  bool preempted_ = false;        // in the step being planned
  std::int64_t num_plans_ = 0;
  std::int64_t num_preemptions_ = 0;
  std::int64_t num_forks_ = 0;
  PrefixHits prefix_hits_;
};

}  // namespace tandem
