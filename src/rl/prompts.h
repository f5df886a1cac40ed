// prompts.h — the problems of a run: text, prompt ids and the gold answer, checked when loaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"
#include "io/jsonl.h"
#include "rl/reward.h"
#include "text/tokenizer.h"

namespace tandem {

struct Problem {
  std::string question;
  std::string label;
  std::vector<std::int32_t> prompt;  // ids, at least one
  Rational gold;
};

/// Errors: a Failure naming file and line: unreadable, no gold number in the label, an empty
/// prompt.
Expected<std::vector<Problem>> load_problems(const std::string& path, const JsonlKeys& keys,
                                             const Tokenizer& tokenizer);

}  // namespace tandem
