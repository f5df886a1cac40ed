// tokenizer.h — bytes in, token ids out, and back. A tokenizer is immutable after loading, so one
// object serves any number of threads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace tandem {

/// A stretch of a prompt. Only text that our own code wrote may set `allow_special`; whatever came
/// from a user, a tool or a model must not, or "<|open|>" typed by a user would become a marker.
struct Segment {
  std::string text;
  bool allow_special = false;

  friend bool operator==(const Segment&, const Segment&) = default;
};

/// What decode() does with control tokens (those marked special; K3's <|open|>, <|close|> and
/// <|sep|> are not).
enum class SpecialText { kKeep, kSkip };

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  /// Encodes ordinary text: spellings of special tokens in it are plain characters.
  /// Any bytes are accepted, also invalid UTF-8; no beginning-of-text token is added.
  [[nodiscard]] std::vector<std::int32_t> encode(std::string_view text) const;

  /// Encodes each segment on its own (no merge crosses a border) and joins the ids. In segments
  /// with allow_special the leftmost, longest special spelling becomes its id.
  [[nodiscard]] std::vector<std::int32_t> encode_segments(std::span<const Segment> segments) const;

  /// The bytes of the ids; not necessarily UTF-8 when the ids cut a character (see StreamDecoder).
  /// Ids without a token (a model's table may be wider than the vocabulary) give U+FFFD.
  [[nodiscard]] std::string decode(std::span<const std::int32_t> ids,
                                   SpecialText special = SpecialText::kKeep) const;

  /// The bytes one id stands for; valid as long as the tokenizer. U+FFFD for an id without a token.
  [[nodiscard]] virtual std::string_view token_bytes(std::int32_t id) const = 0;

  /// Number of ids, special ones included: ids are 0..vocab_size()-1.
  [[nodiscard]] virtual std::int64_t vocab_size() const = 0;

  /// Ids that end a generation, ascending; stop at any of them.
  [[nodiscard]] virtual std::span<const std::int32_t> stop_ids() const = 0;

  /// The id of a special token by its spelling, e.g. "<|open|>".
  [[nodiscard]] virtual std::optional<std::int32_t> special_id(std::string_view name) const = 0;

  /// True for ids that decode() leaves out under SpecialText::kSkip.
  [[nodiscard]] virtual bool is_control(std::int32_t id) const = 0;

 protected:
  virtual void append_encoded(std::vector<std::int32_t>& ids, std::string_view text,
                              bool allow_special) const = 0;
};

/// Loads the tokenizer of a checkpoint folder: `tiktoken.model` gives a KimiTokenizer,
/// `char_tokenizer.json` a CharTokenizer.
/// Errors: a Failure naming the file (and line or field) when there is none, both, or a bad one.
[[nodiscard]] Expected<std::unique_ptr<Tokenizer>> load_tokenizer(const std::string& dir);

}  // namespace tandem
