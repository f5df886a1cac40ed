// tensor_linear.cu — linear layers on the tensor cores: chooses, fills in, launches.   Contract:
// gemm/tensor.h   Kernels: gemm/linear_kernels.cuh
#include <algorithm>

#include "backends/cuda/gemm/linear_launch.cuh"
#include "backends/cuda/gemm/tensor.h"
#include "backends/cuda/gemm/to_bf16.h"
#include "backends/cuda/runtime/cuda_device.h"
#include "core/check.h"
#include "core/checked_cast.h"

namespace tandem::cuda {
namespace {

void launch_format(const ExecCtx& ctx, WeightFormat format, const LinearConfig& config,
                   const TensorLinearArgs& args, int heads) {
  switch (format) {
    case WeightFormat::kBF16:
      return launch_linear<WeightFormat::kBF16>(ctx, config, args, heads);
    case WeightFormat::kFp8Block:
      return launch_linear<WeightFormat::kFp8Block>(ctx, config, args, heads);
    case WeightFormat::kMxFp4:
      return launch_linear<WeightFormat::kMxFp4>(ctx, config, args, heads);
    case WeightFormat::kNvFp4:
      return launch_linear<WeightFormat::kNvFp4>(ctx, config, args, heads);
    case WeightFormat::kF32:
      break;
  }
  TDM_CHECK(false, "fp32 weights have no tensor-core path");
}

/// Whether every row begins at a multiple of 8 bytes and fills tiles.
bool whole_rows(const ConstF32Cube& x) {
  return x.size(2) % kTileInputs == 0 && reinterpret_cast<std::uintptr_t>(x.data()) % 8 == 0 &&
         (x.size(0) == 1 || x.stride(0) % 2 == 0) && (x.size(1) == 1 || x.stride(1) % 2 == 0);
}

/// At most kMaxHeads heads.
void linear_cube(const ExecCtx& ctx, F32Cube y, ConstF32Cube x, std::span<const PackedWeight> w,
                 bool accumulate) {
  const ArenaScope scope(*ctx.workspace);
  const PackedWeight& first = w.front();
  const auto heads = static_cast<int>(w.size());
  const LinearDesc desc{.format = first.format,
                        .out = first.out,
                        .in = first.in,
                        .tokens = x.size(0),
                        .heads = heads};
  const auto config = choose_linear(desc, device_of(ctx).info());
  TDM_CHECK(config.has_value(), desc.out, desc.in, desc.tokens);
  TensorLinearArgs args{};
  for (int h = 0; h < heads; ++h) {
    const PackedWeight& head = w[usize(h)];
    TDM_CHECK(head.format == first.format, h);
    args.weights[h] = reinterpret_cast<const std::uint8_t*>(head.data.data());
  }
  args.shape = tensor_shape(desc.format, desc.out, desc.in);
  args.y = device_cube(y);
  args.x = device_cube(x);
  args.tokens = desc.tokens;
  args.accumulate = accumulate;
  args.whole = whole_rows(x);
  args.plan = config->plan;
  args.cluster = config->cluster;
  if (!config->stream) {
    const std::int64_t width = args.shape.k_tiles * kTileInputs;
    auto* rows = ctx.workspace->take<std::uint16_t>(desc.tokens * heads * width).data();
    to_bf16(ctx, rows, width, x);
    args.x_bf16 = {rows, heads * width, width};
  }
  launch_format(ctx, desc.format, *config, args, heads);
}

}  // namespace

void tensor_linear(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, const PackedWeight& w,
                   bool accumulate) {
  if (y.empty()) {
    return;
  }
  const F32Cube y_heads(y.data(), {y.size(0), 1, y.size(1)}, {y.stride(0), 0, y.stride(1)});
  const ConstF32Cube x_heads(x.data(), {x.size(0), 1, x.size(1)}, {x.stride(0), 0, x.stride(1)});
  linear_cube(ctx, y_heads, x_heads, {&w, 1}, accumulate);
}

void tensor_linear_heads(const ExecCtx& ctx, F32Cube y, ConstF32Cube x,
                         std::span<const PackedWeight> w, bool accumulate) {
  if (y.empty()) {
    return;
  }
  for (std::int64_t begin = 0; begin < isize(w); begin += kMaxHeads) {
    const std::int64_t count = std::min<std::int64_t>(kMaxHeads, isize(w) - begin);
    const auto heads = [&](auto cube) {
      return decltype(cube)(cube.data() + begin * cube.stride(1),
                            {cube.size(0), count, cube.size(2)},
                            {cube.stride(0), cube.stride(1), cube.stride(2)});
    };
    linear_cube(ctx, heads(y), heads(x), w.subspan(usize(begin), usize(count)), accumulate);
  }
}

}  // namespace tandem::cuda
