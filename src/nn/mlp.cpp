#include "nn/mlp.h"

#include "nn/activations.h"

namespace tandem::nn {

Mlp::Saved Mlp::forward(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, Arena& keep) const {
  const std::int64_t rows = x.size(0);
  const F32Mat gate = take_mat(keep, rows, gate_proj.out());
  const F32Mat up = take_mat(keep, rows, up_proj.out());
  const F32Mat activated = take_mat(keep, rows, gate_proj.out());
  gate_proj.forward(ctx, gate, x);
  up_proj.forward(ctx, up, x);
  ops::situ(ctx, activated, gate, up, act);
  down_proj.forward(ctx, y, activated);
  return {x, gate, up, activated};
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
