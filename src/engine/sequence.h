// sequence.h — one request on its way through the engine.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/cache/cache_manager.h"
#include "engine/request.h"

namespace tandem {

/// waiting -> running -> finished; preemption goes from running back to waiting and keeps the
/// tokens.
enum class SeqState { kWaiting, kRunning, kFinished };

/// What a client was given of the engine, so that the others get their turn.
struct ClientShare {
  std::int64_t tokens = 0;          // rows computed for it
  std::int64_t num_unfinished = 0;  // its requests
};

struct Sequence {
  using Clock = std::chrono::steady_clock;

  Request request;          // its prompt has moved to all_tokens
  RequestOutput output;     // id, logprobs, ... ; `tokens` is cut out of all_tokens when taken
  std::uint64_t group = 0;  // submitted together with the same prompt; 0: alone
  std::int64_t prompt_size = 0;
  std::vector<std::int32_t> all_tokens;  // prompt, then response
  SeqState state = SeqState::kWaiting;
  SeqCache cache;
  CacheSalt salt;                // of Request::cache_salt
  ClientShare* share = nullptr;  // of Request::client; the scheduler's
  // Running and not null: waits for this older running member of its group to compute the prompt,
  // and is then forked from it.
  const Sequence* leader = nullptr;
  Clock::time_point submitted_at;
  bool has_run = false;  // so a waiting one was preempted

  [[nodiscard]] RequestId id() const { return output.id; }
  [[nodiscard]] std::int64_t length() const { return static_cast<std::int64_t>(all_tokens.size()); }
  [[nodiscard]] std::int64_t num_new_tokens() const { return length() - prompt_size; }
  /// Tokens the model has not seen yet: 1 in decode, the rest of the prompt (or of everything after
  /// a preemption) in prefill. The last row of a prompt is prefill even when it comes alone.
  [[nodiscard]] std::int64_t num_pending() const { return length() - cache.length; }
  [[nodiscard]] bool in_decode() const {
    return cache.length > 0 && num_pending() == 1 && num_new_tokens() > 0;
  }
  /// The tokens of which a cached prefix may spare the computation: not the last one, whose logits
  /// are wanted, nor those whose log-probabilities or experts are.
  [[nodiscard]] std::span<const std::int32_t> cacheable() const {
    std::int64_t count = request.want_routed_experts ? 0 : length() - 1;
    if (request.prompt_logprobs_from >= 0) {
      count = std::clamp<std::int64_t>(request.prompt_logprobs_from - 1, 0, count);
    }
    return std::span(all_tokens).first(static_cast<std::size_t>(count));
  }
  [[nodiscard]] bool has_deadline() const {
    return request.queue_timeout_s > 0 || request.timeout_s > 0;
  }
  [[nodiscard]] double seconds_since_submit() const {
    return std::chrono::duration<double>(Clock::now() - submitted_at).count();
  }
};

}  // namespace tandem
