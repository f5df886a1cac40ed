// demonstrations.h — questions and answers as token ids, through the tokenizer's chat template.
// SFT, RL, evaluation and generation render a question with this one routine.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "io/jsonl.h"
#include "text/tokenizer.h"

namespace tandem {

struct EncodedDemonstration {
  std::vector<std::int32_t> tokens;  // prompt, answer, end of turn
  std::int64_t num_prompt = 0;
};

/// The prompt of one user turn, ready for the assistant's answer.
Expected<std::vector<std::int32_t>> encode_prompt(const Tokenizer& tokenizer,
                                                  const std::string& question);

/// Errors: a Failure naming the record's line when it renders to nothing, or not to a continuation
/// of its prompt.
Expected<std::vector<EncodedDemonstration>> encode_demonstrations(
    const Tokenizer& tokenizer, std::span<const PromptRecord> records);

}  // namespace tandem
