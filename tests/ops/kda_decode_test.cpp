// The fused KDA step of one token a sequence: bit for bit its parts. A backend without the kernel
// runs the parts, and these tests say little of it.
#include <array>
#include <numeric>

#include "ops/conv1d.h"
#include "ops/kda.h"
#include "ops/norm.h"
#include "ops/op_table.h"
#include "support/op_test.h"
#include "tensor/arena_views.h"

namespace tandem::test {
namespace {

constexpr std::int64_t kTaps = 4;
constexpr std::int64_t kInner = 24;  // width of the decay's first projection
constexpr float kL2Eps = 1e-6F;

/// A mixer's weights, and projections of `rows` rows. The rows of qkv, f_a and gate_out are slices
/// of wider ones.
struct DecodeCase {
  std::int64_t rows, heads, dim;
  Tensor qkv, f_a, b, gate_out;
  std::array<Tensor, 3> filters;
  Tensor a_log, dt_bias, o_norm;
  Tensor f_b_values;
  PackedWeight f_b;

  DecodeCase(const ExecCtx& ctx, std::int64_t num_rows, std::int64_t num_heads,
             std::int64_t head_dim)
      : rows(num_rows),
        heads(num_heads),
        dim(head_dim),
        qkv(Tensor::normal(rows * (3 * width() + 4), 1)),
        f_a(Tensor::normal(rows * (kInner + 1), 2)),
        b(Tensor::normal(rows * heads, 3)),
        gate_out(Tensor::normal(rows * (width() + 8), 4)),
        filters{Tensor::normal(width() * kTaps, 5), Tensor::normal(width() * kTaps, 6),
                Tensor::normal(width() * kTaps, 7)},
        a_log(Tensor::normal(heads, 8)),
        dt_bias(Tensor::normal(width(), 9)),
        o_norm(Tensor::normal(dim, 10)),
        f_b_values(Tensor::normal(width() * kInner, 11, 0.3)) {
    ops::pack(ctx, f_b, WeightRef::of(f_b_values.mat(width(), kInner)), Orientation::kNormal);
  }
  [[nodiscard]] std::int64_t width() const { return heads * dim; }

  /// Of rows [begin, begin + count).
  [[nodiscard]] KdaDecode step(std::int64_t begin, std::int64_t count) {
    const std::int64_t qkv_stride = 3 * width() + 4;
    const std::int64_t gate_stride = width() + 8;
    return {.qkv = {qkv.data() + begin * qkv_stride, {count, 3 * width()}, {qkv_stride, 1}},
            .f_a = {f_a.data() + begin * (kInner + 1), {count, kInner}, {kInner + 1, 1}},
            .f_b = &f_b,
            .b = {b.data() + begin * heads, {count, heads}},
            .gate_out = {gate_out.data() + begin * gate_stride,
                         {count, heads, dim},
                         {gate_stride, dim, 1}},
            .filters = {filters[0].mat(width(), kTaps), filters[1].mat(width(), kTaps),
                        filters[2].mat(width(), kTaps)},
            .a_log = a_log.vec(),
            .dt_bias = dt_bias.vec(),
            .o_norm = o_norm.vec(),
            .gate = {},
            .q_scale = 1.0F / std::sqrt(static_cast<float>(dim)),
            .l2_eps = kL2Eps,
            .norm_eps = 1e-5F};
  }
};

/// States and windows of some slots.
struct Memory {
  Tensor states;
  Tensor windows;
  KdaStatePool pool;
  F32Cube conv;

  Memory(const DecodeCase& c, std::int64_t slots)
      : states(Tensor::normal(slots * c.width() * c.dim, 20)),
        windows(Tensor::normal(slots * (kTaps - 1) * 3 * c.width(), 21)),
        pool{states.data(), slots, c.heads, c.dim, c.dim},
        conv(windows.data(), {slots, kTaps - 1, 3 * c.width()}) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() = default;
  [[nodiscard]] bool same_as(const Memory& other) const {
    return same_bits(states.data(), other.states.data(), states.numel()) &&
           same_bits(windows.data(), other.windows.data(), windows.numel());
  }
  [[nodiscard]] bool guards_intact() const {
    return states.guards_intact() && windows.guards_intact();
  }
};

/// What kda_decode stands for; sequences of any length.
void run_parts(const ExecCtx& ctx, F32Cube y, const KdaDecode& in, const Memory& memory,
               const SeqBatch& seqs) {
  const std::int64_t rows = y.size(0);
  const std::int64_t heads = y.size(1);
  const std::int64_t dim = y.size(2);
  const std::int64_t width = heads * dim;
  Arena scratch = arena_under_test();
  const auto as_heads = [&](ConstF32Mat x, std::int64_t of) {
    return ConstF32Cube(x.data(), {rows, of, dim}, {x.stride(0), dim, 1});
  };
  const F32Mat qkv = take_mat(scratch, rows, 3 * width);
  ops::conv1d(ctx, qkv, in.qkv, in.filters, memory.conv, seqs);
  const F32Cube qk = take_cube(scratch, rows, 2 * heads, dim);
  ops::l2_norm(ctx, qk, as_heads(qkv.cols(0, 2 * width), 2 * heads), std::array{in.q_scale, 1.0F},
               in.l2_eps);
  const F32Mat f = take_mat(scratch, rows, width);
  ops::linear(ctx, f, in.f_a, *in.f_b);
  const F32Cube g = take_cube(scratch, rows, heads, dim);
  const F32Mat beta = take_mat(scratch, rows, heads);
  ops::kda_gate(ctx, g, beta, as_heads(f, heads), in.b, in.a_log, in.dt_bias, in.gate);
  const F32Cube o = take_cube(scratch, rows, heads, dim);
  const ConstF32Mat normed(qk.data(), {rows, 2 * width});
  ops::kda_recurrent(
      ctx, o,
      {as_heads(normed.cols(0, width), heads), as_heads(normed.cols(width, width), heads),
       as_heads(qkv.cols(2 * width, width), heads), g, beta},
      memory.pool, seqs);
  ops::rms_norm_gated(ctx, y, o, in.gate_out, in.o_norm, in.norm_eps);
}

void run_step(const ExecCtx& ctx, F32Cube y, const KdaDecode& in, const Memory& memory,
              const SeqBatch& seqs) {
  if (!ops::kda_decode(ctx, y, in, memory.pool, memory.conv, seqs)) {
    run_parts(ctx, y, in, memory, seqs);
  }
}

/// Sequences of one row each.
struct Steps {
  std::vector<std::int32_t> cu_seqlens;
  std::vector<std::int32_t> slots;

  explicit Steps(std::vector<std::int32_t> of) : slots(std::move(of)) {
    for (std::int32_t b = 0; b <= checked_cast<std::int32_t>(isize(slots)); ++b) {
      cu_seqlens.push_back(b);
    }
  }
  [[nodiscard]] SeqBatch seqs() const {
    return {{cu_seqlens.data(), {isize(cu_seqlens)}}, {slots.data(), {isize(slots)}}, true};
  }
};

TEST(KdaDecode, EqualsItsParts) {
  const TestContext ctx;
  struct Shape {
    std::int64_t batch, heads, dim;
  };
  // A backend may cut the heads' states in several ways: more items, fewer blocks each.
  for (const Shape& s : {Shape{1, 1, 128}, {5, 2, 128}, {12, 8, 128}, {40, 7, 128}, {3, 2, 16}}) {
    SCOPED_TRACE(testing::Message() << s.batch << " x " << s.heads << " x " << s.dim);
    DecodeCase c(*ctx, s.batch, s.heads, s.dim);
    std::vector<std::int32_t> slots;
    for (std::int64_t b = 0; b < s.batch; ++b) {  // from the last one down; one is padding
      slots.push_back(checked_cast<std::int32_t>(b == 3 ? -1 : s.batch - b));
    }
    const Steps steps(slots);
    Memory expected(c, s.batch + 1);
    Memory memory(c, s.batch + 1);
    Tensor y(s.batch * c.width());
    Tensor y_expected(s.batch * c.width());
    run_parts(*ctx, y_expected.cube(s.batch, s.heads, s.dim), c.step(0, s.batch), expected,
              steps.seqs());
    run_step(*ctx, y.cube(s.batch, s.heads, s.dim), c.step(0, s.batch), memory, steps.seqs());
    for (std::int64_t b = 0; b < s.batch; ++b) {
      const float* const row = y.data() + b * c.width();
      if (slots[usize(b)] >= 0) {
        EXPECT_TRUE(same_bits(row, y_expected.data() + b * c.width(), c.width())) << b;
      } else {  // of either sign
        EXPECT_EQ(std::count(row, row + c.width(), 0.0F), c.width());
      }
    }
    EXPECT_TRUE(memory.same_as(expected));
    EXPECT_TRUE(y.guards_intact() && memory.guards_intact());
  }
}

TEST(KdaDecode, StepsEqualThePromptWhereverItIsCut) {
  const TestContext ctx;
  constexpr std::int64_t kRows = 9;
  DecodeCase c(*ctx, kRows, 3, 128);
  const std::array<std::int32_t, 1> slot = {1};
  Memory whole(c, 2);
  Tensor y_whole(kRows * c.width());
  const std::array<std::int32_t, 2> all = {0, kRows};
  run_parts(*ctx, y_whole.cube(kRows, c.heads, c.dim), c.step(0, kRows), whole,
            {{all.data(), {2}}, {slot.data(), {1}}});
  const Steps one({1});
  for (std::int64_t cut = 0; cut <= kRows; cut += 3) {  // a prompt of `cut` rows, then steps
    Memory memory(c, 2);
    Tensor y(kRows * c.width());
    const F32Cube rows = y.cube(kRows, c.heads, c.dim);
    if (cut > 0) {
      const std::array<std::int32_t, 2> cu = {0, checked_cast<std::int32_t>(cut)};
      run_parts(*ctx, rows.rows(0, cut), c.step(0, cut), memory,
                {{cu.data(), {2}}, {slot.data(), {1}}});
    }
    for (std::int64_t t = cut; t < kRows; ++t) {
      run_step(*ctx, rows.rows(t, 1), c.step(t, 1), memory, one.seqs());
    }
    EXPECT_TRUE(same_bits(y.data(), y_whole.data(), y.numel())) << cut;
    EXPECT_TRUE(memory.same_as(whole)) << cut;
  }
}

TEST(KdaDecode, ASequenceIsTheSameAloneAndAmongMany) {
  const TestContext ctx;
  constexpr std::int64_t kBatch = 40;
  DecodeCase c(*ctx, kBatch, 8, 128);
  std::vector<std::int32_t> slots(kBatch);
  std::iota(slots.begin(), slots.end(), 0);
  Memory memory(c, kBatch);
  Tensor y(kBatch * c.width());
  run_step(*ctx, y.cube(kBatch, c.heads, c.dim), c.step(0, kBatch), memory, Steps(slots).seqs());
  for (const std::int32_t b : {0, 23, 39}) {
    Memory alone(c, kBatch);
    Tensor y_alone(c.width());
    run_step(*ctx, y_alone.cube(1, c.heads, c.dim), c.step(b, 1), alone, Steps({b}).seqs());
    const std::int64_t state = c.width() * c.dim;
    EXPECT_TRUE(same_bits(y_alone.data(), y.data() + b * c.width(), c.width())) << b;
    EXPECT_TRUE(same_bits(alone.states.data() + b * state, memory.states.data() + b * state, state))
        << b;
  }
}

TEST(KdaDecode, PaddingGivesZeroAndTouchesNothing) {
  const TestContext ctx;
  DecodeCase c(*ctx, 2, 2, 128);
  std::fill(c.qkv.begin(), c.qkv.end(), std::numeric_limits<float>::quiet_NaN());
  Memory memory(c, 2);
  const Memory before(c, 2);
  Tensor y(2 * c.width());
  run_step(*ctx, y.cube(2, c.heads, c.dim), c.step(0, 2), memory, Steps({-1, -1}).seqs());
  for (const float value : y) {
    EXPECT_EQ(value, 0.0F);
  }
  EXPECT_TRUE(memory.same_as(before));
}

}  // namespace
}  // namespace tandem::test
