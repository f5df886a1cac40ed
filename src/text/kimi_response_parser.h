// kimi_response_parser.h — K3's answers (spec kimi-k3.md 9.3, 9.4): channels are elements of
// <|open|>TAG<|sep|> ... <|close|>TAG<|sep|>, tool calls elements within `tools`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/response_parser.h"
#include "text/stream_decoder.h"

namespace tandem {

/// What is tolerated: a channel that opens closes the one before; closes that close nothing are
/// ignored; a header without <|sep|> ends at the next marker, and what stands behind its tag is
/// text; text outside all channels is answer, unless blank; a call's value that is not what its
/// type says is a string; a call without a name, or whose `json` is no object, is text.
///
/// Strings stream while they are generated, other values of arguments once they are complete,
/// because only then it is known whether they are JSON.
class KimiResponseParser final : public ResponseParser {
 public:
  /// `tokenizer` must have the markers, and outlive the parser.
  KimiResponseParser(const Tokenizer& tokenizer, bool thinking);

  [[nodiscard]] std::vector<ResponsePiece> push(std::int32_t id) override;
  [[nodiscard]] std::vector<ResponsePiece> finish() override;
  [[nodiscard]] Channel channel() const override;
  [[nodiscard]] std::int64_t num_reasoning_tokens() const override { return reasoning_tokens_; }
  [[nodiscard]] std::int64_t num_complete_calls() const override { return complete_calls_; }

 private:
  enum class Element { kBetween, kThink, kResponse, kCall, kString, kValue, kJson };
  // What a call's arguments have come from so far.
  enum class Body { kNone, kArguments, kRaw, kBroken };
  struct Header {
    bool opens = false;
    std::string text;
  };

  void on_marker(std::int32_t id);
  void on_text(std::int32_t id);
  void end_header(bool has_sep);
  void open_element(std::string_view tag, std::string_view attributes);
  void close_element(std::string_view tag);
  void open_call(std::string_view attributes);
  void open_argument(std::string_view attributes);
  void close_channel();

  void take_text(std::string text);
  void end_run();
  void end_held_value();
  void end_argument();
  void end_call();

  void emit(Channel channel, std::string text, std::int64_t num_tokens);
  void emit_arguments(std::string text, std::int64_t num_tokens);
  void emit_leftover();
  void emit_markup();
  [[nodiscard]] std::int64_t take_finished_tokens();
  [[nodiscard]] std::int64_t take_all_tokens();

  const Tokenizer* tokenizer_;
  StreamDecoder decoder_;
  std::int32_t open_;
  std::int32_t close_;
  std::int32_t sep_;

  Element element_;
  std::optional<Header> header_;
  std::string held_text_;         // of a value, a json element or a call, until its kind is known
  std::int64_t held_tokens_ = 0;  // whose text has not gone out
  bool streams_json_ = false;
  bool is_blank_so_far_ = true;  // between channels

  bool in_call_ = false;
  bool is_announced_ = false;  // the call's name went out
  Body body_ = Body::kNone;
  std::string call_name_;
  std::int64_t call_index_ = 0;

  std::int64_t reasoning_tokens_ = 0;
  std::int64_t complete_calls_ = 0;
  std::vector<ResponsePiece> pieces_;  // of the call of push() that runs
};

}  // namespace tandem
