// conv1d_bwd.cu — causal depthwise convolution and SiLU, backward.   Contract: ops/conv1d.h
// Oracle: ops/ref/conv1d_ref.h
// Traffic   x, d_y and d_x once, d_z (in the workspace) written once and read twice; the rows that
//           the taps share from L1.
// Numerics  fp32; d_w: 64 rows in order, then these sums in order.
// Launch    a thread a channel, a block 16 rows (d_w: 64 rows and one tap); graph-safe.
#include "backends/cuda/conv1d.cuh"
#include "backends/cuda/conv1d_bwd.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/row_sums.h"
#include "backends/cuda/sigmoid.cuh"

namespace tandem::cuda {
namespace {

constexpr std::int64_t kGradRows = 64;

struct ConvBwdArgs {
  Mat<float> d_x;
  float* d_w;  // [runs of kGradRows rows, C, W]
  float* d_z;  // [T, C]
  Mat<const float> d_y;
  ConvInputs in;
};

/// Calls fn(t, sequence) for this block's rows, in order.
template <typename Fn>
__device__ __forceinline__ void for_rows(const ConvInputs& in, std::int64_t rows_per_block,
                                         SeqCursor seq, const Fn& fn) {
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * rows_per_block;
  const std::int64_t last = min(first + rows_per_block, in.rows);
  for (std::int64_t t = first; t < last; ++t) {
    if (seq.ended(t)) {
      seq = seq.next(in.seqs, t);
    }
    fn(t, seq);
  }
}

/// d_z = d_y silu'(z).
__global__ void __launch_bounds__(kConvThreads)
    conv_bwd_z(const __grid_constant__ ConvBwdArgs args) {
  begin_kernel();
  const SeqCursor start = find_sequence(args.in.seqs, blockIdx.x * kConvRows);
  const std::int64_t c = conv_channel();
  if (c >= args.in.channels) {
    return;
  }
  const Taps<0> taps(args.in, c);
  for_rows(args.in, kConvRows, start, [&](std::int64_t t, const SeqCursor& seq) {
    const float z = tap_sum<0>(taps, {args.in.x, seq.begin, nullptr, 0, 0}, t, c);
    const SigmoidPair s = sigmoid_pair(z);
    const float slope = s.value * fmaf(z, s.complement, 1.0F);
    args.d_z[t * args.in.channels + c] = seq.valid() ? args.d_y.row(t)[c] * slope : 0.0F;
  });
}

/// d_x[t] = sum over ahead of w[W-1-ahead] d_z[t + ahead], within the sequence.
__global__ void __launch_bounds__(kConvThreads)
    conv_bwd_x(const __grid_constant__ ConvBwdArgs args) {
  begin_kernel();
  const SeqCursor start = find_sequence(args.in.seqs, blockIdx.x * kConvRows);
  const std::int64_t c = conv_channel();
  if (c >= args.in.channels) {
    return;
  }
  const float* const w = args.in.taps_of(c);
  for_rows(args.in, kConvRows, start, [&](std::int64_t t, const SeqCursor& seq) {
    const std::int64_t end = min(args.in.rows, seq.end);
    float sum = 0.0F;
    for (std::int64_t ahead = 0; ahead < args.in.taps && t + ahead < end; ++ahead) {
      sum = fmaf(w[args.in.taps - 1 - ahead], args.d_z[(t + ahead) * args.in.channels + c], sum);
    }
    args.d_x.row(t)[c] = sum;
  });
}

/// Tap j = blockIdx.z: the sum over this block's rows of d_z[t] x[t - (W-1) + j].
__global__ void __launch_bounds__(kConvThreads)
    conv_bwd_w(const __grid_constant__ ConvBwdArgs args) {
  begin_kernel();
  const SeqCursor start = find_sequence(args.in.seqs, blockIdx.x * kGradRows);
  const std::int64_t c = conv_channel();
  if (c >= args.in.channels) {
    return;
  }
  const std::int64_t j = blockIdx.z;
  const std::int64_t back = args.in.taps - 1 - j;
  float sum = 0.0F;
  for_rows(args.in, kGradRows, start, [&](std::int64_t t, const SeqCursor& seq) {
    if (t - back >= seq.begin) {
      sum = fmaf(args.d_z[t * args.in.channels + c], args.in.x.row(t - back)[c], sum);
    }
  });
  args.d_w[(blockIdx.x * args.in.channels + c) * args.in.taps + j] = sum;
}

}  // namespace

void conv1d_bwd(const ExecCtx& ctx, F32Mat d_x, F32Mat d_w, ConstF32Mat d_y, ConstF32Mat x,
                ConstF32Mat w, const SeqBatch& seqs) {
  if (x.empty()) {
    return;
  }
  const ConvInputs in = conv_inputs(x, {&w, 1}, seqs);
  TDM_CHECK(in.taps <= 65535, in.taps);
  const std::int64_t runs = (in.rows + kGradRows - 1) / kGradRows;
  const ArenaScope scope(*ctx.workspace);
  const ConvBwdArgs args{
      device_mat(d_x), ctx.workspace->take<float>(runs * in.channels * in.taps).data(),
      ctx.workspace->take<float>(in.rows * in.channels).data(), device_mat(d_y), in};
  const dim3 grid = conv_grid(in, kConvRows);
  launch(ctx, "conv1d_bwd", conv_bwd_z, {grid, kConvThreads}, args);
  launch(ctx, "conv1d_bwd", conv_bwd_x, {grid, kConvThreads}, args);
  dim3 grad_grid = conv_grid(in, kGradRows);
  grad_grid.z = static_cast<unsigned>(in.taps);
  launch(ctx, "conv1d_bwd", conv_bwd_w, {grad_grid, kConvThreads}, args);
  add_row_sum(ctx, "conv1d_bwd", d_w.data(), args.d_w, runs, in.channels * in.taps);
}

}  // namespace tandem::cuda
