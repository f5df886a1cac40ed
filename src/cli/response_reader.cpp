#include "cli/response_reader.h"

namespace tandem::cli {

ResponseReader::ResponseReader(const Tokenizer& tokenizer, bool thinking)
    : decoder_(tokenizer),
      open_(tokenizer.special_id("<|open|>")),
      close_(tokenizer.special_id("<|close|>")),
      sep_(tokenizer.special_id("<|sep|>")),
      channel_(thinking && open_ ? Channel::kReasoning : Channel::kContent) {}

std::string ResponseReader::push(std::int32_t id) {
  if (open_ && close_ && sep_) {
    if (id == *open_ || id == *close_) {
      const std::string rest = finish();
      in_header_ = true;
      is_opening_ = id == *open_;
      header_.clear();
      return rest;
    }
    if (in_header_ && id == *sep_) {
      header_ += decoder_.finish();
      in_header_ = false;
      channel_ = !is_opening_            ? Channel::kOther
                 : header_ == "response" ? Channel::kContent
                 : header_ == "think"    ? Channel::kReasoning
                                         : Channel::kOther;
      return {};
    }
  }
  return add(decoder_.push(id));
}

std::string ResponseReader::finish() {
  return add(decoder_.finish());
}

std::string ResponseReader::add(const std::string& text) {
  if (in_header_) {
    header_ += text;
    return {};
  }
  if (channel_ == Channel::kReasoning) {
    reasoning_ += text;
  }
  if (channel_ != Channel::kContent) {
    return {};
  }
  content_ += text;
  return text;
}

}  // namespace tandem::cli
