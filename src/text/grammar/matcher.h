// matcher.h — a text that is being generated under a grammar.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "text/grammar/mask_cache.h"
#include "text/grammar/walk.h"
#include "text/token_constraint.h"

namespace tandem::grammar {

/// Copies are exact and independent. Markers and stop ids are the business of its users.
class Matcher {
 public:
  explicit Matcher(std::shared_ptr<MaskCache> cache);

  /// Adds the ordinary tokens that may come next to `bits` (layout of TokenConstraint::fill_mask).
  void add_allowed(std::span<std::uint32_t> bits) const;
  /// False, and nothing changes, when the bytes cannot come next.
  [[nodiscard]] bool accept_bytes(std::string_view bytes);
  /// The same for a token; false for ids that are no ordinary token.
  [[nodiscard]] bool accept(std::int32_t id);
  /// The text may end here.
  [[nodiscard]] bool can_end() const { return reach_.leaves_base; }
  /// Some byte may follow.
  [[nodiscard]] bool can_continue() const;

 private:
  using Seen = std::set<std::pair<std::int32_t, std::shared_ptr<const NodeSet>>>;

  void add_entry(std::span<std::uint32_t> bits, const MaskKey& key,
                 const std::shared_ptr<const NodeSet>& from, std::int32_t frame, Seen& seen) const;
  void add_behind_frame(std::span<std::uint32_t> bits, std::int32_t frame,
                        const std::shared_ptr<const NodeSet>& from, Seen& seen) const;

  std::shared_ptr<MaskCache> cache_;
  FrameGraph graph_;
  std::vector<Place> places_;
  Reach reach_;  // of places_
};

/// A grammar's TokenConstraint: the text, then one of the stop ids.
class GrammarConstraint final : public TokenConstraint {
 public:
  GrammarConstraint(Matcher matcher, std::vector<std::int32_t> stop_ids)
      : matcher_(std::move(matcher)), stop_ids_(std::move(stop_ids)) {}

  [[nodiscard]] bool is_active() const override { return true; }
  void fill_mask(std::span<std::uint32_t> bits) override;
  [[nodiscard]] bool accept(std::int32_t id) override;
  [[nodiscard]] bool is_complete() const override;
  [[nodiscard]] std::unique_ptr<TokenConstraint> clone() const override {
    return std::make_unique<GrammarConstraint>(*this);
  }

 private:
  Matcher matcher_;
  std::vector<std::int32_t> stop_ids_;
  bool stopped_ = false;
};

}  // namespace tandem::grammar
