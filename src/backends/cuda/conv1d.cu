// conv1d.cu — causal depthwise convolution and SiLU, forward.   Contract: ops/conv1d.h
// Oracle: ops/ref/conv1d_ref.h
// Traffic   x and y once, the W-1 rows before a block's rows again; each sequence's state once.
// Numerics  fp32; an output is one fma chain over the taps, oldest first, whether a tap reads this
//           call's rows, the state, or the zeros before a sequence: any split gives the same bits.
// Launch    a thread a channel, a block a run of rows: 1 in small batches, else 16. The first W-1
//           rows of a sequence (its head) and its new state belong to the block with its first row:
//           no other block reads that state, so that it may overwrite it. Graph-safe.
#include "backends/cuda/conv1d.cuh"
#include "backends/cuda/conv1d_bwd.h"
#include "backends/cuda/families.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/sigmoid.cuh"

namespace tandem::cuda {
namespace {

constexpr std::int64_t kSmallBatch = 256;  // rows; enough blocks for every SM with one row each
constexpr int kRun = 4;                    // outputs that share one window of inputs

struct ConvArgs {
  Mat<float> y;
  ConvInputs in;
  Cube<float> state;
  const std::int32_t* slots;  // null: sequences start from zeros
  std::int64_t rows_per_block;
};

/// One channel of one sequence.
struct Lane {
  SeqCursor seq;
  std::int64_t c;
  std::int64_t slot;  // -1: padding
  float* state;       // row 0 of its state, or null

  __device__ Lane(const ConvArgs& args, const SeqCursor& at, std::int64_t channel)
      : seq(at), c(channel), slot(0), state(nullptr) {
    if (args.slots != nullptr && seq.valid()) {
      slot = args.slots[seq.index];
      state = slot >= 0 ? args.state.row(slot, 0) + c : nullptr;
    }
  }
};

template <int kTaps>
__device__ __forceinline__ void write_row(const ConvArgs& args, const Lane& lane,
                                          const Taps<kTaps>& taps, std::int64_t t) {
  const TapRows rows{args.in.x, lane.seq.begin, lane.state, args.state.stride_b, args.in.taps - 1};
  const float z = tap_sum<kTaps>(taps, rows, t, lane.c);
  args.y.row(t)[lane.c] = lane.slot < 0 ? 0.0F : silu(z);
}

/// state <- the last W-1 of (state, the sequence's rows). Kept rows move towards the front, so that
/// increasing order reads each before it is overwritten.
__device__ void roll_state(const ConvArgs& args, const Lane& lane) {
  const std::int64_t past = args.in.taps - 1;
  const std::int64_t n = lane.seq.end - lane.seq.begin;
  for (std::int64_t r = 0; r < past; ++r) {
    const std::int64_t at = n - past + r;
    lane.state[r * args.state.stride_b] = at >= 0 ? args.in.x.row(lane.seq.begin + at)[lane.c]
                                                  : lane.state[(r + n) * args.state.stride_b];
  }
}

/// kRun rows from t on, all of them behind the head: the window slides through registers.
template <int kTaps>
__device__ __forceinline__ void write_run(const ConvArgs& args, const Lane& lane,
                                          const Taps<kTaps>& taps, std::int64_t t) {
  float window[kTaps - 1 + kRun];
#pragma unroll
  for (int i = 0; i < kTaps - 1 + kRun; ++i) {
    window[i] = args.in.x.row(t - (kTaps - 1) + i)[lane.c];
  }
#pragma unroll
  for (int r = 0; r < kRun; ++r) {
    const float z = tap_sum(taps.value, window + r);
    args.y.row(t + r)[lane.c] = lane.slot < 0 ? 0.0F : silu(z);
  }
}

template <int kTaps>
__global__ void __launch_bounds__(kConvThreads) conv_rows(const __grid_constant__ ConvArgs args) {
  begin_kernel();
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * args.rows_per_block;
  const std::int64_t last = min(first + args.rows_per_block, args.in.rows);
  const SeqCursor start = find_sequence(args.in.seqs, first);  // all threads of the block
  const std::int64_t c = conv_channel();
  if (c >= args.in.channels) {
    return;
  }
  const Taps<kTaps> taps(args.in, c);
  Lane lane(args, start, c);
  for (std::int64_t t = first; t < last;) {
    if (lane.seq.ended(t)) {
      lane = Lane(args, lane.seq.next(args.in.seqs, t), c);
    }
    if (!lane.seq.valid()) {
      args.y.row(t)[c] = 0.0F;
      ++t;
      continue;
    }
    const std::int64_t head_end = min(lane.seq.begin + args.in.taps - 1, lane.seq.end);
    const std::int64_t run_end = min(last, lane.seq.end);
    if (t < head_end) {
      if (t == lane.seq.begin) {  // else an earlier block writes the head
        for (; t < head_end; ++t) {
          write_row<kTaps>(args, lane, taps, t);
        }
        if (lane.state != nullptr) {
          roll_state(args, lane);
        }
      }
      t = head_end;
      continue;
    }
    if constexpr (kTaps > 0) {
      if (t + kRun <= run_end) {
        write_run<kTaps>(args, lane, taps, t);
        t += kRun;
        continue;
      }
    }
    write_row<kTaps>(args, lane, taps, t);
    ++t;
  }
}

void conv1d(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, std::span<const ConstF32Mat> filters,
            F32Cube state, const SeqBatch& seqs) {
  if (x.empty()) {
    return;
  }
  ConvArgs args{device_mat(y), conv_inputs(x, filters, seqs), device_cube(state), nullptr, 1};
  if (seqs.keeps_state()) {
    args.slots = seqs.state_slots.data();
  }
  if (args.in.rows > kSmallBatch) {
    args.rows_per_block = kConvRows;
  }
  const auto kernel = args.in.taps == 4 ? conv_rows<4> : conv_rows<0>;
  launch(ctx, "conv1d", kernel, {conv_grid(args.in, args.rows_per_block), kConvThreads}, args);
}

}  // namespace

ConvOps conv_ops() {
  return {.conv1d = conv1d, .conv1d_bwd = conv1d_bwd};
}

}  // namespace tandem::cuda
