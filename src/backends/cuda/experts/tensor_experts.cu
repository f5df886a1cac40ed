// tensor_experts.cu — the routed experts on the tensor cores: chooses, fills in, launches.
// Contract: experts/tensor.h   Kernels: experts/experts_kernels.cuh, experts/work.cu
#include "backends/cuda/experts/experts_launch.cuh"
#include "backends/cuda/experts/tensor.h"
#include "backends/cuda/experts/work.cuh"
#include "backends/cuda/gemm/packed_weight.h"
#include "backends/cuda/gemm/to_bf16.h"
#include "backends/cuda/runtime/cuda_device.h"
#include "core/check.h"
#include "core/checked_cast.h"

namespace tandem::cuda {
namespace {

void fill_pointers(const std::uint8_t** to, std::span<const PackedWeight> weights) {
  for (std::size_t e = 0; e < weights.size(); ++e) {
    TDM_CHECK(weights[e].format == weights[0].format, e);
    to[e] = packed_data(weights[e]);
  }
}

std::uint16_t* take_bf16(const ExecCtx& ctx, std::int64_t rows, std::int64_t width) {
  return ctx.workspace->take<std::uint16_t>(rows * width).data();
}

/// Rows of SiTU(gate, up), one a pair.
Mat<std::uint16_t> gate_up(const ExecCtx& ctx, ConstF32Mat x, const ExpertWeights& experts,
                           const ExpertsConfig& config, GateUpArgs& args) {
  const PackedWeight& w1 = experts.w1[0];
  TDM_CHECK(experts.w3[0].format == w1.format);
  fill_pointers(args.w1, experts.w1);
  fill_pointers(args.w3, experts.w3);
  args.shape = tensor_shape(w1.format, w1.out, w1.in);
  args.plan = config.gate_up;
  args.ring = config.ring_gate_up;
  args.x = device_mat(x);
  args.whole = x.size(1) % kTileInputs == 0 &&
               reinterpret_cast<std::uintptr_t>(x.data()) % 8 == 0 &&
               (x.size(0) == 1 || x.stride(0) % 2 == 0);
  if (!config.stream) {
    const std::int64_t width = args.shape.k_tiles * kTileInputs;
    std::uint16_t* rows = take_bf16(ctx, x.size(0), width);
    to_bf16(ctx, rows, width,
            ConstF32Cube(x.data(), {x.size(0), 1, x.size(1)}, {x.stride(0), 0, 1}));
    args.x_bf16 = {rows, width};
  }
  const std::int64_t hidden_width = tiles_of(w1.out, kTileInputs) * kTileInputs;
  args.hidden = {take_bf16(ctx, x.size(0) * args.slots, hidden_width), hidden_width};
  with_packed_format(w1.format, [&](auto of) { launch_gate_up<of.value>(ctx, config, args); });
  return args.hidden;
}

/// Tokens at a time: their pairs' rows in between take 350 KB each in K3.
constexpr std::int64_t kMostTokens = 16384;

void some_tokens(const ExecCtx& ctx, F32Mat out, const RowNorm& norm, ConstF32Mat x,
                 ConstI32Mat ids, ConstF32Mat weights, const ExpertWeights& experts,
                 SituParams act) {
  const ArenaScope scope(*ctx.workspace);
  const PackedWeight& w1 = experts.w1[0];
  const PackedWeight& w2 = experts.w2[0];
  const ExpertsDesc desc{.gate_up = w1.format,
                         .down = w2.format,
                         .experts = isize(experts.w1),
                         .tokens = x.size(0),
                         .slots = ids.size(1),
                         .dim = x.size(1),
                         .width = w1.out};
  TDM_CHECK(desc.experts <= kMaxExperts, desc.experts);
  const std::int64_t pairs = desc.tokens * desc.slots;
  const F32Mat y(ctx.workspace->take<float>(pairs * desc.dim).data(), {pairs, desc.dim});
  if (pairs > 0) {
    const auto config = choose_experts(desc, device_of(ctx).info());
    TDM_CHECK(config.has_value(), desc.tokens, desc.experts, desc.dim, desc.width);
    const ExpertWork work = expert_work(ctx, ids, desc.experts, *config);
    GateUpArgs gate_up_args{};
    gate_up_args.work = work;
    gate_up_args.slots = static_cast<std::int32_t>(desc.slots);
    gate_up_args.act = act;
    const Mat<std::uint16_t> hidden = gate_up(ctx, x, experts, *config, gate_up_args);

    DownArgs down_args{};
    fill_pointers(down_args.w2, experts.w2);
    down_args.work = work;
    down_args.shape = tensor_shape(w2.format, w2.out, w2.in);
    down_args.hidden = {hidden.data, hidden.stride};
    down_args.y = device_mat(y);
    down_args.plan = config->down;
    down_args.ring = config->ring_down;
    with_packed_format(w2.format, [&](auto of) { launch_down<of.value>(ctx, *config, down_args); });
  }
  combine_pairs(ctx, {out, norm, y, ids, weights, desc.experts});
}

}  // namespace

void tensor_experts(const ExecCtx& ctx, F32Mat out, const RowNorm& norm, ConstF32Mat x,
                    ConstI32Mat ids, ConstF32Mat weights, const ExpertWeights& experts,
                    SituParams act) {
  for (std::int64_t begin = 0; begin < x.size(0) && x.size(1) > 0; begin += kMostTokens) {
    const std::int64_t count = std::min(kMostTokens, x.size(0) - begin);
    const auto part = [&](F32Mat rows) {
      return rows.size(1) > 0 ? rows.rows(begin, count) : rows;
    };
    some_tokens(ctx, part(out), {part(norm.y), norm.w, norm.eps}, x.rows(begin, count),
                ids.rows(begin, count), weights.rows(begin, count), experts, act);
  }
}

}  // namespace tandem::cuda
