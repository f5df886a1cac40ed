// regex.h — regular expressions in JavaScript's notation, as far as they are regular: classes,
// groups, alternation, quantifiers, escapes, anchors at the ends.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "text/grammar/char_set.h"
#include "text/grammar/dfa.h"

namespace tandem::grammar {

struct RegexNode {
  enum class Kind { kChars, kSequence, kEither, kRepeat };
  Kind kind = Kind::kSequence;
  CharSet chars = {};                    // kChars
  std::vector<RegexNode> children = {};  // kRepeat: one
  std::int32_t min = 0;                  // kRepeat
  std::int32_t max = kUnbounded;
};

/// One alternative at the top, with its anchors.
struct RegexBranch {
  RegexNode node;
  bool at_start = false;  // began with ^
  bool at_end = false;    // ended with $
};

/// The most repetitions a counted quantifier may name: each is a copy of its operand.
inline constexpr std::int32_t kMaxRegexRepeat = 1000;

/// Errors: a Failure naming the byte and what was expected or is not supported (lookaround,
/// backreferences, \b, \p, flags, anchors inside).
[[nodiscard]] Expected<std::vector<RegexBranch>> parse_regex(std::string_view pattern,
                                                             std::int64_t max_depth);

enum class RegexMatch {
  kWhole,   ///< the expression is the whole text; anchors change nothing
  kSearch,  ///< the text has a match somewhere, as JSON schema's "pattern" means it
};

[[nodiscard]] Dfa regex_dfa(const std::vector<RegexBranch>& branches, RegexMatch match,
                            Budget& budget);

}  // namespace tandem::grammar
