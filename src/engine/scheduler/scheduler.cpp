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
    : cache_(cache),
      limits_{
          options.max_batch_tokens,
          options.max_prefill_tokens == 0 ? options.max_batch_tokens : options.max_prefill_tokens,
          options.preempt_every},
      num_seats_(options.num_seats()) {
  // A step plans and samples at most one chunk a seat: after this nothing below allocates.
  running_.reserve(usize(num_seats_));
  chunks_.reserve(usize(num_seats_));
  targets_.reserve(usize(num_seats_));
}

void Scheduler::add(Sequence& seq) {
  TDM_CHECK(seq.state == SeqState::kWaiting && !seq.cache.slot);
  seq.cache.pages.reserve(usize(cache_.pages_for(seq.prompt_size + seq.request.max_new_tokens)));
  clients_.join(seq);
  waiting_.add(seq);
}

std::span<const SampleTarget> Scheduler::commit() {
  targets_.clear();
  std::int64_t logits_row = 0;
  for (const ScheduledChunk& chunk : chunks_) {
    cache_.advance(chunk.seq->cache, chunk.count);
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

void Scheduler::give_back(Sequence& seq, Prefix prefix) {
  if (prefix == Prefix::kKeep) {
    cache_.retire(seq.cache, seq.all_tokens, seq.salt);
  } else {
    cache_.release(seq.cache);
  }
  seq.leader = nullptr;
}

void Scheduler::preempt(std::size_t index, Prefix prefix) {
  Sequence& seq = *running_[index];
  running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(index));
  TDM_CHECK(std::ranges::none_of(running_, [&](auto* other) { return other->leader == &seq; }));
  give_back(seq, prefix);
  seq.state = SeqState::kWaiting;
  ++seq.output.num_preemptions;
  ++num_preemptions_;
  preempted_ = true;
  waiting_.add(seq);
}

void Scheduler::preempt_all(Prefix prefix) {
  chunks_.clear();
  while (!running_.empty()) {
    preempt(running_.size() - 1, prefix);
  }
}

void Scheduler::preempt_drawn() {
  // Only those that have advanced since they were admitted, so that all of them ever do.
  for (std::size_t i = running_.size(); i-- > 0;) {
    if (running_[i]->cache.has_drawn) {
      preempt(i, Prefix::kKeep);
    }
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

void Scheduler::finish(Sequence& seq, Prefix prefix) {
  TDM_CHECK(seq.state != SeqState::kFinished && chunks_.empty(), chunks_.size());
  if (seq.state == SeqState::kRunning) {
    hand_over_prompt(seq);
    running_.erase(std::ranges::find(running_, &seq));
  } else {
    waiting_.remove(seq);
  }
  give_back(seq, prefix);
  clients_.leave(seq);
  seq.state = SeqState::kFinished;
}

void Scheduler::check_integrity() const {
  std::vector<const SeqCache*> live;
  const Sequence* before = nullptr;
  for (const Sequence* seq : running_) {
    TDM_CHECK(seq->state == SeqState::kRunning && seq->cache.slot.has_value());
    TDM_CHECK(before == nullptr || ranks_before(*before, *seq));
    TDM_CHECK(seq->num_pending() >= 1, seq->num_pending());
    TDM_CHECK(seq->share != nullptr && seq->share->num_unfinished > 0);
    if (seq->leader != nullptr) {
      TDM_CHECK(std::ranges::count(running_, seq->leader) == 1);
      TDM_CHECK(seq->leader->leader == nullptr && seq->leader->num_new_tokens() == 0);
      TDM_CHECK(seq->cache.length == 0 && seq->leader->group == seq->group, seq->cache.length);
    }
    before = seq;
    live.push_back(&seq->cache);
  }
  waiting_.check_integrity();
  for (const Sequence* seq : waiting_.sequences()) {
    live.push_back(&seq->cache);
  }
  TDM_CHECK(has_work() || clients_.num_clients() == 0, clients_.num_clients());
  TDM_CHECK(num_running() <= num_seats_, num_running(), num_seats_);
  cache_.check_integrity(live);
}

}  // namespace tandem
