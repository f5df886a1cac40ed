// sequence.h — one request on its way through the engine.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "engine/cache/cache_manager.h"
#include "engine/request.h"
#include "engine/token_counts.h"

namespace tandem {

/// waiting -> running -> finished; preemption goes from running back to waiting and keeps the
/// tokens.
enum class SeqState { kWaiting, kRunning, kFinished };

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
  // Running and not null: waits for this older running member of its group to compute the prompt,
  // and is then forked from it.
  const Sequence* leader = nullptr;
  Clock::time_point submitted_at;
  bool has_run = false;

  [[nodiscard]] RequestId id() const { return output.id; }
  [[nodiscard]] std::int64_t length() const { return static_cast<std::int64_t>(all_tokens.size()); }
  [[nodiscard]] std::int64_t num_new_tokens() const { return length() - prompt_size; }
  /// Tokens the model has not seen yet: 1 in decode, the rest of the prompt (or of everything after
  /// a preemption) in prefill.
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
  [[nodiscard]] bool in_decode() const { return cache.length > 0 && num_pending() == 1; }
  [[nodiscard]] double seconds_since_submit() const {
    return std::chrono::duration<double>(Clock::now() - submitted_at).count();
  }
};

}  // namespace tandem
