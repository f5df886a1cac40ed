// plan.cpp — choosing the rows of a step: decodes, prefills, admissions.
#include <algorithm>

#include "engine/scheduler/scheduler.h"

namespace tandem {

std::span<const ScheduledChunk> Scheduler::plan() {
  chunks_.clear();
  rows_left_ = limits_.batch_tokens;
  prompt_rows_left_ = limits_.prefill_tokens;
  logits_used_ = 0;
  if (limits_.preempt_every > 0 && ++num_plans_ % limits_.preempt_every == 0) {
    preempt_drawn();
  }
  preempted_ = false;
  admit_urgent();
  plan_decodes();
  plan_prefills();
  if (!preempted_ || running_.empty()) {
    admit();
  }
  TDM_CHECK(!chunks_.empty() || !has_work(), running_.size(), waiting_.size());
  return chunks_;
}

void Scheduler::schedule(Sequence& seq, std::int64_t count) {
  TDM_CHECK(count > 0 && count <= rows_left_, count, rows_left_);
  const std::int64_t first = seq.next_to_score() - 1;  // of the rows that are scored
  const std::int64_t last = std::min(seq.cache.length + count, seq.prompt_size - 1);
  chunks_.push_back({&seq, seq.cache.length, count, std::max<std::int64_t>(last - first, 0)});
  rows_left_ -= count;
  seq.share->tokens += count;
  logits_used_ += chunks_.back().num_scored + (chunks_.back().samples() ? 1 : 0);
  TDM_CHECK(logits_used_ <= num_seats_, logits_used_, num_seats_);
}

std::int64_t Scheduler::spare_logits() const {
  const auto computes = [](const Sequence* seq) { return seq->leader == nullptr; };
  const std::int64_t num_computing = std::ranges::count_if(running_, computes);
  return num_seats_ - logits_used_ - (num_computing - isize(chunks_));
}

/// All that is left of the sequence and the step, unless more of its rows are scored than there are
/// rows of logits to spare. One is left for a sequence to be admitted, so that a long prompt that
/// is scored does not keep others waiting.
std::int64_t Scheduler::prefill_rows(const Sequence& seq) const {
  const std::int64_t rows =
      std::min({seq.cache.until_checkpoint(seq.num_pending()), rows_left_, prompt_rows_left_});
  const std::int64_t next = seq.next_to_score();
  if (next == seq.prompt_size) {
    return rows;
  }
  const std::int64_t without_logits = next - 1 - seq.cache.length;
  TDM_CHECK(without_logits >= 0, next, seq.cache.length);
  const std::int64_t spare = spare_logits() - (waiting_.empty() ? 0 : 1);
  return std::min(rows, without_logits + 1 + std::max<std::int64_t>(spare, 0));
}

void Scheduler::schedule_prefill(Sequence& seq) {
  if (std::min(rows_left_, prompt_rows_left_) > 0 && seq.leader == nullptr) {
    const std::int64_t count = prefill_rows(seq);
    schedule(seq, count);
    prompt_rows_left_ -= count;
  }
}

void Scheduler::plan_decodes() {
  // preempt_last() shortens running_ from the back, so nothing scheduled so far is ever taken
  // away and `seq` itself goes last.
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Sequence& seq = *running_[i];
    if (!seq.in_decode()) {
      continue;
    }
    while (seq.state == SeqState::kRunning && !cache_.extend(seq.cache, seq.length())) {
      preempt_last();
    }
    if (seq.state == SeqState::kRunning) {
      schedule(seq, 1);
    }
  }
}

void Scheduler::plan_prefills() {
  for (Sequence* seq : running_) {
    if (!seq->in_decode()) {
      schedule_prefill(*seq);
    }
  }
}

void Scheduler::admit_urgent() {
  while (!waiting_.empty() && !running_.empty()) {
    Sequence& seq = waiting_.head();
    if (seq.request.priority <= running_.back()->request.priority) {
      return;
    }
    if (!try_admit(seq)) {
      if (!preempting_helps(seq)) {
        return;
      }
      preempt_last();
      if (running_.empty()) {
        return;  // admit() takes it
      }
    }
  }
}

bool Scheduler::preempting_helps(const Sequence& seq) const {
  // An estimate where sequences share pages; then some are preempted in vain.
  std::int64_t pages = cache_.num_available_pages();
  for (const Sequence* other : running_) {
    if (other->request.priority < seq.request.priority) {
      pages += isize(other->cache.pages);
    }
  }
  return cache_.pages_for(seq.length() + 1) <= pages;
}

void Scheduler::admit() {
  while (!waiting_.empty()) {
    Sequence& seq = waiting_.head();
    const bool has_rows = std::min({rows_left_, prompt_rows_left_, spare_logits()}) > 0;
    if ((!has_rows && find_leader(seq) == nullptr) || !try_admit(seq)) {
      return;
    }
    schedule_prefill(seq);
  }
}

bool Scheduler::try_admit(Sequence& seq) {
  if (num_running() == num_seats_) {
    return false;
  }
  const Sequence* leader = find_leader(seq);
  const std::int64_t size = seq.length();
  // A page for the token that follows and one for each running sequence; alone it fits, as open()
  // checks.
  const std::int64_t spare =
      running_.empty() ? 0 : num_running() + cache_.pages_for(size + 1) - cache_.pages_for(size);
  if (leader != nullptr) {
    if (!cache_.open_fork(seq.cache, size, spare)) {
      return false;
    }
  } else {
    const PrefixMatch match = cache_.tree().match(seq.cacheable(), seq.salt);
    if (!cache_.open(seq.cache, size, match, spare)) {
      return false;
    }
    count_match(seq, match);
  }
  waiting_.remove(seq);
  running_.insert(std::ranges::upper_bound(
                      running_, &seq,
                      [](const Sequence* a, const Sequence* b) { return ranks_before(*a, *b); }),
                  &seq);
  seq.state = SeqState::kRunning;
  seq.leader = leader;
  if (!seq.has_run) {
    seq.has_run = true;
    seq.output.timing.queued_s = seq.seconds_since_submit();
  }
  return true;
}

void Scheduler::count_match(Sequence& seq, const PrefixMatch& match) {
  ++prefix_hits_.num_lookups;
  prefix_hits_.num_hits += match.state_len > 0 ? 1 : 0;
  prefix_hits_.kv_tokens += match.kv_len;
  prefix_hits_.state_tokens += match.state_len;
  if (!seq.has_run) {
    seq.output.cached_tokens = match.state_len;
  }
}

const Sequence* Scheduler::find_leader(const Sequence& seq) const {
  if (seq.group == 0 || seq.num_new_tokens() > 0) {
    return nullptr;
  }
  const auto found = std::ranges::find_if(running_, [&](const Sequence* other) {
    return other->group == seq.group && other->leader == nullptr && other->num_new_tokens() == 0;
  });
  return found == running_.end() ? nullptr : *found;
}

}  // namespace tandem
