// tensor_linear.cu — linear layers on the tensor cores: chooses, fills in, launches.   Contract:
// gemm/tensor.h   Kernels: gemm/linear_kernels.cuh
#include <algorithm>
#include <array>
#include <vector>

#include "backends/cuda/gemm/group_launch.cuh"
#include "backends/cuda/gemm/linear_launch.cuh"
#include "backends/cuda/gemm/packed_weight.h"
#include "backends/cuda/gemm/tensor.h"
#include "backends/cuda/gemm/to_bf16.h"
#include "backends/cuda/runtime/cuda_device.h"
#include "core/check.h"
#include "core/checked_cast.h"

namespace tandem::cuda {
namespace {

/// Whether every row begins at a multiple of 8 bytes and fills tiles.
bool whole_rows(const ConstF32Cube& x) {
  return x.size(2) % kTileInputs == 0 && reinterpret_cast<std::uintptr_t>(x.data()) % 8 == 0 &&
         (x.size(0) == 1 || x.stride(0) % 2 == 0) && (x.size(1) == 1 || x.stride(1) % 2 == 0);
}

/// Activations in bf16 in the workspace, kept for the next layer that reads the same ones.
class Bf16Rows {
 public:
  /// x[t, h] in rows of `width`.
  Cube<const std::uint16_t> get(const ExecCtx& ctx, ConstF32Cube x, std::int64_t width) {
    if (rows_ == nullptr || x.data() != x_.data() || x.shape() != x_.shape() ||
        x.stride(0) != x_.stride(0) || x.stride(1) != x_.stride(1)) {
      rows_ = ctx.workspace->take<std::uint16_t>(x.size(0) * x.size(1) * width).data();
      x_ = x;
      to_bf16(ctx, rows_, width, x);
    }
    return {rows_, x.size(1) * width, width};
  }

 private:
  std::uint16_t* rows_ = nullptr;
  ConstF32Cube x_;
};

/// At most kMaxHeads heads. `bf16_rows` lives no longer than a scope of the workspace.
void linear_cube(const ExecCtx& ctx, F32Cube y, ConstF32Cube x, std::span<const PackedWeight> w,
                 bool accumulate, Bf16Rows& bf16_rows) {
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
    args.weights[h] = packed_data(head);
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
    args.x_bf16 = bf16_rows.get(ctx, x, args.shape.k_tiles * kTileInputs);
  }
  with_packed_format(desc.format,
                     [&](auto of) { launch_linear<of.value>(ctx, *config, args, heads); });
}

/// A matrix as one head.
template <typename T>
TensorView<T, 3> one_head(TensorView<T, 2> x) {
  return {x.data(), {x.size(0), 1, x.size(1)}, {x.stride(0), 0, x.stride(1)}};
}

void linear_mat(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, const PackedWeight& w, bool accumulate,
                Bf16Rows& bf16_rows) {
  if (!y.empty()) {
    linear_cube(ctx, one_head(y), one_head(x), {&w, 1}, accumulate, bf16_rows);
  }
}

void each_alone(const ExecCtx& ctx, std::span<const LinearCall> calls) {
  const ArenaScope scope(*ctx.workspace);
  Bf16Rows bf16_rows;
  for (const LinearCall& call : calls) {
    linear_mat(ctx, call.y, call.x, *call.w, false, bf16_rows);
  }
}

/// At most kMaxGroupLayers calls of one format with 1 to kMaxStreamRows rows each, in one launch if
/// a plan for all of them exists.
void stream_group(const ExecCtx& ctx, std::span<const LinearCall> calls) {
  const WeightFormat format = calls.front().w->format;
  const int blocks = stream_blocks(format);
  LinearGroupDesc desc;
  desc.format = format;
  for (const LinearCall& call : calls) {
    desc.tokens = std::max(desc.tokens, call.x.size(0));
    desc.layers.push_back(tensor_shape(format, call.w->out, call.w->in));
    desc.gated = desc.gated || call.up != nullptr;
  }
  auto config = calls.size() > 1 || desc.gated ? choose_linear_group(desc, device_of(ctx).info())
                                               : std::nullopt;
  if (!config) {
    ops::linear_group_in_steps(ctx, calls, each_alone);
    return;
  }
  LinearGroupArgs args{};
  args.count = static_cast<int>(calls.size());
  args.whole = true;
  args.plan = config->plan;
  std::int64_t groups = 0;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const LinearCall& call = calls[i];
    args.layers[i] = {.weight = packed_data(*call.w),
                      .up = call.up != nullptr ? packed_data(*call.up) : nullptr,
                      .shape = desc.layers[i],
                      .act = call.act,
                      .y = device_mat(call.y),
                      .x = device_mat(call.x),
                      .tokens = static_cast<int>(call.x.size(0)),
                      .first_group = static_cast<int>(groups)};
    args.whole = args.whole && whole_rows(one_head(call.x));
    groups += config->plan.groups(desc.layers[i].row_blocks * (call.up != nullptr ? 2 : 1), blocks);
  }
  config->grid_x = groups * config->plan.cluster;
  with_packed_format(format, [&](auto of) { launch_linear_group<of.value>(ctx, *config, args); });
}

/// Up to this many rows a small weight is streamed for eight of them at a time: read again from the
/// second-level cache, it is still sooner there than through activations in bf16 and a tile.
constexpr std::int64_t kMostPieceRows = 16;
constexpr std::int64_t kSmallWeightBytes = std::int64_t{16} << 20;

bool streams_in_pieces(std::int64_t rows, const PackedWeight& w) {
  return rows <= kMaxStreamRows ||
         (rows <= kMostPieceRows && w.data.size_bytes() <= kSmallWeightBytes);
}

/// The calls of a format that one launch can take, launched when it is full.
class StreamedCalls {
 public:
  void add(const ExecCtx& ctx, const LinearCall& call) {
    for (std::int64_t begin = 0; begin < call.x.size(0); begin += kMaxStreamRows) {
      const std::int64_t count = std::min(kMaxStreamRows, call.x.size(0) - begin);
      LinearCall& piece = calls_[count_++];
      piece = call;
      piece.y = call.y.rows(begin, count);
      piece.x = call.x.rows(begin, count);
      if (count_ == calls_.size()) {
        launch(ctx);
      }
    }
  }
  void launch(const ExecCtx& ctx) {
    if (count_ > 0) {
      stream_group(ctx, std::span(calls_).first(count_));
      count_ = 0;
    }
  }

 private:
  std::array<LinearCall, kMaxGroupLayers> calls_;
  std::size_t count_ = 0;
};

/// At most kMaxStreamRows rows.
void stream_sum(const ExecCtx& ctx, F32Mat y, ConstF32Mat base, std::span<const LinearTerm> terms) {
  const PackedWeight& first = *terms.front().w;
  const LinearDesc desc{.format = first.format,
                        .out = first.out,
                        .in = first.in,
                        .tokens = y.size(0),
                        .second_in = terms.size() > 1 ? terms[1].w->in : 0};
  const auto config = choose_linear(desc, device_of(ctx).info());
  if (!config || !config->stream) {
    return ops::linear_sum_in_steps(ctx, y, base, terms);
  }
  LinearSumArgs args{};
  args.whole = true;
  for (std::size_t i = 0; i < terms.size(); ++i) {
    args.weights[i] = packed_data(*terms[i].w);
    args.shapes[i] = tensor_shape(desc.format, desc.out, terms[i].w->in);
    args.x[i] = device_mat(terms[i].x);
    args.whole = args.whole && whole_rows(one_head(terms[i].x));
  }
  args.y = device_mat(y);
  args.base = base.empty() ? Mat<const float>{} : device_mat(base);
  args.tokens = static_cast<int>(desc.tokens);
  args.plan = config->plan;
  with_packed_format(desc.format, [&](auto of) {
    launch_linear_sum<of.value>(ctx, *config, args, static_cast<int>(terms.size()));
  });
}

}  // namespace

void tensor_linear(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, const PackedWeight& w,
                   bool accumulate) {
  if (!accumulate && x.size(0) > kMaxStreamRows && streams_in_pieces(x.size(0), w)) {
    const LinearCall call{y, x, &w};
    return tensor_linear_group(ctx, {&call, 1});
  }
  const ArenaScope scope(*ctx.workspace);
  Bf16Rows bf16_rows;
  linear_mat(ctx, y, x, w, accumulate, bf16_rows);
}

void tensor_linear_group(const ExecCtx& ctx, std::span<const LinearCall> calls) {
  std::vector<LinearCall> tiled;
  for (const WeightFormat format :
       {WeightFormat::kBF16, WeightFormat::kFp8Block, WeightFormat::kMxFp4, WeightFormat::kNvFp4}) {
    StreamedCalls streamed;
    for (const LinearCall& call : calls) {
      if (call.w->format != format || call.y.empty()) {
        continue;
      }
      if (streams_in_pieces(call.x.size(0), *call.w)) {
        streamed.add(ctx, call);
      } else {
        tiled.push_back(call);
      }
    }
    streamed.launch(ctx);
  }
  ops::linear_group_in_steps(ctx, tiled, each_alone);
}

void tensor_linear_sum(const ExecCtx& ctx, F32Mat y, ConstF32Mat base,
                       std::span<const LinearTerm> terms) {
  const std::int64_t rows = y.size(0);
  const auto streams = [&](const LinearTerm& term) {
    return term.w->format == terms.front().w->format && streams_in_pieces(rows, *term.w);
  };
  if (terms.size() > 2 || !std::ranges::all_of(terms, streams)) {
    return ops::linear_sum_in_steps(ctx, y, base, terms);
  }
  for (std::int64_t begin = 0; begin < rows; begin += kMaxStreamRows) {
    const std::int64_t count = std::min(kMaxStreamRows, rows - begin);
    std::array<LinearTerm, 2> piece;
    std::ranges::transform(terms, piece.begin(), [&](const LinearTerm& term) {
      return LinearTerm{term.x.rows(begin, count), term.w};
    });
    stream_sum(ctx, y.rows(begin, count), base.empty() ? base : base.rows(begin, count),
               std::span(piece).first(terms.size()));
  }
}

void tensor_linear_heads(const ExecCtx& ctx, F32Cube y, ConstF32Cube x,
                         std::span<const PackedWeight> w, bool accumulate) {
  // Rows at a time: all heads of a row in bf16 take more than the row itself.
  constexpr std::int64_t kMostRows = 16384;
  for (std::int64_t row = 0; row < y.size(0) && !y.empty(); row += kMostRows) {
    for (std::int64_t head = 0; head < isize(w); head += kMaxHeads) {
      const ArenaScope scope(*ctx.workspace);
      Bf16Rows bf16_rows;
      const std::int64_t rows = std::min(kMostRows, y.size(0) - row);
      const std::int64_t heads = std::min<std::int64_t>(kMaxHeads, isize(w) - head);
      const auto part = [&](auto cube) {
        return decltype(cube)(cube.data() + row * cube.stride(0) + head * cube.stride(1),
                              {rows, heads, cube.size(2)},
                              {cube.stride(0), cube.stride(1), cube.stride(2)});
      };
      linear_cube(ctx, part(y), part(x), w.subspan(usize(head), usize(heads)), accumulate,
                  bf16_rows);
    }
  }
}

}  // namespace tandem::cuda
