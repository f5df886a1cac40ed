// scheduler.cpp — the queues: adding, advancing, preempting, forking, finishing.
#include "engine/scheduler/scheduler.h"

#include <algorithm>

namespace tandem {
namespace {

/// What was found out about a prompt that `to` has in common with `from`.
void copy_prompt_results(Sequence& to, const Sequence& from) {
  to.output.routed_experts = from.output.routed_experts;
  to.output.prompt_logprobs = from.output.prompt_logprobs;
  to.output.prompt_top_logprobs = from.output.prompt_top_logprobs;
  to.output.error = from.output.error;
}

}  // namespace

Scheduler::Scheduler(CacheManager& cache, const EngineOptions& options)
    : cache_(cache), max_batch_tokens_(options.max_batch_tokens), num_seats_(options.num_seats()) {
  // A step plans and samples at most one chunk a seat: after this nothing below allocates.
  running_.reserve(usize(num_seats_));
  chunks_.reserve(usize(num_seats_));
  targets_.reserve(usize(num_seats_));
}

void Scheduler::add(Sequence& seq) {
  TDM_CHECK(seq.state == SeqState::kWaiting && !seq.cache.slot);
  seq.cache.pages.reserve(usize(cache_.pages_for(seq.prompt_size + seq.request.max_new_tokens)));
  waiting_.push_back(&seq);
}

std::span<const SampleTarget> Scheduler::commit() {
  targets_.clear();
  std::int64_t logits_row = 0;
  for (const ScheduledChunk& chunk : chunks_) {
    chunk.seq->cache.length += chunk.count;
    logits_row += chunk.num_scored;
    if (chunk.samples()) {
      targets_.push_back({chunk.seq, logits_row++});
    }
  }
  const std::size_t num_rows = targets_.size();
  for (std::size_t i = 0; i < num_rows; ++i) {
    if (targets_[i].seq->group != 0 && targets_[i].seq->num_new_tokens() == 0) {
      fork_followers(*targets_[i].seq, static_cast<std::int64_t>(i));
    }
  }
  chunks_.clear();
  return targets_;
}

void Scheduler::fork_followers(Sequence& leader, std::int64_t logits_row) {
  for (Sequence* seq : running_) {
    if (seq->leader != &leader) {
      continue;
    }
    cache_.fork(seq->cache, leader.cache);
    seq->leader = nullptr;
    copy_prompt_results(*seq, leader);
    seq->output.shared_prompt_tokens = leader.prompt_size;
    targets_.push_back({seq, logits_row});
    ++num_forks_;
  }
}

void Scheduler::preempt_newest() {
  Sequence& seq = *running_.back();
  running_.pop_back();
  TDM_CHECK(std::ranges::none_of(running_, [&](auto* other) { return other->leader == &seq; }));
  cache_.release(seq.cache);
  seq.leader = nullptr;
  seq.state = SeqState::kWaiting;
  ++seq.output.num_preemptions;
  ++num_preemptions_;
  preempted_ = true;
  waiting_.push_front(&seq);  // it is older than all that wait
}

void Scheduler::preempt_all() {
  chunks_.clear();
  while (!running_.empty()) {
    preempt_newest();
  }
}

void Scheduler::hand_over_prompt(Sequence& leader) {
  const auto is_follower = [&](const Sequence* seq) { return seq->leader == &leader; };
  const auto found = std::ranges::find_if(running_, is_follower);
  if (found == running_.end()) {
    return;
  }
  // The prompts are equal, so what the leader has computed of it is just as valid for the oldest
  // follower; what the follower holds goes with the leader.
  Sequence& heir = **found;
  std::swap(heir.cache, leader.cache);
  copy_prompt_results(heir, leader);
  heir.leader = nullptr;
  for (Sequence* seq : running_) {
    if (is_follower(seq)) {
      seq->leader = &heir;
    }
  }
}

void Scheduler::finish(Sequence& seq) {
  TDM_CHECK(seq.state != SeqState::kFinished && chunks_.empty(), chunks_.size());
  if (seq.state == SeqState::kRunning) {
    hand_over_prompt(seq);
    running_.erase(std::ranges::find(running_, &seq));
  } else {
    waiting_.erase(std::ranges::find(waiting_, &seq));
  }
  cache_.release(seq.cache);
  seq.leader = nullptr;
  seq.state = SeqState::kFinished;
}

void Scheduler::check_integrity() const {
  std::vector<const SeqCache*> live;
  const Sequence* older = nullptr;
  for (const Sequence* seq : running_) {
    TDM_CHECK(seq->state == SeqState::kRunning && seq->cache.slot.has_value());
    TDM_CHECK(older == nullptr || older->id() < seq->id());
    TDM_CHECK(seq->num_pending() >= 1, seq->num_pending());
    if (seq->leader != nullptr) {
      TDM_CHECK(std::ranges::count(running_, seq->leader) == 1);
      TDM_CHECK(seq->leader->leader == nullptr && seq->leader->num_new_tokens() == 0);
      TDM_CHECK(seq->cache.length == 0 && seq->leader->group == seq->group, seq->cache.length);
    }
    older = seq;
    live.push_back(&seq->cache);
  }
  for (const Sequence* seq : waiting_) {
    TDM_CHECK(seq->state == SeqState::kWaiting && !seq->cache.slot && seq->leader == nullptr);
    TDM_CHECK(older == nullptr || older->id() < seq->id());
    older = seq;
    live.push_back(&seq->cache);
  }
  TDM_CHECK(num_running() <= num_seats_, num_running(), num_seats_);
  cache_.check_integrity(live);
}

}  // namespace tandem
