#include "nn/linear.h"

#include "core/check.h"

namespace tandem::nn {

Linear::Linear(const ExecCtx& ctx, const WeightRef& weight) {
  ops::pack(ctx, forward_, weight, Orientation::kNormal);
}

Linear::Linear(const ExecCtx& ctx, Parameter& master) : master_(&master) {
  refresh(ctx);
}

void Linear::refresh(const ExecCtx& ctx) {
  if (master_ == nullptr) {
    return;
  }
  const WeightRef weight = WeightRef::of(master_->value_mat());
  ops::pack(ctx, forward_, weight, Orientation::kNormal);
  ops::pack(ctx, backward_, weight, Orientation::kTransposed);
}

void Linear::backward(const ExecCtx& ctx, F32Mat d_x, ConstF32Mat d_y, ConstF32Mat x,
                      InputGrad mode) const {
  TDM_CHECK(master_ != nullptr);
  ops::weight_grad(ctx, master_->grad_mat(), d_y, x);
  ops::linear(ctx, d_x, d_y, backward_, mode == InputGrad::kAccumulate);
}

}  // namespace tandem::nn
