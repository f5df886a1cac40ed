// tensor_table.h — every text tensor of a K3 checkpoint with its shape and role
// (kimi-k3.md 7.2, 7.4), unquantised.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/kimi_k3/config.h"

namespace tandem::kimi_k3 {

enum class TensorRole {
  kEmbedding,
  kHead,
  kNorm,
  kResProj,
  kAttention,
  kAttentionOut,
  kConv,
  kALog,
  kDtBias,
  kMlpIn,
  kMlpOut,
  kRouter,
  kRouterBias,
  kLatentDown,
  kLatentUp,
  kExpertIn,
  kExpertOut,
};

struct TensorEntry {
  std::string name;
  std::vector<std::int64_t> shape;
  TensorRole role;

  [[nodiscard]] std::int64_t numel() const;
  /// Stored as F32 whatever the checkpoint's dtype.
  [[nodiscard]] bool always_f32() const;
};

/// In layer order. `a_log_length` is the stored length of A_log, at least the number of heads.
[[nodiscard]] std::vector<TensorEntry> tensor_table(const Config& config,
                                                    std::int64_t a_log_length);

}  // namespace tandem::kimi_k3
