// jsonl.h — prompt data sets: one JSON object a line.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace tandem {

/// Keys that hold the prompt and its label.
struct JsonlKeys {
  std::string input_key = "question";
  std::string label_key = "answer";
};

struct PromptRecord {
  std::string prompt;
  std::string label;
  std::int64_t line = 0;  // 1-based, in the file

  bool operator==(const PromptRecord&) const = default;
};

/// Parses the text of a file; `label` names it in errors. Lines end at '\n' only (U+2028 and the
/// like are data); the last one may lack it; blank lines are skipped; other keys are ignored.
/// Errors: a Failure "file:line: ..." for bad JSON, a duplicate or missing key, or a value that is
/// not a string.
[[nodiscard]] Expected<std::vector<PromptRecord>> parse_jsonl(std::string_view label,
                                                              std::string_view text,
                                                              const JsonlKeys& keys);

/// Errors: as parse_jsonl(), or a Failure naming the path when it cannot be read.
[[nodiscard]] Expected<std::vector<PromptRecord>> load_jsonl(const std::string& path,
                                                             const JsonlKeys& keys);

}  // namespace tandem
