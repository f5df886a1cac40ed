// MLA forward: absorbed over pages, expanded, determinism.
#include "ops/mla.h"

#include <array>
#include <bit>
#include <numeric>

#include "ops/mla_cases.h"
#include "ops/norm.h"
#include "ops/op_table.h"

namespace tandem::test {
namespace {

struct MlaOut {
  Tensor o, lse;
};

MlaOut run(const ExecCtx& ctx, MlaCase& c, std::int64_t page_size,
           LatentFormat format = LatentFormat::kF32) {
  MlaOut out{Tensor(c.rows() * c.dims.heads * c.dims.latent), Tensor(c.rows() * c.dims.heads)};
  PagedCache cache(c, page_size, format);
  ops::mla_absorbed(ctx, out.o.cube(c.rows(), c.dims.heads, c.dims.latent),
                    out.lse.mat(c.rows(), c.dims.heads), c.query(), cache.view(), c.batch(),
                    c.scale);
  EXPECT_TRUE(out.o.guards_intact());
  EXPECT_TRUE(out.lse.guards_intact());
  return out;
}

const std::vector<MlaDims> kDims = {{1, 1, 0},   {4, 32, 8},   {2, 5, 2},
                                    {3, 48, 17}, {8, 512, 64}, {5, 130, 3}};

class MlaFormats : public ::testing::TestWithParam<LatentFormat> {};
INSTANTIATE_TEST_SUITE_P(All, MlaFormats, ::testing::ValuesIn(kLatentFormats),
                         [](const auto& of) { return std::string(latent_format_name(of.param)); });

TEST_P(MlaFormats, AttendsOverTheValuesOfTheRows) {
  const TestContext ctx;
  for (const MlaDims& dims : kDims) {
    MlaCase c(dims, {{1, 1}, {5, 5}, {3, 70}, {1, 129}, {40, 64}, {0, 0}, {66, 66}, {2, 300}}, 3);
    const MlaOut out = run(*ctx, c, 16, GetParam());
    const MlaExpected expected = mla_expected(c.rounded(GetParam()));
    EXPECT_TRUE(close(out.o.data(), expected.o, mla_tolerance(c))) << dims.latent;
    EXPECT_TRUE(close(out.lse.data(), expected.lse, mla_tolerance(c))) << dims.latent;
  }
}

TEST_P(MlaFormats, RoundedFp32RowsGiveTheSameBits) {
  const TestContext ctx;
  for (const MlaDims& dims : {MlaDims{3, 48, 17}, MlaDims{8, 512, 64}}) {
    MlaCase c(dims, {{1, 200}, {33, 90}, {1, 64}, {2, 65}}, 7);
    MlaCase rounded = c.rounded(GetParam());
    const MlaOut expected = run(*ctx, rounded, 16);
    const MlaOut out = run(*ctx, c, 16, GetParam());
    EXPECT_TRUE(same_bits(out.o.data(), expected.o.data(), out.o.numel())) << dims.latent;
    EXPECT_TRUE(same_bits(out.lse.data(), expected.lse.data(), out.lse.numel())) << dims.latent;
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

TEST_P(MlaFormats, PagesAndThreadsDoNotChangeBits) {
  MlaCase c({3, 48, 17}, {{1, 200}, {33, 90}, {7, 7}, {1, 64}, {2, 65}}, 7);
  const TestContext first(1);
  const MlaOut expected = run(*first, c, 1, GetParam());
  for (const int threads : {1, 2, 3}) {
    const TestContext ctx(threads);
    for (const std::int64_t page_size : {1, 3, 16, 64}) {
      const MlaOut out = run(*ctx, c, page_size, GetParam());
      EXPECT_TRUE(same_bits(out.o.data(), expected.o.data(), out.o.numel())) << page_size;
      EXPECT_TRUE(same_bits(out.lse.data(), expected.lse.data(), out.lse.numel())) << page_size;
    }
  }
}

TEST_P(MlaFormats, EverySplitOfAPromptGivesTheSameBits) {
  const TestContext ctx;
  const std::int64_t length = 130;
  for (const MlaDims& dims : {MlaDims{3, 40, 9}, MlaDims{8, 32, 8}}) {
    const MlaCase whole(dims, {{length, length}}, 9);
    MlaCase full = whole;
    const MlaOut expected = run(*ctx, full, 16, GetParam());
    const std::int64_t width = dims.heads * dims.latent;
    const auto part = [&](std::int64_t begin, std::int64_t count) {
      MlaCase c = whole.rows_of_first(begin, count);
      const MlaOut out = run(*ctx, c, 16, GetParam());
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

TEST_P(MlaFormats, BatchOfManyEqualsEachAlone) {
  const TestContext ctx;
  const MlaDims dims{4, 32, 8};
  MlaCase c(dims, {{1, 9}, {20, 30}, {1, 1}, {2, 150}}, 13);
  const MlaOut all = run(*ctx, c, 3, GetParam());
  std::int64_t row = 0;
  for (std::int64_t b = 0; b < c.num_seqs(); ++b) {
    MlaCase alone = c.only(b);
    const MlaOut out = run(*ctx, alone, 3, GetParam());
    EXPECT_TRUE(
        same_bits(out.o.data(), all.o.data() + row * dims.heads * dims.latent, out.o.numel()))
        << b;
    row += alone.rows();
  }
}

TEST_P(MlaFormats, MaskedKeysStayOutOfTheArithmetic) {
  const TestContext ctx;
  MlaCase c({3, 20, 4}, {{6, 40}}, 15);
  const MlaOut expected = run(*ctx, c, 16, GetParam());
  MlaCase poisoned = c;  // the newest key is NaN: only the last row may see it
  std::fill(poisoned.kv[0].end() - 24, poisoned.kv[0].end(),
            std::numeric_limits<float>::quiet_NaN());
  const MlaOut out = run(*ctx, poisoned, 16, GetParam());
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
  ops::mla_store(*ctx, LatentRows(rows.mat(5, 3)), kv.mat(3, 3), {slots.data(), {3}});
  EXPECT_TRUE(same_bits(&rows[12], &kv[0], 3));
  EXPECT_TRUE(same_bits(&rows[0], &kv[6], 3));
  for (std::int64_t i = 3; i < 12; ++i) {
    EXPECT_EQ(rows[i], 9.0F);
  }
}

/// The E4M3 code of a value by search among all codes in integers of 2^-9 / 2^14: nearest, the even
/// code on a tie, saturating.
std::uint8_t e4m3_by_search(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint8_t>(bits >> 24 & 0x80U);
  if (std::isnan(value)) {
    return sign | 0x7F;
  }
  // Codes 0 to 126 rise with their values; all are multiples of 2^-9.
  const auto steps_of = [](int code) {
    const int exponent = code >> 3;
    return exponent == 0 ? std::int64_t{code} : std::int64_t{8 + (code & 7)} << (exponent - 1);
  };
  const double steps = std::min(std::abs(static_cast<double>(value)) * 512.0, 1e9);
  int best = 0;
  for (int code = 1; code <= 126; ++code) {
    const double below = std::abs(steps - static_cast<double>(steps_of(best)));
    const double here = std::abs(steps - static_cast<double>(steps_of(code)));
    best = here < below || (here == below && code % 2 == 0) ? code : best;
  }
  return static_cast<std::uint8_t>(sign | best);
}

TEST(MlaStore, RoundsEveryBf16PatternToE4M3) {
  const TestContext ctx;
  constexpr std::int64_t kWidth = 256;
  Tensor kv(65536);
  for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
    kv[pattern] = std::bit_cast<float>(pattern << 16);
  }
  std::vector<std::int32_t> slots(kWidth);
  std::iota(slots.begin(), slots.end(), 0);
  std::vector<std::byte> bytes(65536);
  ops::mla_store(*ctx, {bytes.data(), LatentFormat::kFp8, kWidth, kWidth}, kv.mat(kWidth, kWidth),
                 {slots.data(), {kWidth}});
  for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
    const auto code = std::to_integer<std::uint8_t>(bytes[pattern]);
    const float value = kv[pattern];
    if (std::isnan(value)) {
      ASSERT_EQ(code & 0x7F, 0x7F) << pattern;
    } else {
      ASSERT_EQ(code, e4m3_by_search(value)) << pattern;
    }
  }
}

TEST(MlaStore, RoundsToBf16FirstAndKeepsFp32) {
  const TestContext ctx;
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  // 1.0625 + 2^-16: directly to E4M3 it lies above the tie of 1 and 1.125, over bf16 on it.
  Tensor kv(6);
  std::ranges::copy(std::array{1.0625F + 0x1p-16F, 1.0F + 0x1p-8F, 500.0F, -0.0F, kNaN, 1e-9F},
                    kv.begin());
  const std::int32_t slot = 1;
  const auto stored = [&](LatentFormat format) {
    std::vector<std::byte> bytes(usize(2 * 6 * element_bytes(format)), std::byte{0x11});
    const LatentRows rows(bytes.data(), format, 2, 6);
    ops::mla_store(*ctx, rows, kv.mat(1, 6), {&slot, {1}});
    EXPECT_TRUE(
        std::all_of(rows.row(0), rows.row(1), [](std::byte b) { return b == std::byte{0x11}; }));
    std::vector<float> values(6);
    decode_latent(values, rows.row(1), format);
    return values;
  };
  EXPECT_TRUE(same_bits(stored(LatentFormat::kF32).data(), kv.data(), 6));
  const std::vector<float> half = stored(LatentFormat::kBF16);
  EXPECT_EQ(half[0], 1.0625F);
  EXPECT_EQ(half[1], 1.0F);  // a tie: the even neighbour
  EXPECT_EQ(half[2], 500.0F);
  EXPECT_TRUE(std::isnan(half[4]));
  const std::vector<float> eighth = stored(LatentFormat::kFp8);
  EXPECT_EQ(eighth[0], 1.0F);
  EXPECT_EQ(eighth[1], 1.0F);
  EXPECT_EQ(eighth[2], 448.0F);
  EXPECT_TRUE(eighth[3] == 0.0F && std::signbit(eighth[3]));
  EXPECT_TRUE(std::isnan(eighth[4]));
  EXPECT_EQ(eighth[5], 0.0F);
}

struct Prepared {
  Tensor cq, kv;
  std::vector<std::byte> rows;
};

TEST(MlaPrepare, EqualsItsParts) {
  for (const auto& [query, latent, shared] :
       {std::array<std::int64_t, 3>{1536, 512, 64}, {7, 1, 0}, {64, 33, 5}, {2304, 128, 32}}) {
    const std::int64_t width = latent + shared;
    const std::vector<std::int32_t> slots{3, -1, 0, 6, 2};
    const std::int64_t count = isize(slots);
    const TestContext ctx;
    Tensor cq_raw = Tensor::normal(count * query, 31);
    Tensor kv_raw = Tensor::normal(count * width, 32, 3.0);
    Tensor q_weight = Tensor::normal(query, 33);
    Tensor kv_weight = Tensor::normal(latent, 34);
    for (const LatentFormat format : kLatentFormats) {
      const auto empty_rows = [&] {
        return std::vector<std::byte>(usize(7 * width * element_bytes(format)), std::byte{0x22});
      };
      Tensor cq(count * query), kv(count * width);
      std::vector<std::byte> bytes = empty_rows();
      const auto rows_of = [&](std::vector<std::byte>& memory) {
        return LatentRows(memory.data(), format, 7, width);
      };
      ops::rms_norm(*ctx, cq.mat(count, query), cq_raw.mat(count, query), q_weight.vec(), 1e-6F);
      const F32Mat raw = kv_raw.mat(count, width);
      ops::rms_norm(*ctx, kv.mat(count, width).cols(0, latent), raw.cols(0, latent),
                    kv_weight.vec(), 1e-5F);
      for (std::int64_t t = 0; t < count; ++t) {
        std::copy_n(raw.row(t) + latent, shared, kv.begin() + t * width + latent);
      }
      ops::mla_store(*ctx, rows_of(bytes), kv.mat(count, width), {slots.data(), {count}});
      for (const bool keeps : {false, true}) {
        for (const bool stores : {false, true}) {
          Prepared out{Tensor(count * query), Tensor(count * width), empty_rows()};
          ops::mla_prepare(*ctx, {.cq = out.cq.mat(count, query),
                                  .kv = keeps ? out.kv.mat(count, width) : F32Mat(),
                                  .rows = stores ? rows_of(out.rows) : LatentRows(),
                                  .cq_raw = cq_raw.mat(count, query),
                                  .q_weight = q_weight.vec(),
                                  .kv_raw = raw,
                                  .kv_weight = kv_weight.vec(),
                                  .slot_mapping = {slots.data(), {stores ? count : 0}},
                                  .q_eps = 1e-6F,
                                  .kv_eps = 1e-5F});
          EXPECT_TRUE(same_bits(out.cq.data(), cq.data(), cq.numel())) << query;
          EXPECT_TRUE(!keeps || same_bits(out.kv.data(), kv.data(), kv.numel())) << query;
          EXPECT_EQ(out.rows, stores ? bytes : empty_rows()) << query;
          EXPECT_TRUE(out.cq.guards_intact() && out.kv.guards_intact());
        }
      }
    }
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
