// gemm.cpp — the linear family of the CPU backend: contracts to jobs of gemm/.

#include <algorithm>
#include <span>

#include "backends/cpu/families.h"
#include "backends/cpu/gemm/pack.h"
#include "backends/cpu/gemm/panel.h"
#include "core/checked_cast.h"

namespace tandem {
namespace {

gemm::LinearJob linear_job(F32Mat y, ConstF32Mat x, const PackedWeight& w, bool accumulate) {
  return {.y = y.data(),
          .y_stride = y.stride(0),
          .x = x.data(),
          .x_stride = x.stride(0),
          .rows = x.size(0),
          .weight = &w,
          .accumulate = accumulate};
}

void linear(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, const PackedWeight& w, bool accumulate) {
  const gemm::LinearJob job = linear_job(y, x, w, accumulate);
  gemm::run_linear(ctx, {&job, 1});
}

void plain_group(const ExecCtx& ctx, std::span<const LinearCall> calls) {
  const ArenaScope scope(*ctx.workspace);
  const std::span<gemm::LinearJob> jobs = ctx.workspace->take<gemm::LinearJob>(isize(calls));
  std::ranges::transform(calls, jobs.begin(), [](const LinearCall& call) {
    return linear_job(call.y, call.x, *call.w, false);
  });
  gemm::run_linear(ctx, jobs);
}

void linear_group(const ExecCtx& ctx, std::span<const LinearCall> calls) {
  ops::linear_group_in_steps(ctx, calls, plain_group);
}

void linear_heads(const ExecCtx& ctx, F32Cube y, ConstF32Cube x, std::span<const PackedWeight> w,
                  bool accumulate) {
  const ArenaScope scope(*ctx.workspace);
  const std::span<gemm::LinearJob> jobs = ctx.workspace->take<gemm::LinearJob>(isize(w));
  for (std::size_t h = 0; h < w.size(); ++h) {
    const auto head = static_cast<std::int64_t>(h);
    jobs[h] = {.y = y.data() + head * y.stride(1),
               .y_stride = y.stride(0),
               .x = x.data() + head * x.stride(1),
               .x_stride = x.stride(0),
               .rows = x.size(0),
               .weight = &w[h],
               .accumulate = accumulate};
  }
  gemm::run_linear(ctx, jobs);
}

void weight_grad(const ExecCtx& ctx, F32Mat d_w, ConstF32Mat d_y, ConstF32Mat x) {
  const gemm::WeightGradJob job{.d_w = d_w.data(),
                                .d_w_stride = d_w.stride(0),
                                .d_y = d_y.data(),
                                .d_y_stride = d_y.stride(0),
                                .x = x.data(),
                                .x_stride = x.stride(0),
                                .rows = x.size(0),
                                .n = d_y.size(1),
                                .k = x.size(1)};
  gemm::run_weight_grad(ctx, {&job, 1});
}

}  // namespace

GemmOps cpu_gemm_ops() {
  return {.pack = gemm::pack,
          .linear = linear,
          .linear_group = linear_group,
          .linear_sum = ops::linear_sum_in_steps,
          .linear_heads = linear_heads,
          .weight_grad = weight_grad};
}

}  // namespace tandem
