// Routed experts: against the oracle in double and, for the forward, bit for bit against the
// contract's composition; gradients against double finite differences of the oracle.
#include <functional>

#include <gtest/gtest.h>

#include "ops/moe.h"
#include "ops/op_checks.h"
#include "ops/op_table.h"
#include "ops/ref/gemm_ref.h"
#include "ops/ref/moe_ref.h"
#include "support/op_test.h"
#include "support/weights.h"

namespace tandem {
namespace {

using test::same_bits;
using test::Tensor;

void scalar_situ(const ExecCtx&, F32Mat y, ConstF32Mat gate, ConstF32Mat up, SituParams params) {
  for (std::int64_t t = 0; t < gate.size(0); ++t) {
    for (std::int64_t f = 0; f < gate.size(1); ++f) {
      y(t, f) = ref::situ_value(gate(t, f), up(t, f), params).y;
    }
  }
}
void scalar_situ_bwd(const ExecCtx&, F32Mat d_gate, F32Mat d_up, ConstF32Mat d_y, ConstF32Mat gate,
                     ConstF32Mat up, SituParams params) {
  for (std::int64_t t = 0; t < gate.size(0); ++t) {
    for (std::int64_t f = 0; f < gate.size(1); ++f) {
      const auto value = ref::situ_value(gate(t, f), up(t, f), params);
      const float d = d_y(t, f);
      d_gate(t, f) = d * value.d_gate;
      d_up(t, f) = d * value.d_up;
    }
  }
}

/// The backend under test with the oracle's SiTU: what is tested here is the experts alone.
class Context {
 public:
  explicit Context(int threads = 2) : table_(test::ops_under_test()), pool_(threads) {
    table_.act.situ = scalar_situ;
    table_.act.situ_bwd = scalar_situ_bwd;
    ctx_ = {&table_, &pool_, &arena_, nullptr, &test::device_under_test()};
  }
  [[nodiscard]] const ExecCtx& operator*() const { return ctx_; }
  [[nodiscard]] std::size_t workspace_bytes() const { return arena_.capacity_bytes(); }

 private:
  OpTable table_;
  ThreadPool pool_;
  Arena arena_ = test::arena_under_test();
  ExecCtx ctx_;
};

using Problem = ref::ExpertsProblem<float>;

Problem random_problem(std::int64_t tokens, std::int64_t slots, std::int64_t dim,
                       std::int64_t width, std::int64_t num_experts, std::uint64_t seed) {
  Problem p;
  p.tokens = tokens;
  p.slots = slots;
  p.dim = dim;
  p.width = width;
  const auto values = [&](std::int64_t count, std::uint64_t key, double scale) {
    const Tensor t = Tensor::normal(count, mix_key({seed, key}), scale);
    return std::vector<float>(t.begin(), t.end());
  };
  p.x = values(tokens * dim, 1, 1.0);
  p.weights = values(tokens * slots, 2, 1.0);
  const double scale = 1.0 / std::sqrt(static_cast<double>(dim));
  for (std::int64_t e = 0; e < num_experts; ++e) {
    const auto key = static_cast<std::uint64_t>(10 * e);
    p.experts.push_back({values(width * dim, key + 3, scale), values(width * dim, key + 4, scale),
                         values(dim * width, key + 5, scale)});
  }
  // Distinct experts a token; the last one is never chosen when there are enough.
  Rng rng(mix_key({seed, 6}));
  const std::int64_t eligible = num_experts > slots ? num_experts - 1 : num_experts;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto start = static_cast<std::int64_t>(rng.below(usize(eligible)));
    for (std::int64_t a = 0; a < slots; ++a) {
      p.ids.push_back(static_cast<std::int32_t>((start + a) % eligible));
    }
  }
  return p;
}

Problem token_of(const Problem& p, std::int64_t t) {
  Problem one = p;
  one.tokens = 1;
  one.x.assign(p.x.begin() + t * p.dim, p.x.begin() + (t + 1) * p.dim);
  one.ids.assign(p.ids.begin() + t * p.slots, p.ids.begin() + (t + 1) * p.slots);
  one.weights.assign(p.weights.begin() + t * p.slots, p.weights.begin() + (t + 1) * p.slots);
  return one;
}

ref::ExpertsProblem<double> in_double(const Problem& p) {
  ref::ExpertsProblem<double> d{p.tokens,
                                p.slots,
                                p.dim,
                                p.width,
                                {p.x.begin(), p.x.end()},
                                p.ids,
                                {p.weights.begin(), p.weights.end()},
                                {},
                                p.act};
  for (const auto& e : p.experts) {
    d.experts.push_back(
        {{e.w1.begin(), e.w1.end()}, {e.w3.begin(), e.w3.end()}, {e.w2.begin(), e.w2.end()}});
  }
  return d;
}

struct Packed {
  std::vector<PackedWeight> w1, w3, w2;

  Packed(const ExecCtx& ctx, const Problem& p, Orientation orientation) {
    for (const auto& e : p.experts) {
      const ConstF32Mat up_shape1{e.w1.data(), {p.width, p.dim}};
      const ConstF32Mat up_shape3{e.w3.data(), {p.width, p.dim}};
      const ConstF32Mat down_shape{e.w2.data(), {p.dim, p.width}};
      w1.push_back(test::packed(ctx, WeightRef::of(up_shape1), orientation));
      w3.push_back(test::packed(ctx, WeightRef::of(up_shape3), orientation));
      w2.push_back(test::packed(ctx, WeightRef::of(down_shape), orientation));
    }
  }
  [[nodiscard]] ExpertWeights view() const { return {w1, w3, w2}; }
};

struct Saved {
  Tensor gate, up, out;
  std::vector<std::int32_t> pair_of_slot;
  std::int64_t tokens, slots, dim, width;

  explicit Saved(const Problem& p)
      : gate(p.tokens * p.slots * p.width),
        up(p.tokens * p.slots * p.width),
        out(p.tokens * p.slots * p.dim),
        pair_of_slot(p.ids.size(), -1),
        tokens(p.tokens),
        slots(p.slots),
        dim(p.dim),
        width(p.width) {}
  [[nodiscard]] ExpertsSaved view() {
    return {gate.mat(tokens * slots, width), up.mat(tokens * slots, width),
            out.mat(tokens * slots, dim), I32Mat(pair_of_slot.data(), {tokens, slots})};
  }
};

void run_into(const ExecCtx& ctx, F32Mat out, const RowNorm& norm, const Problem& p,
              const ExpertWeights& weights, const ExpertsSaved* saved = nullptr) {
  ops::experts(ctx, out, norm, saved, ConstF32Mat(p.x.data(), {p.tokens, p.dim}),
               ConstI32Mat(p.ids.data(), {p.tokens, p.slots}),
               ConstF32Mat(p.weights.data(), {p.tokens, p.slots}), weights, p.act);
}

Tensor run(const ExecCtx& ctx, const Problem& p, const ExpertWeights& weights,
           const ExpertsSaved* saved = nullptr) {
  Tensor out(p.tokens * p.dim);
  run_into(ctx, out.mat(p.tokens, p.dim), {}, p, weights, saved);
  EXPECT_TRUE(out.guards_intact());
  return out;
}

// The float oracle uses the same chains as the contract, so the forward must equal it to the bit.
TEST(Experts, EqualsTheOracleBitForBit) {
  for (const int threads : {1, 2, 3}) {
    const Context ctx(threads);
    for (const auto& [tokens, slots, dim, width, num] : {std::tuple{1, 2, 33, 17, 4},
                                                         {1, 1, 16, 16, 1},
                                                         {5, 2, 17, 40, 8},
                                                         {40, 3, 32, 48, 5},
                                                         {130, 2, 31, 33, 8}}) {
      const Problem p = random_problem(tokens, slots, dim, width, num, 1);
      const Packed weights(*ctx, p, Orientation::kNormal);
      const std::vector<float> expected = ref::experts(p);
      const Tensor out = run(*ctx, p, weights.view());
      ASSERT_TRUE(same_bits(out.data(), expected.data(), out.numel())) << tokens << " tokens";
      Saved saved(p);
      const ExpertsSaved view = saved.view();
      const Tensor again = run(*ctx, p, weights.view(), &view);
      ASSERT_TRUE(same_bits(again.data(), expected.data(), out.numel())) << tokens << " tokens";
    }
  }
}

TEST(Experts, NearTheDoubleOracle) {
  const Context ctx;
  const Problem p = random_problem(60, 2, 48, 40, 6, 2);
  const Packed weights(*ctx, p, Orientation::kNormal);
  const std::vector<double> exact = ref::experts(in_double(p));
  const Tensor out = run(*ctx, p, weights.view());
  // Errors of gate and up enter w2 times a factor below 2 (|SiTU'| < 1.2 |up| + ...): the bound is
  // that of one sum of 2 dim + width products of the observed magnitude.
  const double magnitude =
      48.0 * test::max_abs(p.x) * test::max_abs(p.experts[0].w1) * test::max_abs(p.weights) * 4;
  EXPECT_TRUE(test::close(out.data(), exact, test::sum_tolerance(2 * 48 + 40, magnitude)));
}

TEST(Experts, SavedRowsAreGroupedByExpertTokensInOrder) {
  const Context ctx;
  const Problem p = random_problem(37, 2, 16, 20, 5, 3);
  const Packed weights(*ctx, p, Orientation::kNormal);
  Saved saved(p);
  const ExpertsSaved view = saved.view();
  run(*ctx, p, weights.view(), &view);
  std::vector<std::pair<std::int32_t, std::int64_t>> order(p.ids.size(), {-1, -1});
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    for (std::int64_t a = 0; a < p.slots; ++a) {
      const std::size_t slot = usize(t * p.slots + a);
      const std::int64_t row = saved.pair_of_slot[slot];
      order.at(usize(row)) = {p.ids[slot], t};
      const auto values = ref::pair_values(p, t, a);
      EXPECT_TRUE(same_bits(saved.gate.data() + row * p.width, values.gate.data(), p.width));
      EXPECT_TRUE(same_bits(saved.up.data() + row * p.width, values.up.data(), p.width));
      EXPECT_TRUE(same_bits(saved.out.data() + row * p.dim, values.out.data(), p.dim));
    }
  }
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_TRUE(saved.gate.guards_intact() && saved.up.guards_intact() && saved.out.guards_intact());
}

TEST(Experts, TokenAloneEqualsTokenInBatch) {
  const Context ctx;
  const Problem p = random_problem(40, 2, 48, 33, 4, 4);
  const Packed weights(*ctx, p, Orientation::kNormal);
  const Tensor all = run(*ctx, p, weights.view());
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    const Tensor alone = run(*ctx, token_of(p, t), weights.view());
    ASSERT_TRUE(same_bits(alone.data(), all.data() + t * p.dim, p.dim)) << t;
  }
}

TEST(Experts, AllTokensToOneExpertAndNoTokens) {
  const Context ctx;
  Problem p = random_problem(70, 1, 32, 24, 3, 5);
  std::fill(p.ids.begin(), p.ids.end(), 1);
  const Packed weights(*ctx, p, Orientation::kNormal);
  const std::vector<float> expected = ref::experts(p);
  const Tensor out = run(*ctx, p, weights.view());
  EXPECT_TRUE(same_bits(out.data(), expected.data(), out.numel()));

  Problem none = p;
  none.tokens = 0;
  none.x.clear();
  none.ids.clear();
  none.weights.clear();
  run(*ctx, none, weights.view());
}

// Unchosen experts are not read: their weights are NaN and their storage may be paged out.
TEST(Experts, UnchosenExpertsAreNotTouched) {
  const Context ctx;
  Problem p = random_problem(20, 2, 16, 16, 4, 6);
  std::fill(p.experts[3].w1.begin(), p.experts[3].w1.end(), std::nanf(""));
  Packed weights(*ctx, p, Orientation::kNormal);
  weights.w1[3].data = Storage();  // reading it would crash
  weights.w2[3].data = Storage();
  const std::vector<float> expected = ref::experts(p);
  const Tensor out = run(*ctx, p, weights.view());
  EXPECT_TRUE(same_bits(out.data(), expected.data(), out.numel()));
}

TEST(Experts, PackedFormatsEqualTheirFp32Values) {
  const Context ctx;
  for (const test::Format& format : test::kFormats) {
    Problem p = random_problem(9, 2, 64, 32, 3, 7);
    Packed weights(*ctx, p, Orientation::kNormal);
    for (std::size_t e = 0; e < 3; ++e) {
      const test::RandomWeight w1(format.format, p.width, p.dim, 100 + e);
      const test::RandomWeight w3(format.format, p.width, p.dim, 200 + e);
      const test::RandomWeight w2(format.format, p.dim, p.width, 300 + e);
      p.experts[e] = {ref::dequantize(w1.ref()), ref::dequantize(w3.ref()),
                      ref::dequantize(w2.ref())};
      weights.w1[e] = test::packed(*ctx, w1.ref());
      weights.w3[e] = test::packed(*ctx, w3.ref());
      weights.w2[e] = test::packed(*ctx, w2.ref());
    }
    const std::vector<float> expected = ref::experts(p);
    const Tensor out = run(*ctx, p, weights.view());
    EXPECT_TRUE(same_bits(out.data(), expected.data(), out.numel())) << format;
  }
}

struct Gradients {
  Tensor d_x, d_weights;
  std::vector<Tensor> d_w1, d_w3, d_w2;
};

/// Runs forward and backward; expert gradients start at `start`.
Gradients run_bwd(const ExecCtx& ctx, const Problem& p, const Tensor& d_out, float start) {
  const Packed weights(ctx, p, Orientation::kNormal);
  const Packed transposed(ctx, p, Orientation::kTransposed);
  Saved saved(p);
  const ExpertsSaved view = saved.view();
  run(ctx, p, weights.view(), &view);
  Gradients g{Tensor(p.tokens * p.dim), Tensor(p.tokens * p.slots), {}, {}, {}};
  std::vector<F32Mat> d_w1, d_w3, d_w2;
  const std::size_t num = p.experts.size();
  for (std::size_t e = 0; e < num; ++e) {
    g.d_w1.push_back(Tensor::filled(p.width * p.dim, start));
    g.d_w3.push_back(Tensor::filled(p.width * p.dim, start));
    g.d_w2.push_back(Tensor::filled(p.width * p.dim, start));
  }
  for (std::size_t e = 0; e < num; ++e) {
    d_w1.push_back(g.d_w1[e].mat(p.width, p.dim));
    d_w3.push_back(g.d_w3[e].mat(p.width, p.dim));
    d_w2.push_back(g.d_w2[e].mat(p.dim, p.width));
  }
  ops::experts_bwd(
      ctx, g.d_x.mat(p.tokens, p.dim), g.d_weights.mat(p.tokens, p.slots), {d_w1, d_w3, d_w2},
      ConstF32Mat(d_out.data(), {p.tokens, p.dim}), ConstF32Mat(p.x.data(), {p.tokens, p.dim}),
      ConstI32Mat(p.ids.data(), {p.tokens, p.slots}),
      ConstF32Mat(p.weights.data(), {p.tokens, p.slots}), transposed.view(), view, p.act);
  EXPECT_TRUE(g.d_x.guards_intact() && g.d_weights.guards_intact());
  for (std::size_t e = 0; e < num; ++e) {
    EXPECT_TRUE(g.d_w1[e].guards_intact() && g.d_w3[e].guards_intact() &&
                g.d_w2[e].guards_intact());
  }
  return g;
}

/// fp32 against double: a chain of three sums, each of at most `terms` products.
double tolerance(const std::vector<double>& exact, std::int64_t terms) {
  // Sums of random signs: partial sums stay below a few times the largest result.
  return test::sum_tolerance(terms, 8 * test::max_abs(exact));
}

TEST(ExpertsBwd, NearTheDoubleOracle) {
  for (const int threads : {1, 2}) {
    const Context ctx(threads);
    for (const auto& [tokens, slots, dim, width, num] :
         {std::tuple{1, 2, 33, 17, 4}, {29, 2, 24, 40, 5}, {300, 2, 32, 16, 8}}) {
      const Problem p = random_problem(tokens, slots, dim, width, num, 8);
      const Tensor d_out = Tensor::normal(tokens * dim, 9);
      const auto exact = ref::experts_bwd(in_double(p), d_out.as_double());
      const float start = 0.5F;
      const Gradients g = run_bwd(*ctx, p, d_out, start);
      const std::int64_t terms = 3 * std::max({dim, width, tokens});
      EXPECT_TRUE(test::close(g.d_x.data(), exact.d_x, tolerance(exact.d_x, terms)));
      EXPECT_TRUE(
          test::close(g.d_weights.data(), exact.d_weights, tolerance(exact.d_weights, terms)));
      for (std::size_t e = 0; e < p.experts.size(); ++e) {
        const auto check = [&](const Tensor& actual, std::vector<double> expected) {
          for (double& value : expected) {
            value += static_cast<double>(start);
          }
          EXPECT_TRUE(test::close(actual.data(), expected, tolerance(expected, terms)));
        };
        check(g.d_w1[e], exact.d_experts[e].w1);
        check(g.d_w3[e], exact.d_experts[e].w3);
        check(g.d_w2[e], exact.d_experts[e].w2);
      }
    }
  }
}

TEST(ExpertsBwd, SameBitsForAnyThreads) {
  const Problem p = random_problem(200, 2, 32, 24, 4, 10);
  const Tensor d_out = Tensor::normal(200 * 32, 11);
  const Gradients one = run_bwd(*Context(1), p, d_out, 0.0F);
  for (const int threads : {2, 3}) {
    const Gradients more = run_bwd(*Context(threads), p, d_out, 0.0F);
    EXPECT_TRUE(same_bits(one.d_x.data(), more.d_x.data(), one.d_x.numel()));
    EXPECT_TRUE(same_bits(one.d_weights.data(), more.d_weights.data(), one.d_weights.numel()));
    for (std::size_t e = 0; e < 4; ++e) {
      EXPECT_TRUE(same_bits(one.d_w1[e].data(), more.d_w1[e].data(), one.d_w1[e].numel()));
      EXPECT_TRUE(same_bits(one.d_w3[e].data(), more.d_w3[e].data(), one.d_w3[e].numel()));
      EXPECT_TRUE(same_bits(one.d_w2[e].data(), more.d_w2[e].data(), one.d_w2[e].numel()));
    }
  }
}

// The oracle's own backward against central differences of its forward, in double.
TEST(ExpertsBwd, OracleMatchesFiniteDifferences) {
  for (const float lambda : {25.0F, 0.0F}) {
    auto p = in_double(random_problem(3, 2, 5, 4, 3, 12));
    p.act.linear_beta = lambda;
    const std::vector<double> d_out = Tensor::normal(15, 13).as_double();
    const auto grads = ref::experts_bwd(p, d_out);
    const auto loss = [&] {
      const std::vector<double> out = ref::experts(p);
      double sum = 0;
      for (std::size_t i = 0; i < out.size(); ++i) {
        sum += out[i] * d_out[i];
      }
      return sum;
    };
    const auto check = [&](std::vector<double>& values, const std::vector<double>& d) {
      for (std::size_t i = 0; i < values.size(); ++i) {
        constexpr double kStep = 1e-5;
        const double before = values[i];
        values[i] = before + kStep;
        const double above = loss();
        values[i] = before - kStep;
        const double below = loss();
        values[i] = before;
        // Truncation ~ step^2, rounding ~ 1e-16 |loss| / step.
        ASSERT_NEAR((above - below) / (2 * kStep), d[i], 1e-8 * (1 + std::abs(d[i])));
      }
    };
    check(p.x, grads.d_x);
    check(p.weights, grads.d_weights);
    for (std::size_t e = 0; e < p.experts.size(); ++e) {
      check(p.experts[e].w1, grads.d_experts[e].w1);
      check(p.experts[e].w3, grads.d_experts[e].w3);
      check(p.experts[e].w2, grads.d_experts[e].w2);
    }
  }
}

struct NormCase {
  std::int64_t tokens, slots, dim, num_experts, pad;
};
// Widths on either side of every way to cut a row; more slots than are staged at a time.
constexpr NormCase kNormCases[] = {{5, 2, 33, 4, 0},     {1, 2, 512, 4, 0},   {3, 2, 512, 4, 4},
                                   {3, 40, 64, 41, 3},   {1, 9, 1023, 10, 0}, {2, 3, 1028, 4, 0},
                                   {2, 17, 3584, 18, 0}, {2, 2, 4100, 4, 3},  {2, 2, 8192, 4, 0},
                                   {2, 2, 8200, 4, 1}};
constexpr float kNormEps = 1e-5F;

TEST(Experts, NormedIsTheNormOfTheSum) {
  const Context ctx;
  const bool on_host = &test::device_under_test() == &host_device();
  for (const auto& [tokens, slots, dim, num, pad] : kNormCases) {
    SCOPED_TRACE(testing::Message() << slots << " slots, dim " << dim << ", pad " << pad);
    const Problem p = random_problem(tokens, slots, dim, 8, num, 15);
    const Packed weights(*ctx, p, Orientation::kNormal);
    Tensor w = Tensor::normal(dim, 16);
    Tensor alone = run(*ctx, p, weights.view());
    test::Rows out(tokens, dim, pad);
    test::Rows normed(tokens, dim, pad);
    test::Rows only_normed(tokens, dim, pad);
    test::Rows in_training(tokens, dim, pad);
    Saved saved(p);
    const ExpertsSaved view = saved.view();
    run_into(*ctx, out.mat(), {normed.mat(), w.vec(), kNormEps}, p, weights.view());
    run_into(*ctx, {}, {only_normed.mat(), w.vec(), kNormEps}, p, weights.view());
    run_into(*ctx, out.mat(), {in_training.mat(), w.vec(), kNormEps}, p, weights.view(), &view);
    const std::vector<float> actual = normed.values();
    EXPECT_TRUE(same_bits(out.values().data(), alone.data(), alone.numel()));
    EXPECT_EQ(only_normed.values(), actual);
    EXPECT_EQ(in_training.values(), actual);
    EXPECT_TRUE(out.poison_intact() && normed.poison_intact() && only_normed.poison_intact());

    Tensor after(tokens * dim);
    ops::rms_norm(*ctx, after.mat(tokens, dim), alone.mat(tokens, dim), w.vec(), kNormEps);
    const std::vector<double> expected = after.as_double();
    const double rounding = test::sum_tolerance(dim, test::max_abs(expected));
    EXPECT_TRUE(test::close(actual.data(), expected, on_host ? 0.0 : rounding));
  }
}

TEST(Experts, NormOfATokenAloneEqualsThatInABatch) {
  const Context ctx;
  for (const std::int64_t dim : {48, 1028}) {
    const Problem p = random_problem(20, 2, dim, 8, 4, 17);
    const Packed weights(*ctx, p, Orientation::kNormal);
    Tensor w = Tensor::normal(dim, 18);
    Tensor all(p.tokens * dim);
    run_into(*ctx, {}, {all.mat(p.tokens, dim), w.vec(), kNormEps}, p, weights.view());
    for (std::int64_t t = 0; t < p.tokens; ++t) {
      const Problem one = token_of(p, t);
      Tensor alone(dim);
      run_into(*ctx, {}, {alone.mat(1, dim), w.vec(), kNormEps}, one, weights.view());
      ASSERT_TRUE(same_bits(alone.data(), all.data() + t * dim, dim)) << t;
    }
  }
}

TEST(Experts, WarmCallsDoNotGrowTheWorkspace) {
  const Context ctx;
  const Problem p = random_problem(50, 2, 32, 24, 4, 14);
  const Packed weights(*ctx, p, Orientation::kNormal);
  run(*ctx, p, weights.view());
  const std::size_t before = ctx.workspace_bytes();
  run(*ctx, p, weights.view());
  EXPECT_EQ(before, ctx.workspace_bytes());
}

}  // namespace
}  // namespace tandem
