// word_problems.h — the demo's task: two-step + and - word problems from templates, with a careful
// answer (the steps, then the number) and a hasty one (a number at once, seldom right). Supervised
// training on both gives a model with two habits; reinforcement learning then chooses.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// Why a problem is kept out of all training data. Both are functions of the problem alone, not of
/// a seed.
enum class HeldOut { kNo, kText, kTriple };

struct WordProblem {
  std::string question;
  std::string careful_answer;  ///< "7+3=10\n10-4=6\n#### 6"
  std::string hasty_answer;    ///< "#### 8"
  std::int64_t gold = 0;
  std::array<std::int64_t, 3> numbers{};  ///< start, first and second operand, 1..9 each
};

/// Problem `index` of the endless stream `seed`. No intermediate result is negative, none is
/// above 27. Determinism: a pure function of its arguments.
[[nodiscard]] WordProblem make_word_problem(std::uint64_t seed, std::uint64_t index);

/// About a tenth of the number triples and a tenth of the remaining texts.
[[nodiscard]] HeldOut held_out(const WordProblem& problem);

/// Chance that a hasty answer is right; the others are uniform over the wrong numbers in [gold-9,
/// gold+9] and [0, 27].
inline constexpr double kHastyAccuracy = 0.10;

/// `count` different problems of the training split, or of the held-out split (texts and triples as
/// they fall).
[[nodiscard]] std::vector<WordProblem> training_problems(std::uint64_t seed, std::int64_t count);
[[nodiscard]] std::vector<WordProblem> held_out_problems(std::uint64_t seed, std::int64_t count);

struct DemonstrationOptions {
  std::uint64_t seed = 0;
  std::int64_t num_batches = 0;
  std::int64_t batch_size = 64;
  double careful_share = 0.40;
};

/// One demonstration: a training problem and the answer to imitate.
struct Demonstration {
  WordProblem problem;
  bool is_careful = false;

  [[nodiscard]] const std::string& answer() const {
    return is_careful ? problem.careful_answer : problem.hasty_answer;
  }
};

/// Batch after batch, each with exactly round(careful_share * batch_size) careful answers in
/// shuffled places, so that the share does not drift from batch to batch. Read it in file order.
/// Problems are fresh draws and may repeat.
[[nodiscard]] std::vector<Demonstration> make_demonstrations(const DemonstrationOptions& options);

/// Every piece the texts are made of: words and numbers 0..27 with and without a leading space,
/// symbols, newline, and all single characters. By longest match a problem takes about 35 tokens.
[[nodiscard]] std::vector<std::string> word_problem_vocabulary();

/// The tokenizer file for that vocabulary:
/// {"type":"char","tokens":[...],"special":[...],"stop":[...]}.
[[nodiscard]] std::string word_problem_tokenizer_json();

struct DemoDataOptions {
  std::uint64_t seed = 0;
  std::int64_t num_train = 8192;
  std::int64_t num_test = 1000;
  DemonstrationOptions demonstrations;
};

/// Writes train.jsonl and test.jsonl (careful answers) and sft.jsonl, each line GSM8K's
/// {"question": ..., "answer": ...}, and tokenizer.json into `dir`, which is created.
/// Errors: throws Error when the disk refuses.
void write_demo_data(const std::string& dir, const DemoDataOptions& options);

}  // namespace tandem
