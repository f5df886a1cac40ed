// channel_constraint.h — a grammar that governs the answer channel of a response and nothing else:
// reasoning before it and the markers around it are free.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "text/response_parser.h"
#include "text/token_constraint.h"

namespace tandem::server {

class ChannelConstraint final : public TokenConstraint {
 public:
  /// `answer` takes the marker that closes the channel as its stop id. `tokenizer` outlives this.
  ChannelConstraint(const Tokenizer& tokenizer, bool thinking,
                    std::unique_ptr<TokenConstraint> answer)
      : tokenizer_(tokenizer),
        thinking_(thinking),
        parser_(make_response_parser(tokenizer, thinking)),
        answer_(std::move(answer)) {}

  [[nodiscard]] bool is_active() const override {
    return !is_answered_ && parser_->channel() == Channel::kAnswer && answer_->is_active();
  }
  void fill_mask(std::span<std::uint32_t> bits) override { answer_->fill_mask(bits); }
  [[nodiscard]] bool accept(std::int32_t id) override;
  /// The markers that end the message still follow.
  [[nodiscard]] bool is_complete() const override { return false; }
  [[nodiscard]] std::unique_ptr<TokenConstraint> clone() const override;

 private:
  const Tokenizer& tokenizer_;
  bool thinking_;
  std::unique_ptr<ResponseParser> parser_;  // for its channel only
  std::unique_ptr<TokenConstraint> answer_;
  std::vector<std::int32_t> ids_;  // so far: a parser has no copy
  bool is_answered_ = false;
};

}  // namespace tandem::server
