#include "server/api/sample_text.h"

#include <iterator>
#include <random>
#include <utility>

namespace tandem::server {
namespace {

template <typename T>
void append_all(std::vector<T>& to, std::vector<T>&& from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

/// Unique over any conversation; nothing else depends on it.
std::string new_call_id() {
  constexpr std::string_view kDigits = "abcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device random;
  std::string id = "call_";
  for (int i = 0; i < 24; ++i) {
    id += kDigits[random() % kDigits.size()];
  }
  return id;
}

}  // namespace

void Delta::append(Delta other) {
  content += other.content;
  reasoning += other.reasoning;
  append_all(tools, std::move(other.tools));
  append_all(content_tokens, std::move(other.content_tokens));
  append_all(reasoning_tokens, std::move(other.reasoning_tokens));
  append_all(ids, std::move(other.ids));
}

std::vector<ResponsePiece> PlainParser::piece(std::string text) {
  if (text.empty()) {
    return {};
  }
  ResponsePiece piece;
  piece.text = std::move(text);
  piece.num_tokens = std::exchange(num_pending_, 0);
  return {std::move(piece)};
}

std::vector<ResponsePiece> PlainParser::push(std::int32_t id) {
  ++num_pending_;
  return piece(decoder_.push(id));
}

std::vector<ResponsePiece> PlainParser::finish() {
  std::vector<ResponsePiece> pieces = piece(decoder_.finish());
  if (num_pending_ > 0) {  // tokens without text: control tokens
    ResponsePiece rest;
    rest.num_tokens = std::exchange(num_pending_, 0);
    pieces.push_back(std::move(rest));
  }
  return pieces;
}

SampleText::SampleText(std::unique_ptr<ResponseParser> parser, StopStrings stops, bool keeps_stop)
    : parser_(std::move(parser)), stops_(std::move(stops)), keeps_stop_(keeps_stop) {}

Delta SampleText::push(TokenEntry token) {
  Delta delta;
  if (is_stopped()) {
    return delta;
  }
  const std::int32_t id = token.id;
  ids_.push_back(id);
  pending_.push_back(std::move(token));
  take_pieces(parser_->push(id), delta);
  delta.ids = std::exchange(ids_, {});
  return delta;
}

Delta SampleText::finish() {
  Delta delta;
  if (!is_stopped()) {
    take_pieces(parser_->finish(), delta);
  }
  if (!is_stopped()) {
    const std::string rest = stops_.finish();
    answer_out_ += rest.size();
    delta.content += rest;
    if (keeps_stop_) {  // a match that was waiting for a longer one
      delta.content += stops_.matched();
    }
    release_held(delta, true);
  }
  delta.ids = std::exchange(ids_, {});
  return delta;
}

std::vector<TokenEntry> SampleText::next_pending(std::int64_t count) {
  std::vector<TokenEntry> entries;
  for (; count > 0 && !pending_.empty(); --count) {
    entries.push_back(std::move(pending_.front()));
    pending_.pop_front();
  }
  return entries;
}

void SampleText::release_held(Delta& delta, bool all) {
  while (!held_.empty() && (all || held_.front().end <= answer_out_)) {
    delta.content_tokens.push_back(std::move(held_.front().entry));
    held_.pop_front();
  }
}

void SampleText::take_pieces(std::vector<ResponsePiece> pieces, Delta& delta) {
  for (ResponsePiece& piece : pieces) {
    std::vector<TokenEntry> entries = next_pending(piece.num_tokens);
    switch (piece.channel) {
      case Channel::kAnswer: {
        answer_in_ += piece.text.size();
        for (TokenEntry& entry : entries) {
          held_.push_back({answer_in_, std::move(entry)});
        }
        const std::string text = stops_.push(piece.text);
        answer_out_ += text.size();
        delta.content += text;
        release_held(delta, is_stopped());
        if (is_stopped()) {
          delta.content += keeps_stop_ ? stops_.matched() : std::string();
          return;
        }
        break;
      }
      case Channel::kReasoning:
        delta.reasoning += piece.text;
        append_all(delta.reasoning_tokens, std::move(entries));
        break;
      case Channel::kToolCall:
        take_tool_piece(piece, delta);
        break;
      case Channel::kMarkup:
        break;
    }
  }
}

void SampleText::take_tool_piece(ResponsePiece& piece, Delta& delta) {
  ToolDelta tool{.index = piece.call_index, .arguments = std::move(piece.text)};
  if (!piece.call_name.empty()) {
    tool.id = new_call_id();
    tool.name = std::move(piece.call_name);
  }
  if (!tool.name.empty() || !tool.arguments.empty()) {
    delta.tools.push_back(std::move(tool));
  }
}

}  // namespace tandem::server
