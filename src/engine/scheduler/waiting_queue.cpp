#include "engine/scheduler/waiting_queue.h"

#include <algorithm>
#include <limits>

#include "core/checked_cast.h"

namespace tandem {
namespace {

bool waits_before(const Sequence* a, const Sequence* b) {
  if (a->request.priority != b->request.priority) {
    return a->request.priority > b->request.priority;
  }
  return a->has_run != b->has_run ? a->has_run : a->id() < b->id();
}

}  // namespace

bool ranks_before(const Sequence& a, const Sequence& b) {
  return a.request.priority != b.request.priority ? a.request.priority > b.request.priority
                                                  : a.id() < b.id();
}

void ClientShares::join(Sequence& seq) {
  const auto [entry, is_new] = shares_.try_emplace(seq.request.client);
  if (is_new && shares_.size() > 1) {
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    for (const auto& [client, share] : shares_) {
      if (share.num_unfinished > 0) {
        least = std::min(least, share.tokens);
      }
    }
    entry->second.tokens = least;
  }
  ++entry->second.num_unfinished;
  seq.share = &entry->second;
}

void ClientShares::leave(Sequence& seq) {
  seq.share = nullptr;
  const auto entry = shares_.find(seq.request.client);
  TDM_CHECK(entry != shares_.end());
  if (--entry->second.num_unfinished == 0) {
    shares_.erase(entry);
  }
}

void WaitingQueue::add(Sequence& seq) {
  sequences_.insert(std::ranges::upper_bound(sequences_, &seq, waits_before), &seq);
}

void WaitingQueue::remove(Sequence& seq) {
  const auto found = std::ranges::find(sequences_, &seq);
  TDM_CHECK(found != sequences_.end(), value_of(seq.id()));
  sequences_.erase(found);
}

Sequence& WaitingQueue::head() const {
  Sequence* best = sequences_.front();
  if (best->has_run) {
    return *best;
  }
  for (Sequence* seq : sequences_) {
    if (seq->request.priority != best->request.priority) {
      break;
    }
    if (seq->share->tokens < best->share->tokens) {
      best = seq;
    }
  }
  return *best;
}

Sequence* WaitingQueue::last_below(std::int32_t priority) const {
  const auto gives_way = [&](const Sequence* seq) {
    return !seq->has_run && seq->request.priority < priority;
  };
  const auto found = std::find_if(sequences_.rbegin(), sequences_.rend(), gives_way);
  return found == sequences_.rend() ? nullptr : *found;
}

std::int64_t WaitingQueue::num_below(std::int32_t priority) const {
  return std::ranges::count_if(sequences_, [&](const Sequence* seq) {
    return !seq->has_run && seq->request.priority < priority;
  });
}

void WaitingQueue::check_integrity() const {
  TDM_CHECK(std::ranges::is_sorted(sequences_, waits_before));
  for (const Sequence* seq : sequences_) {
    TDM_CHECK(seq->state == SeqState::kWaiting && !seq->cache.slot && seq->leader == nullptr);
    TDM_CHECK(seq->share != nullptr && seq->share->num_unfinished > 0);
  }
}

}  // namespace tandem
