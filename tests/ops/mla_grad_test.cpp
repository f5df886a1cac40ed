// MLA gradients: the oracle against central differences, the CPU kernel against the oracle.
#include <numeric>

#include "ops/mla_cases.h"
#include "ops/op_table.h"

namespace tandem::test {
namespace {

TEST(MlaRef, GradientsAgreeWithDifferences) {
  const MlaCase c({2, 3, 2}, {{5, 5}}, 201);
  ref::MlaSeq<double> in = c.seq(0);
  std::vector<double> d_o(usize(in.rows * in.heads * in.latent));
  Rng rng(6);
  std::generate(d_o.begin(), d_o.end(), [&] { return rng.normal(); });
  const auto loss = [&] {
    const ref::MlaSeqOut<double> out = ref::mla_absorbed_ref(in);
    return std::inner_product(out.o.begin(), out.o.end(), d_o.begin(), 0.0);
  };
  const ref::MlaSeqGrads<double> grads = ref::mla_absorbed_bwd_ref(in, d_o);
  const auto check = [&](std::vector<double>& x, const std::vector<double>& d_x) {
    constexpr double kStep = 1e-5;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double at = x[i];
      x[i] = at + kStep;
      const double plus = loss();
      x[i] = at - kStep;
      const double minus = loss();
      x[i] = at;
      // step^2 times third derivatives of order 100.
      EXPECT_NEAR(d_x[i], (plus - minus) / (2 * kStep), 1e-8) << i;
    }
  };
  check(in.q, grads.d_q);
  check(in.kv, grads.d_kv);
}

struct Training {
  MlaCase c;
  Tensor kv{0}, d_o{0};

  Training(MlaDims dims, const std::vector<std::int64_t>& lengths, std::uint64_t seed)
      : c(dims, sizes(lengths), seed) {
    kv = Tensor(c.rows() * dims.dim());
    float* to = kv.data();
    for (const Tensor& rows : c.kv) {
      to = std::copy(rows.begin(), rows.end(), to);
    }
    d_o = Tensor::normal(c.rows() * dims.heads * dims.latent, seed + 1);
  }
  static std::vector<MlaSeqSize> sizes(const std::vector<std::int64_t>& lengths) {
    std::vector<MlaSeqSize> out;
    for (const std::int64_t n : lengths) {
      out.push_back({n, n});
    }
    return out;
  }
};

struct MlaGrads {
  Tensor d_q, d_kv;
};

MlaGrads run_bwd(const ExecCtx& ctx, Training& x) {
  const auto [heads, latent, shared] = x.c.dims;
  const std::int64_t rows = x.c.rows();
  const std::int64_t dim = latent + shared;
  Tensor o(rows * heads * latent);
  Tensor lse(rows * heads);
  PagedCache cache(x.c, 16);
  ops::mla_absorbed(ctx, o.cube(rows, heads, latent), lse.mat(rows, heads), x.c.query(),
                    cache.view(), x.c.batch(), x.c.scale);
  MlaGrads out{Tensor(rows * heads * dim), Tensor(rows * dim)};
  ops::mla_absorbed_bwd(ctx, query_parts(out.d_q.cube(rows, heads, dim), latent),
                        out.d_kv.mat(rows, dim), x.d_o.cube(rows, heads, latent), x.c.query(),
                        x.kv.mat(rows, dim), o.cube(rows, heads, latent), lse.mat(rows, heads),
                        x.c.batch().cu_seqlens, x.c.scale);
  EXPECT_TRUE(out.d_q.guards_intact());
  EXPECT_TRUE(out.d_kv.guards_intact());
  return out;
}

ref::MlaSeqGrads<double> expected_grads(const Training& x) {
  ref::MlaSeqGrads<double> out;
  const std::int64_t width = x.c.dims.heads * x.c.dims.latent;
  for (std::int64_t b = 0; b < x.c.num_seqs(); ++b) {
    const std::vector<double> d_o(x.d_o.begin() + x.c.cu_seqlens[usize(b)] * width,
                                  x.d_o.begin() + x.c.cu_seqlens[usize(b + 1)] * width);
    const auto seq = ref::mla_absorbed_bwd_ref(x.c.seq(b), d_o);
    out.d_q.insert(out.d_q.end(), seq.d_q.begin(), seq.d_q.end());
    out.d_kv.insert(out.d_kv.end(), seq.d_kv.begin(), seq.d_kv.end());
  }
  return out;
}

/// p has the relative error of a score, d_p - delta that of two dot products of latent terms; d_s
/// is their product and is summed over the keys for d_q, over queries and heads for d_kv.
double grad_tolerance(const Training& x, double terms) {
  double largest = max_abs(x.c.q);
  for (const Tensor& rows : x.c.kv) {
    largest = std::max(largest, max_abs(rows));
  }
  const auto dim = static_cast<double>(x.c.dims.dim());
  const double score = 4.0 * static_cast<double>(x.c.scale) * dim;
  const double d_p = 4.0 * dim;  // |d_o|_2 |c|_2, normal data, margin 2 each
  // Rows of softmax weights sum to 1, so d_q is an average; d_kv sums `terms` such averages of
  // which a key gets the share of its weight.
  const double element =
      sum_tolerance(x.c.dims.dim(), (score + 2.0) * d_p) * static_cast<double>(x.c.scale) * largest;
  return element * std::sqrt(terms) + sum_tolerance(static_cast<std::int64_t>(terms), largest);
}

TEST(MlaAbsorbedBwd, MatchesTheOracle) {
  const TestContext ctx;
  for (const MlaDims& dims :
       {MlaDims{1, 1, 0}, MlaDims{4, 32, 8}, MlaDims{3, 21, 6}, MlaDims{2, 130, 30}}) {
    Training x(dims, {1, 40, 0, 17, 70}, 211);
    const MlaGrads grads = run_bwd(*ctx, x);
    const auto expected = expected_grads(x);
    EXPECT_TRUE(close(grads.d_q.data(), expected.d_q, grad_tolerance(x, 1)));
    EXPECT_TRUE(close(grads.d_kv.data(), expected.d_kv,
                      grad_tolerance(x, 70.0 * static_cast<double>(dims.heads))));
  }
}

TEST(MlaAbsorbedBwd, ToleranceCatchesPlantedBugs) {
  const TestContext ctx;
  Training x({4, 32, 8}, {30, 50}, 221);
  const auto expected = expected_grads(x);
  Training wrong = x;  // the last row's gradient is dropped
  std::fill(wrong.d_o.end() - 4 * 32, wrong.d_o.end(), 0.0F);
  const MlaGrads grads = run_bwd(*ctx, wrong);
  EXPECT_FALSE(close(grads.d_q.data(), expected.d_q, grad_tolerance(x, 1)));
  EXPECT_FALSE(close(grads.d_kv.data(), expected.d_kv, grad_tolerance(x, 200)));
}

TEST(MlaAbsorbedBwd, ThreadsDoNotChangeBits) {
  Training x({4, 32, 8}, {40, 3, 90}, 231);
  const TestContext one(1);
  const MlaGrads first = run_bwd(*one, x);
  for (const int threads : {2, 3}) {
    const TestContext ctx(threads);
    const MlaGrads again = run_bwd(*ctx, x);
    EXPECT_TRUE(same_bits(again.d_q.data(), first.d_q.data(), first.d_q.numel()));
    EXPECT_TRUE(same_bits(again.d_kv.data(), first.d_kv.data(), first.d_kv.numel()));
  }
}

}  // namespace
}  // namespace tandem::test
