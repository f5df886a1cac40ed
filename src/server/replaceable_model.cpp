#include "server/replaceable_model.h"

namespace tandem::server {
namespace {

bool same_layer(const StateSpec& a, const StateSpec& b) {
  return a.num_heads == b.num_heads && a.key_dim == b.key_dim && a.value_dim == b.value_dim &&
         a.conv_rows == b.conv_rows && a.conv_channels == b.conv_channels;
}

bool same_caches(const CacheSpec& a, const CacheSpec& b) {
  bool same = a.state_layers.size() == b.state_layers.size() && a.latent_widths == b.latent_widths;
  for (std::size_t i = 0; same && i < a.state_layers.size(); ++i) {
    same = same_layer(a.state_layers[i], b.state_layers[i]);
  }
  return same;
}

}  // namespace

Status ReplaceableModel::replace(std::unique_ptr<Model> model) {
  if (model->vocab_size() != vocab_size()) {
    return fail("the checkpoint's vocab_size is {}: expected {}, as the served model has",
                model->vocab_size(), vocab_size());
  }
  if (!same_caches(model->cache_spec(), cache_spec())) {
    return fail("the checkpoint's layers differ in number or width from the served model's");
  }
  if (model->moe_layers() != moe_layers() || model->experts_per_token() != experts_per_token()) {
    return fail(
        "the checkpoint has {} expert layers with {} experts a token: expected {} with {}, as the "
        "served model has",
        model->moe_layers(), model->experts_per_token(), moe_layers(), experts_per_token());
  }
  model_ = std::move(model);
  return Ok{};
}

}  // namespace tandem::server
