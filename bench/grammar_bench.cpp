// Token masks of grammars over a vocabulary of K3's size, made up of words, code and characters.
//
//   build/bench/bench/grammar_bench
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "core/checked_cast.h"
#include "core/rng.h"
#include "support/tiny_vocab.h"
#include "text/grammar.h"
#include "text/kimi_tokenizer.h"

namespace tandem {
namespace {

constexpr std::size_t kVocab = 163'584;

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string random_word(Rng& rng) {
  static constexpr std::string_view kConsonants = "bcdfghklmnprstvwz";
  static constexpr std::string_view kVowels = "aeiou";
  std::string word;
  for (std::uint64_t n = 1 + rng.below(5); n > 0; --n) {
    word += kConsonants[rng.below(kConsonants.size())];
    word += kVowels[rng.below(kVowels.size())];
  }
  return word;
}

std::string random_token(Rng& rng) {
  static constexpr std::string_view kMarks = "\"\"\"'{}[]():,.;_-/\\=<>+*&#!?\n\t ";
  std::string token = rng.below(2) == 0 ? " " : "";
  switch (rng.below(6)) {
    case 0:  // Chinese
      for (std::uint64_t n = 1 + rng.below(3); n > 0; --n) {
        const std::uint64_t code = 0x4E00 + rng.below(0x5000);
        token += static_cast<char>(0xE0 | (code >> 12));
        token += static_cast<char>(0x80 | ((code >> 6) & 0x3F));
        token += static_cast<char>(0x80 | (code & 0x3F));
      }
      return token;
    case 1:  // code
      for (std::uint64_t n = 1 + rng.below(6); n > 0; --n) {
        token +=
            rng.below(3) == 0 ? random_word(rng) : std::string(1, kMarks[rng.below(kMarks.size())]);
      }
      return token;
    case 2:
      return token + std::to_string(rng.below(1000));
    default:
      return token + random_word(rng);
  }
}

std::unique_ptr<KimiTokenizer> make_tokenizer() {
  Rng rng(1);
  std::vector<std::string> tokens = testing::tiny_vocab({});
  std::set<std::string> known(tokens.begin(), tokens.end());
  while (tokens.size() < kVocab) {
    std::string token = random_token(rng);
    if (!token.empty() && known.insert(token).second) {
      tokens.push_back(std::move(token));
    }
  }
  BpeVocab vocab = BpeVocab::parse(testing::tiktoken_text(tokens), "synthetic").value_or_throw();
  return KimiTokenizer::create(std::move(vocab), KimiTokenizer::k3_specials()).value_or_throw();
}

struct Case {
  std::string name;
  std::function<Expected<std::shared_ptr<const Grammar>>()> compile;
};

std::vector<Case> cases() {
  const auto schema = [](std::string text) { return [text] { return compile_json_schema(text); }; };
  return {
      {"any object", [] { return compile_json_object(); }},
      {"record", schema(R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":
          "integer","minimum":0,"maximum":150},"mail":{"type":"string","format":"email"},"tags":
          {"type":"array","items":{"enum":["red","green","blue"]},"maxItems":4}},
          "required":["name","age"],"additionalProperties":false})")},
      {"open record",
       schema(R"({"properties":{"name":{"type":"string"},"born":{"format":"date"}}})")},
      {"short strings", schema(R"({"items":{"type":"string","maxLength":60}})")},
      {"tree", schema(R"({"$defs":{"t":{"type":"object","properties":{"v":{"type":"number"},"kids":
          {"type":"array","items":{"$ref":"#/$defs/t"}}},"required":["v"],
          "additionalProperties":false}},"$ref":"#/$defs/t"})")},
      {"pattern", schema(R"({"type":"string","pattern":"^[A-Z][a-z ]{3,80}\\.$"})")},
      {"regex", [] { return compile_regex("(?:[^\\n]{0,40}\\n){1,3}"); }},
  };
}

void run(const Case& one, const KimiTokenizer& tokenizer,
         const std::shared_ptr<const TokenTrie>& trie) {
  std::shared_ptr<const Grammar> grammar;
  const double compile_s = seconds([&] { grammar = one.compile().value_or_throw(); });
  std::unique_ptr<TokenConstraint> constraint;
  const std::vector<std::int32_t> stops(tokenizer.stop_ids().begin(), tokenizer.stop_ids().end());
  const double start_s = seconds([&] { constraint = grammar->make_constraint(trie, stops); });
  std::vector<std::uint32_t> bits(usize((tokenizer.vocab_size() + 31) / 32));
  std::vector<double> first;
  std::vector<double> again;
  double accept_s = 0;
  std::int64_t accepts = 0;
  Rng rng(2);
  for (int response = 0; response < 20; ++response) {
    const auto walker = grammar->make_constraint(trie, stops);
    for (int step = 0; step < 100 && !walker->is_complete(); ++step) {
      first.push_back(seconds([&] { walker->fill_mask(bits); }));
      again.push_back(seconds([&] { walker->fill_mask(bits); }));
      std::vector<std::int32_t> ids;
      for (std::int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
        if ((bits[usize(id / 32)] >> (id % 32) & 1U) != 0) {
          ids.push_back(id);
        }
      }
      const std::int32_t id = ids[rng.below(ids.size())];
      accept_s += seconds([&] { static_cast<void>(walker->accept(id)); });
      ++accepts;
    }
  }
  std::sort(first.begin(), first.end());
  std::sort(again.begin(), again.end());
  const auto at = [](const std::vector<double>& sorted, double share) {
    return 1e6 * sorted[static_cast<std::size_t>(share * static_cast<double>(sorted.size() - 1))];
  };
  fmt::print("{:14} {:8.2f} {:8.1f} {:9.1f} {:9.1f} {:9.1f} {:9.1f} {:9.1f} {:8.2f}\n", one.name,
             compile_s * 1e3, start_s * 1e3, at(first, 0.5), at(first, 0.99), at(first, 1),
             at(again, 0.5), at(again, 1), accept_s * 1e6 / static_cast<double>(accepts));
}

}  // namespace
}  // namespace tandem

int main() {
  const auto tokenizer = tandem::make_tokenizer();
  std::shared_ptr<const tandem::TokenTrie> trie;
  const double trie_s = tandem::seconds([&] { trie = tandem::make_token_trie(*tokenizer); });
  fmt::print("trie of {} tokens: {:.0f} ms\n", tokenizer->vocab_size(), trie_s * 1e3);
  fmt::print("{:14} {:>8} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8}\n", "grammar", "compile",
             "start", "mask p50", "p99", "max", "cached50", "max", "accept");
  fmt::print("{:14} {:>8} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8}\n", "", "ms", "ms", "us", "us",
             "us", "us", "us", "us");
  for (const auto& one : tandem::cases()) {
    tandem::run(one, *tokenizer, trie);
  }
  return 0;
}
