// reward.h — grading an answer by its number: exact, total, and without ever evaluating what the
// model wrote.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "core/error.h"
#include "core/rng.h"

namespace tandem {

__extension__ using Int128 = __int128;

/// A number in lowest terms with a positive denominator, so equal numbers are equal structs.
struct Rational {
  Int128 numerator = 0;
  Int128 denominator = 1;

  friend bool operator==(const Rational&, const Rational&) = default;
};

/// What reading a number found. kOverflow: a well-formed number beyond 128 bits, equal to nothing.
enum class NumberStatus { kOk, kMalformed, kOverflow };

struct ParsedNumber {
  NumberStatus status = NumberStatus::kMalformed;
  Rational value;
};

/// Reads the inside of an answer: optional `$...$` or `\(...\)`, sign (- + U+2212), currency ($ £
/// €), integer with groups of three, decimal, `a/b`, `\frac{a}{b}` or `\dfrac{a}{b}`, one trailing
/// `.` and `%`. No units, no exponents.
[[nodiscard]] ParsedNumber parse_answer_number(std::string_view text);

enum class RewardStatus { kCorrect, kWrong, kNoAnswer, kMalformed, kTruncated };

[[nodiscard]] std::string_view to_string(RewardStatus status);

struct RewardResult {
  double reward = 0.0;
  RewardStatus status = RewardStatus::kNoAnswer;
};

/// Where an answer may stand. kGsm8k: the last `####` line, else the last balanced \boxed{}.
/// kArithmetic: only the
/// `####` line.
enum class RewardType { kGsm8k, kArithmetic };

/// The grader that `rollout.rm_type` names.
[[nodiscard]] Expected<RewardType> parse_reward_type(std::string_view rm_type);

/// The number a data set calls right: a worked solution that ends in `#### N` or a boxed number, or
/// the bare number. Errors: a Failure that quotes the label when it holds no such number.
[[nodiscard]] Expected<Rational> parse_gold(std::string_view label);

/// Grades a response without its special tokens. `finished`: it ended by the end-of-sequence token,
/// not by a limit. An answer counts only when a newline or that end follows it; one cut off has
/// status kTruncated. Determinism: a pure function of its arguments.      Errors: none; every input
/// has a result.
[[nodiscard]] RewardResult grade(RewardType type, std::string_view response, const Rational& gold,
                                 bool finished);

/// Metric only, never a reward: does the last number anywhere in the text equal `gold`? It pays
/// trailing numbers.
[[nodiscard]] bool flexible_match(std::string_view response, const Rational& gold);

}  // namespace tandem
