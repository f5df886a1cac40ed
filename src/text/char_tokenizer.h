// char_tokenizer.h — the demo's tokenizer: a closed list of characters and whole words, the longest
// match at each place.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/special_tokens.h"
#include "text/tokenizer.h"

namespace tandem {

class CharTokenizer final : public Tokenizer {
 public:
  static constexpr std::string_view kFileName = "char_tokenizer.json";
  static constexpr std::string_view kUnknown = "<unk>";

  struct Spec {
    std::vector<std::string> tokens;   ///< ids 0..; characters and words, UTF-8
    std::vector<std::string> special;  ///< the ids behind them; must contain kUnknown
    std::vector<std::string> stop;     ///< those of `special` that end a generation
  };

  /// Errors: a Failure naming the field and entry: empty, repeated or not UTF-8; a stop that is
  /// not special; no kUnknown.
  static Expected<std::unique_ptr<CharTokenizer>> create(Spec spec);

  /// Reads {"type": "char", "tokens": [...], "special": [...], "stop": [...]}.
  /// Errors: a Failure naming the file and the field; unknown fields are errors.
  static Expected<std::unique_ptr<CharTokenizer>> load(const std::string& path);

  /// Writes what load() reads, replacing the file in one step.
  /// Errors: throws Error when the file cannot be written.
  void save(const std::string& path) const;

  /// A character that no token starts with becomes kUnknown, whose bytes are U+FFFD.
  [[nodiscard]] std::string_view token_bytes(std::int32_t id) const override;
  [[nodiscard]] std::int64_t vocab_size() const override;
  [[nodiscard]] std::span<const std::int32_t> stop_ids() const override { return stop_ids_; }
  [[nodiscard]] std::optional<std::int32_t> special_id(std::string_view name) const override {
    return specials_.id_of(name);
  }
  [[nodiscard]] bool is_control(std::int32_t id) const override;

 protected:
  void append_encoded(std::vector<std::int32_t>& ids, std::string_view text,
                      bool allow_special) const override;

 private:
  CharTokenizer() = default;
  void add_to_trie(std::string_view token, std::int32_t id);
  void append_ordinary(std::vector<std::int32_t>& ids, std::string_view text) const;

  Spec spec_;
  SpecialTokens specials_;
  std::vector<std::int32_t> stop_ids_;
  std::int32_t unknown_id_ = 0;
  // A trie over the bytes of the tokens: edges_[node * 256 + byte] is the child, ids_[node] the
  // token that ends there or -1. Tokens are whole UTF-8 characters, so a match never cuts one.
  std::unordered_map<std::uint64_t, std::uint32_t> edges_;
  std::vector<std::int32_t> ids_;
};

}  // namespace tandem
