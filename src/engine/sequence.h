// sequence.h — one request on its way through the engine.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "engine/cache/cache_manager.h"
#include "engine/request.h"

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
  [[nodiscard]] bool in_decode() const { return cache.length > 0 && num_pending() == 1; }
  [[nodiscard]] double seconds_since_submit() const {
    return std::chrono::duration<double>(Clock::now() - submitted_at).count();
  }
};

}  // namespace tandem
