// norm_bwd.cu — backward of RMSNorm, gated RMSNorm and L2 norm.   Contract: ops/norm.h
// Oracle: ops/ref/norm_ref.h
// Traffic   a row is read three times, from L1 or L2 after the first; results once.
// Numerics  fp32; d_w: a group of threads adds its fixed run of rows in order (8 rows for a block,
//           64 for a warp) into a partial row in the workspace; row_sums.h adds these.
// Launch    RMSNorm: a block for 8 rows; per-head norms: a warp for 64 rows (L2: for one).
//           Graph-safe.
#include <cmath>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/norm_bwd.h"
#include "backends/cuda/row_group.cuh"
#include "backends/cuda/row_sums.h"
#include "backends/cuda/sigmoid.cuh"

namespace tandem::cuda {
namespace {

template <typename Group>
constexpr std::int64_t kRowsPerGroup = Group::kPerBlock == 1 ? 8 : 64;

struct RmsBwd {
  Cube<float> d_x, d_gate;
  float* d_w;  // [groups, n]
  Cube<const float> d_y, x, gate;
  const float* w;
  float eps;
  std::int64_t rows, heads, width;  // rows: of all heads
};

/// One element's share: the gradient of the normalised x, and sigmoid(gate) (1 without a gate).
struct Element {
  float d_norm;
  SigmoidPair s;
};
template <bool kGated>
__device__ __forceinline__ Element element(const RmsBwd& args, std::int64_t t, std::int64_t h,
                                           std::int64_t c) {
  Element e{args.d_y.row(t, h)[c] * args.w[c], {1.0F, 0.0F}};
  if constexpr (kGated) {
    e.s = sigmoid_pair(args.gate.row(t, h)[c]);
    e.d_norm *= e.s.value;
  }
  return e;
}

/// One row. d_x may be d_y: a thread reads an element for the last time before it writes it.
template <typename Group, bool kGated>
__device__ __forceinline__ void rms_bwd_row(const RmsBwd& args, std::int64_t row, float* d_w,
                                            bool first) {
  const std::int64_t t = row / args.heads;
  const std::int64_t h = row % args.heads;
  const std::int64_t n = args.width;
  const float* const x = args.x.row(t, h);
  float squares = 0.0F;
  for (std::int64_t c = Group::rank(); c < n; c += Group::kSize) {
    squares = fmaf(x[c], x[c], squares);
  }
  const float scale = 1.0F / sqrtf(Group::sum(squares) / static_cast<float>(n) + args.eps);
  float dot = 0.0F;
  for (std::int64_t c = Group::rank(); c < n; c += Group::kSize) {
    dot = fmaf(element<kGated>(args, t, h, c).d_norm, x[c] * scale, dot);
  }
  const float mean = Group::sum(dot) / static_cast<float>(n);
  for (std::int64_t c = Group::rank(); c < n; c += Group::kSize) {
    const Element e = element<kGated>(args, t, h, c);
    const float norm = x[c] * scale;
    const float d_w_before = first ? 0.0F : d_w[c];
    d_w[c] = fmaf(args.d_y.row(t, h)[c] * e.s.value, norm, d_w_before);
    if constexpr (kGated) {
      args.d_gate.row(t, h)[c] = e.d_norm * norm * e.s.complement;
    }
    args.d_x.row(t, h)[c] = scale * fmaf(-norm, mean, e.d_norm);
  }
}

template <typename Group, bool kGated>
__global__ void __launch_bounds__(kRowThreads) rms_bwd_rows(const __grid_constant__ RmsBwd args) {
  begin_kernel();
  const std::int64_t group =
      static_cast<std::int64_t>(blockIdx.x) * Group::kPerBlock + Group::index();
  const std::int64_t begin = group * kRowsPerGroup<Group>;
  const std::int64_t end = min(begin + kRowsPerGroup<Group>, args.rows);
  for (std::int64_t row = begin; row < end; ++row) {
    rms_bwd_row<Group, kGated>(args, row, args.d_w + group * args.width, row == begin);
  }
}

/// Blocks of kRowThreads threads for `groups` groups.
template <typename Group>
unsigned blocks_for(std::int64_t groups) {
  return static_cast<unsigned>((groups + Group::kPerBlock - 1) / Group::kPerBlock);
}

template <typename Group, bool kGated>
void launch_rms_bwd(const ExecCtx& ctx, const char* op, F32Vec d_w, RmsBwd args) {
  if (args.rows == 0 || args.width == 0) {
    return;
  }
  const std::int64_t groups = (args.rows + kRowsPerGroup<Group> - 1) / kRowsPerGroup<Group>;
  const ArenaScope scope(*ctx.workspace);
  args.d_w = ctx.workspace->take<float>(groups * args.width).data();
  launch(ctx, op, rms_bwd_rows<Group, kGated>, {blocks_for<Group>(groups), kRowThreads}, args);
  add_row_sum(ctx, op, d_w.data(), args.d_w, groups, args.width);
}

struct L2Bwd {
  Cube<float> d_x;
  Cube<const float> d_y, x;
  float factor, eps;
  std::int64_t rows, heads, width;  // rows: of all heads
};

__global__ void __launch_bounds__(kRowThreads) l2_bwd_rows(const __grid_constant__ L2Bwd args) {
  begin_kernel();
  const std::int64_t row =
      static_cast<std::int64_t>(blockIdx.x) * WarpGroup::kPerBlock + WarpGroup::index();
  if (row >= args.rows) {
    return;
  }
  const std::int64_t t = row / args.heads;
  const std::int64_t h = row % args.heads;
  const float* const x = args.x.row(t, h);
  const float* const d_y = args.d_y.row(t, h);
  float* const d_x = args.d_x.row(t, h);
  float squares = 0.0F;
  float dot = 0.0F;
  for (std::int64_t c = WarpGroup::rank(); c < args.width; c += WarpGroup::kSize) {
    squares = fmaf(x[c], x[c], squares);
    dot = fmaf(x[c], d_y[c], dot);
  }
  const float rho = 1.0F / sqrtf(WarpGroup::sum(squares) + args.eps);
  const float slope = rho * (rho * WarpGroup::sum(dot));
  const float scale = args.factor * rho;
  for (std::int64_t c = WarpGroup::rank(); c < args.width; c += WarpGroup::kSize) {
    d_x[c] = scale * fmaf(-x[c], slope, d_y[c]);
  }
}

}  // namespace

void rms_norm_bwd(const ExecCtx& ctx, F32Mat d_x, F32Vec d_w, ConstF32Mat d_y, ConstF32Mat x,
                  ConstF32Vec w, float eps) {
  const RmsBwd args{.d_x = {d_x.data(), d_x.stride(0), 0},
                    .d_gate = {},
                    .d_w = nullptr,
                    .d_y = {d_y.data(), d_y.stride(0), 0},
                    .x = {x.data(), x.stride(0), 0},
                    .gate = {},
                    .w = w.data(),
                    .eps = eps,
                    .rows = x.size(0),
                    .heads = 1,
                    .width = x.size(1)};
  launch_rms_bwd<BlockGroup, false>(ctx, "rms_norm_bwd", d_w, args);
}

void rms_norm_gated_bwd(const ExecCtx& ctx, F32Cube d_o, F32Cube d_gate, F32Vec d_w,
                        ConstF32Cube d_y, ConstF32Cube o, ConstF32Cube gate, ConstF32Vec w,
                        float eps) {
  const RmsBwd args{.d_x = device_cube(d_o),
                    .d_gate = device_cube(d_gate),
                    .d_w = nullptr,
                    .d_y = device_cube(d_y),
                    .x = device_cube(o),
                    .gate = device_cube(gate),
                    .w = w.data(),
                    .eps = eps,
                    .rows = o.size(0) * o.size(1),
                    .heads = o.size(1),
                    .width = o.size(2)};
  launch_rms_bwd<WarpGroup, true>(ctx, "rms_norm_gated_bwd", d_w, args);
}

void l2_norm_bwd(const ExecCtx& ctx, F32Cube d_x, ConstF32Cube d_y, ConstF32Cube x, float scale,
                 float eps) {
  const std::int64_t rows = x.size(0) * x.size(1);
  if (rows == 0 || x.size(2) == 0) {
    return;
  }
  const L2Bwd args{device_cube(d_x), device_cube(d_y), device_cube(x), scale, eps, rows,
                   x.size(1),        x.size(2)};
  launch(ctx, "l2_norm_bwd", l2_bwd_rows, {blocks_for<WarpGroup>(rows), kRowThreads}, args);
}

}  // namespace tandem::cuda
