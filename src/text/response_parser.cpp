#include "text/response_parser.h"

#include <algorithm>
#include <utility>

#include "text/kimi_markers.h"
#include "text/kimi_response_parser.h"
#include "text/stream_decoder.h"

namespace tandem {
namespace {

// Everything is answer, but for control and stop tokens.
class PlainResponseParser final : public ResponseParser {
 public:
  explicit PlainResponseParser(const Tokenizer& tokenizer)
      : tokenizer_(&tokenizer), decoder_(tokenizer) {}

  [[nodiscard]] std::vector<ResponsePiece> push(std::int32_t id) override {
    const auto stops = tokenizer_->stop_ids();
    if (std::find(stops.begin(), stops.end(), id) == stops.end()) {
      ++held_tokens_;
      return piece_of(decoder_.push(id));
    }
    std::vector<ResponsePiece> pieces = finish();
    ResponsePiece& end = pieces.emplace_back();
    end.channel = Channel::kMarkup;
    end.num_tokens = 1;
    return pieces;
  }

  [[nodiscard]] std::vector<ResponsePiece> finish() override {
    std::string rest = decoder_.finish();
    return rest.empty() && held_tokens_ == 0 ? std::vector<ResponsePiece>()
                                             : one_piece(std::move(rest), held_tokens_);
  }

  [[nodiscard]] Channel channel() const override { return Channel::kAnswer; }
  [[nodiscard]] std::int64_t num_reasoning_tokens() const override { return 0; }
  [[nodiscard]] std::int64_t num_complete_calls() const override { return 0; }

 private:
  std::vector<ResponsePiece> piece_of(std::string text) {
    if (text.empty()) {
      return {};
    }
    return one_piece(std::move(text), held_tokens_ - (decoder_.has_pending() ? 1 : 0));
  }

  std::vector<ResponsePiece> one_piece(std::string text, std::int64_t num_tokens) {
    ResponsePiece piece;
    piece.text = std::move(text);
    piece.num_tokens = num_tokens;
    held_tokens_ -= num_tokens;
    return {std::move(piece)};
  }

  const Tokenizer* tokenizer_;
  StreamDecoder decoder_;
  std::int64_t held_tokens_ = 0;  // whose text has not gone out
};

}  // namespace

std::unique_ptr<ResponseParser> make_response_parser(const Tokenizer& tokenizer, bool thinking) {
  if (has_markers(tokenizer)) {
    return std::make_unique<KimiResponseParser>(tokenizer, thinking);
  }
  return std::make_unique<PlainResponseParser>(tokenizer);
}

}  // namespace tandem
