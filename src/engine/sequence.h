// sequence.h — one request on its way through the engine.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/cache/cache_manager.h"
#include "engine/request.h"
#include "engine/token_counts.h"

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
  // Of its own tokens only, so that they outlive a preemption.
  TokenCounts counts;                  // filled when a penalty is asked for
  std::vector<std::int32_t> stop_ids;  // every id that ends it; filled when it has a least length
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
  /// The next token may not end the response.
  [[nodiscard]] bool must_go_on() const {
    return num_new_tokens() < request.rules.min_new_tokens && !stop_ids.empty();
  }
  [[nodiscard]] bool is_constrained() const {
    return request.constraint != nullptr && request.constraint->is_active();
  }
  /// Not every token may come next.
  [[nodiscard]] bool restricts_tokens() const { return must_go_on() || is_constrained(); }
  /// The next token is not drawn from the model's logits as they are.
  [[nodiscard]] bool changes_logits() const {
    return !counts.seen().empty() || !request.rules.logit_bias.empty() || restricts_tokens();
  }
  /// Position of the first prompt token whose log-probability is wanted and not yet known;
  /// prompt_size: there is none.
  [[nodiscard]] std::int64_t next_to_score() const {
    const std::int64_t from = request.prompt_logprobs_from;
    const auto known = static_cast<std::int64_t>(output.prompt_logprobs.size());
    return from < 0 ? prompt_size : from + known;
  }
  [[nodiscard]] bool in_decode() const {
    return cache.length > 0 && num_pending() == 1 && num_new_tokens() > 0;
  }
  /// The tokens of which a cached prefix may spare the computation: not the last one, whose logits
  /// are wanted, nor those whose log-probabilities or experts are.
  [[nodiscard]] std::span<const std::int32_t> cacheable() const {
    std::int64_t count = request.want_routed_experts ? 0 : length() - 1;
    if (next_to_score() < prompt_size) {
      count = std::clamp<std::int64_t>(next_to_score() - 1, 0, count);
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
