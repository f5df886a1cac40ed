// engine_control.cpp — what ends, pauses and resets: finishing, deadlines, the bound of the queue,
// pauses, new weights, an empty prefix cache.
#include <algorithm>
#include <utility>

#include "engine/engine.h"

namespace tandem {

void Engine::finish(Sequence& seq, FinishReason reason) {
  scheduler_.finish(
      seq, reason == FinishReason::kError ? Scheduler::Prefix::kDrop : Scheduler::Prefix::kKeep);
  num_deadlines_ -= seq.has_deadline() ? 1 : 0;
  seq.output.finish_reason = reason;
  seq.output.timing.total_s = seq.seconds_since_submit();
}

void Engine::abort(Sequence& seq, AbortCause cause, std::string error) {
  finish(seq, FinishReason::kAborted);  // first: an heir of its prompt gets the errors it has
  seq.output.abort_cause = cause;
  seq.output.error = std::move(error);
}

bool Engine::abort(RequestId id) {
  const auto found = sequences_.find(value_of(id));
  if (found == sequences_.end() || found->second->state == SeqState::kFinished) {
    return false;
  }
  abort(*found->second, AbortCause::kCaller, "");
  return true;
}

void Engine::end_late_requests() {
  if (num_deadlines_ == 0) {
    return;
  }
  const std::size_t first = early_events_.size();
  for (const auto& [id, seq] : sequences_) {
    if (seq->state == SeqState::kFinished || !seq->has_deadline()) {
      continue;
    }
    const Request& request = seq->request;
    const double age = seq->seconds_since_submit();
    const auto end = [&](AbortCause cause, const char* field, double limit) {
      abort(*seq, cause, fmt::format("{} is {}: the request is {:.3f} s old", field, limit, age));
      early_events_.push_back({seq->id(), -1, 0, FinishReason::kAborted});
    };
    if (request.timeout_s > 0 && age > request.timeout_s) {
      end(AbortCause::kTimeout, "timeout_s", request.timeout_s);
    } else if (!seq->has_run && request.queue_timeout_s > 0 && age > request.queue_timeout_s) {
      end(AbortCause::kQueueTimeout, "queue_timeout_s", request.queue_timeout_s);
    }
  }
  std::sort(early_events_.begin() + static_cast<std::ptrdiff_t>(first), early_events_.end(),
            [](const StepEvent& a, const StepEvent& b) { return a.id < b.id; });
}

Status Engine::make_room_in_queue(std::int64_t count, std::int32_t priority) {
  if (options_.max_queued == 0) {
    return Ok{};
  }
  std::int64_t room = options_.max_queued - scheduler_.num_waiting();
  if (room < count && room + scheduler_.num_waiting_below(priority) < count) {
    Failure full = fail("the queue is full: {} of at most {} requests wait",
                        scheduler_.num_waiting(), options_.max_queued);
    full.kind = Failure::Kind::kOverloaded;
    return full;
  }
  for (; room < count; ++room) {
    Sequence& victim = *scheduler_.last_waiting_below(priority);
    abort(victim, AbortCause::kQueueFull,
          fmt::format("the queue is full: a request of higher priority took the place of this one, "
                      "whose priority is {}",
                      victim.request.priority));
    early_events_.push_back({victim.id(), -1, 0, FinishReason::kAborted});
  }
  return Ok{};
}

void Engine::pause(PauseMode mode) {
  paused_ = true;
  if (mode == PauseMode::kRetract) {
    preempt_all();
  }
}

Status Engine::flush_cache() {
  if (scheduler_.num_running() > 0) {
    return fail("flush_cache: {} requests are running: expected none, as they use the cache",
                scheduler_.num_running());
  }
  cache_.clear_tree();
  return Ok{};
}

void Engine::on_weights_changed(std::optional<std::int64_t> version) {
  weight_version_ = version.value_or(weight_version_ + 1);
  scheduler_.preempt_all(Scheduler::Prefix::kDrop);
  cache_.clear_tree();
}

void Engine::on_weights_moved() {
  recordings_.clear();
  on_weights_changed();
}

}  // namespace tandem
