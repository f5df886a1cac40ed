// conv1d.cpp — causal depthwise convolution and SiLU. Contract: ops/conv1d.h. Oracle:
// ops/ref/conv1d_ref.h.
//
// The taps are transposed to [W, C] once a call; then every row is W fused multiply-adds and a SiLU
// over channels. Each output is one chain over the taps in order, oldest first, starting from 0,
// whether a tap reads this call's rows, the state, or the zeros before the sequence: a sequence cut
// into several calls gives the same bits. States are written after all rows have been computed.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/conv1d.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <algorithm>
#include <cstring>
#include <span>

#include "backends/cpu/families.h"
#include "backends/cpu/row_blocks.h"
#include "backends/cpu/simd_loops-inl.h"
#include "backends/cpu/simd_math-inl.h"
#include "core/checked_cast.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr double kNsPerElement = 1.2;
constexpr std::int64_t kMinGradRows = 16;
constexpr std::size_t kMaxTaps = 16;

/// The filters, F of [C/F, W], as [W, C] in the workspace.
std::span<float> transpose_taps(const ExecCtx& ctx, std::span<const ConstF32Mat> filters) {
  const std::int64_t width = filters.front().size(0);
  const std::int64_t channels = isize(filters) * width;
  const std::int64_t taps = filters.front().size(1);
  const auto out = ctx.workspace->take<float>(taps * channels);
  for (std::int64_t c = 0; c < channels; ++c) {
    const float* const w = filters[usize(c / width)].row(c % width);
    for (std::int64_t j = 0; j < taps; ++j) {
      out[usize(j * channels + c)] = w[j];
    }
  }
  return out;
}

/// Walks the sequences of a batch along increasing rows.
class SeqCursor {
 public:
  SeqCursor(const SeqBatch& seqs, std::int64_t row) : seqs_(seqs) {
    const std::int32_t* const ends = seqs.cu_seqlens.data() + 1;
    seq_ = std::upper_bound(ends, ends + seqs.num_seqs(), row) - ends;
  }
  /// The sequence of `row`; rows must not decrease.
  std::int64_t at(std::int64_t row) {
    while (seqs_.begin(seq_) + seqs_.length(seq_) <= row) {
      ++seq_;
    }
    return seq_;
  }

 private:
  const SeqBatch& seqs_;
  std::int64_t seq_;
};

/// The rows under the taps, oldest first.
struct Window {
  const float* rows[kMaxTaps];
};

/// sum_j taps[j][c] rows[j][c], in order of j from 0.
template <class Part>
HWY_INLINE FloatVec tap_sum(const float* taps, const Window& window, std::size_t num_taps,
                            std::size_t channels, std::size_t c, Part part) {
  FloatVec sum = hn::Zero(FloatTag());
  for (std::size_t j = 0; j < num_taps; ++j) {
    sum = hn::MulAdd(part.load(taps + j * channels + c), part.load(window.rows[j] + c), sum);
  }
  return sum;
}

/// What every row of one call needs.
struct ConvCall {
  ConstF32Mat x;
  const float* taps;   // [W, C]
  const float* zeros;  // [C]
  std::size_t num_taps;
  std::size_t channels;

  HWY_INLINE std::int64_t past_rows() const { return static_cast<std::int64_t>(num_taps) - 1; }
  /// past: W-1 rows before the sequence, or null for zeros.
  HWY_INLINE Window window(std::int64_t first, std::int64_t t, const float* past,
                           std::int64_t past_stride) const {
    Window window;
    for (std::size_t j = 0; j < num_taps; ++j) {
      const std::int64_t row = t - past_rows() + static_cast<std::int64_t>(j);
      if (row >= first) {
        window.rows[j] = x.row(row);
      } else {
        window.rows[j] = past == nullptr ? zeros : past + (row - first + past_rows()) * past_stride;
      }
    }
    return window;
  }
};

HWY_INLINE void conv_row(float* y, const ConvCall& call, const Window& window) {
  for_each_vector(call.channels, [&](std::size_t c, auto part) HWY_ATTR {
    const auto z = tap_sum(call.taps, window, call.num_taps, call.channels, c, part);
    part.store(vsilu(FloatTag(), z), y + c);
  });
}

/// state <- the last W-1 rows of (state, rows of the sequence).
void roll_state(float* state, std::int64_t stride, std::int64_t past_rows, ConstF32Mat rows) {
  const std::int64_t n = rows.size(0);
  const std::int64_t keep = std::max<std::int64_t>(0, past_rows - n);
  for (std::int64_t r = 0; r < past_rows; ++r) {
    // Kept rows move towards the front, so increasing order reads each before it is overwritten.
    const float* const source = r < keep ? state + (r + n) * stride : rows.row(n - past_rows + r);
    if (n > 0) {
      std::copy_n(source, rows.size(1), state + r * stride);
    }
  }
}

void conv1d(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, std::span<const ConstF32Mat> filters,
            F32Cube state, const SeqBatch& seqs) {
  const std::size_t channels = usize(x.size(1));
  const std::size_t taps = usize(filters.front().size(1));
  TDM_CHECK(taps <= kMaxTaps, taps);
  const ArenaScope scope(*ctx.workspace);
  const ConvCall call{x, transpose_taps(ctx, filters).data(), take_zeroed(ctx, 1, x.size(1)).data(),
                      taps, channels};
  const RowBlocks blocks = row_blocks(x.size(0), kNsPerElement * static_cast<double>(channels));
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    SeqCursor cursor(seqs, begin);
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t b = cursor.at(t);
      const std::int64_t slot = seqs.keeps_state() ? seqs.state_slots(b) : 0;
      if (slot < 0) {
        std::fill_n(y.row(t), channels, 0.0F);
        continue;
      }
      const float* const past = seqs.keeps_state() ? state.row(slot) : nullptr;
      conv_row(y.row(t), call, call.window(seqs.begin(b), t, past, state.stride(1)));
    }
  });
  if (!seqs.keeps_state() || call.past_rows() == 0) {
    return;
  }
  const RowBlocks states =
      row_blocks(seqs.num_seqs(), 0.1 * static_cast<double>(channels * call.num_taps));
  parallel_rows(ctx, states, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t b = begin; b < end; ++b) {
      if (seqs.state_slots(b) >= 0) {
        roll_state(state.row(seqs.state_slots(b)), state.stride(1), call.past_rows(),
                   x.rows(seqs.begin(b), seqs.length(b)));
      }
    }
  });
}

/// d_z = d_y silu'(z), and d_taps[j] += d_z * rows[j].
HWY_INLINE void conv_bwd_row(float* d_z, float* d_taps, const float* d_y, const ConvCall& call,
                             const Window& window) {
  const FloatTag d;
  for_each_vector(call.channels, [&](std::size_t c, auto part) HWY_ATTR {
    const auto z = tap_sum(call.taps, window, call.num_taps, call.channels, c, part);
    const auto s = vsigmoid_pair(d, z);
    const auto slope = hn::Mul(s.value, hn::MulAdd(z, s.complement, hn::Set(d, 1.0F)));
    const auto dz = hn::Mul(part.load(d_y + c), slope);
    part.store(dz, d_z + c);
    for (std::size_t j = 0; j < call.num_taps; ++j) {
      float* const sum = d_taps + j * call.channels + c;
      part.store(hn::MulAdd(dz, part.load(window.rows[j] + c), part.load(sum)), sum);
    }
  });
}

/// d_x[t] = sum_j taps[j] d_z[t + (W-1) - j], over the rows before `end` (of the sequence).
HWY_INLINE void conv_bwd_input_row(float* d_x, const float* d_z, const ConvCall& call,
                                   std::int64_t t, std::int64_t end) {
  const std::size_t last = usize(std::min(call.past_rows(), end - 1 - t));
  for_each_vector(call.channels, [&](std::size_t c, auto part) HWY_ATTR {
    FloatVec sum = hn::Zero(FloatTag());
    for (std::size_t ahead = 0; ahead <= last; ++ahead) {
      const float* const row = d_z + (usize(t) + ahead) * call.channels + c;
      const float* const tap = call.taps + (call.num_taps - 1 - ahead) * call.channels + c;
      sum = hn::MulAdd(part.load(tap), part.load(row), sum);
    }
    part.store(sum, d_x + c);
  });
}

void conv1d_bwd(const ExecCtx& ctx, F32Mat d_x, F32Mat d_w, ConstF32Mat d_y, ConstF32Mat x,
                ConstF32Mat w, const SeqBatch& seqs) {
  const std::int64_t channels = x.size(1);
  const std::int64_t taps = w.size(1);
  TDM_CHECK(usize(taps) <= kMaxTaps, taps);
  const ArenaScope scope(*ctx.workspace);
  const ConvCall call{x, transpose_taps(ctx, {&w, 1}).data(), take_zeroed(ctx, 1, channels).data(),
                      usize(taps), usize(channels)};
  const RowBlocks blocks =
      row_blocks(x.size(0), 2 * kNsPerElement * static_cast<double>(channels), kMinGradRows);
  const auto d_z = ctx.workspace->take<float>(x.size(0) * channels);
  const auto partials = take_zeroed(ctx, blocks.count(), taps * channels);
  const auto d_taps = take_zeroed(ctx, 1, taps * channels);
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t b) HWY_ATTR {
    SeqCursor cursor(seqs, begin);
    for (std::int64_t t = begin; t < end; ++t) {
      const Window window = call.window(seqs.begin(cursor.at(t)), t, nullptr, 0);
      conv_bwd_row(&d_z[usize(t * channels)], &partials[usize(b * taps * channels)], d_y.row(t),
                   call, window);
    }
  });
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    SeqCursor cursor(seqs, begin);
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t seq = cursor.at(t);
      conv_bwd_input_row(d_x.row(t), d_z.data(), call, t, seqs.begin(seq) + seqs.length(seq));
    }
  });
  add_partials(ctx, d_taps.data(), partials, usize(taps * channels));
  for (std::int64_t c = 0; c < channels; ++c) {
    for (std::int64_t j = 0; j < taps; ++j) {
      d_w.data()[c * taps + j] += d_taps[usize(j * channels + c)];
    }
  }
}

ConvOps conv_ops() {
  return {.conv1d = conv1d, .conv1d_bwd = conv1d_bwd};
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(conv_ops);
ConvOps cpu_conv_ops() {
  return HWY_DYNAMIC_DISPATCH(conv_ops)();
}

}  // namespace tandem
#endif  // HWY_ONCE
