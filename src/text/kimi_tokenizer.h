// kimi_tokenizer.h — the tokenizer of Kimi K3 (and, with their own added_tokens_decoder, of K2 and
// Kimi-Linear): tiktoken BPE plus 256 special ids behind the last rank.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/bpe_vocab.h"
#include "text/pretokenizer.h"
#include "text/special_tokens.h"
#include "text/tokenizer.h"

namespace tandem {

class KimiTokenizer final : public Tokenizer {
 public:
  static constexpr std::string_view kFileName = "tiktoken.model";
  static constexpr std::int32_t kNumSpecials = 256;

  /// Reads `dir`/tiktoken.model. Names of the special ids come from tokenizer_config.json's
  /// added_tokens_decoder; without that file K3's own table is taken. Ids without a name become
  /// "<|reserved_token_ID|>". Stop ids: eos_token_id of generation_config.json and eos_token of
  /// tokenizer_config.json, where the files have them, and always [EOS] and <|end_of_msg|>
  /// where the table has them (the config's [EOS] alone would never stop a chat).
  /// Errors: a Failure naming the file and the line or field.
  static Expected<std::unique_ptr<KimiTokenizer>> load(const std::string& dir);

  /// Special tokens by their offset behind the last rank, for create().
  struct NamedSpecial {
    std::int32_t offset = 0;  // 0..kNumSpecials-1
    SpecialToken token;
  };
  /// K3's 16 named special tokens.
  static std::vector<NamedSpecial> k3_specials();

  /// The tokenizer over `vocab`; stop ids as in load() without config files, plus `extra_stops`.
  static Expected<std::unique_ptr<KimiTokenizer>> create(
      BpeVocab vocab, const std::vector<NamedSpecial>& named,
      const std::vector<std::int32_t>& extra_stops = {});

  [[nodiscard]] std::string_view token_bytes(std::int32_t id) const override;
  [[nodiscard]] std::int64_t vocab_size() const override { return vocab_.size() + kNumSpecials; }
  [[nodiscard]] std::span<const std::int32_t> stop_ids() const override { return stop_ids_; }
  [[nodiscard]] std::optional<std::int32_t> special_id(std::string_view name) const override {
    return specials_.id_of(name);
  }
  [[nodiscard]] bool is_control(std::int32_t id) const override;

 protected:
  void append_encoded(std::vector<std::int32_t>& ids, std::string_view text,
                      bool allow_special) const override;

 private:
  KimiTokenizer(BpeVocab vocab, SpecialTokens specials)
      : vocab_(std::move(vocab)), specials_(std::move(specials)) {}
  void append_ordinary(std::vector<std::int32_t>& ids, std::string_view piece) const;

  BpeVocab vocab_;
  SpecialTokens specials_;
  PreTokenizer pre_tokenizer_;
  std::vector<std::int32_t> stop_ids_;
};

}  // namespace tandem
