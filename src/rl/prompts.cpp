#include "rl/prompts.h"

#include "train/demonstrations.h"

namespace tandem {

Expected<std::vector<Problem>> load_problems(const std::string& path, const JsonlKeys& keys,
                                             const Tokenizer& tokenizer) {
  auto records = load_jsonl(path, keys);
  if (!records.ok()) {
    return records.failure();
  }
  if (records->empty()) {
    return fail("{}: expected at least one record", path);
  }
  std::vector<Problem> problems;
  for (PromptRecord& record : *records) {
    const auto gold = parse_gold(record.label);
    if (!gold.ok()) {
      return fail("{}:{}: field \"{}\": {}", path, record.line, keys.label_key, gold.message());
    }
    auto prompt = encode_prompt(tokenizer, record.prompt);
    if (!prompt.ok() || prompt->empty()) {
      return fail("{}:{}: field \"{}\": expected a prompt of at least one token{}", path,
                  record.line, keys.input_key, prompt.ok() ? "" : "; " + prompt.message());
    }
    problems.push_back(
        {std::move(record.prompt), std::move(record.label), *std::move(prompt), *gold});
  }
  return problems;
}

}  // namespace tandem
