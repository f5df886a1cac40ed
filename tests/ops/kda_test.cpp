// KDA forward: the recurrence, its gate, states and determinism.
#include <array>

#include "ops/kda_cases.h"
#include "ops/op_table.h"

namespace tandem::test {
namespace {

const std::vector<KdaDims> kDims = {{1, 1, 1},   {2, 16, 16},   {4, 32, 32}, {3, 5, 7},
                                    {2, 24, 40}, {1, 128, 128}, {2, 33, 130}};

Tensor run(const ExecCtx& ctx, KdaCase& c, Tensor& states, float* checkpoints = nullptr) {
  Tensor o(c.rows() * c.dims.heads * c.dims.values);
  ops::kda_recurrent(ctx, o.cube(c.rows(), c.dims.heads, c.dims.values), c.inputs(), c.pool(states),
                     c.seqs(), checkpoints);
  EXPECT_TRUE(o.guards_intact());
  EXPECT_TRUE(states.guards_intact());
  return o;
}

TEST(KdaRef, HandNumbers) {
  // kimi-k3.md 10.1.
  const auto unit = [](double x, double y, double scale) {
    const double norm = std::sqrt(x * x + y * y + 1e-6);
    return std::array{x / norm * scale, y / norm * scale};
  };
  const double scale = 1.0 / std::sqrt(2.0);
  ref::KdaHead<double> in{
      3, 2, 2, {}, {}, {1, -1, 2, 0.5, 0, 3}, {-0.1, -1, -2, -0.05, -0.5, -0.5}, {0.6, 0.3, 0.9}};
  for (const auto& row : {unit(0.2, 1, scale), unit(1, 1, scale), unit(-1, 0.5, scale)}) {
    in.q.insert(in.q.end(), row.begin(), row.end());
  }
  for (const auto& row : {unit(1, 2, 1), unit(0.5, -1, 1), unit(2, 0.3, 1)}) {
    in.k.insert(in.k.end(), row.begin(), row.end());
  }
  constexpr double kPrinted = 5e-9;  // the specification prints 8 decimals
  const std::vector<double> o_expected = {0.40931439,  -0.40931439, 0.10969515,
                                          -0.27740014, -0.06037102, -1.68570985};
  const std::vector<double> s_expected = {0.03798788, 2.71023173, -0.11493425, 0.08977874};
  std::vector<double> state(4);
  std::vector<double> written;
  const std::vector<double> o = ref::kda_recurrent_ref<double>(in, state, nullptr, &written);
  std::vector<double> chunk_state(4);
  const std::vector<double> o_chunk = ref::kda_chunk_ref(in, chunk_state, 2);
  for (std::size_t i = 0; i < o.size(); ++i) {
    EXPECT_NEAR(o[i], o_expected[i], kPrinted);
    EXPECT_NEAR(o_chunk[i], o_expected[i], kPrinted);
  }
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(state[i], s_expected[i], kPrinted);
    EXPECT_NEAR(chunk_state[i], s_expected[i], kPrinted);
  }
  EXPECT_NEAR(written[2], 0.7321049, kPrinted);
  EXPECT_NEAR(written[5], 2.75791637, kPrinted);
}

struct GateNumbers {
  double a_log, f, dt_bias, bounded, softplus;
};
const std::vector<GateNumbers> kGateNumbers = {{0, 0, 0, -2.5, -0.693147181},
                                               {0.5, 1, 0.25, -4.435222687, -2.476262423},
                                               {1, -2, 0.5, -0.083342733, -0.547498054},
                                               {-1, 3, -1, -3.380338726, -0.782453088}};

TEST(KdaGate, HandNumbers) {
  const TestContext ctx;
  for (const GateNumbers& n : kGateNumbers) {
    EXPECT_NEAR(ref::kda_gate_ref(n.f, n.a_log, n.dt_bias, true, -5.0), n.bounded, 5e-10);
    EXPECT_NEAR(ref::kda_gate_ref(n.f, n.a_log, n.dt_bias, false, -5.0), n.softplus, 5e-10);
    for (const bool bounded : {true, false}) {
      const Tensor f = Tensor::filled(1, static_cast<float>(n.f));
      Tensor a_log = Tensor::filled(1, static_cast<float>(n.a_log));
      Tensor bias = Tensor::filled(1, static_cast<float>(n.dt_bias));
      Tensor g(1);
      Tensor beta = Tensor::filled(1, 0.0F);
      ops::kda_gate(*ctx, g.cube(1, 1, 1), beta.mat(1, 1), ConstF32Cube(f.data(), {1, 1, 1}),
                    beta.mat(1, 1), a_log.vec(), bias.vec(), {bounded, -5.0F});
      EXPECT_EQ(beta[0], 0.5F);
      const double expected = bounded ? n.bounded : n.softplus;
      EXPECT_NEAR(static_cast<double>(g[0]), expected, sum_tolerance(4, std::abs(expected)));
    }
  }
}

TEST(KdaGate, MatchesTheOracleIncludingTheFarEnds) {
  const TestContext ctx;
  const std::int64_t rows = 70;
  const KdaDims dims{3, 37, 1};
  Tensor f = Tensor::normal(rows * dims.heads * dims.keys, 5, 8.0);
  f[0] = 200.0F;
  f[1] = -200.0F;
  f[2] = 0.0F;
  Tensor a_log = Tensor::normal(dims.heads, 6);
  Tensor bias = Tensor::normal(dims.heads * dims.keys, 7);
  Tensor g(f.numel());
  Tensor b = Tensor::normal(rows * dims.heads, 8);
  Tensor beta(b.numel());
  for (const bool bounded : {true, false}) {
    ops::kda_gate(*ctx, g.cube(rows, dims.heads, dims.keys), beta.mat(rows, dims.heads),
                  f.cube(rows, dims.heads, dims.keys), b.mat(rows, dims.heads), a_log.vec(),
                  bias.vec(), {bounded, -5.0F});
    EXPECT_TRUE(beta.guards_intact());
    ASSERT_TRUE(g.guards_intact());
    for (std::int64_t i = 0; i < f.numel(); ++i) {
      const std::int64_t h = i / dims.keys % dims.heads;
      const auto x = static_cast<double>(f[i]);
      const auto a = static_cast<double>(a_log[h]);
      const auto dt = static_cast<double>(bias[i % (dims.heads * dims.keys)]);
      const double expected = ref::kda_gate_ref(x, a, dt, bounded, -5.0);
      // The argument a (f + dt) carries 3 roundings; the gate turns an argument error into at most
      // |error| * 5 / 4 (bounded: slope of the sigmoid) or |error| (softplus: a is outside).
      const double argument = std::exp(a) * (std::abs(x) + std::abs(dt));
      ASSERT_NEAR(static_cast<double>(g[i]), expected,
                  sum_tolerance(3, std::abs(expected) + 1.25 * argument))
          << i;
      ASSERT_LE(g[i], 0.0F);
    }
  }
}

TEST(KdaGate, BetaIsTheSigmoidAlsoInPlace) {
  const TestContext ctx;
  Tensor b = Tensor::normal(19 * 5, 3, 4.0);
  Tensor beta(b.numel());
  Tensor f = Tensor::normal(19 * 5 * 2, 4);
  Tensor a_log = Tensor::normal(5, 5);
  Tensor bias = Tensor::normal(5 * 2, 6);
  Tensor g(f.numel());
  const auto run = [&](Tensor& out) {
    ops::kda_gate(*ctx, g.cube(19, 5, 2), out.mat(19, 5), f.cube(19, 5, 2), b.mat(19, 5),
                  a_log.vec(), bias.vec(), {});
  };
  run(beta);
  for (std::int64_t i = 0; i < b.numel(); ++i) {
    EXPECT_NEAR(static_cast<double>(beta[i]), ref::gate_sigmoid(static_cast<double>(b[i])),
                sum_tolerance(4, 1.0));
  }
  run(b);
  EXPECT_TRUE(same_bits(b.data(), beta.data(), b.numel()));
}

TEST(KdaRecurrent, MatchesTheOracle) {
  const TestContext ctx;
  for (const KdaDims& dims : kDims) {
    KdaCase c(dims, {1, 0, 17, 70, 2}, 11);
    c.give_slots();
    Tensor states = Tensor::normal(c.state_floats(), 12);
    const std::vector<double> start = states.as_double();
    const KdaExpected expected = kda_expected(c, start);
    const Tensor o = run(*ctx, c, states);
    const double tolerance = kda_tolerance(c, expected, max_abs(start));
    EXPECT_TRUE(close(o.data(), expected.o, tolerance)) << dims.keys << "x" << dims.values;
    EXPECT_TRUE(close(states.data(), expected.state, tolerance));
  }
}

TEST(KdaRecurrent, ToleranceCatchesPlantedBugs) {
  const TestContext ctx;
  KdaCase c({2, 32, 24}, {70}, 13);
  c.give_slots();
  const KdaExpected expected = kda_expected(c);
  const double tolerance = kda_tolerance(c, expected);
  Tensor states = Tensor::filled(c.state_floats(), 0.0F);
  EXPECT_TRUE(close(run(*ctx, c, states).data(), expected.o, tolerance));
  // Decay after the write: token t is decayed by the gate of token t + 1.
  KdaCase late({2, 32, 24}, {70}, 13);
  std::copy(c.g.begin(), c.g.end() - 64, late.g.begin() + 64);
  late.give_slots();
  std::fill(states.begin(), states.end(), 0.0F);
  EXPECT_FALSE(close(run(*ctx, late, states).data(), expected.o, tolerance));
  // The write strengths of the two heads swapped.
  for (std::int64_t t = 0; t < c.rows(); ++t) {
    std::swap(c.beta[2 * t], c.beta[2 * t + 1]);
  }
  std::fill(states.begin(), states.end(), 0.0F);
  EXPECT_FALSE(close(run(*ctx, c, states).data(), expected.o, tolerance));
}

TEST(KdaRecurrent, CheckpointsAreTheStatesBeforeRows0And16AndSoOn) {
  const TestContext ctx;
  for (const KdaDims& dims : {KdaDims{2, 9, 21}, KdaDims{1, 32, 128}}) {
    KdaCase c(dims, {33, 0, 16, 1, 47}, 21);
    Tensor none(0);
    Tensor saved(kda_num_checkpoints(*ctx, c.seqs(), c.seqs().num_rows()) * dims.heads * dims.keys *
                 dims.values);
    const Tensor o = run(*ctx, c, none, saved.data());
    const Tensor plain = run(*ctx, c, none);
    EXPECT_TRUE(same_bits(o.data(), plain.data(), o.numel()));
    EXPECT_TRUE(saved.guards_intact());
    const std::int64_t size = dims.heads * dims.keys * dims.values;
    std::int64_t index = 0;
    for (std::int64_t b = 0; b < c.num_seqs(); ++b) {
      for (std::int64_t row = 0; row < c.seqs().length(b); row += kKdaCheckpointRows, ++index) {
        Tensor state = Tensor::filled(size, 0.0F);
        const std::array<std::int32_t, 2> cu = {0, checked_cast<std::int32_t>(row)};
        const std::array<std::int32_t, 1> slot = {0};
        Tensor scratch(row * dims.heads * dims.values);
        ops::kda_recurrent(*ctx, scratch.cube(row, dims.heads, dims.values),
                           c.inputs(c.seqs().begin(b), row), c.pool(state),
                           {{cu.data(), {2}}, {slot.data(), {1}}});
        ASSERT_TRUE(same_bits(state.data(), saved.data() + index * size, size)) << b << " " << row;
      }
    }
  }
}

TEST(KdaRecurrent, EverySplitOfAPromptGivesTheSameBits) {
  const TestContext ctx;
  for (const KdaDims& dims : {KdaDims{2, 32, 32}, KdaDims{1, 13, 70}}) {
    const std::int64_t length = 130;
    KdaCase c(dims, {length}, 31);
    c.give_slots();
    Tensor whole = Tensor::filled(c.state_floats(), 0.0F);
    const Tensor o = run(*ctx, c, whole);
    const std::int64_t width = dims.heads * dims.values;
    for (std::int64_t cut = 1; cut < length; ++cut) {
      Tensor state = Tensor::filled(c.state_floats(), 0.0F);
      Tensor parts(length * width);
      for (const auto& [begin, count] :
           {std::pair(std::int64_t{0}, cut), std::pair(cut, length - cut)}) {
        const std::array<std::int32_t, 2> cu = {0, checked_cast<std::int32_t>(count)};
        ops::kda_recurrent(*ctx, parts.cube(length, dims.heads, dims.values).rows(begin, count),
                           c.inputs(begin, count), c.pool(state),
                           {{cu.data(), {2}}, {c.slots.data(), {1}}});
      }
      ASSERT_TRUE(same_bits(parts.data(), o.data(), o.numel())) << cut;
      ASSERT_TRUE(same_bits(state.data(), whole.data(), state.numel())) << cut;
    }
    Tensor state = Tensor::filled(c.state_floats(), 0.0F);
    Tensor steps(length * width);
    for (std::int64_t t = 0; t < length; ++t) {  // decode
      const std::array<std::int32_t, 2> cu = {0, 1};
      Tensor moved = Tensor::filled(state.numel(), 0.0F);  // save and restore at every length
      std::copy(state.begin(), state.end(), moved.begin());
      ops::kda_recurrent(*ctx, steps.cube(length, dims.heads, dims.values).rows(t, 1),
                         c.inputs(t, 1), c.pool(moved), {{cu.data(), {2}}, {c.slots.data(), {1}}});
      state = moved;
    }
    EXPECT_TRUE(same_bits(steps.data(), o.data(), o.numel()));
    EXPECT_TRUE(same_bits(state.data(), whole.data(), state.numel()));
  }
}

TEST(KdaRecurrent, BatchAndThreadsDoNotChangeBits) {
  const KdaDims dims{3, 16, 150};
  KdaCase c(dims, {5, 40, 1, 1, 64, 65, 3}, 41);
  c.give_slots();
  std::vector<Tensor> outputs;
  std::vector<Tensor> finals;
  for (const int threads : {1, 2, 3}) {
    const TestContext ctx(threads);
    Tensor states = Tensor::normal(c.state_floats(), 42);
    outputs.push_back(run(*ctx, c, states));
    finals.push_back(states);
    EXPECT_TRUE(same_bits(outputs[0].data(), outputs.back().data(), outputs[0].numel()));
    EXPECT_TRUE(same_bits(finals[0].data(), finals.back().data(), finals[0].numel()));
  }
  const TestContext ctx;
  Tensor states = Tensor::normal(c.state_floats(), 42);
  for (std::int64_t b = 0; b < c.num_seqs(); ++b) {  // each sequence alone, in its own slot
    const std::int64_t count = c.seqs().length(b);
    const std::array<std::int32_t, 2> cu = {0, checked_cast<std::int32_t>(count)};
    Tensor o(count * dims.heads * dims.values);
    ops::kda_recurrent(*ctx, o.cube(count, dims.heads, dims.values),
                       c.inputs(c.seqs().begin(b), count), c.pool(states),
                       {{cu.data(), {2}}, {&c.slots[usize(b)], {1}}});
    EXPECT_TRUE(same_bits(
        o.data(), outputs[0].data() + c.seqs().begin(b) * dims.heads * dims.values, o.numel()))
        << b;
  }
  EXPECT_TRUE(same_bits(states.data(), finals[0].data(), states.numel()));
}

TEST(KdaRecurrent, ASequenceIsTheSameAloneAndAmongMany) {
  // Enough of them that a backend may cut the states in another way.
  const TestContext ctx;
  const KdaDims dims{8, 128, 128};
  KdaCase c(dims, std::vector<std::int64_t>(40, 1), 43);
  c.give_slots();
  Tensor states = Tensor::normal(c.state_floats(), 44);
  Tensor alone_states = states;
  const Tensor o = run(*ctx, c, states);
  const std::int64_t width = dims.heads * dims.values;
  const std::int64_t size = dims.heads * dims.keys * dims.values;
  for (const std::int64_t b : {0, 17, 39}) {
    const std::array<std::int32_t, 2> cu = {0, 1};
    Tensor alone(width);
    ops::kda_recurrent(*ctx, alone.cube(1, dims.heads, dims.values), c.inputs(b, 1),
                       c.pool(alone_states), {{cu.data(), {2}}, {&c.slots[usize(b)], {1}}});
    EXPECT_TRUE(same_bits(alone.data(), o.data() + b * width, width)) << b;
    EXPECT_TRUE(same_bits(alone_states.data() + b * size, states.data() + b * size, size)) << b;
  }
}

TEST(KdaRecurrent, PaddingGivesZeroAndTouchesNoState) {
  const TestContext ctx;
  const KdaDims dims{2, 16, 20};
  KdaCase c(dims, {1, 1, 3, 1}, 51);
  c.slots = {1, -1, -1, 0};
  Tensor states = Tensor::normal(c.state_floats(), 52);
  const Tensor before = states;
  for (std::int64_t i = c.wide; i < 5 * c.wide; ++i) {  // the padding rows hold garbage
    c.qkv[i] = std::numeric_limits<float>::quiet_NaN();
  }
  const Tensor o = run(*ctx, c, states);
  const std::int64_t width = dims.heads * dims.values;
  for (std::int64_t i = width; i < 5 * width; ++i) {
    ASSERT_EQ(o[i], 0.0F) << i;
  }
  const std::int64_t used = 2 * dims.heads * dims.keys * dims.values;
  EXPECT_FALSE(same_bits(states.data(), before.data(), used));
  EXPECT_TRUE(same_bits(states.data() + used, before.data() + used, states.numel() - used));
}

TEST(KdaRecurrent, NanInOneSequenceStaysThere) {
  const TestContext ctx;
  KdaCase c({1, 16, 16}, {3, 3}, 61);
  c.g[0] = std::numeric_limits<float>::quiet_NaN();
  Tensor none(0);
  const Tensor o = run(*ctx, c, none);
  for (std::int64_t i = 0; i < o.numel(); ++i) {
    // A zero start state hides the first decay only if NaN were turned into a number.
    EXPECT_EQ(std::isnan(o[i]), i < o.numel() / 2) << i;
  }
}

}  // namespace
}  // namespace tandem::test
