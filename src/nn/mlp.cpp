#include "nn/mlp.h"

#include "nn/activations.h"

namespace tandem::nn {

Mlp::Products Mlp::take_products(ConstF32Mat x, Arena& keep) const {
  return {x, take_mat(keep, x.size(0), gate_proj.out()), take_mat(keep, x.size(0), up_proj.out())};
}

std::array<LinearCall, 2> Mlp::calls(const Products& products) const {
  return {gate_proj.call(products.gate, products.x), up_proj.call(products.up, products.x)};
}

Mlp::Saved Mlp::finish(const ExecCtx& ctx, F32Mat y, const Products& products, Arena& keep) const {
  const F32Mat activated = take_mat(keep, y.size(0), gate_proj.out());
  ops::situ(ctx, activated, products.gate, products.up, act);
  down_proj.forward(ctx, y, activated);
  return {products.x, products.gate, products.up, activated};
}

Mlp::Saved Mlp::forward(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, Arena& keep) const {
  const Products products = take_products(x, keep);
  ops::linear_group(ctx, calls(products));
  return finish(ctx, y, products, keep);
}

void Mlp::backward(const ExecCtx& ctx, F32Mat d_x, ConstF32Mat d_y, const Saved& saved,
                   Linear::InputGrad mode) const {
  const ArenaScope scope(*ctx.workspace);
  const std::int64_t rows = d_y.size(0);
  const F32Mat d_act = take_mat(*ctx.workspace, rows, gate_proj.out());
  const F32Mat d_up = take_mat(*ctx.workspace, rows, gate_proj.out());
  down_proj.backward(ctx, d_act, d_y, saved.act, Linear::InputGrad::kOverwrite);
  ops::situ_bwd(ctx, d_act, d_up, d_act, saved.gate, saved.up, act);
  gate_proj.backward(ctx, d_x, d_act, saved.x, mode);
  up_proj.backward(ctx, d_x, d_up, saved.x, Linear::InputGrad::kAccumulate);
}

}  // namespace tandem::nn
