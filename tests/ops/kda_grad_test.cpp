// KDA gradients: the oracle against central differences, the CPU kernels against the oracle.
#include <functional>

#include "ops/kda_cases.h"
#include "ops/op_table.h"

namespace tandem::test {
namespace {

/// Central difference of f at x[i]; f is smooth, so the error is O(step^2) + O(eps / step).
double central(const std::function<double()>& f, double& x) {
  const double step = 1e-5;
  const double at = x;
  x = at + step;
  const double plus = f();
  x = at - step;
  const double minus = f();
  x = at;
  return (plus - minus) / (2 * step);
}
constexpr double kCentralError = 1e-8;  // step^2 times third derivatives of order 100

TEST(KdaRef, RecurrentGradientsAgreeWithDifferences) {
  KdaCase c({1, 4, 3}, {7}, 101);
  ref::KdaHead<double> in = c.head(0, 0);
  std::vector<double> d_o(usize(in.rows * in.values));
  Rng rng(5);
  std::generate(d_o.begin(), d_o.end(), [&] { return rng.normal(); });
  const auto loss = [&] {
    std::vector<double> state(usize(in.keys * in.values));
    const std::vector<double> o = ref::kda_recurrent_ref(in, state);
    return std::inner_product(o.begin(), o.end(), d_o.begin(), 0.0);
  };
  const ref::KdaHeadGrads<double> grads = ref::kda_recurrent_bwd_ref(in, d_o);
  const std::vector<std::pair<std::vector<double>*, const std::vector<double>*>> pairs = {
      {&in.q, &grads.d_q},
      {&in.k, &grads.d_k},
      {&in.v, &grads.d_v},
      {&in.g, &grads.d_g},
      {&in.beta, &grads.d_beta}};
  for (const auto& [x, d_x] : pairs) {
    for (std::size_t i = 0; i < x->size(); ++i) {
      EXPECT_NEAR((*d_x)[i], central(loss, (*x)[i]), kCentralError) << i;
    }
  }
}

TEST(KdaRef, GateGradientsAgreeWithDifferences) {
  for (const bool bounded : {true, false}) {
    for (const double f : {-3.0, -0.4, 0.0, 1.7}) {
      double x[3] = {f, 0.3, -0.25};  // f, A_log, dt_bias
      const auto value = [&] { return ref::kda_gate_ref(x[0], x[1], x[2], bounded, -5.0); };
      const auto grad = ref::kda_gate_bwd_ref(1.0, x[0], x[1], x[2], bounded, -5.0);
      EXPECT_NEAR(grad.d_f, central(value, x[0]), kCentralError);
      EXPECT_NEAR(grad.d_a_log, central(value, x[1]), kCentralError);
      EXPECT_NEAR(grad.d_dt_bias, central(value, x[2]), kCentralError);
    }
  }
}

struct Grads {
  Tensor d_q, d_k, d_v, d_g, d_beta;

  explicit Grads(const KdaCase& c)
      : d_q(c.rows() * c.dims.heads * c.dims.keys),
        d_k(d_q.numel()),
        d_v(c.rows() * c.dims.heads * c.dims.values),
        d_g(d_q.numel()),
        d_beta(c.rows() * c.dims.heads) {}
  [[nodiscard]] KdaGrads views(const KdaCase& c) {
    const auto [heads, keys, values] = c.dims;
    return {d_q.cube(c.rows(), heads, keys), d_k.cube(c.rows(), heads, keys),
            d_v.cube(c.rows(), heads, values), d_g.cube(c.rows(), heads, keys),
            d_beta.mat(c.rows(), heads)};
  }
  [[nodiscard]] std::vector<const Tensor*> all() const { return {&d_q, &d_k, &d_v, &d_g, &d_beta}; }
};

Grads run_bwd(const ExecCtx& ctx, KdaCase& c, Tensor& d_o) {
  const auto [heads, keys, values] = c.dims;
  Tensor o(d_o.numel());
  Tensor saved(kda_num_checkpoints(ctx, c.seqs(), c.seqs().num_rows()) * heads * keys * values);
  ops::kda_recurrent(ctx, o.cube(c.rows(), heads, values), c.inputs(), {}, c.seqs(), saved.data());
  Grads grads(c);
  ops::kda_recurrent_bwd(ctx, grads.views(c), d_o.cube(c.rows(), heads, values), c.inputs(),
                         c.seqs(), saved.data());
  for (const Tensor* t : grads.all()) {
    EXPECT_TRUE(t->guards_intact());
  }
  return grads;
}

/// The oracle's gradients of every head in the layout of the batch, in the order of Grads::all().
std::vector<std::vector<double>> expected_grads(KdaCase& c, const Tensor& d_o) {
  const auto [heads, keys, values] = c.dims;
  const std::int64_t rows = c.rows();
  std::vector<std::vector<double>> out;
  for (const std::int64_t width : {keys, keys, values, keys, std::int64_t{1}}) {
    out.emplace_back(usize(rows * heads * width));
  }
  for (std::int64_t b = 0; b < c.num_seqs(); ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const ref::KdaHead<double> in = c.head(b, h);
      const std::int64_t begin = c.cu_seqlens[usize(b)];
      std::vector<double> grad;
      for (std::int64_t t = begin; t < begin + in.rows; ++t) {
        const float* row = d_o.data() + (t * heads + h) * values;
        grad.insert(grad.end(), row, row + values);
      }
      const ref::KdaHeadGrads<double> g = ref::kda_recurrent_bwd_ref(in, grad);
      const std::vector<const std::vector<double>*> parts = {&g.d_q, &g.d_k, &g.d_v, &g.d_g,
                                                             &g.d_beta};
      for (std::size_t p = 0; p < parts.size(); ++p) {
        const std::int64_t width = isize(out[p]) / (rows * heads);
        for (std::int64_t t = 0; t < in.rows; ++t) {
          std::copy_n(parts[p]->begin() + t * width, width,
                      out[p].begin() + ((begin + t) * heads + h) * width);
        }
      }
    }
  }
  return out;
}

/// The state gradient obeys the transposed recurrence, which does not amplify either: its error is
/// at most one error a row, of products of it with k (|k|_1 <= K^1/2) and of d_o with q. Every
/// output is a sum over V (or K) of products of the state, its gradient, u, d_o, each with such an
/// error: relative rows * (K + 8) / 2 eps on the one side and the same on the other.
double grad_tolerance(KdaCase& c, const Tensor& d_o) {
  const KdaExpected forward = kda_expected(c);
  const std::int64_t longest = c.rows();
  const auto width = static_cast<double>(std::max(c.dims.keys, c.dims.values));
  const double state = std::max({max_abs(forward.o), max_abs(forward.state), max_abs(c.qkv)});
  const double magnitude = 2.0 * std::sqrt(width) * state * max_abs(d_o);
  return static_cast<double>(longest) * sum_tolerance(c.dims.keys + c.dims.values, magnitude);
}

TEST(KdaRecurrentBwd, MatchesTheOracle) {
  const TestContext ctx;
  for (const KdaDims& dims : {KdaDims{1, 1, 1}, KdaDims{2, 32, 32}, KdaDims{3, 5, 7},
                              KdaDims{1, 24, 70}, KdaDims{1, 128, 20}, KdaDims{2, 49, 16}}) {
    KdaCase c(dims, {1, 33, 0, 16, 17, 50}, 111);
    Tensor d_o = Tensor::normal(c.rows() * dims.heads * dims.values, 112);
    const Grads grads = run_bwd(*ctx, c, d_o);
    const auto expected = expected_grads(c, d_o);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(close(grads.all()[i]->data(), expected[i], grad_tolerance(c, d_o)))
          << dims.keys << "x" << dims.values << " part " << i;
    }
  }
}

TEST(KdaRecurrentBwd, ToleranceCatchesPlantedBugs) {
  KdaCase c({2, 16, 16}, {20, 30}, 121);
  Tensor d_o = Tensor::normal(c.rows() * 2 * 16, 122);
  const double tolerance = grad_tolerance(c, d_o);
  const auto expected = expected_grads(c, d_o);
  const TestContext ctx;
  // The gradient of the last row of the second sequence is dropped.
  Tensor dropped = d_o;
  std::fill(dropped.end() - 2 * 16, dropped.end(), 0.0F);
  const Grads grads = run_bwd(*ctx, c, dropped);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_FALSE(close(grads.all()[i]->data(), expected[i], tolerance)) << i;
  }
}

TEST(KdaRecurrentBwd, ThreadsAndBatchDoNotChangeBits) {
  KdaCase c({2, 32, 40}, {40, 3, 65}, 131);
  Tensor d_o = Tensor::normal(c.rows() * 2 * 40, 132);
  const TestContext one(1);
  const Grads first = run_bwd(*one, c, d_o);
  for (const int threads : {2, 3}) {
    const TestContext ctx(threads);
    const Grads again = run_bwd(*ctx, c, d_o);
    for (std::size_t i = 0; i < first.all().size(); ++i) {
      EXPECT_TRUE(
          same_bits(again.all()[i]->data(), first.all()[i]->data(), first.all()[i]->numel()))
          << i;
    }
  }
}

TEST(KdaGateBwd, MatchesTheOracleAndAccumulates) {
  const TestContext ctx;
  const std::int64_t rows = 150;
  const std::int64_t heads = 3;
  const std::int64_t keys = 21;
  Tensor f = Tensor::normal(rows * heads * keys, 141, 2.0);
  Tensor d_g = Tensor::normal(f.numel(), 142);
  Tensor a_log = Tensor::normal(heads, 143, 0.5);
  Tensor bias = Tensor::normal(heads * keys, 144);
  for (const bool bounded : {true, false}) {
    Tensor d_f(f.numel());
    Tensor d_a_log = Tensor::filled(heads, 1.0F);
    Tensor d_bias = Tensor::filled(heads * keys, 2.0F);
    ops::kda_gate_bwd(*ctx, d_f.cube(rows, heads, keys), d_a_log.vec(), d_bias.vec(),
                      d_g.cube(rows, heads, keys), f.cube(rows, heads, keys), a_log.vec(),
                      bias.vec(), {bounded, -5.0F});
    std::vector<double> expected_f(usize(f.numel()));
    std::vector<double> expected_a(usize(heads), 1.0);
    std::vector<double> expected_bias(usize(heads * keys), 2.0);
    double largest = 0;
    double sum_a = 1;
    for (std::int64_t i = 0; i < f.numel(); ++i) {
      const std::int64_t channel = i % (heads * keys);
      const auto grad =
          ref::kda_gate_bwd_ref(static_cast<double>(d_g[i]), static_cast<double>(f[i]),
                                static_cast<double>(a_log[channel / keys]),
                                static_cast<double>(bias[channel]), bounded, -5.0);
      expected_f[usize(i)] = grad.d_f;
      expected_a[usize(channel / keys)] += grad.d_a_log;
      expected_bias[usize(channel)] += grad.d_dt_bias;
      largest = std::max(largest, std::abs(grad.d_f));
      sum_a += std::abs(grad.d_a_log);
    }
    // Slope of the gate: the argument a (f + dt) errs by 3 roundings of |a||f + dt| < 100, and the
    // second derivative of either gate is at most 5 a^2 / 10.
    const double element = sum_tolerance(8, largest + 0.5 * 100 * max_abs(d_g));
    EXPECT_TRUE(close(d_f.data(), expected_f, element));
    EXPECT_TRUE(close(d_bias.data(), expected_bias,
                      static_cast<double>(rows) * element + sum_tolerance(70, 2 + largest * 150)));
    EXPECT_TRUE(close(d_a_log.data(), expected_a, sum_tolerance(70 * 2 + 3, 2 * sum_a)));
  }
}

TEST(KdaBetaBwd, IsTheSlopeOfTheSigmoid) {
  const TestContext ctx;
  Tensor beta = Tensor::filled(4, 0.25F);
  Tensor d_beta = Tensor::normal(4, 1);
  Tensor d_b(4);
  ops::kda_beta_bwd(*ctx, d_b.mat(2, 2), d_beta.mat(2, 2), beta.mat(2, 2));
  for (std::int64_t i = 0; i < 4; ++i) {
    EXPECT_FLOAT_EQ(d_b[i], d_beta[i] * 0.1875F);
  }
}

}  // namespace
}  // namespace tandem::test
