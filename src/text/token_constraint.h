// token_constraint.h — which tokens may come next, for constrained decoding. The engine asks before
// each draw and tells what was drawn; what stands behind it (a grammar, a channel) is the maker's
// business.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

namespace tandem {

/// One per response; used by the engine's thread only.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;

  /// False: every token may come next, and fill_mask() need not be called.
  [[nodiscard]] virtual bool is_active() const = 0;
  /// Sets bit (id % 32) of bits[id / 32] for every id that may come next, clears all others.
  /// bits [ceil(vocab / 32)]. Stop ids are set where the response may end.
  virtual void fill_mask(std::span<std::uint32_t> bits) = 0;
  /// Advances by a token of the response. Errors: false when the token was not allowed.
  [[nodiscard]] virtual bool accept(std::int32_t id) = 0;
  /// Nothing may follow but the end: the engine finishes the response as kStop.
  [[nodiscard]] virtual bool is_complete() const = 0;
  /// The state right now, to be advanced independently (samples of a group, drafts).
  [[nodiscard]] virtual std::unique_ptr<TokenConstraint> clone() const = 0;
};

}  // namespace tandem
