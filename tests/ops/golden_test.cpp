// Each operator of the CPU backend, forward and gradients, against values of an independent fp64
// program (tools/golden). Inputs are exact in fp32; GoldenOp::check() says where the bounds come
// from.
#include <array>

#include "ops/act.h"
#include "ops/attn_res.h"
#include "ops/conv1d.h"
#include "ops/golden_ops.h"
#include "ops/kda.h"
#include "ops/moe.h"
#include "ops/norm.h"

namespace tandem::test {
namespace {

TEST(GoldenOps, Situ) {
  const TestContext ctx;
  const GoldenOp op("situ");
  Tensor gate = op.tensor("gate"), up = op.tensor("up"), d_y = op.tensor("y_grad");
  const std::int64_t n = gate.numel();
  Tensor y(n), d_gate(n), d_up(n);
  ops::situ(*ctx, y.mat(1, n), gate.mat(1, n), up.mat(1, n), {4.0F, 25.0F});
  ops::situ_bwd(*ctx, d_gate.mat(1, n), d_up.mat(1, n), d_y.mat(1, n), gate.mat(1, n), up.mat(1, n),
                {4.0F, 25.0F});
  const std::vector<float> expected = op.expected("y");
  for (std::int64_t i = 0; i < n; ++i) {  // from 1e-8 to 100: each relative to itself
    const double e = double{expected[usize(i)]};
    // Functions of <= 3 ulp and a few roundings, no sums: 16 ulp.
    EXPECT_NEAR(double{y[i]}, e, sum_tolerance(24, std::abs(e))) << i;
  }
  op.check("gate_grad", d_gate);
  op.check("up_grad", d_up);
}

TEST(GoldenOps, KdaGates) {
  const TestContext ctx;
  for (const bool bounded : {true, false}) {
    const GoldenOp op(bounded ? "bounded_gate" : "softplus_gate");
    const KdaGateParams params{bounded, -5.0F};
    Tensor f = op.tensor("f"), a_log = op.tensor("a_log"), dt = op.tensor("dt_bias");
    Tensor d_y = op.tensor("y_grad");
    const std::int64_t rows = op.extent("f", 0), heads = op.extent("f", 1), k = op.extent("f", 2);
    const auto cube = [&](Tensor& t) { return t.cube(rows, heads, k); };
    Tensor y(f.numel()), d_f(f.numel());
    Tensor d_a = Tensor::filled(heads, 0.0F), d_dt = Tensor::filled(heads * k, 0.0F);
    Tensor b = Tensor::filled(rows * heads, 0.0F);
    ops::kda_gate(*ctx, cube(y), b.mat(rows, heads), cube(f), b.mat(rows, heads), a_log.vec(),
                  dt.vec(), params);
    ops::kda_gate_bwd(*ctx, cube(d_f), d_a.vec(), d_dt.vec(), cube(d_y), cube(f), a_log.vec(),
                      dt.vec(), params);
    op.check("y", y);
    op.check("f_grad", d_f);
    op.check("dt_bias_grad", d_dt);
    op.check("a_log_grad", d_a);
  }
}

TEST(GoldenOps, AttnRes) {
  const TestContext ctx;
  for (const std::int64_t n : {1, 2, 4}) {
    const GoldenOp op(fmt::format("attn_res{}", n));
    Tensor v = op.tensor("v"), norm = op.tensor("norm"), query = op.tensor("query");
    Tensor d_y = op.tensor("y_grad");
    const std::int64_t rows = op.extent("v", 1), dim = op.extent("v", 2);
    Tensor y(rows * dim), d_v = Tensor::filled(v.numel(), 0.0F);
    Tensor d_norm = Tensor::filled(dim, 0.0F), d_query = Tensor::filled(dim, 0.0F);
    std::vector<ConstF32Mat> sources;
    std::vector<F32Mat> d_sources;
    for (std::int64_t i = 0; i < n; ++i) {
      sources.emplace_back(v.data() + i * rows * dim, std::array{rows, dim});
      d_sources.emplace_back(d_v.data() + i * rows * dim, std::array{rows, dim});
    }
    ops::attn_res(*ctx, y.mat(rows, dim), {}, sources, norm.vec(), query.vec(), 1e-5F);
    ops::attn_res_bwd(*ctx, d_sources, d_norm.vec(), d_query.vec(), d_y.mat(rows, dim), sources,
                      norm.vec(), query.vec(), 1e-5F);
    op.check("y", y);
    op.check("v_grad", d_v);
    op.check("norm_grad", d_norm);
    op.check("query_grad", d_query);
  }
}

TEST(GoldenOps, RmsNorm) {
  const TestContext ctx;
  for (const bool small : {false, true}) {
    const GoldenOp op(small ? "rms_norm_small" : "rms_norm");
    const float eps = small ? 1e-6F : 1e-5F;
    Tensor x = op.tensor("x"), w = op.tensor("w"), d_y = op.tensor("y_grad");
    const std::int64_t rows = op.extent("x", 0), dim = op.extent("x", 1);
    Tensor y(x.numel()), d_x(x.numel()), d_w = Tensor::filled(dim, 0.0F);
    ops::rms_norm(*ctx, y.mat(rows, dim), x.mat(rows, dim), w.vec(), eps);
    ops::rms_norm_bwd(*ctx, d_x.mat(rows, dim), d_w.vec(), d_y.mat(rows, dim), x.mat(rows, dim),
                      w.vec(), eps);
    op.check("y", y);
    op.check("x_grad", d_x);
    op.check("w_grad", d_w);
  }
}

TEST(GoldenOps, L2Norm) {
  const TestContext ctx;
  const GoldenOp op("l2_norm");
  Tensor x = op.tensor("x"), d_y = op.tensor("y_grad");
  const std::int64_t rows = op.extent("x", 0), dim = op.extent("x", 1);
  Tensor y(x.numel()), d_x(x.numel());
  ops::l2_norm(*ctx, y.cube(rows, 1, dim), x.cube(rows, 1, dim), std::array{1.0F}, 1e-6F);
  ops::l2_norm_bwd(*ctx, d_x.cube(rows, 1, dim), d_y.cube(rows, 1, dim), x.cube(rows, 1, dim), 1.0F,
                   1e-6F);
  op.check("y", y);
  op.check("x_grad", d_x);
  // And row by row: the last one is 1000 times smaller, and its gradients as much larger.
  const std::vector<float> expected = op.expected("x_grad");
  for (std::int64_t t = 0; t < rows; ++t) {
    double square = 1e-6;
    for (std::int64_t c = 0; c < dim; ++c) {
      square += double{x[t * dim + c]} * double{x[t * dim + c]};
    }
    const double tolerance = sum_tolerance(dim, std::sqrt(static_cast<double>(dim) / square) * 2);
    for (std::int64_t c = 0; c < dim; ++c) {
      EXPECT_NEAR(double{d_x[t * dim + c]}, double{expected[usize(t * dim + c)]}, tolerance) << t;
    }
  }
}

TEST(GoldenOps, GatedNorm) {
  const TestContext ctx;
  const GoldenOp op("gated_norm");
  Tensor o = op.tensor("o"), w = op.tensor("w"), gate = op.tensor("gate");
  Tensor d_y = op.tensor("y_grad");
  const std::int64_t rows = op.extent("o", 0), heads = op.extent("o", 1), dim = op.extent("o", 2);
  const auto cube = [&](Tensor& t) { return t.cube(rows, heads, dim); };
  Tensor y(o.numel()), d_o(o.numel()), d_gate(o.numel()), d_w = Tensor::filled(dim, 0.0F);
  ops::rms_norm_gated(*ctx, cube(y), cube(o), cube(gate), w.vec(), 1e-5F);
  ops::rms_norm_gated_bwd(*ctx, cube(d_o), cube(d_gate), d_w.vec(), cube(d_y), cube(o), cube(gate),
                          w.vec(), 1e-5F);
  op.check("y", y);
  op.check("o_grad", d_o);
  op.check("gate_grad", d_gate);
  op.check("w_grad", d_w);
}

TEST(GoldenOps, ShortConv) {
  const TestContext ctx;
  const GoldenOp op("short_conv");
  Tensor x = op.tensor("x"), w = op.tensor("w"), window = op.tensor("window");
  const std::int64_t rows = op.extent("x", 0), channels = op.extent("x", 1), taps = 4;
  const std::vector<std::int32_t> cu{0, checked_cast<std::int32_t>(rows)}, slot{0};
  Tensor y(x.numel()), state = window;
  ops::conv1d(*ctx, y.mat(rows, channels), x.mat(rows, channels),
              std::array<ConstF32Mat, 1>{w.mat(channels, taps)}, state.cube(1, taps - 1, channels),
              {{cu.data(), {2}}, {slot.data(), {1}}});
  op.check("y", y);
  EXPECT_EQ(std::vector<float>(state.begin(), state.end()), op.expected("next_window"));

  // The gradient starts from zeros, so the window becomes rows of x whose outputs nobody reads;
  // next_window is the last rows of x, whose gradient it adds to.
  const std::int64_t all = rows + taps - 1;
  const std::int64_t head = (taps - 1) * channels;
  Tensor long_x(all * channels), d_y = Tensor::filled(all * channels, 0.0F);
  std::copy(window.begin(), window.end(), long_x.begin());
  std::copy(x.begin(), x.end(), long_x.begin() + head);
  const std::vector<float> y_grad = op.expected("y_grad");
  std::copy(y_grad.begin(), y_grad.end(), d_y.begin() + head);
  const std::vector<std::int32_t> long_cu{0, checked_cast<std::int32_t>(all)};
  Tensor d_x(all * channels), d_w = Tensor::filled(w.numel(), 0.0F);
  ops::conv1d_bwd(*ctx, d_x.mat(all, channels), d_w.mat(channels, taps), d_y.mat(all, channels),
                  long_x.mat(all, channels), w.mat(channels, taps), {{long_cu.data(), {2}}, {}});
  const std::vector<float> next_grad = op.expected("next_window_grad");
  for (std::size_t i = 0; i < next_grad.size(); ++i) {
    d_x[d_x.numel() - isize(next_grad) + static_cast<std::int64_t>(i)] += next_grad[i];
  }
  op.check("window_grad", std::span(d_x.begin(), usize(head)));
  op.check("x_grad", std::span(d_x.begin() + head, usize(rows * channels)));
  op.check("w_grad", d_w);
}

TEST(GoldenOps, Router) {
  const TestContext ctx;
  for (const bool scaled : {false, true}) {
    const GoldenOp op(scaled ? "router_scaled" : "router");
    const RouterParams params{true, scaled ? 2.446F : 1.0F};
    Tensor logits = op.tensor("logits"), bias = op.tensor("bias"), d_y = op.tensor("y_grad");
    const std::int64_t rows = op.extent("logits", 0), experts = op.extent("logits", 1);
    const std::int64_t active = op.extent("y", 1);
    std::vector<std::int32_t> ids(usize(rows * active), -1);
    Tensor weights(rows * active), scores(logits.numel()), d_logits(logits.numel());
    ops::route(*ctx, {ids.data(), {rows, active}}, weights.mat(rows, active),
               scores.mat(rows, experts), logits.mat(rows, experts), bias.vec(), params);
    EXPECT_EQ(ids, op.ids());
    ops::route_bwd(*ctx, d_logits.mat(rows, experts), d_y.mat(rows, active),
                   {ids.data(), {rows, active}}, scores.mat(rows, experts), params);
    op.check("y", weights);
    op.check("logits_grad", d_logits);
  }
}

}  // namespace
}  // namespace tandem::test
