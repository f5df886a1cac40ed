// prefill_bench.h — a prompt through a model in pieces: tokens a second, and whether pieces leave
// the very bits that one piece leaves.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/batch.h"
#include "engine/cache/cache_manager.h"
#include "models/model.h"
#include "ops/exec_ctx.h"

namespace tandem::cli {

/// What a prompt leaves behind, on the host: logits of its last token, states, latent rows.
struct PrefillImage {
  struct Part {
    std::string name;
    std::vector<std::byte> bytes;
  };
  std::vector<Part> parts;

  /// nullopt when equal; else the first difference.
  [[nodiscard]] std::optional<std::string> difference(const PrefillImage& other) const;
};

class PrefillBench {
 public:
  /// A prompt of `tokens` random tokens, `piece` at a time.
  PrefillBench(const ExecCtx& ctx, const Model& model, const CacheSpec& spec, std::int64_t tokens,
               std::int64_t piece);

  /// Seconds of the whole prompt, from an empty cache.
  [[nodiscard]] double run();
  /// Of the last run.
  [[nodiscard]] PrefillImage image() const;

 private:
  const ExecCtx& ctx_;
  const Model& model_;
  CacheSpec spec_;
  std::int64_t tokens_;
  std::int64_t piece_;
  CacheManager cache_;
  BatchBuilder builder_;
  Storage logits_;
  Sequence sequence_;
};

struct PieceCheck {
  std::int64_t tokens = 0;  // of the prompt, and of its one piece
  std::string cut_reason;   // why fewer than asked for; empty otherwise
  double whole_s = 0;
  double pieces_s = 0;
  std::optional<std::string> difference;
};

/// Prefills `tokens` at once, or as many of them as the device's memory allows at once, and again
/// in pieces of `piece`; compares the bits.
[[nodiscard]] PieceCheck check_pieces(const ExecCtx& ctx, const Model& model, const CacheSpec& spec,
                                      std::int64_t tokens, std::int64_t piece);

}  // namespace tandem::cli
