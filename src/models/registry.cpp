#include "models/registry.h"

#include <cmath>

#include "models/kimi_k3/model.h"

namespace tandem {

double ModelFootprint::step_read_bytes(std::int64_t tokens, std::int64_t experts_per_token) const {
  const double chosen =
      num_experts == 0 ? 0.0
                       : static_cast<double>(experts_per_token) / static_cast<double>(num_experts);
  const double all = static_cast<double>(expert_bytes);
  const double hit = 1.0 - std::pow(1.0 - chosen, static_cast<double>(tokens));
  return static_cast<double>(decode_read_bytes) + all * (hit - chosen);
}

// One line a model. With a second one this becomes a look-up of config.json's model_type.
Expected<std::unique_ptr<Model>> load_model(const ExecCtx& ctx, const std::string& dir,
                                            LoadOptions options) {
  auto model = kimi_k3::KimiK3::load(ctx, dir, options);
  if (!model.ok()) {
    return model.failure();
  }
  return std::unique_ptr<Model>(*std::move(model));
}

}  // namespace tandem
