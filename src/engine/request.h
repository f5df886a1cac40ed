// request.h — what is asked of the engine and what comes back. Token ids only: text, stop strings
// and templates belong to the layers above.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/ids.h"
#include "ops/sample.h"
#include "text/token_constraint.h"

namespace tandem {

/// Changes of the logits before temperature and filters, in this order. Source: spec
/// serving.md 3.2.
struct LogitRules {
  float repetition_penalty = 1;  // > 0; seen tokens (prompt and response): z > 0 ? z / p : z * p
  float frequency_penalty = 0;   // z -= count in the response * f
  float presence_penalty = 0;    // z -= p for tokens of the response
  std::vector<LogitBias> logit_bias = {};
  std::int64_t min_new_tokens = 0;  // until then no stop id may be drawn
};

[[nodiscard]] constexpr bool has_penalties(const LogitRules& rules) {
  return rules.repetition_penalty != 1 || rules.frequency_penalty != 0 ||
         rules.presence_penalty != 0;
}

/// Which log-probability is reported. Source: spec serving.md 3.3.
enum class LogprobMode {
  kScaled,  // log softmax(z / temperature) of the model's own logits; temperature 1 when greedy
  kRaw,     // log softmax(z)
};

/// Of Request::num_top_logprobs.
inline constexpr std::int64_t kMaxTopLogprobs = 20;

/// An alternative at one position.
struct TokenLogprob {
  std::int32_t token = 0;
  float logprob = 0;
};

struct Request {
  std::vector<std::int32_t> prompt = {};  // token ids in [0, vocab)
  SamplingParams sampling = {};           // temperature below 1e-6 is greedy
  std::int64_t max_new_tokens = 128;      // 0: only the prompt is scored

  // The draw at position p of the sequence (prompt included) uses mix_key({seed, sequence_id, p}).
  // The caller gives both numbers, so a result never depends on the order of arrival; and a
  // response that is resumed later as a longer prompt draws the same tokens as an undisturbed one.
  std::uint64_t seed = 0;
  std::uint64_t sequence_id = 0;

  std::vector<std::int32_t> stop_ids = {};  // end the response besides EngineOptions::eos_ids
  bool ignore_eos = false;  // eos_ids do not stop; stop_ids still do. No logit is masked

  LogitRules rules = {};
  std::shared_ptr<TokenConstraint> constraint =
      {};  // null: none; belongs to this request from then on

  bool want_logprobs = false;
  LogprobMode logprob_mode = LogprobMode::kScaled;
  std::int64_t num_top_logprobs = 0;  // alternatives a position, at most kMaxTopLogprobs
  // Log-probabilities of the prompt's tokens from this position on, each under the weights of the
  // step that computed it; -1: none. Limits what the prefix cache may serve. Such a prompt takes
  // as many rows of logits a step as the engine has seats to spare.
  std::int64_t prompt_logprobs_from = -1;

  std::int32_t priority = 0;    // higher runs first; equal ones in order of arrival
  double queue_timeout_s = 0;   // finishes as kAborted when it has waited longer; 0: never
  double timeout_s = 0;         // the same for its whole life
  std::string client = {};      // fairness: waiting requests of different clients take turns
  std::string cache_salt = {};  // prefixes are shared among requests of the same salt only
  bool want_routed_experts = false;
};

enum class FinishReason { kStop, kLength, kAborted, kError };
/// "stop", "length", "aborted", "error".
[[nodiscard]] std::string_view finish_reason_name(FinishReason reason);

/// Who ended a request that finished as kAborted.
enum class AbortCause {
  kNone,          // it was not aborted
  kCaller,        // Engine::abort()
  kQueueFull,     // gave way to a request of higher priority
  kQueueTimeout,  // Request::queue_timeout_s
  kTimeout,       // Request::timeout_s
};

/// Tokens from `first_token` of the response up to the next span were sampled under `version`.
struct WeightSpan {
  std::int64_t first_token = 0;
  std::int64_t version = 0;
};

/// Seconds since submit().
struct RequestTiming {
  double queued_s = 0;       // until the first time it ran
  double first_token_s = 0;  // until its first token (TTFT); 0 when it has none
  double total_s = 0;        // until it finished
};

struct RequestOutput {
  RequestId id{};
  std::vector<std::int32_t> tokens;  // the response, including the token that stopped it
  // Natural log of softmax(logits / temperature) over the full vocabulary, of the model's own
  // logits: before rules, constraint, top-k, top-p and min-p. The temperature is 1 for a greedy
  // request and for LogprobMode::kRaw. [tokens], empty unless want_logprobs.
  std::vector<float> logprobs;
  std::vector<std::vector<TokenLogprob>> top_logprobs;  // [tokens]; most likely first
  // From Request::prompt_logprobs_from on; position 0 has none (NaN, no alternatives). What
  // sampling the token there would have reported, bit for bit.
  std::vector<float> prompt_logprobs;
  std::vector<std::vector<TokenLogprob>> prompt_top_logprobs;
  FinishReason finish_reason = FinishReason::kStop;
  AbortCause abort_cause = AbortCause::kNone;
  std::string error;  // one sentence; for kError, and where the engine itself aborted
  // [prompt + tokens - 1, moe_layers * top_k]: the experts every fed token was routed to (the last
  // token is never fed). Rows recomputed after a weight change are those of the newer weights. An
  // aborted request has the rows computed so far. Empty unless want_routed_experts.
  std::vector<std::int32_t> routed_experts;
  std::vector<WeightSpan> weight_spans;  // one unless the weights changed midway; empty: no token
  std::int64_t num_preemptions = 0;
  std::int64_t cached_tokens = 0;  // prompt tokens taken from the prefix cache when it first ran
  std::int64_t shared_prompt_tokens = 0;  // prompt tokens taken from a group member's prefill
  RequestTiming timing;

  /// Version under which the last token was sampled; -1 when there is none.
  [[nodiscard]] std::int64_t weight_version() const {
    return weight_spans.empty() ? -1 : weight_spans.back().version;
  }
};

/// What one step did to one request, for streaming.
struct StepEvent {
  RequestId id{};
  std::int32_t token = -1;  // -1: no token (an error or the engine ended the request)
  float logprob = 0;        // of `token`, as in RequestOutput::logprobs
  std::optional<FinishReason> finish;
  std::span<const TokenLogprob> top_logprobs = {};  // valid until the next step
};

}  // namespace tandem
