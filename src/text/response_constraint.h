// response_constraint.h — grammars inside a response with channels. For K3 the constraint is
// inactive while the model thinks and covers the rest of the turn up to its end, markers included;
// they are ids, never text. For models without channels it covers the whole response.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "core/error.h"
#include "text/grammar.h"
#include "text/token_constraint.h"
#include "text/tokenizer.h"

namespace tandem {

/// The answer is a text of `grammar`; no tool can be called. `thinking`: the prompt ended by
/// opening the think channel, else the response channel. The tokenizer is not kept.
[[nodiscard]] std::unique_ptr<TokenConstraint> make_answer_constraint(
    const Grammar& grammar, std::shared_ptr<const TokenTrie> trie, const Tokenizer& tokenizer,
    bool thinking);

struct ToolGrammar {
  std::string name;
  std::string parameters_json;  ///< JSON schema of the arguments; empty: no arguments
};

/// tool_choice "required" (all tools) or of one name (that tool alone): a response text of any
/// kind, then at least one call; with `parallel` more. Arguments come in the order of their
/// properties, none besides them.
/// Errors: a Failure naming the tool and the place in its schema; a tokenizer without markers.
[[nodiscard]] Expected<std::unique_ptr<TokenConstraint>> make_tool_call_constraint(
    std::span<const ToolGrammar> tools, bool parallel, std::shared_ptr<const TokenTrie> trie,
    const Tokenizer& tokenizer, bool thinking, const GrammarLimits& limits = {});

}  // namespace tandem
