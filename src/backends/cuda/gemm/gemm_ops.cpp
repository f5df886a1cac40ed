// gemm_ops.cpp — the linear family of the CUDA backend: which kernels take a weight.
#include <algorithm>
#include <vector>

#include "backends/cuda/families.h"
#include "backends/cuda/gemm/exact.h"
#include "backends/cuda/gemm/pack.h"
#include "backends/cuda/gemm/tensor.h"
#include "backends/cuda/runtime/cuda_device.h"

namespace tandem::cuda {
namespace {

bool on_tensor_cores(const ExecCtx& ctx, const PackedWeight& w) {
  return w.format != WeightFormat::kF32 && !device_of(ctx).options().exact_linear;
}

void linear(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, const PackedWeight& w, bool accumulate) {
  if (on_tensor_cores(ctx, w)) {
    tensor_linear(ctx, y, x, w, accumulate);
  } else {
    exact_linear(ctx, y, x, w, accumulate);
  }
}

void exact_group(const ExecCtx& ctx, std::span<const LinearCall> calls) {
  for (const LinearCall& call : calls) {
    exact_linear(ctx, call.y, call.x, *call.w, false);
  }
}

void linear_group(const ExecCtx& ctx, std::span<const LinearCall> calls) {
  std::vector<LinearCall> exact;
  std::vector<LinearCall> tensor;
  for (const LinearCall& call : calls) {
    (on_tensor_cores(ctx, *call.w) ? tensor : exact).push_back(call);
  }
  ops::linear_group_in_steps(ctx, exact, exact_group);
  tensor_linear_group(ctx, tensor);
}

void linear_sum(const ExecCtx& ctx, F32Mat y, ConstF32Mat base, std::span<const LinearTerm> terms) {
  const auto on_tensor = [&](const LinearTerm& term) { return on_tensor_cores(ctx, *term.w); };
  if (std::ranges::all_of(terms, on_tensor)) {
    tensor_linear_sum(ctx, y, base, terms);
  } else {
    ops::linear_sum_in_steps(ctx, y, base, terms);
  }
}

void linear_heads(const ExecCtx& ctx, F32Cube y, ConstF32Cube x, std::span<const PackedWeight> w,
                  bool accumulate) {
  if (!w.empty() && on_tensor_cores(ctx, w.front())) {
    tensor_linear_heads(ctx, y, x, w, accumulate);
  } else {
    exact_linear_heads(ctx, y, x, w, accumulate);
  }
}

}  // namespace

GemmOps gemm_ops() {
  return {.pack = pack,
          .linear = linear,
          .linear_group = linear_group,
          .linear_sum = linear_sum,
          .linear_heads = linear_heads,
          .weight_grad = exact_weight_grad};
}

}  // namespace tandem::cuda
