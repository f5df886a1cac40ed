// experts_ops.cpp — the routed experts of the CUDA backend: which kernels take a layer.
#include "backends/cuda/experts/exact.h"
#include "backends/cuda/experts/tensor.h"
#include "backends/cuda/families.h"
#include "backends/cuda/runtime/cuda_device.h"

namespace tandem::cuda {
namespace {

bool on_tensor_cores(const ExecCtx& ctx, const ExpertWeights& experts) {
  return experts.w1[0].format != WeightFormat::kF32 && experts.w3[0].format != WeightFormat::kF32 &&
         experts.w2[0].format != WeightFormat::kF32 && !device_of(ctx).options().exact_linear;
}

void experts(const ExecCtx& ctx, F32Mat out, const RowNorm& norm, const ExpertsSaved* saved,
             ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights, const ExpertWeights& experts,
             SituParams act) {
  if (saved == nullptr && on_tensor_cores(ctx, experts)) {
    tensor_experts(ctx, out, norm, x, ids, weights, experts, act);
  } else {
    exact_experts(ctx, out, norm, saved, x, ids, weights, experts, act);
  }
}

}  // namespace

void add_expert_ops(MoeOps& ops) {
  ops.experts = experts;
  ops.experts_bwd = exact_experts_bwd;
}

}  // namespace tandem::cuda
