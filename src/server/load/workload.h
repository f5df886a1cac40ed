// workload.h — what a load asks: conversations of one or more turns, made from a seed or read from
// a file. The same options give the same requests on every machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "server/load/endpoint.h"

namespace tandem::load {

struct WorkloadOptions {
  std::string dataset = "random-ids";
  Endpoint endpoint = Endpoint::kCompletions;
  std::int64_t num_prompts = 100;         // requests; a conversation of T turns is T of them
  std::optional<std::int64_t> input_len;  // tokens; see input_length()
  std::optional<std::int64_t> output_len;
  double range_ratio = 1;       // lengths are uniform in [ratio * len, len]
  std::int64_t num_groups = 8;  // shared-prefix
  std::int64_t system_len = 0;  // shared-prefix; 0: the input length
  std::int64_t question_len = 128;
  std::int64_t turns = 4;           // multi-turn
  std::int64_t vocab_size = 10000;  // ids are drawn from [0, vocab_size)
  std::string path;                 // jsonl
  std::uint64_t seed = 42;

  /// The length given, else 1024 and 128, for sharegpt-like 161 and 338: ShareGPT's means in the
  /// paper on PagedAttention (arXiv 2309.06180).
  [[nodiscard]] std::int64_t input_length() const;
  [[nodiscard]] std::int64_t output_length() const;
  /// Tokens of a shared prefix.
  [[nodiscard]] std::int64_t system_length() const;
};

/// What a turn adds to its conversation.
struct Turn {
  Prompt prompt;
  std::int64_t output_len = 0;
};

/// Its turns are asked one after the other.
struct Conversation {
  std::vector<Turn> turns;
  /// Whether the prompt of a turn is put after all earlier prompts and replies.
  bool keeps_history = false;
  double arrival_s = 0;  // from a file's "t", else 0
};

struct Workload {
  std::vector<Conversation> conversations;
  bool has_arrivals = false;  // the file had "t" on every line

  [[nodiscard]] std::int64_t num_requests() const;
};

/// Errors: a Failure that names the option, or the file and line, and what was expected.
[[nodiscard]] Expected<Workload> make_workload(const WorkloadOptions& options);

/// One short request that shares no beginning with those of `workload`, unless that is a file.
[[nodiscard]] Turn warm_up_turn(const WorkloadOptions& options, const Workload& workload);

/// `history` with `turn` behind it.
void append(Prompt& history, const Prompt& turn);
/// Puts the server's reply into the history. Where it came without ids (`reply_ids` empty) and ids
/// are needed, `reply_len` made-up ones take its place: the next prompt has the right length.
void append_reply(Prompt& history, Endpoint endpoint, std::string_view reply_text,
                  const std::vector<std::int32_t>& reply_ids, std::int64_t reply_len,
                  std::int64_t vocab_size);

/// Conversations of a jsonl text, `label` names it in errors. A line: one of "input_ids", "prompt"
/// (text or ids), "messages", "question"; "output_len" (default: output_length()); "t"
/// (seconds), "session" (text or number: lines of one session are asked one after the other).
[[nodiscard]] Expected<Workload> parse_workload(std::string_view label, std::string_view text,
                                                const WorkloadOptions& options);

}  // namespace tandem::load
