#include "server/api/channel_constraint.h"

namespace tandem::server {

bool ChannelConstraint::accept(std::int32_t id) {
  bool allowed = true;
  if (!is_answered_ && parser_->channel() == Channel::kAnswer) {
    allowed = answer_->accept(id);
    (void)parser_->push(id);
    // The channel's close marker was the answer's stop.
    is_answered_ = parser_->channel() != Channel::kAnswer;
  } else {
    (void)parser_->push(id);
  }
  ids_.push_back(id);
  return allowed;
}

std::unique_ptr<TokenConstraint> ChannelConstraint::clone() const {
  auto copy = std::make_unique<ChannelConstraint>(tokenizer_, thinking_, answer_->clone());
  for (const std::int32_t id : ids_) {
    (void)copy->parser_->push(id);
  }
  copy->ids_ = ids_;
  copy->is_answered_ = is_answered_;
  return copy;
}

}  // namespace tandem::server
