// grammar_session.h — a small vocabulary and what tests do with a grammar over it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "core/checked_cast.h"
#include "core/rng.h"
#include "support/tiny_vocab.h"
#include "text/grammar.h"
#include "text/kimi_tokenizer.h"

namespace tandem::testing {

/// All bytes, and tokens that run across the borders of JSON's elements and of characters.
inline std::unique_ptr<KimiTokenizer> grammar_tokenizer() {
  const auto tokens =
      tiny_vocab({"{\"",      "\":",     "\": \"",   "\", \"", "\"}",        "\"]",     "},{\"",
                  "}}",       "]]",      "[[",       "[{",     ", ",         "\n ",     "\n  ",
                  "    ",     "true",    "false",    "nul",    "l,",         "12",      "345",
                  "-1",       ".5",      "e1",       "00",     "ab",         "abc",     "bcd",
                  "cd\"",     "a\",\"b", "\\\"",     "\\u",    "\\u00",      "\\ud83d", "\xE4\xBD",
                  "\xBD\xA0", "a\xE4",   "\xF0\x9F", "name\"", "\"name\": ", "value",   "id",
                  "]}",       "}]",      "\"\"",     "{}",     "[]",         "0,",      "2026",
                  "-01",      "T1",      ":00",      "Z\"",    "@x",         ".de",     "xyz\"}",
                  "]}]}"});
  BpeVocab vocab = BpeVocab::parse(tiktoken_text(tokens), "t").value_or_throw();
  return KimiTokenizer::create(std::move(vocab), KimiTokenizer::k3_specials()).value_or_throw();
}

class GrammarSession {
 public:
  GrammarSession() : tokenizer_(grammar_tokenizer()), trie_(make_token_trie(*tokenizer_)) {}

  [[nodiscard]] const KimiTokenizer& tokenizer() const { return *tokenizer_; }
  [[nodiscard]] std::shared_ptr<const TokenTrie> trie() const { return trie_; }
  [[nodiscard]] std::vector<std::int32_t> stops() const {
    return {tokenizer_->stop_ids().begin(), tokenizer_->stop_ids().end()};
  }
  [[nodiscard]] std::unique_ptr<TokenConstraint> start(const Grammar& grammar) const {
    return grammar.make_constraint(trie_, stops());
  }

  /// Whether the whole text is allowed, taken byte by byte.
  [[nodiscard]] bool matches(const Grammar& grammar, std::string_view text) const {
    const auto constraint = start(grammar);
    return accept_bytes(*constraint, text) && constraint->accept(stops().front());
  }
  [[nodiscard]] static bool accept_bytes(TokenConstraint& constraint, std::string_view text) {
    return std::all_of(text.begin(), text.end(),
                       [&](char c) { return constraint.accept(byte_id(c)); });
  }

  [[nodiscard]] std::vector<std::int32_t> allowed(TokenConstraint& constraint) const {
    std::vector<std::uint32_t> bits(usize((tokenizer_->vocab_size() + 31) / 32), 0xFFFFFFFFU);
    constraint.fill_mask(bits);
    std::vector<std::int32_t> ids;
    for (std::int32_t id = 0; id < isize(bits) * 32; ++id) {
      if ((bits[usize(id / 32)] >> (id % 32) & 1U) != 0) {
        ids.push_back(id);
      }
    }
    return ids;
  }

  /// What fill_mask() must say, found by trying each token's bytes on a copy.
  [[nodiscard]] std::vector<std::int32_t> allowed_by_trying(const TokenConstraint& from) const {
    std::vector<std::int32_t> ids;
    for (std::int32_t id = 0; id < tokenizer_->vocab_size(); ++id) {
      const auto copy = from.clone();
      const bool is_special = id >= tokenizer_->special_id("[BOS]").value();
      if (is_special ? copy->accept(id) : accept_bytes(*copy, tokenizer_->token_bytes(id))) {
        ids.push_back(id);
      }
    }
    return ids;
  }

  struct Walk {
    std::string text;
    bool finished = false;
    std::string problem;  // what broke; empty: nothing
  };
  /// Draws allowed tokens until the end; after `long_after` tokens it prefers those that close
  /// something. Checks each mask against allowed_by_trying() when `check_masks`.
  [[nodiscard]] Walk walk(const Grammar& grammar, Rng& rng, bool check_masks,
                          int long_after = 40) const {
    Walk result;
    const auto constraint = start(grammar);
    for (int step = 0; step < 300; ++step) {
      const auto ids = allowed(*constraint);
      if (ids.empty()) {
        result.problem = "nothing is allowed behind: " + result.text;
        return result;
      }
      if (check_masks && ids != allowed_by_trying(*constraint)) {
        result.problem = "the mask is wrong behind: " + result.text;
        return result;
      }
      const std::int32_t id = choose(ids, rng, step >= long_after);
      if (!constraint->accept(id)) {
        result.problem = "an allowed token was refused behind: " + result.text;
        return result;
      }
      const auto ends = stops();
      if (std::find(ends.begin(), ends.end(), id) != ends.end()) {
        result.finished = true;
        return result;
      }
      result.text += tokenizer_->token_bytes(id);
      if (constraint->is_complete()) {
        result.finished = true;
        return result;
      }
    }
    return result;
  }

 private:
  [[nodiscard]] std::int32_t choose(const std::vector<std::int32_t>& ids, Rng& rng,
                                    bool prefer_closing) const {
    if (prefer_closing) {
      for (const std::int32_t id : ids) {
        if (id >= tokenizer_->special_id("[BOS]").value()) {
          return id;
        }
      }
      for (const char c : std::string_view("}]\"")) {
        if (std::find(ids.begin(), ids.end(), byte_id(c)) != ids.end()) {
          return byte_id(c);
        }
      }
    }
    return ids[rng.below(ids.size())];
  }

  std::unique_ptr<KimiTokenizer> tokenizer_;
  std::shared_ptr<const TokenTrie> trie_;
};

}  // namespace tandem::testing
