// scheduler.h — which tokens of which sequences the next step computes.
//
// One step, in this order, within max_batch_tokens rows:
//   1. every running sequence in decode gets one row; when pages run out, the newest running
//   sequence is
//      preempted: it gives back all it holds, keeps its tokens and is computed again later;
//   2. running prefills continue, oldest first, each with one chunk;
//   3. waiting sequences are admitted strictly first come first served, while there is a seat, a
//   state
//      slot, pages for all their tokens, and one more page for each running sequence (so that an
//      admission does not cause a preemption at once). Not in a step that preempted.
// Hence every running sequence is older than every waiting one, and the oldest always advances:
// there is no livelock, as one sequence alone fits (EngineOptions).
//
// A member of a group whose prompt an older member is computing is admitted as its follower: it
// takes a seat, a slot and its own last page, costs no rows, and is forked when the prompt is
// complete.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "engine/cache/cache_manager.h"
#include "engine/options.h"
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

  /// Queues a sequence newer than all before it.
  void add(Sequence& seq);
  /// The chunks of the next step; empty only without work. Valid until the next call.
  [[nodiscard]] std::span<const ScheduledChunk> plan();
  /// After the model ran the planned chunks: the caches have advanced; followers are forked.
  /// Returns who gets a token: first the chunks that sample, in order, with the last row of logits
  /// that the model wrote for each; then the followers, with the row their leader's went to.
  [[nodiscard]] std::span<const SampleTarget> commit();
  /// Takes a waiting or running sequence out; it holds nothing afterwards.
  void finish(Sequence& seq);
  /// Every running sequence gives back its caches and waits, its tokens kept.
  void preempt_all();

  void check_integrity() const;

 private:
  void plan_decodes();
  void plan_prefills();
  void admit();
  void schedule(Sequence& seq, std::int64_t count);
  [[nodiscard]] std::int64_t prefill_rows(const Sequence& seq) const;
  /// Rows of logits, of one a seat, beyond those used and one for each sequence that is still to be
  /// scheduled; followers take none.
  [[nodiscard]] std::int64_t spare_logits() const;
  void preempt_newest();
  void fork_followers(Sequence& leader, std::int64_t logits_row);
  void hand_over_prompt(Sequence& leader);
  [[nodiscard]] const Sequence* find_leader(const Sequence& seq) const;
  [[nodiscard]] bool has_pages_for(const Sequence& seq, bool follows) const;

  CacheManager& cache_;
  std::int64_t max_batch_tokens_;
  std::int64_t num_seats_;
  std::vector<Sequence*> running_;  // oldest first
  std::deque<Sequence*> waiting_;   // oldest first
  std::vector<ScheduledChunk> chunks_;
  std::vector<SampleTarget> targets_;
  std::int64_t rows_left_ = 0;
  std::int64_t logits_used_ = 0;  // rows of logits of chunks_
  bool preempted_ = false;        // in the step being planned
  std::int64_t num_preemptions_ = 0;
  std::int64_t num_forks_ = 0;
};

}  // namespace tandem
