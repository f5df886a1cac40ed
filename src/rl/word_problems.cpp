#include "rl/word_problems.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <span>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/checked_cast.h"
#include "core/error.h"
#include "core/rng.h"
#include "io/lines.h"
#include "rl/metrics.h"

namespace tandem {
namespace {

struct Person {
  std::string_view name;
  std::string_view pronoun;
};
struct Thing {
  std::string_view singular;
  std::string_view plural;
};

constexpr std::array<Person, 8> kPeople = {{{"Tom", "He"},
                                            {"Anna", "She"},
                                            {"Ben", "He"},
                                            {"Mia", "She"},
                                            {"Sam", "He"},
                                            {"Lucy", "She"},
                                            {"Max", "He"},
                                            {"Emma", "She"}}};
constexpr std::array<Thing, 6> kThings = {{{"pen", "pens"},
                                           {"apple", "apples"},
                                           {"book", "books"},
                                           {"coin", "coins"},
                                           {"card", "cards"},
                                           {"shell", "shells"}}};
constexpr std::array<std::string_view, 4> kGains = {"gets {} more", "finds {} more", "buys {} more",
                                                    "wins {} more"};
constexpr std::array<std::string_view, 4> kLosses = {"gives away {}", "loses {}", "sells {}",
                                                     "drops {}"};
/// {0} name, {1} start with its thing, {2} and {3} the two events, {4} He/She, {5} the things.
constexpr std::array<std::string_view, 6> kTemplates = {
    "{0} has {1}. {4} {2}. {4} {3}. How many {5}?",
    "{0} has {1}. {4} {2} and then {3}. How many {5}?",
    "{0} has {1} and {2}. Then {0} {3}. How many {5}?",
    "{0} starts with {1}. {4} {2}. Then {4} {3}. How many now?",
    "{0} has {1}. {4} {2}. {4} {3}. How many {5} are left?",
    "First {0} has {1}. Then {4} {2}. Last {4} {3}. How many {5}?"};

constexpr std::int64_t kMaxOperand = 9;
constexpr std::int64_t kMaxResult = 3 * kMaxOperand;

/// What the random numbers decide.
struct Choices {
  std::size_t form = 0;
  std::size_t person = 0;
  std::size_t thing = 0;
  std::array<std::size_t, 2> verbs{};
  std::array<bool, 2> is_gain{};
  std::array<std::int64_t, 3> numbers{};
};

std::string event_text(bool is_gain, std::size_t verb, std::int64_t number) {
  return fmt::format(fmt::runtime(is_gain ? kGains.at(verb) : kLosses.at(verb)), number);
}

/// "He" inside a sentence is "he".
std::string question_text(const Choices& c) {
  const Person& person = kPeople.at(c.person);
  const Thing& thing = kThings.at(c.thing);
  const std::string start =
      fmt::format("{} {}", c.numbers[0], c.numbers[0] == 1 ? thing.singular : thing.plural);
  std::string text =
      fmt::format(fmt::runtime(kTemplates.at(c.form)), person.name, start,
                  event_text(c.is_gain[0], c.verbs[0], c.numbers[1]),
                  event_text(c.is_gain[1], c.verbs[1], c.numbers[2]), person.pronoun, thing.plural);
  for (const std::string_view adverb : {"Then ", "Last "}) {
    const std::string capital = fmt::format("{}{}", adverb, person.pronoun);
    if (const std::size_t at = text.find(capital); at != std::string::npos) {
      char& letter = text[at + adverb.size()];
      letter = letter == 'H' ? 'h' : 's';
    }
  }
  return text;
}

std::int64_t apply(bool is_gain, std::int64_t value, std::int64_t operand) {
  return is_gain ? value + operand : value - operand;
}

template <std::size_t N, typename T>
std::size_t pick(Rng& rng, const std::array<T, N>&) {
  return rng.below(N);
}

std::int64_t one_to_nine(Rng& rng) {
  return 1 + checked_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(kMaxOperand)));
}

Choices draw_choices(Rng& rng) {
  Choices c;
  c.form = pick(rng, kTemplates);
  c.person = pick(rng, kPeople);
  c.thing = pick(rng, kThings);
  c.numbers[0] = one_to_nine(rng);
  std::int64_t value = c.numbers[0];
  for (std::size_t k = 0; k < 2; ++k) {
    // Draw again rather than force a gain: otherwise small starts would always be followed by gains
    // of any size.
    do {
      c.is_gain.at(k) = rng.below(2) == 0;
      c.numbers.at(k + 1) = one_to_nine(rng);
    } while (apply(c.is_gain.at(k), value, c.numbers.at(k + 1)) < 0);
    value = apply(c.is_gain.at(k), value, c.numbers.at(k + 1));
    c.verbs.at(k) = pick(rng, kGains);
  }
  return c;
}

std::int64_t hasty_guess(Rng& rng, std::int64_t gold) {
  if (rng.uniform() < kHastyAccuracy) {
    return gold;
  }
  const std::int64_t low = std::max<std::int64_t>(gold - kMaxOperand, 0);
  const std::int64_t high = std::min(gold + kMaxOperand, kMaxResult);
  const std::int64_t guess =
      low + checked_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(high - low)));
  return guess < gold ? guess : guess + 1;  // skips the right one
}

WordProblem build(const Choices& c, std::int64_t guess_of_hasty) {
  WordProblem problem;
  problem.question = question_text(c);
  problem.numbers = c.numbers;
  const std::int64_t middle = apply(c.is_gain[0], c.numbers[0], c.numbers[1]);
  problem.gold = apply(c.is_gain[1], middle, c.numbers[2]);
  problem.careful_answer = fmt::format(
      "{}{}{}={}\n{}{}{}={}\n#### {}", c.numbers[0], c.is_gain[0] ? '+' : '-', c.numbers[1], middle,
      middle, c.is_gain[1] ? '+' : '-', c.numbers[2], problem.gold, problem.gold);
  problem.hasty_answer = fmt::format("#### {}", guess_of_hasty);
  return problem;
}

std::int64_t gold_of(const Choices& c) {
  return apply(c.is_gain[1], apply(c.is_gain[0], c.numbers[0], c.numbers[1]), c.numbers[2]);
}

std::uint64_t text_hash(std::string_view text) {
  std::uint64_t hash = 0;
  for (const char c : text) {
    hash = mix_key({hash, static_cast<std::uint64_t>(static_cast<unsigned char>(c))});
  }
  return hash;
}

std::vector<WordProblem> distinct_problems(std::uint64_t seed, std::int64_t count,
                                           bool want_held_out) {
  std::vector<WordProblem> problems;
  std::unordered_set<std::string> seen;
  // Distinct texts number in the hundreds of thousands; a count near that would draw for ever.
  const std::uint64_t max_draws = 1000 + 100 * static_cast<std::uint64_t>(count);
  for (std::uint64_t index = 0; isize(problems) < count; ++index) {
    TDM_CHECK(index < max_draws, count);
    WordProblem problem = make_word_problem(seed, index);
    if ((held_out(problem) != HeldOut::kNo) == want_held_out &&
        seen.insert(problem.question).second) {
      problems.push_back(std::move(problem));
    }
  }
  return problems;
}

/// Words with their leading space, numbers, and single other characters: the pieces of a text.
void collect_pieces(std::string_view text, std::set<std::string>& pieces) {
  const auto is_word = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
  };
  for (std::size_t i = 0; i < text.size();) {
    std::size_t end = i + 1;
    const bool has_space = text[i] == ' ' && end < text.size() && is_word(text[end]);
    if (has_space || is_word(text[i])) {
      while (end < text.size() && is_word(text[end])) {
        ++end;
      }
    }
    pieces.emplace(text.substr(i, end - i));
    i = end;
  }
}

/// Pieces do not depend on their neighbours, so varying one choice at a time meets them all.
void collect_all_questions(std::set<std::string>& pieces) {
  const std::size_t num_choices = std::max({kPeople.size(), kThings.size(), kGains.size()});
  for (std::size_t form = 0; form < kTemplates.size(); ++form) {
    for (std::size_t k = 0; k < num_choices; ++k) {
      for (const bool is_gain : {false, true}) {
        for (const std::int64_t start : {1, 2}) {
          Choices c;
          c.form = form;
          c.person = k % kPeople.size();
          c.thing = k % kThings.size();
          c.verbs = {k % kGains.size(), k % kGains.size()};
          c.is_gain = {is_gain, is_gain};
          c.numbers = {start, 1, 1};
          collect_pieces(question_text(c), pieces);
        }
      }
    }
  }
}

std::string jsonl_line(std::string_view question, std::string_view answer) {
  nlohmann::ordered_json line;
  line["question"] = question;
  line["answer"] = answer;
  return line.dump();
}

std::vector<std::string> careful_lines(std::span<const WordProblem> problems) {
  std::vector<std::string> lines;
  for (const WordProblem& problem : problems) {
    lines.push_back(jsonl_line(problem.question, problem.careful_answer));
  }
  return lines;
}

}  // namespace

WordProblem make_word_problem(std::uint64_t seed, std::uint64_t index) {
  Rng rng(mix_key({seed, index}));
  const Choices choices = draw_choices(rng);
  return build(choices, hasty_guess(rng, gold_of(choices)));
}

HeldOut held_out(const WordProblem& problem) {
  constexpr std::uint64_t kTripleSalt = 0x7472;  // any constants: they fix the split for ever
  const auto& n = problem.numbers;
  const std::uint64_t triple =
      mix_key({kTripleSalt, static_cast<std::uint64_t>(n[0]), static_cast<std::uint64_t>(n[1]),
               static_cast<std::uint64_t>(n[2])});
  if (triple % 10 == 0) {
    return HeldOut::kTriple;
  }
  return text_hash(problem.question) % 10 == 0 ? HeldOut::kText : HeldOut::kNo;
}

std::vector<WordProblem> training_problems(std::uint64_t seed, std::int64_t count) {
  return distinct_problems(seed, count, false);
}

std::vector<WordProblem> held_out_problems(std::uint64_t seed, std::int64_t count) {
  return distinct_problems(seed, count, true);
}

std::vector<Demonstration> make_demonstrations(const DemonstrationOptions& options) {
  TDM_CHECK(options.batch_size > 0 && options.num_batches >= 0, options.batch_size);
  TDM_CHECK(options.careful_share >= 0.0 && options.careful_share <= 1.0, options.careful_share);
  const auto num_careful =
      std::lround(options.careful_share * static_cast<double>(options.batch_size));
  std::vector<Demonstration> demonstrations;
  std::uint64_t index = 0;
  for (std::int64_t batch = 0; batch < options.num_batches; ++batch) {
    std::vector<std::uint8_t> is_careful(usize(options.batch_size), 0);
    std::fill_n(is_careful.begin(), num_careful, std::uint8_t{1});
    Rng rng(mix_key({options.seed, 1, static_cast<std::uint64_t>(batch)}));
    for (std::size_t i = is_careful.size(); i > 1; --i) {  // Fisher-Yates
      std::swap(is_careful[i - 1], is_careful[rng.below(i)]);
    }
    for (const std::uint8_t careful : is_careful) {
      WordProblem problem;
      do {
        problem = make_word_problem(mix_key({options.seed, 0}), index++);
      } while (held_out(problem) != HeldOut::kNo);
      demonstrations.push_back({std::move(problem), careful != 0});
    }
  }
  return demonstrations;
}

std::vector<std::string> word_problem_vocabulary() {
  std::set<std::string> pieces = {"\n", "+", "-", "=", "####", "#", " "};
  collect_all_questions(pieces);
  for (std::int64_t n = 0; n <= kMaxResult; ++n) {
    pieces.insert(fmt::format("{}", n));
    pieces.insert(fmt::format(" {}", n));
  }
  std::set<std::string> characters;
  for (const std::string& piece : pieces) {
    for (const char c : piece) {
      characters.insert(std::string(1, c));
    }
  }
  pieces.merge(characters);
  return {pieces.begin(), pieces.end()};
}

std::string word_problem_tokenizer_json() {
  nlohmann::ordered_json file;
  file["type"] = "char";
  file["tokens"] = word_problem_vocabulary();
  file["special"] = {"<eos>", "<unk>"};
  file["stop"] = {"<eos>"};
  return file.dump(1);
}

void write_demo_data(const std::string& dir, const DemoDataOptions& options) {
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (error) {
    throw_error("{}: cannot create the folder: {}", dir, error.message());
  }
  // Different streams, so that no problem of one file is the same draw as one of another.
  rewrite_lines(dir + "/train.jsonl",
                careful_lines(training_problems(mix_key({options.seed, 1}), options.num_train)));
  rewrite_lines(dir + "/test.jsonl",
                careful_lines(held_out_problems(mix_key({options.seed, 2}), options.num_test)));
  DemonstrationOptions demonstration_options = options.demonstrations;
  demonstration_options.seed = mix_key({options.seed, 3, options.demonstrations.seed});
  std::vector<std::string> lines;
  for (const Demonstration& demo : make_demonstrations(demonstration_options)) {
    lines.push_back(jsonl_line(demo.problem.question, demo.answer()));
  }
  rewrite_lines(dir + "/sft.jsonl", lines);
  rewrite_lines(dir + "/tokenizer.json", std::array{word_problem_tokenizer_json()});
}

}  // namespace tandem
