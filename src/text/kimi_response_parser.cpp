#include "text/kimi_response_parser.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/check.h"
#include "text/json_text.h"
#include "text/kimi_markers.h"
#include "text/utf8.h"

namespace tandem {
namespace {

// Longer headers are text that a stray marker came before.
constexpr std::size_t kMaxHeaderBytes = 16 * 1024;

constexpr std::array<std::string_view, 7> kTags = {"think", "response", "tools",  "call",
                                                   "json",  "argument", "message"};

// The value of ` key="value"` among a header's attributes; none when it is missing or torn.
std::optional<std::string> attribute(std::string_view attributes, std::string_view key) {
  while (!attributes.empty()) {
    attributes.remove_prefix(std::min(attributes.find_first_not_of(' '), attributes.size()));
    const std::size_t equals = attributes.find("=\"");
    if (equals == attributes.npos) {
      return std::nullopt;
    }
    const std::size_t end = attributes.find('"', equals + 2);
    if (end == attributes.npos) {
      return std::nullopt;
    }
    if (attributes.substr(0, equals) == key) {
      return to_valid_utf8(unescape_attribute(attributes.substr(equals + 2, end - equals - 2)));
    }
    attributes.remove_prefix(end + 1);
  }
  return std::nullopt;
}

bool is_object(std::string_view text) {
  const auto value = parse_json(text);
  return value.ok() && value->is(JsonKind::kObject);
}

}  // namespace

KimiResponseParser::KimiResponseParser(const Tokenizer& tokenizer, bool thinking)
    : tokenizer_(&tokenizer),
      decoder_(tokenizer),
      open_(markers_of(tokenizer).open),
      close_(markers_of(tokenizer).close),
      sep_(markers_of(tokenizer).sep),
      element_(thinking ? Element::kThink : Element::kResponse) {}

std::vector<ResponsePiece> KimiResponseParser::push(std::int32_t id) {
  pieces_.clear();
  const auto stops = tokenizer_->stop_ids();
  const bool is_stop = std::find(stops.begin(), stops.end(), id) != stops.end();
  if (is_stop || id == open_ || id == close_ || id == sep_) {
    on_marker(id);
  } else if (header_) {
    if (!tokenizer_->is_control(id)) {
      header_->text += tokenizer_->token_bytes(id);
    }
    emit_markup();
    if (header_->text.size() > kMaxHeaderBytes) {
      end_header(false);
    }
  } else {
    on_text(id);
  }
  return std::move(pieces_);
}

std::vector<ResponsePiece> KimiResponseParser::finish() {
  pieces_.clear();
  header_.reset();  // cut short: markup, not text
  take_text(decoder_.finish());
  if (!held_text_.empty() && in_call_ && is_announced_) {
    emit_arguments(std::exchange(held_text_, {}), take_all_tokens());
  } else if (!is_blank(held_text_)) {
    emit(Channel::kAnswer, std::exchange(held_text_, {}), take_all_tokens());
  } else {
    emit_leftover();
  }
  return std::move(pieces_);
}

Channel KimiResponseParser::channel() const {
  if (header_) {
    return Channel::kMarkup;
  }
  switch (element_) {
    case Element::kThink:
      return Channel::kReasoning;
    case Element::kResponse:
      return Channel::kAnswer;
    case Element::kString:
    case Element::kValue:
    case Element::kJson:
      return Channel::kToolCall;
    case Element::kBetween:
    case Element::kCall:
      return Channel::kMarkup;
  }
  TDM_CHECK(false);
}

void KimiResponseParser::on_marker(std::int32_t id) {
  if (id == sep_) {
    if (header_) {
      emit_markup();
      end_header(true);
      return;
    }
    // A stray one. Tokens are told in their order, so it waits with a value that waits.
    take_text(decoder_.finish());
    if (held_text_.empty()) {
      emit_leftover();
    }
    if (held_tokens_ > 0) {
      ++held_tokens_;
    } else {
      emit_markup();
    }
    return;
  }
  if (header_) {
    end_header(false);
  }
  end_run();
  if (id == open_ || id == close_) {
    header_ = Header{id == open_, {}};
  } else {
    close_channel();
  }
  emit_markup();
}

void KimiResponseParser::on_text(std::int32_t id) {
  ++held_tokens_;
  reasoning_tokens_ += element_ == Element::kThink ? 1 : 0;
  take_text(decoder_.push(id));
}

// Text of the current element goes out, or waits for what decides where it belongs.
void KimiResponseParser::take_text(std::string text) {
  if (text.empty()) {
    return;
  }
  switch (element_) {
    case Element::kThink:
      return emit(Channel::kReasoning, std::move(text), take_finished_tokens());
    case Element::kResponse:
      return emit(Channel::kAnswer, std::move(text), take_finished_tokens());
    case Element::kBetween:
      is_blank_so_far_ = is_blank_so_far_ && is_blank(text);
      return is_blank_so_far_ ? emit(Channel::kMarkup, {}, take_finished_tokens())
                              : emit(Channel::kAnswer, std::move(text), take_finished_tokens());
    case Element::kString: {
      const std::string quoted = quote_json(text);
      return emit_arguments(quoted.substr(1, quoted.size() - 2), take_finished_tokens());
    }
    case Element::kJson:
      held_text_ += text;
      streams_json_ = streams_json_ || (body_ == Body::kNone &&
                                        held_text_.find_first_not_of(" \t\r\n") != text.npos &&
                                        held_text_[held_text_.find_first_not_of(" \t\r\n")] == '{');
      if (streams_json_) {
        body_ = Body::kRaw;
        emit_arguments(std::exchange(held_text_, {}), take_finished_tokens());
      }
      return;
    case Element::kValue:
    case Element::kCall:
      held_text_ += text;
      return;
  }
}

// A marker ends what is being written: text goes out before the marker is told.
void KimiResponseParser::end_run() {
  take_text(decoder_.finish());
  end_held_value();
  emit_leftover();
}

void KimiResponseParser::end_held_value() {
  std::string text = std::exchange(held_text_, {});
  if (element_ == Element::kValue) {
    emit_arguments(parse_json(text) ? text : quote_json(text), take_all_tokens());
    element_ = Element::kCall;
    return;
  }
  const bool decides = element_ == Element::kJson || element_ == Element::kCall;
  if (!decides || is_blank(text)) {
    return;
  }
  // The reference writes arguments that are no JSON into `json` as they are; other values there
  // cannot be arguments. In the call itself only an object can be meant as such.
  const bool is_json = element_ == Element::kJson;
  if (body_ == Body::kNone && (is_object(text) || (is_json && !parse_json(text)))) {
    body_ = Body::kRaw;
    emit_arguments(std::move(text), take_all_tokens());
  } else {
    body_ = body_ == Body::kNone ? Body::kBroken : body_;
    emit(Channel::kAnswer, std::move(text), take_all_tokens());
  }
}

void KimiResponseParser::end_header(bool has_sep) {
  const Header header = std::move(*header_);
  header_.reset();
  std::string_view text = header.text;
  const auto tag = std::find_if(kTags.begin(), kTags.end(), [&](std::string_view known) {
    return text.starts_with(known) &&
           (!has_sep || text.size() == known.size() || text[known.size()] == ' ');
  });
  if (tag == kTags.end()) {
    if (!has_sep) {
      take_text(to_valid_utf8(text));
    }
    return;
  }
  std::string_view rest = text.substr(tag->size());
  const bool has_attributes = header.opens && rest.starts_with(" ") && rest.ends_with("\"");
  if (header.opens) {
    open_element(*tag, rest);
  } else {
    close_element(*tag);
  }
  if (!has_sep && !has_attributes) {
    take_text(to_valid_utf8(rest));
  }
}

void KimiResponseParser::open_element(std::string_view tag, std::string_view attributes) {
  if (tag == "call") {
    open_call(attributes);
  } else if (tag == "argument") {
    open_argument(attributes);
  } else if (tag == "json") {
    end_argument();
    element_ = in_call_ ? Element::kJson : Element::kBetween;
    streams_json_ = false;
  } else {
    close_channel();
    element_ = tag == "think"      ? Element::kThink
               : tag == "response" ? Element::kResponse
                                   : Element::kBetween;
  }
}

void KimiResponseParser::close_element(std::string_view tag) {
  if (tag == "argument" || tag == "json") {
    end_argument();
  } else if (tag == "call") {
    end_call();
  } else if (tag == "tools" || tag == "message" ||
             (tag == "think" && element_ == Element::kThink) ||
             (tag == "response" && element_ == Element::kResponse)) {
    close_channel();
  }
}

void KimiResponseParser::close_channel() {
  end_call();
  element_ = Element::kBetween;
  is_blank_so_far_ = true;
}

void KimiResponseParser::open_call(std::string_view attributes) {
  close_channel();
  const auto name = attribute(attributes, "tool");
  if (!name || name->empty()) {
    return;
  }
  element_ = Element::kCall;
  in_call_ = true;
  is_announced_ = false;
  body_ = Body::kNone;
  call_name_ = *name;
}

void KimiResponseParser::open_argument(std::string_view attributes) {
  end_argument();
  if (!in_call_ || body_ == Body::kRaw || body_ == Body::kBroken) {
    element_ = in_call_ ? Element::kCall : Element::kBetween;
    return;
  }
  const std::string key = attribute(attributes, "key").value_or(std::string());
  const bool is_string = attribute(attributes, "type").value_or("string") == "string";
  element_ = is_string ? Element::kString : Element::kValue;
  emit_arguments(fmt::format("{}{}:{}", body_ == Body::kNone ? "{" : ",", quote_json(key),
                             is_string ? "\"" : ""),
                 0);
  body_ = Body::kArguments;
}

void KimiResponseParser::end_argument() {
  if (element_ == Element::kString) {
    emit_arguments("\"", 0);
  }
  if (in_call_) {
    element_ = Element::kCall;
  }
}

void KimiResponseParser::end_call() {
  if (!in_call_) {
    return;
  }
  end_argument();
  in_call_ = false;
  element_ = Element::kBetween;
  is_blank_so_far_ = true;
  if (body_ == Body::kBroken) {
    return;
  }
  emit_arguments(body_ == Body::kNone ? "{}" : body_ == Body::kArguments ? "}" : "", 0);
  pieces_.back().call_complete = true;
  ++call_index_;
  ++complete_calls_;
}

void KimiResponseParser::emit(Channel channel, std::string text, std::int64_t num_tokens) {
  ResponsePiece piece;
  piece.channel = channel;
  piece.text = std::move(text);
  piece.num_tokens = num_tokens;
  pieces_.push_back(std::move(piece));
}

void KimiResponseParser::emit_arguments(std::string text, std::int64_t num_tokens) {
  emit(Channel::kToolCall, std::move(text), num_tokens);
  pieces_.back().call_index = call_index_;
  if (!std::exchange(is_announced_, true)) {
    pieces_.back().call_name = call_name_;
  }
}

// Tokens whose text turned out to be nothing: control tokens, blanks of a call.
void KimiResponseParser::emit_leftover() {
  if (held_tokens_ == 0) {
    return;
  }
  if (channel() != Channel::kToolCall) {
    emit(channel(), {}, take_all_tokens());
  } else if (is_announced_) {
    emit_arguments({}, take_all_tokens());
  } else {
    emit(Channel::kMarkup, {}, take_all_tokens());
  }
}

void KimiResponseParser::emit_markup() {
  emit(Channel::kMarkup, {}, 1);
}

std::int64_t KimiResponseParser::take_finished_tokens() {
  const std::int64_t unfinished = decoder_.has_pending() && held_tokens_ > 0 ? 1 : 0;
  return std::exchange(held_tokens_, unfinished) - unfinished;
}

std::int64_t KimiResponseParser::take_all_tokens() {
  return std::exchange(held_tokens_, 0);
}

}  // namespace tandem
