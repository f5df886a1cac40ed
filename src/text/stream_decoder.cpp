#include "text/stream_decoder.h"

#include "text/utf8.h"

namespace tandem {

std::string StreamDecoder::push(std::int32_t id) {
  if (special_ == SpecialText::kSkip && tokenizer_->is_control(id)) {
    return {};
  }
  pending_ += tokenizer_->token_bytes(id);
  std::string out;
  std::string_view rest = pending_;
  while (!rest.empty()) {
    const Utf8Char next = first_utf8_char(rest);
    if (next.kind == Utf8Kind::kIncomplete) {
      break;
    }
    out += next.kind == Utf8Kind::kValid ? rest.substr(0, next.length) : kReplacementCharacter;
    rest.remove_prefix(next.length);
  }
  pending_.erase(0, pending_.size() - rest.size());
  return out;
}

std::string StreamDecoder::finish() {
  std::string out = to_valid_utf8(pending_);
  pending_.clear();
  return out;
}

}  // namespace tandem
