// compiled.h — the last step of every compilation.
#pragma once

#include <memory>
#include <vector>

#include "text/grammar.h"
#include "text/grammar/budget.h"
#include "text/grammar/dfa.h"

namespace tandem::grammar {

/// The grammar of finished rules; rule 0 is the whole text. Null when no text can match.
/// Errors: a Failure when the budget ran out.
[[nodiscard]] Expected<std::shared_ptr<const Grammar>> link_grammar(const std::vector<Dfa>& rules,
                                                                    const Budget& budget);

}  // namespace tandem::grammar
