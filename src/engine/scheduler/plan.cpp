// plan.cpp — choosing the rows of a step: decodes, prefills, admissions.
#include <algorithm>

#include "engine/scheduler/scheduler.h"

namespace tandem {

std::span<const ScheduledChunk> Scheduler::plan() {
  chunks_.clear();
  rows_left_ = max_batch_tokens_;
  logits_used_ = 0;
  preempted_ = false;
  plan_decodes();
  plan_prefills();
  if (!preempted_) {
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
  const std::int64_t rows = std::min(seq.num_pending(), rows_left_);
  const std::int64_t next = seq.next_to_score();
  if (next == seq.prompt_size) {
    return rows;
  }
  const std::int64_t without_logits = next - 1 - seq.cache.length;
  TDM_CHECK(without_logits >= 0, next, seq.cache.length);
  const std::int64_t spare = spare_logits() - (waiting_.empty() ? 0 : 1);
  return std::min(rows, without_logits + 1 + std::max<std::int64_t>(spare, 0));
}

void Scheduler::plan_decodes() {
  // preempt_newest() shortens running_ from the back, so nothing scheduled so far is ever taken
  // away and `seq` itself goes last.
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Sequence& seq = *running_[i];
    if (!seq.in_decode()) {
      continue;
    }
    while (seq.state == SeqState::kRunning && !cache_.extend(seq.cache, seq.length())) {
      preempt_newest();
    }
    if (seq.state == SeqState::kRunning) {
      schedule(seq, 1);
    }
  }
}

void Scheduler::plan_prefills() {
  for (Sequence* seq : running_) {
    if (rows_left_ > 0 && !seq->in_decode() && seq->leader == nullptr) {
      schedule(*seq, prefill_rows(*seq));
    }
  }
}

void Scheduler::admit() {
  while (!waiting_.empty() && num_running() < num_seats_) {
    Sequence& seq = *waiting_.front();
    const Sequence* leader = find_leader(seq);
    const bool follows = leader != nullptr;
    if ((!follows && (rows_left_ == 0 || spare_logits() <= 0)) || !has_pages_for(seq, follows)) {
      return;
    }
    const bool opened =
        follows ? cache_.open_fork(seq.cache, seq.length()) : cache_.open(seq.cache, seq.length());
    if (!opened) {
      return;
    }
    waiting_.pop_front();
    running_.push_back(&seq);
    seq.state = SeqState::kRunning;
    seq.leader = leader;
    if (!seq.has_run) {
      seq.has_run = true;
      seq.output.timing.queued_s = seq.seconds_since_submit();
    }
    if (!follows) {
      schedule(seq, prefill_rows(seq));
    }
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

bool Scheduler::has_pages_for(const Sequence& seq, bool follows) const {
  if (running_.empty()) {
    return true;  // alone it fits; open() checks
  }
  // A follower needs its last page now, or a page for its first token soon.
  const std::int64_t needed = follows ? 1 : cache_.pages_for(seq.length() + 1);
  return cache_.num_free_pages() >= needed + num_running();
}

}  // namespace tandem
