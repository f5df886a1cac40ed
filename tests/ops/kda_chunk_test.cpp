// The chunkwise form of KDA against the recurrence.
#include <array>

#include "ops/kda_cases.h"
#include "ops/op_table.h"

namespace tandem::test {
namespace {

Tensor run_chunk(const ExecCtx& ctx, KdaCase& c, Tensor& states) {
  Tensor o(c.rows() * c.dims.heads * c.dims.values);
  ops::kda_chunk(ctx, o.cube(c.rows(), c.dims.heads, c.dims.values), c.inputs(), c.pool(states),
                 c.seqs());
  EXPECT_TRUE(o.guards_intact());
  EXPECT_TRUE(states.guards_intact());
  return o;
}

/// kda_tolerance, with the rows of a chunk as further terms of each sum and of each decay product.
double chunk_tolerance(KdaCase& c, const KdaExpected& expected, double start) {
  const double terms = static_cast<double>(c.dims.keys);
  return kda_tolerance(c, expected, start) * (terms + 8 + 2 * 64) / (terms + 8);
}

TEST(KdaRef, ChunkEqualsRecurrentForEveryChunkSize) {
  KdaCase c({1, 6, 5}, {75}, 301, 5.0);
  const ref::KdaHead<double> in = c.head(0, 0);
  std::vector<double> state(30, 0.25);
  const std::vector<double> o = ref::kda_recurrent_ref(in, state);
  for (const std::int64_t chunk : {1, 2, 16, 64, 75, 100}) {
    std::vector<double> other(30, 0.25);
    const std::vector<double> o_chunk = ref::kda_chunk_ref(in, other, chunk);
    for (std::size_t i = 0; i < o.size(); ++i) {
      ASSERT_NEAR(o_chunk[i], o[i], 1e-13);
    }
    for (std::size_t i = 0; i < other.size(); ++i) {
      ASSERT_NEAR(other[i], state[i], 1e-13);
    }
  }
}

TEST(KdaChunk, EqualsTheRecurrenceAtEveryLengthAndAnyDecay) {
  const TestContext ctx;
  // 5: the bounded gate. 0.05: almost no decay, the worst case for the triangular solve. 300: the
  // softplus gate at its far end, where e^-G overflows.
  for (const double max_decay : {0.05, 5.0, 300.0}) {
    for (std::int64_t length = 1; length <= 130; ++length) {
      KdaCase c({1, 16, 24}, {length}, mix_key({311, static_cast<std::uint64_t>(length)}),
                max_decay);
      c.give_slots();
      Tensor states = Tensor::normal(c.state_floats(), 312);
      const std::vector<double> start = states.as_double();
      const KdaExpected expected = kda_expected(c, start);
      const Tensor o = run_chunk(*ctx, c, states);
      const double tolerance = chunk_tolerance(c, expected, max_abs(start));
      ASSERT_TRUE(close(o.data(), expected.o, tolerance)) << length << " " << max_decay;
      ASSERT_TRUE(close(states.data(), expected.state, tolerance)) << length << " " << max_decay;
    }
  }
}

TEST(KdaChunk, OddShapesBatchesAndPadding) {
  for (const KdaDims& dims : {KdaDims{2, 5, 7}, KdaDims{3, 33, 130}, KdaDims{1, 128, 64}}) {
    KdaCase c(dims, {63, 64, 0, 65, 1, 129}, 321, 5.0);
    c.give_slots();
    Tensor states = Tensor::normal(c.state_floats(), 322);
    const Tensor before = states;
    const KdaExpected expected = kda_expected(c, before.as_double());
    const double tolerance = chunk_tolerance(c, expected, max_abs(before));
    const TestContext ctx;
    const Tensor o = run_chunk(*ctx, c, states);
    EXPECT_TRUE(close(o.data(), expected.o, tolerance));
    EXPECT_TRUE(close(states.data(), expected.state, tolerance));
    // One thread: the same bits. Sequence 0 as padding: zeros, its state untouched.
    const TestContext one(1);
    c.slots[0] = -1;
    Tensor again = before;
    const Tensor padded = run_chunk(*one, c, again);
    const std::int64_t width = dims.heads * dims.values;
    EXPECT_TRUE(std::all_of(padded.begin(), padded.begin() + 63 * width,
                            [](float x) { return x == 0.0F; }));
    EXPECT_TRUE(
        same_bits(padded.data() + 63 * width, o.data() + 63 * width, o.numel() - 63 * width));
    EXPECT_TRUE(same_bits(again.data(), before.data(), dims.heads * dims.keys * dims.values));
  }
}

TEST(KdaChunk, ToleranceCatchesPlantedBugs) {
  const TestContext ctx;
  KdaCase c({2, 32, 24}, {100}, 331);
  c.give_slots();
  const KdaExpected expected = kda_expected(c);
  const double tolerance = chunk_tolerance(c, expected, 0);
  Tensor states = Tensor::filled(c.state_floats(), 0.0F);
  EXPECT_TRUE(close(run_chunk(*ctx, c, states).data(), expected.o, tolerance));
  // The state of the first chunk is not carried into the second.
  KdaCase cut({2, 32, 24}, {64, 36}, 331);
  cut.give_slots();
  Tensor two = Tensor::filled(cut.state_floats(), 0.0F);
  EXPECT_FALSE(close(run_chunk(*ctx, cut, two).data(), expected.o, tolerance));
  // Decay of the row after.
  std::copy(c.g.begin() + 64, c.g.end(), c.g.begin());
  std::fill(states.begin(), states.end(), 0.0F);
  EXPECT_FALSE(close(run_chunk(*ctx, c, states).data(), expected.o, tolerance));
}

}  // namespace
}  // namespace tandem::test
