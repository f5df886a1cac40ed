// registry.h — from a checkpoint folder to a model, by the model_type of its config.json.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/error.h"
#include "models/model.h"

namespace tandem {

struct LoadOptions {
  bool trainable =
      false;  // keep fp32 masters and gradients; 4/8-bit weights are dequantised into them
  std::int64_t num_layers = 0;  // only the first so many; 0: all
  /// Real shapes, made-up numbers: only `dir`/config.json is read, or `dir` names a preset. Experts
  /// are then stored in this format; empty: an ordinary load.
  std::string dummy_experts = {};  // bf16, mxfp4 or nvfp4
};

/// Errors: a Failure naming the folder, file, field or tensor and what was expected.
Expected<std::unique_ptr<Model>> load_model(const ExecCtx& ctx, const std::string& dir,
                                            LoadOptions options);

}  // namespace tandem
