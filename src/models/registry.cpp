#include "models/registry.h"

#include "models/kimi_k3/model.h"

namespace tandem {

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
