#include "nn/mlp.h"

#include <array>

#include "nn/activations.h"

namespace tandem::nn {

Mlp::Products Mlp::take_products(ConstF32Mat x, bool training, Arena& keep) const {
  const auto take = [&] { return take_mat(keep, x.size(0), gate_proj.out()); };
  return {x, training ? take() : F32Mat{}, training ? take() : F32Mat{}, take()};
}

void Mlp::add_calls(std::vector<LinearCall>& group, const Products& products) const {
  if (products.gate.empty()) {
    group.push_back({products.act, products.x, &gate_proj.packed(), &up_proj.packed(), act});
  } else {
    group.push_back(gate_proj.call(products.gate, products.x));
    group.push_back(up_proj.call(products.up, products.x));
  }
}

Mlp::Saved Mlp::activate(const ExecCtx& ctx, const Products& products) const {
  if (!products.gate.empty()) {
    ops::situ(ctx, products.act, products.gate, products.up, act);
  }
  return {products.x, products.gate, products.up, products.act};
}

Mlp::Saved Mlp::forward(const ExecCtx& ctx, F32Mat y, ConstF32Mat base, ConstF32Mat x,
                        bool training, Arena& keep) const {
  const Products products = take_products(x, training, keep);
  std::vector<LinearCall> group;
  add_calls(group, products);
  ops::linear_group(ctx, group);
  const Saved saved = activate(ctx, products);
  ops::linear_sum(ctx, y, base, std::array{down_proj.term(saved.act)});
  return saved;
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
