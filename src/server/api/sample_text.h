// sample_text.h — from the tokens of one sample to what a client sees: channels, stop strings, and
// the log-probabilities that go with each piece of text. The only place where tokens become text:
// streamed and whole answers are sums of the same deltas.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "engine/request.h"
#include "text/response_parser.h"
#include "text/stop_strings.h"
#include "text/stream_decoder.h"

namespace tandem::server {

struct TokenEntry {
  std::int32_t id = 0;
  float logprob = 0;
  std::vector<TokenLogprob> top = {};
};

struct ToolDelta {
  std::int64_t index = 0;
  std::string id = {};  // with the first delta of a call only, like the name
  std::string name = {};
  std::string arguments = {};
};

struct Delta {
  std::string content = {};
  std::string reasoning = {};
  std::vector<ToolDelta> tools = {};
  std::vector<TokenEntry> content_tokens = {};  // whose text is in `content`
  std::vector<TokenEntry> reasoning_tokens = {};
  std::vector<std::int32_t> ids = {};  // every token since the last delta

  [[nodiscard]] bool has_text() const {
    return !content.empty() || !reasoning.empty() || !tools.empty();
  }
  void append(Delta other);
};

/// All tokens are answer: completions and the native interface.
class PlainParser final : public ResponseParser {
 public:
  /// `tokenizer` outlives the parser.
  PlainParser(const Tokenizer& tokenizer, SpecialText special) : decoder_(tokenizer, special) {}

  [[nodiscard]] std::vector<ResponsePiece> push(std::int32_t id) override;
  [[nodiscard]] std::vector<ResponsePiece> finish() override;
  [[nodiscard]] Channel channel() const override { return Channel::kAnswer; }
  [[nodiscard]] std::int64_t num_reasoning_tokens() const override { return 0; }
  [[nodiscard]] std::int64_t num_complete_calls() const override { return 0; }

 private:
  [[nodiscard]] std::vector<ResponsePiece> piece(std::string text);
  StreamDecoder decoder_;
  std::int64_t num_pending_ = 0;  // tokens whose text has not come out
};

class SampleText {
 public:
  /// `keeps_stop`: the text keeps a stop string that ended it.
  SampleText(std::unique_ptr<ResponseParser> parser, StopStrings stops, bool keeps_stop);

  /// Nothing after a stop string was met.
  Delta push(TokenEntry token);
  /// A token that ended the response and has no text in it.
  void count_stop_token(std::int32_t id) { ids_.push_back(id); }
  /// What was held back.
  Delta finish();

  [[nodiscard]] bool is_stopped() const { return !stops_.matched().empty(); }
  [[nodiscard]] const std::string& stop_string() const { return stops_.matched(); }
  [[nodiscard]] std::int64_t num_reasoning_tokens() const {
    return parser_->num_reasoning_tokens();
  }
  [[nodiscard]] std::int64_t num_complete_calls() const { return parser_->num_complete_calls(); }

 private:
  struct HeldToken {
    std::size_t end = 0;  // bytes of the answer up to the end of its text
    TokenEntry entry;
  };
  void take_pieces(std::vector<ResponsePiece> pieces, Delta& delta);
  void take_tool_piece(ResponsePiece& piece, Delta& delta);
  void release_held(Delta& delta, bool all);
  [[nodiscard]] std::vector<TokenEntry> next_pending(std::int64_t count);

  std::unique_ptr<ResponseParser> parser_;
  StopStrings stops_;
  bool keeps_stop_;
  std::deque<TokenEntry> pending_;  // in the parser
  std::deque<HeldToken> held_;      // in the stop strings
  std::size_t answer_in_ = 0;       // bytes given to the stop strings
  std::size_t answer_out_ = 0;      // and that came out
  std::vector<std::int32_t> ids_;   // since the last delta
};

}  // namespace tandem::server
