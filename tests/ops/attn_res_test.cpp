#include "ops/attn_res.h"

#include <functional>

#include "backends/cpu/families.h"
#include "ops/each_target.h"
#include "ops/op_checks.h"
#include "ops/op_table.h"
#include "ops/ref/attn_res_ref.h"
#include "ops/ref/norm_ref.h"

namespace tandem::test {
namespace {

constexpr float kEps = 1e-5F;
constexpr std::int64_t kRows = 5;

/// n sources of one shape, as fp32 rows and as doubles.
struct Bank {
  std::vector<Rows> rows;
  std::vector<RefTensor> refs;
  std::int64_t dim;

  Bank(std::size_t n, std::int64_t num_rows, std::int64_t width, std::int64_t pad = 0)
      : dim(width) {
    for (std::size_t i = 0; i < n; ++i) {
      rows.push_back(Rows::normal(num_rows, width, 100 + i, 1.0 + static_cast<double>(i), pad));
      refs.emplace_back(rows.back().values<double>());
    }
  }
  [[nodiscard]] std::vector<ConstF32Mat> views() {
    std::vector<ConstF32Mat> out;
    for (Rows& source : rows) {
      out.emplace_back(source.mat());
    }
    return out;
  }
  [[nodiscard]] std::vector<TensorView<const double, 2>> ref_views() {
    std::vector<TensorView<const double, 2>> out;
    for (RefTensor& source : refs) {
      out.emplace_back(source.mat(dim));
    }
    return out;
  }
  [[nodiscard]] double max() const {
    double largest = 0;
    for (const RefTensor& source : refs) {
      largest = std::max(largest, max_abs(source.values()));
    }
    return largest;
  }
};

std::vector<TensorView<const double, 2>> const_views(
    const std::vector<TensorView<double, 2>>& mats) {
  return {mats.begin(), mats.end()};
}

/// sum_j |a_j b_j| of one row.
double abs_dot(TensorView<const double, 2> a, std::int64_t t, const std::vector<double>& b) {
  double sum = 0;
  for (std::int64_t j = 0; j < a.size(1); ++j) {
    sum += std::abs(a(t, j) * b[usize(j)]);
  }
  return sum;
}

std::vector<double> product(const RefTensor& w, const RefTensor& u) {
  std::vector<double> c(w.values());
  std::transform(c.begin(), c.end(), u.values().begin(), c.begin(), std::multiplies<>());
  return c;
}

/// Bound on the error of row t's scores: a score is r times a sum of D products, and r itself
/// carries a relative error like that of a sum of D terms.
double score_error(Bank& bank, RefTensor& w, RefTensor& u, std::int64_t t) {
  const ref::AttnResRow<double> row(bank.ref_views(), w.vec(), u.vec(), 1e-5, t);
  const std::vector<double> c = product(w, u);
  double magnitude = 0;
  for (std::size_t i = 0; i < row.r.size(); ++i) {
    magnitude = std::max(magnitude, row.r[i] * abs_dot(bank.ref_views()[i], t, c));
  }
  return sum_tolerance(2 * bank.dim, magnitude);
}

/// A weight moves by p times twice the score error; the output mixes n of them.
double output_tolerance(Bank& bank, RefTensor& w, RefTensor& u) {
  double ds = 0;
  for (std::int64_t t = 0; t < kRows; ++t) {
    ds = std::max(ds, score_error(bank, w, u, t));
  }
  const std::int64_t n = isize(bank.rows);
  return 2 * bank.max() * ds + sum_tolerance(2 * n + 4, bank.max());
}

/// Per row of every source, the bound of d_source; and per element that of d_w and d_u.
struct GradBounds {
  std::vector<std::vector<double>> d_source;  // [n][rows]
  std::vector<double> d_query;                // [D] of sum a x, before the factor u or w
};

/// With ds the score error, 2 ds is the relative error of p; a = p (p_bar - mean) r has magnitude
/// A = p (P_i + sum p P) r, P = sum |x d_out|, and relative error 4 ds + a sum's.
GradBounds grad_bounds(Bank& bank, RefTensor& w, RefTensor& u, RefTensor& d_out,
                       std::int64_t rows) {
  const std::vector<double> c = product(w, u);
  const std::int64_t dim = bank.dim;
  const std::size_t n = bank.rows.size();
  GradBounds bounds{std::vector<std::vector<double>>(n), std::vector<double>(c.size(), 0.0)};
  const double add_error = sum_tolerance(rows * isize(bank.rows) + 4, 1.0);
  for (std::int64_t t = 0; t < rows; ++t) {
    const ref::AttnResRow<double> row(bank.ref_views(), w.vec(), u.vec(), 1e-5, t);
    const double ds = score_error(bank, w, u, t);
    const double* const grad = &d_out.mat(dim)(t, 0);
    const std::vector<double> d_row(grad, grad + dim);
    double mean = 0;
    for (std::size_t i = 0; i < n; ++i) {
      mean += row.p[i] * abs_dot(bank.ref_views()[i], t, d_row);
    }
    for (std::size_t i = 0; i < n; ++i) {
      const double* const x = &bank.ref_views()[i](t, 0);
      const double x_max = max_abs(std::vector<double>(x, x + dim));
      const double a = row.p[i] * (abs_dot(bank.ref_views()[i], t, d_row) + mean) * row.r[i];
      const double a_error = a * (4 * ds + sum_tolerance(2 * dim + isize(row.p), 1.0));
      const double back = row.r[i] / static_cast<double>(dim) * x_max;  // times s
      const double factor = max_abs(c) + back * std::abs(row.s[i]);
      const double direct = row.p[i] * max_abs(d_row);
      bounds.d_source[i].push_back(direct * 2 * ds + a_error * factor + a * back * ds +
                                   sum_tolerance(8, 0.25 + direct + a * factor));
      for (std::size_t j = 0; j < c.size(); ++j) {
        bounds.d_query[j] += (a_error + a * add_error) * std::abs(x[j]);
      }
    }
  }
  return bounds;
}

TEST(AttnRes, HandNumbers) {
  const PoisonedContext ctx;
  const float a[] = {1, 2, 3, 4};
  const float b[] = {0.5F, -1, 0, 2};
  const float c[] = {-2, 1, 1, 0};
  const float w[] = {1, 0.5F, 2, 1};
  const float u[] = {0.3F, -0.2F, 0.1F, 0.4F};
  const std::vector<ConstF32Mat> sources{{a, {1, 4}}, {b, {1, 4}}, {c, {1, 4}}};
  float out[4];
  ops::attn_res(*ctx, {out, {1, 4}}, {}, sources, {w, {4}}, {u, {4}}, kEps);
  const std::vector<double> expected{0.40804522, 0.51013905, 1.38885271, 2.60247157};
  EXPECT_TRUE(close(out, expected, sum_tolerance(12, 4.0)));
  const RefTensor w_ref({1, 0.5, 2, 1});
  std::vector<double> scores{0.83984069, 0.91651165, -0.40824693};
  const std::vector<double> a_ref(a, a + 4);
  const std::vector<double> b_ref(b, b + 4);
  const std::vector<double> c_ref(c, c + 4);
  const std::vector<double> u_ref{0.3, -0.2, 0.1, 0.4};
  const std::vector<TensorView<const double, 2>> refs{
      {a_ref.data(), {1, 4}}, {b_ref.data(), {1, 4}}, {c_ref.data(), {1, 4}}};
  const ref::AttnResRow<double> row(refs, {w_ref.values().data(), {4}}, {u_ref.data(), {4}}, 1e-5,
                                    0);
  const std::vector<double> weights{0.42252212, 0.45619154, 0.12128634};
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_NEAR(row.s[i], scores[i], 1e-8);  // eight printed digits
    EXPECT_NEAR(row.p[i], weights[i], 1e-8);
  }
}

TEST(AttnRes, MatchesTheOracle) {
  const PoisonedContext ctx;
  for (const std::size_t n : {1U, 2U, 9U, 32U}) {
    for (const std::int64_t dim : kWidths) {
      for (const std::int64_t pad : {0, 3}) {
        SCOPED_TRACE(testing::Message() << "n " << n << " dim " << dim << " pad " << pad);
        Bank bank(n, kRows, dim, pad);
        Tensor w = Tensor::normal(dim, 2, 0.5);
        Tensor u = Tensor::normal(dim, 3, 0.5);
        RefTensor w_ref(w.as_double());
        RefTensor u_ref(u.as_double());
        Rows out(kRows, dim, pad);
        ops::attn_res(*ctx, out.mat(), {}, bank.views(), w.vec(), u.vec(), kEps);
        RefTensor expected = RefTensor::zeros(kRows * dim);
        ref::attn_res<double>(expected.mat(dim), bank.ref_views(), w_ref.vec(), u_ref.vec(),
                              static_cast<double>(kEps));
        const double tolerance = output_tolerance(bank, w_ref, u_ref);
        EXPECT_TRUE(close(out.values().data(), expected.values(), tolerance));
        EXPECT_TRUE(out.poison_intact());
        if (n == 1) {
          EXPECT_EQ(out.values(), bank.rows[0].values());
        } else if (dim >= 15) {  // planted bug: scores divided by sqrt(D)
          for (double& value : u_ref.values()) {
            value /= std::sqrt(static_cast<double>(dim));
          }
          ref::attn_res<double>(expected.mat(dim), bank.ref_views(), w_ref.vec(), u_ref.vec(),
                                static_cast<double>(kEps));
          EXPECT_FALSE(close(out.values().data(), expected.values(), tolerance));
        }
      }
    }
  }
}

TEST(AttnRes, NormedIsTheNormOfTheAggregate) {
  const PoisonedContext ctx;
  for (const std::size_t n : {1U, 2U, 9U, 11U}) {
    for (const std::int64_t dim : {1, 17, 129, 7168, 9000}) {
      for (const std::int64_t pad : {0, 3}) {
        SCOPED_TRACE(testing::Message() << "n " << n << " dim " << dim << " pad " << pad);
        Bank bank(n, kRows, dim, pad);
        Tensor w = Tensor::normal(dim, 2, 0.1);
        Tensor u = Tensor::normal(dim, 3, 0.1);
        Tensor norm_w = Tensor::normal(dim, 4);
        Rows alone(kRows, dim, pad);
        Rows out(kRows, dim, pad);
        Rows normed(kRows, dim, pad);
        Rows only_normed(kRows, dim, pad);
        const auto run = [&](F32Mat to, F32Mat norm_to) {
          ops::attn_res(*ctx, to, {norm_to, norm_w.vec(), kEps}, bank.views(), w.vec(), u.vec(),
                        kEps);
        };
        run(alone.mat(), {});
        run(out.mat(), normed.mat());
        run({}, only_normed.mat());
        EXPECT_EQ(out.values(), alone.values());
        EXPECT_EQ(only_normed.values(), normed.values());
        EXPECT_TRUE(out.poison_intact() && normed.poison_intact());
        RefTensor expected = RefTensor::zeros(kRows * dim);
        RefTensor out_ref(out.values<double>());
        RefTensor norm_w_ref(norm_w.as_double());
        ref::rms_norm<double>(expected.mat(dim), out_ref.mat(dim), norm_w_ref.vec(),
                              static_cast<double>(kEps));
        EXPECT_TRUE(close(normed.values().data(), expected.values(),
                          sum_tolerance(dim, max_abs(expected.values()))));
      }
    }
  }
}

/// Everything the backward writes, as one vector: d_sources, d_w, d_u. All start at 0.25.
std::vector<float> backward(const ExecCtx& ctx, std::size_t n, std::int64_t rows,
                            std::int64_t dim) {
  Bank bank(n, rows, dim);
  Tensor w = Tensor::normal(dim, 2, 0.5);
  Tensor u = Tensor::normal(dim, 3, 0.5);
  Rows d_out = Rows::normal(rows, dim, 4);
  std::vector<Rows> d_sources(n, Rows::filled(rows, dim, 0.25F));
  std::vector<F32Mat> d_views;
  for (Rows& d_source : d_sources) {
    d_views.push_back(d_source.mat());
  }
  Tensor d_w = Tensor::filled(dim, 0.25F);
  Tensor d_u = Tensor::filled(dim, 0.25F);
  ops::attn_res_bwd(ctx, d_views, d_w.vec(), d_u.vec(), d_out.mat(), bank.views(), w.vec(), u.vec(),
                    kEps);
  std::vector<float> all;
  for (const Rows& d_source : d_sources) {
    EXPECT_TRUE(d_source.poison_intact());
    append(all, d_source.values());
  }
  append(all, {d_w.begin(), d_w.end()});
  append(all, {d_u.begin(), d_u.end()});
  return all;
}

TEST(AttnRes, BackwardMatchesTheOracle) {
  const PoisonedContext ctx;
  const std::int64_t rows = 20;
  for (const std::size_t n : {1U, 3U, 9U}) {
    for (const std::int64_t dim : kWidths) {
      SCOPED_TRACE(testing::Message() << "n " << n << " dim " << dim);
      Bank bank(n, rows, dim);
      RefTensor w(Tensor::normal(dim, 2, 0.5).as_double());
      RefTensor u(Tensor::normal(dim, 3, 0.5).as_double());
      RefTensor d_out(Rows::normal(rows, dim, 4).values<double>());
      std::vector<RefTensor> d_sources(n, RefTensor(std::vector<double>(usize(rows * dim), 0.25)));
      std::vector<TensorView<double, 2>> d_views;
      for (RefTensor& d_source : d_sources) {
        d_views.push_back(d_source.mat(dim));
      }
      RefTensor d_w(std::vector<double>(usize(dim), 0.25));
      RefTensor d_u(std::vector<double>(usize(dim), 0.25));
      ref::attn_res_bwd<double>(d_views, d_w.vec(), d_u.vec(), d_out.mat(dim), bank.ref_views(),
                                w.vec(), u.vec(), static_cast<double>(kEps));
      const std::vector<float> actual = backward(*ctx, n, rows, dim);
      const GradBounds bounds = grad_bounds(bank, w, u, d_out, rows);
      const auto source_close = [&](std::size_t i, const RefTensor& expected) {
        bool all = true;
        for (std::int64_t t = 0; t < rows; ++t) {
          const double* const begin = expected.values().data() + t * dim;
          const float* const at = actual.data() + (static_cast<std::int64_t>(i) * rows + t) * dim;
          all = all &&
                close(at, std::vector<double>(begin, begin + dim), bounds.d_source[i][usize(t)]);
        }
        return all;
      };
      const float* const queries = actual.data() + isize(bank.rows) * rows * dim;
      const auto query_close = [&](const float* at, const RefTensor& expected,
                                   const RefTensor& other) {
        bool all = true;
        for (std::size_t j = 0; j < usize(dim); ++j) {
          const double bound = bounds.d_query[j] * std::abs(other.values()[j]) +
                               sum_tolerance(2, std::abs(expected.values()[j]) + 0.25);
          all = all && close(at + j, std::vector<double>{expected.values()[j]}, bound);
        }
        return all;
      };
      EXPECT_TRUE(query_close(queries, d_w, u));
      EXPECT_TRUE(query_close(queries + dim, d_u, w));
      for (std::size_t i = 0; i < n; ++i) {
        EXPECT_TRUE(source_close(i, d_sources[i])) << i;
        if (n > 1 && dim > 1) {  // planted bug: the scores' gradient forgotten (at D = 1 it is 0)
          RefTensor wrong = RefTensor::zeros(rows * dim);
          for (std::int64_t t = 0; t < rows; ++t) {
            const ref::AttnResRow<double> row(bank.ref_views(), w.vec(), u.vec(), 1e-5, t);
            for (std::int64_t j = 0; j < dim; ++j) {
              wrong.mat(dim)(t, j) = 0.25 + row.p[i] * d_out.mat(dim)(t, j);
            }
          }
          EXPECT_FALSE(source_close(i, wrong)) << i;
        }
      }
      if (n > 1) {  // planted bug: w and u swapped
        EXPECT_FALSE(query_close(queries, d_u, u));
      }
    }
  }
}

TEST(AttnRes, OracleGradientIsTheDerivative) {
  const std::int64_t dim = 5;
  const std::int64_t rows = 2;
  std::vector<RefTensor> sources;
  std::vector<RefTensor> d_sources;
  for (std::size_t i = 0; i < 3; ++i) {
    sources.push_back(RefTensor::normal(rows * dim, 10 + i));
    d_sources.push_back(RefTensor::zeros(rows * dim));
  }
  std::vector<TensorView<double, 2>> views;
  std::vector<TensorView<double, 2>> d_views;
  for (std::size_t i = 0; i < 3; ++i) {
    views.push_back(sources[i].mat(dim));
    d_views.push_back(d_sources[i].mat(dim));
  }
  RefTensor w = RefTensor::normal(dim, 2);
  RefTensor u = RefTensor::normal(dim, 3);
  RefTensor d_out = RefTensor::normal(rows * dim, 4);
  RefTensor d_w = RefTensor::zeros(dim);
  RefTensor d_u = RefTensor::zeros(dim);
  ref::attn_res_bwd<double>(d_views, d_w.vec(), d_u.vec(), d_out.mat(dim), const_views(views),
                            w.vec(), u.vec(), 1e-3);
  const auto loss = [&] {
    RefTensor out = RefTensor::zeros(rows * dim);
    ref::attn_res<double>(out.mat(dim), const_views(views), w.vec(), u.vec(), 1e-3);
    return dot(out.values(), d_out.values());
  };
  expect_central_differences(loss, w, d_w, "d_w");
  expect_central_differences(loss, u, d_u, "d_u");
  for (std::size_t i = 0; i < 3; ++i) {
    expect_central_differences(loss, sources[i], d_sources[i], "d_source");
  }
}

TEST(AttnRes, SameBitsForAnyThreadCount) {
  for (const std::int64_t rows : {0, 150}) {
    expect_same_for_any_thread_count([&](const ExecCtx& ctx) {
      Bank bank(9, rows, 129);
      Tensor w = Tensor::normal(129, 2);
      Rows out(rows, 129);
      ops::attn_res(ctx, out.mat(), {}, bank.views(), w.vec(), w.vec(), kEps);
      std::vector<float> all = out.values();
      append(all, backward(ctx, 9, rows, 129));
      return all;
    });
  }
}

TEST(AttnRes, ARowDoesNotDependOnTheOthers) {
  const PoisonedContext ctx;
  const std::int64_t dim = 77;
  Bank bank(4, 200, dim);
  Tensor w = Tensor::normal(dim, 2);
  Rows batch(200, dim);
  Rows alone(1, dim);
  ops::attn_res(*ctx, batch.mat(), {}, bank.views(), w.vec(), w.vec(), kEps);
  for (const std::int64_t r : {0, 1, 100, 199}) {
    std::vector<ConstF32Mat> row;
    for (const ConstF32Mat& source : bank.views()) {
      row.push_back(source.rows(r, 1));
    }
    ops::attn_res(*ctx, alone.mat(), {}, row, w.vec(), w.vec(), kEps);
    EXPECT_TRUE(same_bits(alone.row(0), batch.row(r), dim)) << r;
  }
}

TEST(AttnRes, EveryInstructionSetIsWithinTheBound) {
  const PoisonedContext ctx;
  const std::int64_t dim = 33;
  Bank bank(3, kRows, dim);
  Tensor w = Tensor::normal(dim, 2, 0.5);
  RefTensor w_ref(w.as_double());
  RefTensor expected = RefTensor::zeros(kRows * dim);
  ref::attn_res<double>(expected.mat(dim), bank.ref_views(), w_ref.vec(), w_ref.vec(), 1e-5);
  for_each_simd_target([&](const char* target) {
    Rows out(kRows, dim);
    cpu_attn_res_ops().aggregate(*ctx, out.mat(), {}, bank.views(), w.vec(), w.vec(), kEps);
    EXPECT_TRUE(close(out.values().data(), expected.values(), output_tolerance(bank, w_ref, w_ref)))
        << target;
  });
}

}  // namespace
}  // namespace tandem::test
