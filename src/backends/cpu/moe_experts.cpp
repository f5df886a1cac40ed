// moe_experts.cpp — the routed experts: (token, slot) pairs grouped by expert, three grouped linear
// layers, and a combination in slot order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "backends/cpu/gemm/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/moe_experts.cpp"
#include <hwy/foreach_target.h>
// After foreach_target: once per target.
#include <hwy/highway.h>

#include "backends/cpu/families.h"
#include "backends/cpu/gemm/formats-inl.h"
#include "backends/cpu/gemm/panel.h"
#include "core/checked_cast.h"
#include "tensor/arena_views.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::gemm::HWY_NAMESPACE {

/// out[i] = the chain fma(weights[a], rows[a][i], sum) over a from 0; weights null means all 1.
/// Row a is base + ids[a] * stride.
void combine_rows(float* out, std::int64_t size, const float* base, std::int64_t stride,
                  std::span<const std::int32_t> ids, const float* weights) {
  const Floats d;
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    VF sum = hn::Zero(d);
    for (std::size_t a = 0; a < ids.size(); ++a) {
      const VF weight = hn::Set(d, weights == nullptr ? 1.0F : weights[a]);
      sum = fma(weight, hn::LoadU(d, base + ids[a] * stride + i), sum);
    }
    hn::StoreU(sum, d, out + i);
  }
  for (; i < size; ++i) {
    float sum = 0.0F;
    for (std::size_t a = 0; a < ids.size(); ++a) {
      sum = std::fma(weights == nullptr ? 1.0F : weights[a], base[ids[a] * stride + i], sum);
    }
    out[i] = sum;
  }
}

/// 16 chains, the i-th over the elements congruent to i, then added in pairs: the same on every
/// target.
float dot(const float* a, const float* b, std::int64_t size) {
  const Floats d;
  VF sums[std::size_t{kVectors}];
  for (VF& sum : sums) {
    sum = hn::Zero(d);
  }
  std::int64_t i = 0;
  for (; i + kPanel <= size; i += kPanel) {
    for (int v = 0; v < kVectors; ++v) {
      sums[v] = fma(hn::LoadU(d, a + i + v * kLanes), hn::LoadU(d, b + i + v * kLanes), sums[v]);
    }
  }
  HWY_ALIGN float lanes[16];
  for (int v = 0; v < kVectors; ++v) {
    hn::Store(sums[v], d, lanes + v * kLanes);
  }
  for (; i < size; ++i) {
    lanes[i % kPanel] = std::fma(a[i], b[i], lanes[i % kPanel]);
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      lanes[lane] += lanes[lane + half];
    }
  }
  return lanes[0];
}

}  // namespace tandem::gemm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {
namespace gemm {
HWY_EXPORT(combine_rows);
HWY_EXPORT(dot);
}  // namespace gemm

namespace {

// Rows of a block of the element-wise passes, for about 10 us of memory traffic.
std::int64_t rows_per_block(std::int64_t floats_per_row) {
  return std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, floats_per_row));
}

template <typename Fn>
void for_rows(const ExecCtx& ctx, std::int64_t rows, std::int64_t floats_per_row, const Fn& fn) {
  const std::int64_t per_block = rows_per_block(floats_per_row);
  ctx.pool->parallel_for(gemm::ceil_div(rows, per_block), [&](std::int64_t block, int) {
    for (std::int64_t row = block * per_block; row < std::min(rows, (block + 1) * per_block);
         ++row) {
      fn(row);
    }
  });
}

/// (token, slot) pairs grouped by expert, tokens in order inside. Lives in the workspace.
struct Groups {
  std::span<std::int32_t> begin;         // [E + 1] first row of an expert
  std::span<std::int32_t> token_of_row;  // [T * A]
  std::span<std::int32_t> row_of_slot;   // [T * A] by token, then slot

  [[nodiscard]] std::int64_t rows_of(std::size_t expert) const {
    return begin[expert + 1] - begin[expert];
  }
};

Groups take_groups(const ExecCtx& ctx, std::int64_t num_experts, std::int64_t pairs) {
  Groups groups;
  groups.begin = ctx.workspace->take<std::int32_t>(num_experts + 1);
  groups.token_of_row = ctx.workspace->take<std::int32_t>(pairs);
  groups.row_of_slot = ctx.workspace->take<std::int32_t>(pairs);
  return groups;
}

Groups group_by_expert(const ExecCtx& ctx, ConstI32Mat ids, std::int64_t num_experts) {
  const std::int64_t tokens = ids.size(0);
  const std::int64_t slots = ids.size(1);
  const Groups groups = take_groups(ctx, num_experts, tokens * slots);
  std::fill(groups.begin.begin(), groups.begin.end(), 0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t a = 0; a < slots; ++a) {
      TDM_CHECK(ids(t, a) >= 0 && ids(t, a) < num_experts, t, a, ids(t, a), num_experts);
      ++groups.begin[usize(ids(t, a)) + 1];
    }
  }
  for (std::size_t e = 1; e < groups.begin.size(); ++e) {
    groups.begin[e] += groups.begin[e - 1];
  }
  const std::span<std::int32_t> next = ctx.workspace->take<std::int32_t>(num_experts);
  std::copy_n(groups.begin.begin(), num_experts, next.begin());
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t a = 0; a < slots; ++a) {
      const std::int32_t row = next[usize(ids(t, a))]++;
      groups.token_of_row[usize(row)] = checked_cast<std::int32_t>(t);
      groups.row_of_slot[usize(t * slots + a)] = row;
    }
  }
  return groups;
}

/// Jobs of one linear layer per expert.
struct Jobs {
  std::span<gemm::LinearJob> jobs;
  std::size_t count = 0;

  /// y and x by row of the grouping; x_rows, when given, turns a row into a row of x.
  void add(const Groups& groups, std::span<const PackedWeight> weights, F32Mat y, ConstF32Mat x,
           bool gather, bool accumulate = false) {
    for (std::size_t e = 0; e < weights.size(); ++e) {
      const std::int64_t rows = groups.rows_of(e);
      if (rows == 0) {
        continue;
      }
      const std::int64_t begin = groups.begin[e];
      jobs[count++] = {.y = y.row(begin),
                       .y_stride = y.stride(0),
                       .x = gather ? x.data() : x.row(begin),
                       .x_stride = x.stride(0),
                       .x_rows = gather ? groups.token_of_row.data() + begin : nullptr,
                       .rows = rows,
                       .weight = &weights[e],
                       .accumulate = accumulate};
    }
  }
  void run(const ExecCtx& ctx) {
    gemm::run_linear(ctx, jobs.first(count));
    count = 0;
  }
};

void experts(const ExecCtx& ctx, F32Mat out, const RowNorm& norm, const ExpertsSaved* saved,
             ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights, const ExpertWeights& experts,
             SituParams act) {
  const ArenaScope scope(*ctx.workspace);
  const std::int64_t slots = ids.size(1);
  const std::int64_t pairs = ids.size(0) * slots;
  if (pairs == 0) {
    return;
  }
  const std::int64_t width = experts.w1[0].out;
  const Groups groups = group_by_expert(ctx, ids, isize(experts.w1));
  const F32Mat gate = saved != nullptr ? saved->gate : take_mat(*ctx.workspace, pairs, width);
  const F32Mat up = saved != nullptr ? saved->up : take_mat(*ctx.workspace, pairs, width);
  const F32Mat expert_out =
      saved != nullptr ? saved->out : take_mat(*ctx.workspace, pairs, x.size(1));
  const F32Mat activated = saved != nullptr ? take_mat(*ctx.workspace, pairs, width) : gate;
  Jobs jobs{ctx.workspace->take<gemm::LinearJob>(2 * isize(experts.w1))};

  jobs.add(groups, experts.w1, gate, x, true);
  jobs.add(groups, experts.w3, up, x, true);
  jobs.run(ctx);
  ctx.ops->act.situ(ctx, activated, gate, up, act);
  jobs.add(groups, experts.w2, expert_out, activated, false);
  jobs.run(ctx);

  const auto combine = HWY_DYNAMIC_DISPATCH(gemm::combine_rows);
  const F32Mat combined = out.size(1) > 0 ? out : norm.y;  // the norm works in place as well
  for_rows(ctx, x.size(0), (slots + 1) * x.size(1), [&](std::int64_t t) {
    combine(combined.row(t), x.size(1), expert_out.data(), expert_out.stride(0),
            groups.row_of_slot.subspan(usize(t * slots), usize(slots)), weights.row(t));
  });
  if (norm.wanted()) {
    ctx.ops->norm.rms_norm(ctx, norm.y, combined, norm.w, norm.eps);
  }
  if (saved != nullptr) {
    for (std::int64_t t = 0; t < ids.size(0); ++t) {
      std::copy_n(groups.row_of_slot.begin() + t * slots, slots, saved->pair_of_slot.row(t));
    }
  }
}

/// One weight gradient per expert and matrix.
struct GradJobs {
  std::span<gemm::WeightGradJob> jobs;
  std::size_t count = 0;

  void add(const Groups& groups, std::span<const F32Mat> grads, ConstF32Mat d_y, ConstF32Mat x,
           bool gather) {
    for (std::size_t e = 0; e < grads.size(); ++e) {
      const std::int64_t begin = groups.begin[e];
      jobs[count++] = {.d_w = grads[e].data(),
                       .d_w_stride = grads[e].stride(0),
                       .d_y = d_y.row(begin),
                       .d_y_stride = d_y.stride(0),
                       .x = gather ? x.data() : x.row(begin),
                       .x_stride = x.stride(0),
                       .x_rows = gather ? groups.token_of_row.data() + begin : nullptr,
                       .rows = groups.rows_of(e),
                       .n = grads[e].size(0),
                       .k = grads[e].size(1)};
    }
  }
};

void experts_bwd(const ExecCtx& ctx, F32Mat d_x, F32Mat d_weights, const ExpertGrads& grads,
                 ConstF32Mat d_out, ConstF32Mat x, ConstI32Mat ids, ConstF32Mat weights,
                 const ExpertWeights& experts_transposed, const ExpertsSaved& saved,
                 SituParams act) {
  const ArenaScope scope(*ctx.workspace);
  const std::int64_t slots = ids.size(1);
  const std::int64_t pairs = ids.size(0) * slots;
  if (pairs == 0) {
    return;
  }
  const std::int64_t num_experts = isize(experts_transposed.w1);
  const std::int64_t dim = d_out.size(1);
  const std::int64_t width = saved.gate.size(1);
  const Groups groups = group_by_expert(ctx, ids, num_experts);
  const F32Mat d_pair = take_mat(*ctx.workspace, pairs, dim);  // gradient of an expert's output
  const auto combine = HWY_DYNAMIC_DISPATCH(gemm::combine_rows);
  const auto dot = HWY_DYNAMIC_DISPATCH(gemm::dot);
  for_rows(ctx, ids.size(0), 3 * slots * dim, [&](std::int64_t t) {
    for (std::int64_t a = 0; a < slots; ++a) {
      const std::int64_t row = groups.row_of_slot[usize(t * slots + a)];
      const std::int32_t token = checked_cast<std::int32_t>(t);
      d_weights(t, a) = dot(d_out.row(t), saved.out.row(row), dim);
      combine(d_pair.row(row), dim, d_out.data(), d_out.stride(0), {&token, 1}, &weights(t, a));
    }
  });

  const F32Mat activated = take_mat(*ctx.workspace, pairs, width);
  const F32Mat d_gate = take_mat(*ctx.workspace, pairs, width);
  const F32Mat d_up = take_mat(*ctx.workspace, pairs, width);
  const F32Mat d_pair_x = take_mat(*ctx.workspace, pairs, dim);
  Jobs jobs{ctx.workspace->take<gemm::LinearJob>(num_experts)};
  ctx.ops->act.situ(ctx, activated, saved.gate, saved.up, act);
  jobs.add(groups, experts_transposed.w2, d_up, d_pair, false);
  jobs.run(ctx);
  ctx.ops->act.situ_bwd(ctx, d_gate, d_up, d_up, saved.gate, saved.up, act);

  GradJobs grad_jobs{ctx.workspace->take<gemm::WeightGradJob>(3 * num_experts)};
  grad_jobs.add(groups, grads.d_w1, d_gate, x, true);
  grad_jobs.add(groups, grads.d_w3, d_up, x, true);
  grad_jobs.add(groups, grads.d_w2, d_pair, activated, false);
  gemm::run_weight_grad(ctx, grad_jobs.jobs.first(grad_jobs.count));

  jobs.add(groups, experts_transposed.w1, d_pair_x, d_gate, false);
  jobs.run(ctx);
  jobs.add(groups, experts_transposed.w3, d_pair_x, d_up, false, true);
  jobs.run(ctx);
  for_rows(ctx, ids.size(0), (slots + 1) * dim, [&](std::int64_t t) {
    combine(d_x.row(t), dim, d_pair_x.data(), d_pair_x.stride(0),
            groups.row_of_slot.subspan(usize(t * slots), usize(slots)), nullptr);
  });
}

}  // namespace

void cpu_add_expert_ops(MoeOps& ops) {
  ops.experts = experts;
  ops.experts_bwd = experts_bwd;
}

}  // namespace tandem
#endif
