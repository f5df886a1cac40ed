// MLA forward: absorbed over pages, expanded, determinism.
#include "ops/mla.h"

#include <array>
#include <numeric>

#include "ops/mla_cases.h"
#include "ops/op_table.h"

namespace tandem::test {
namespace {

struct MlaOut {
  Tensor o, lse;
};

MlaOut run(const ExecCtx& ctx, MlaCase& c, std::int64_t page_size) {
  MlaOut out{Tensor(c.rows() * c.dims.heads * c.dims.latent), Tensor(c.rows() * c.dims.heads)};
  PagedCache cache(c, page_size);
  ops::mla_absorbed(ctx, out.o.cube(c.rows(), c.dims.heads, c.dims.latent),
                    out.lse.mat(c.rows(), c.dims.heads), c.q_cube(), cache.view(), c.batch(),
                    c.scale);
  EXPECT_TRUE(out.o.guards_intact());
  EXPECT_TRUE(out.lse.guards_intact());
  return out;
}

const std::vector<MlaDims> kDims = {{1, 1, 0},   {4, 32, 8},   {2, 5, 2},
                                    {3, 48, 17}, {8, 512, 64}, {5, 130, 3}};

TEST(MlaAbsorbed, MatchesTheOracle) {
  const TestContext ctx;
  for (const MlaDims& dims : kDims) {
    MlaCase c(dims, {{1, 1}, {5, 5}, {3, 70}, {1, 129}, {40, 64}, {0, 0}, {66, 66}}, 3);
    const MlaOut out = run(*ctx, c, 16);
    const MlaExpected expected = mla_expected(c);
    EXPECT_TRUE(close(out.o.data(), expected.o, mla_tolerance(c))) << dims.latent;
    EXPECT_TRUE(close(out.lse.data(), expected.lse, mla_tolerance(c))) << dims.latent;
  }
}

TEST(MlaAbsorbed, ToleranceCatchesPlantedBugs) {
  const TestContext ctx;
  MlaCase c({4, 32, 8}, {{40, 60}}, 5);
  const MlaExpected expected = mla_expected(c);
  EXPECT_TRUE(close(run(*ctx, c, 16).o.data(), expected.o, mla_tolerance(c)));
  MlaCase wrong = c;
  wrong.kv_lens[0] = 59;  // the last key is dropped
  EXPECT_FALSE(close(run(*ctx, wrong, 16).o.data(), expected.o, mla_tolerance(c)));
  wrong = c;
  wrong.scale *= 1.001F;
  EXPECT_FALSE(close(run(*ctx, wrong, 16).o.data(), expected.o, mla_tolerance(c)));
}

TEST(MlaAbsorbed, PagesAndThreadsDoNotChangeBits) {
  MlaCase c({3, 48, 17}, {{1, 200}, {33, 90}, {7, 7}, {1, 64}, {2, 65}}, 7);
  const TestContext first(1);
  const MlaOut expected = run(*first, c, 1);
  for (const int threads : {1, 2, 3}) {
    const TestContext ctx(threads);
    for (const std::int64_t page_size : {1, 3, 16, 64}) {
      const MlaOut out = run(*ctx, c, page_size);
      EXPECT_TRUE(same_bits(out.o.data(), expected.o.data(), out.o.numel())) << page_size;
      EXPECT_TRUE(same_bits(out.lse.data(), expected.lse.data(), out.lse.numel())) << page_size;
    }
  }
}

TEST(MlaAbsorbed, EverySplitOfAPromptGivesTheSameBits) {
  const TestContext ctx;
  const std::int64_t length = 130;
  for (const MlaDims& dims : {MlaDims{3, 40, 9}, MlaDims{8, 32, 8}}) {
    const MlaCase whole(dims, {{length, length}}, 9);
    MlaCase full = whole;
    const MlaOut expected = run(*ctx, full, 16);
    const std::int64_t width = dims.heads * dims.latent;
    const auto part = [&](std::int64_t begin, std::int64_t count) {
      MlaCase c = whole.rows_of_first(begin, count);
      const MlaOut out = run(*ctx, c, 16);
      return same_bits(out.o.data(), expected.o.data() + begin * width, count * width) &&
             same_bits(out.lse.data(), expected.lse.data() + begin * dims.heads,
                       count * dims.heads);
    };
    for (std::int64_t cut = 1; cut < length; ++cut) {
      ASSERT_TRUE(part(0, cut)) << cut;
      ASSERT_TRUE(part(cut, length - cut)) << cut;
      ASSERT_TRUE(part(cut, 1)) << cut;  // decode
    }
  }
}

TEST(MlaAbsorbed, BatchOfManyEqualsEachAlone) {
  const TestContext ctx;
  const MlaDims dims{4, 32, 8};
  MlaCase c(dims, {{1, 9}, {20, 30}, {1, 1}, {2, 150}}, 13);
  const MlaOut all = run(*ctx, c, 3);
  std::int64_t row = 0;
  for (std::int64_t b = 0; b < c.num_seqs(); ++b) {
    MlaCase alone = c.only(b);
    const MlaOut out = run(*ctx, alone, 3);
    EXPECT_TRUE(
        same_bits(out.o.data(), all.o.data() + row * dims.heads * dims.latent, out.o.numel()))
        << b;
    row += alone.rows();
  }
}

TEST(MlaAbsorbed, MaskedKeysStayOutOfTheArithmetic) {
  const TestContext ctx;
  MlaCase c({3, 20, 4}, {{6, 40}}, 15);
  const MlaOut expected = run(*ctx, c, 16);
  MlaCase poisoned = c;  // the newest key is NaN: only the last row may see it
  std::fill(poisoned.kv[0].end() - 24, poisoned.kv[0].end(),
            std::numeric_limits<float>::quiet_NaN());
  const MlaOut out = run(*ctx, poisoned, 16);
  const std::int64_t width = 3 * 20;
  EXPECT_TRUE(same_bits(out.o.data(), expected.o.data(), 5 * width));
  for (std::int64_t i = 5 * width; i < 6 * width; ++i) {
    EXPECT_TRUE(std::isnan(out.o[i])) << i;
  }
}

TEST(MlaAbsorbed, PaddingSequencesGiveZero) {
  const TestContext ctx;
  MlaCase c({2, 16, 4}, {{1, 5}, {1, 0}, {2, 0}, {1, 3}}, 17);
  const MlaOut out = run(*ctx, c, 16);
  for (std::int64_t i = 32; i < 4 * 32; ++i) {
    EXPECT_EQ(out.o[i], 0.0F) << i;
  }
  EXPECT_NE(out.o[0], 0.0F);
  EXPECT_NE(out.o[4 * 32], 0.0F);
}

TEST(MlaStore, WritesSlotsAndSkipsMinusOne) {
  const TestContext ctx;
  Tensor rows = Tensor::filled(5 * 3, 9.0F);
  Tensor kv = Tensor::normal(3 * 3, 1);
  const std::array<std::int32_t, 3> slots = {4, -1, 0};
  ops::mla_store(*ctx, rows.mat(5, 3), kv.mat(3, 3), {slots.data(), {3}});
  EXPECT_TRUE(same_bits(&rows[12], &kv[0], 3));
  EXPECT_TRUE(same_bits(&rows[0], &kv[6], 3));
  for (std::int64_t i = 3; i < 12; ++i) {
    EXPECT_EQ(rows[i], 9.0F);
  }
}

/// Expanded and absorbed problems of the same attention: k_nope = W_UK c, v = W_UV c,
/// q_lat = W_UK^T q_n.
struct BothForms {
  std::int64_t rows = 0, heads = 0, latent = 0, nope = 0, shared = 0, values = 0;
  std::vector<double> w_uv;  // [H, V, DL]
  ref::MlaSeq<double> absorbed;
  ref::MlaExpanded<double> expanded;

  BothForms(std::int64_t n, std::uint64_t seed)
      : rows(n), heads(3), latent(24), nope(10), shared(6), values(9) {
    Rng rng(seed);
    const auto draw = [&](std::int64_t count) {
      std::vector<double> x(usize(count));
      std::generate(x.begin(), x.end(), [&] { return rng.normal(); });
      return x;
    };
    const std::vector<double> c = draw(rows * latent);
    const std::vector<double> w_uk = draw(heads * nope * latent);
    w_uv = draw(heads * values * latent);
    const double scale = 0.1;
    expanded = {rows,
                heads,
                nope,
                shared,
                values,
                draw(rows * heads * (nope + shared)),
                std::vector<double>(usize(rows * heads * nope)),
                draw(rows * shared),
                std::vector<double>(usize(rows * heads * values)),
                scale};
    absorbed = {rows, heads, latent + shared, latent, rows, {}, {}, scale};
    for (std::int64_t t = 0; t < rows; ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const double* q = &expanded.q[usize((t * heads + h) * (nope + shared))];
        for (std::int64_t d = 0; d < latent; ++d) {
          double x = 0;
          for (std::int64_t i = 0; i < nope; ++i) {
            x += w_uk[usize((h * nope + i) * latent + d)] * q[i];
            expanded.k_nope[usize((t * heads + h) * nope + i)] +=
                w_uk[usize((h * nope + i) * latent + d)] * c[usize(t * latent + d)];
          }
          absorbed.q.push_back(x);
          for (std::int64_t i = 0; i < values; ++i) {
            expanded.v[usize((t * heads + h) * values + i)] +=
                w_uv[usize((h * values + i) * latent + d)] * c[usize(t * latent + d)];
          }
        }
        absorbed.q.insert(absorbed.q.end(), q + nope, q + nope + shared);
      }
      absorbed.kv.insert(absorbed.kv.end(), c.begin() + t * latent, c.begin() + (t + 1) * latent);
      absorbed.kv.insert(absorbed.kv.end(), expanded.k_shared.begin() + t * shared,
                         expanded.k_shared.begin() + (t + 1) * shared);
    }
  }
};

TEST(MlaRef, AbsorbedEqualsExpanded) {
  const BothForms both(37, 19);
  const std::vector<double> o = ref::mla_expanded_ref(both.expanded);
  const ref::MlaSeqOut<double> latent = ref::mla_absorbed_ref(both.absorbed);
  for (std::int64_t i = 0; i < both.rows * both.heads; ++i) {
    for (std::int64_t v = 0; v < both.values; ++v) {
      double x = 0;
      for (std::int64_t d = 0; d < both.latent; ++d) {
        x += both.w_uv[usize((i % both.heads * both.values + v) * both.latent + d)] *
             latent.o[usize(i * both.latent + d)];
      }
      ASSERT_NEAR(x, o[usize(i * both.values + v)], 1e-12 * max_abs(o));
    }
  }
}

TEST(MlaExpanded, MatchesTheOracle) {
  const TestContext ctx;
  BothForms both(83, 23);
  const auto single = [](const std::vector<double>& x) {
    Tensor t(isize(x));
    std::transform(x.begin(), x.end(), t.begin(), [](double v) { return static_cast<float>(v); });
    return t;
  };
  Tensor q = single(both.expanded.q);
  Tensor k_nope = single(both.expanded.k_nope);
  Tensor k_shared = single(both.expanded.k_shared);
  Tensor v = single(both.expanded.v);
  both.expanded.q = q.as_double();
  both.expanded.k_nope = k_nope.as_double();
  both.expanded.k_shared = k_shared.as_double();
  both.expanded.v = v.as_double();
  const std::vector<double> expected = ref::mla_expanded_ref(both.expanded);
  const std::array<std::int32_t, 2> cu = {0, 83};
  Tensor o(v.numel());
  ops::mla_expanded(*ctx, o.cube(83, 3, 9), q.cube(83, 3, 16), k_nope.cube(83, 3, 10),
                    k_shared.mat(83, 6), v.cube(83, 3, 9), {cu.data(), {2}},
                    static_cast<float>(both.expanded.scale));
  const double largest = std::max(max_abs(k_nope), max_abs(k_shared));
  EXPECT_TRUE(
      close(o.data(), expected,
            attend_tolerance(16, 83, both.expanded.scale * 16 * max_abs(q) * largest, max_abs(v))));
  EXPECT_TRUE(o.guards_intact());
}

}  // namespace
}  // namespace tandem::test
