#include <limits>
#include <numeric>
#include <set>

#include "backends/cpu/families.h"
#include "ops/each_target.h"
#include "ops/moe.h"
#include "ops/op_checks.h"
#include "ops/op_table.h"
#include "ops/ref/router_ref.h"

namespace tandem::test {
namespace {

constexpr std::int64_t kTokens = 9;
struct Shape {
  std::int64_t experts;
  std::int64_t active;
};
constexpr Shape kShapes[] = {{1, 1}, {7, 3}, {16, 16}, {33, 1}, {128, 8}, {320, 16}, {896, 16}};
constexpr RouterParams kParams[] = {{true, 1.0F}, {true, 2.446F}, {false, 1.5F}};

struct Routed {
  std::vector<std::int32_t> ids;
  Rows weights;
  Rows scores;

  Routed(std::int64_t tokens, Shape shape)
      : ids(usize(tokens * shape.active), -7),
        weights(tokens, shape.active, 2),
        scores(tokens, shape.experts, 3),
        tokens_(tokens),
        active_(shape.active) {}
  [[nodiscard]] I32Mat id_view() { return {ids.data(), {tokens_, active_}}; }

 private:
  std::int64_t tokens_;
  std::int64_t active_;
};

/// A score is <= 2 ulp, the sum of A terms relative, then two roundings and the scale.
double tolerance(std::int64_t active, double largest) {
  return sum_tolerance(active + 12, largest);
}

TEST(Router, HandNumbers) {
  const PoisonedContext ctx;
  const float logits[] = {0.2F, -1, 1.5F, 0.9F, -0.3F, 2};
  const float bias[] = {0.5F, 0.9F, -0.4F, 0, 0.1F, -0.6F};
  const float no_bias[6] = {};
  Routed out(1, {6, 3});
  ops::route(*ctx, out.id_view(), out.weights.mat(), out.scores.mat(), {logits, {1, 6}},
             {bias, {6}}, {});
  EXPECT_EQ(out.ids, (std::vector<std::int32_t>{1, 0, 3}));
  EXPECT_TRUE(close(out.weights.row(0), std::vector<double>{0.17581032, 0.35943325, 0.46475644},
                    tolerance(3, 0.5)));
  ops::route(*ctx, out.id_view(), out.weights.mat(), out.scores.mat(), {logits, {1, 6}},
             {no_bias, {6}}, {});
  EXPECT_EQ(out.ids, (std::vector<std::int32_t>{5, 2, 3}));
}

TEST(Router, ChoosesByScorePlusBiasAndMatchesTheOracle) {
  const PoisonedContext ctx;
  for (const RouterParams params : kParams) {
    for (const Shape shape : kShapes) {
      SCOPED_TRACE(testing::Message() << "E " << shape.experts << " A " << shape.active);
      Rows logits = Rows::normal(kTokens, shape.experts, 1, 1.5, 3);
      Tensor bias = Tensor::normal(shape.experts, 2, 0.1);
      Routed out(kTokens, shape);
      ops::route(*ctx, out.id_view(), out.weights.mat(), out.scores.mat(), logits.mat(), bias.vec(),
                 params);
      for (std::int64_t t = 0; t < kTokens; ++t) {  // the exact order, on the fp32 values
        std::vector<std::int32_t> order(usize(shape.experts));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
          return out.scores.row(t)[a] + bias[a] > out.scores.row(t)[b] + bias[b];
        });
        order.resize(usize(shape.active));
        const std::int32_t* const ids = out.id_view().row(t);
        EXPECT_EQ(std::vector<std::int32_t>(ids, ids + shape.active), order) << "token " << t;
      }
      RefTensor logits_ref(logits.values<double>());
      RefTensor weights = RefTensor::zeros(kTokens * shape.active);
      RefTensor scores = RefTensor::zeros(kTokens * shape.experts);
      ref::route_replay<double>(weights.mat(shape.active), scores.mat(shape.experts),
                                logits_ref.mat(shape.experts), out.id_view(), params);
      EXPECT_TRUE(close(out.scores.values().data(), scores.values(), tolerance(1, 1.0)));
      const double bound = tolerance(shape.active, max_abs(weights.values()));
      EXPECT_TRUE(close(out.weights.values().data(), weights.values(), bound));
      EXPECT_TRUE(out.weights.poison_intact() && out.scores.poison_intact());
      if (shape.active > 1) {  // planted bug: the other renormalisation
        ref::route_replay<double>(weights.mat(shape.active), scores.mat(shape.experts),
                                  logits_ref.mat(shape.experts), out.id_view(),
                                  {!params.renormalize, params.scaling_factor});
        EXPECT_FALSE(close(out.weights.values().data(), weights.values(), bound));
      }
      // Replay of the chosen ids: the same bits.
      Routed again(kTokens, shape);
      ops::route_replay(*ctx, again.weights.mat(), again.scores.mat(), logits.mat(), out.id_view(),
                        params);
      EXPECT_EQ(again.weights.values(), out.weights.values());
      EXPECT_EQ(again.scores.values(), out.scores.values());
    }
  }
}

TEST(Router, OracleRouteAgrees) {
  const PoisonedContext ctx;
  const Shape shape{40, 6};
  Rows logits = Rows::normal(kTokens, shape.experts, 5, 1.5);
  Tensor bias = Tensor::normal(shape.experts, 6, 0.3);
  Routed out(kTokens, shape);
  ops::route(*ctx, out.id_view(), out.weights.mat(), out.scores.mat(), logits.mat(), bias.vec(),
             {});
  RefTensor logits_ref(logits.values<double>());
  RefTensor bias_ref(bias.as_double());
  RefTensor weights = RefTensor::zeros(kTokens * shape.active);
  RefTensor scores = RefTensor::zeros(kTokens * shape.experts);
  std::vector<std::int32_t> ids(usize(kTokens * shape.active));
  ref::route<double>({ids.data(), {kTokens, shape.active}}, weights.mat(shape.active),
                     scores.mat(shape.experts), logits_ref.mat(shape.experts), bias_ref.vec(), {});
  EXPECT_EQ(out.ids, ids);  // the seed has no pair closer than fp32 rounding
  EXPECT_TRUE(close(out.weights.values().data(), weights.values(), tolerance(6, 1.0)));
}

TEST(Router, TiesGoToTheLowerId) {
  const PoisonedContext ctx;
  const Shape shape{20, 5};
  Rows logits = Rows::filled(1, shape.experts, 0.5F);
  logits.row(0)[13] = 1.0F;
  logits.row(0)[7] = 1.0F;
  Tensor bias = Tensor::filled(shape.experts, 0.125F);
  Routed out(1, shape);
  ops::route(*ctx, out.id_view(), out.weights.mat(), out.scores.mat(), logits.mat(), bias.vec(),
             {});
  EXPECT_EQ(out.ids, (std::vector<std::int32_t>{7, 13, 0, 1, 2}));
}

TEST(Router, NonFiniteLogitsGiveValidDistinctIds) {
  const PoisonedContext ctx;
  const Shape shape{20, 5};
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  Rows logits = Rows::filled(3, shape.experts, kNan);
  std::fill_n(logits.row(1), shape.experts, -kInf);
  logits.row(2)[4] = 0.0F;
  logits.row(2)[9] = kInf;
  Tensor bias = Tensor::filled(shape.experts, 0.0F);
  Routed out(3, shape);
  ops::route(*ctx, out.id_view(), out.weights.mat(), out.scores.mat(), logits.mat(), bias.vec(),
             {});
  for (std::int64_t t = 0; t < 3; ++t) {
    const std::int32_t* const row = out.id_view().row(t);
    const std::set<std::int32_t> distinct(row, row + shape.active);
    EXPECT_EQ(distinct.size(), usize(shape.active));
    EXPECT_GE(*distinct.begin(), 0);
    EXPECT_LT(*distinct.rbegin(), shape.experts);
  }
  EXPECT_EQ(out.id_view()(2, 0), 9);
  EXPECT_EQ(out.id_view()(2, 1), 4);
  EXPECT_TRUE(std::isnan(out.weights.row(0)[0]));  // never hidden by a constant
}

/// Distinct ids per token, in no special order.
std::vector<std::int32_t> some_ids(std::int64_t tokens, Shape shape) {
  std::vector<std::int32_t> ids;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t a = 0; a < shape.active; ++a) {
      // 3 is prime to every expert count used below
      ids.push_back(checked_cast<std::int32_t>((t + 3 * a) % shape.experts));
    }
  }
  return ids;
}

TEST(Router, BackwardMatchesTheOracle) {
  const PoisonedContext ctx;
  for (const RouterParams params : kParams) {
    for (const Shape shape : {Shape{7, 3}, Shape{16, 16}, Shape{128, 8}, Shape{896, 16}}) {
      SCOPED_TRACE(testing::Message() << "E " << shape.experts << " A " << shape.active);
      const std::vector<std::int32_t> ids = some_ids(kTokens, shape);
      const ConstI32Mat id_view(ids.data(), {kTokens, shape.active});
      Rows logits = Rows::normal(kTokens, shape.experts, 1, 1.5);
      Rows d_weights = Rows::normal(kTokens, shape.active, 2, 1.0, 1);
      Routed out(kTokens, shape);
      ops::route_replay(*ctx, out.weights.mat(), out.scores.mat(), logits.mat(), id_view, params);
      Rows d_logits(kTokens, shape.experts, 3);
      ops::route_bwd(*ctx, d_logits.mat(), d_weights.mat(), id_view, out.scores.mat(), params);
      RefTensor scores(out.scores.values<double>());
      RefTensor d_weights_ref(d_weights.values<double>());
      RefTensor expected = RefTensor::zeros(kTokens * shape.experts);
      ref::route_bwd<double>(expected.mat(shape.experts), d_weights_ref.mat(shape.active), id_view,
                             scores.mat(shape.experts), params);
      // |d_score| <= 2 max|d_w| factor / sum; s (1 - s) <= 1/4; the sum holds A terms.
      double smallest_sum = params.renormalize ? 1e30 : 1.0;
      for (std::int64_t t = 0; t < kTokens && params.renormalize; ++t) {
        double sum = 0;
        for (std::int64_t a = 0; a < shape.active; ++a) {
          sum += scores.mat(shape.experts)(t, id_view(t, a));
        }
        smallest_sum = std::min(smallest_sum, sum);
      }
      const double magnitude = 0.5 * max_abs(d_weights_ref.values()) *
                               static_cast<double>(params.scaling_factor) / smallest_sum;
      EXPECT_TRUE(close(d_logits.values().data(), expected.values(),
                        tolerance(2 * shape.active, magnitude)));
      EXPECT_TRUE(d_logits.poison_intact());
      // Planted bug: the other renormalisation.
      ref::route_bwd<double>(expected.mat(shape.experts), d_weights_ref.mat(shape.active), id_view,
                             scores.mat(shape.experts),
                             {!params.renormalize, params.scaling_factor});
      EXPECT_FALSE(close(d_logits.values().data(), expected.values(),
                         tolerance(2 * shape.active, magnitude)));
    }
  }
}

TEST(Router, OracleGradientIsTheDerivative) {
  const Shape shape{6, 3};
  const std::vector<std::int32_t> ids = some_ids(2, shape);
  const ConstI32Mat id_view(ids.data(), {2, shape.active});
  for (const RouterParams params : kParams) {
    RefTensor logits = RefTensor::normal(2 * shape.experts, 1);
    RefTensor d_weights = RefTensor::normal(2 * shape.active, 2);
    RefTensor weights = RefTensor::zeros(2 * shape.active);
    RefTensor scores = RefTensor::zeros(2 * shape.experts);
    RefTensor d_logits = RefTensor::zeros(2 * shape.experts);
    const auto loss = [&] {
      ref::route_replay<double>(weights.mat(shape.active), scores.mat(shape.experts),
                                logits.mat(shape.experts), id_view, params);
      return dot(weights.values(), d_weights.values());
    };
    static_cast<void>(loss());
    ref::route_bwd<double>(d_logits.mat(shape.experts), d_weights.mat(shape.active), id_view,
                           scores.mat(shape.experts), params);
    expect_central_differences(loss, logits, d_logits, "d_logits");
  }
}

TEST(Router, SameBitsForAnyThreadCountAndAlone) {
  const Shape shape{128, 8};
  for (const std::int64_t tokens : {0, 300}) {
    expect_same_for_any_thread_count([&](const ExecCtx& ctx) {
      Rows logits = Rows::normal(tokens, shape.experts, 1);
      Rows d_weights = Rows::normal(tokens, shape.active, 2);
      Tensor bias = Tensor::normal(shape.experts, 2, 0.1);
      Routed out(tokens, shape);
      Rows d_logits(tokens, shape.experts);
      ops::route(ctx, out.id_view(), out.weights.mat(), out.scores.mat(), logits.mat(), bias.vec(),
                 {});
      ops::route_bwd(ctx, d_logits.mat(), d_weights.mat(), out.id_view(), out.scores.mat(), {});
      if (tokens > 0) {
        Routed alone(1, shape);
        ops::route(ctx, alone.id_view(), alone.weights.mat(), alone.scores.mat(),
                   logits.mat().rows(200, 1), bias.vec(), {});
        EXPECT_TRUE(same_bits(alone.weights.row(0), out.weights.row(200), shape.active));
        EXPECT_TRUE(std::equal(alone.ids.begin(), alone.ids.end(), out.id_view().row(200)));
      }
      std::vector<float> all = out.weights.values();
      append(all, out.scores.values());
      append(all, d_logits.values());
      append(all, {out.ids.begin(), out.ids.end()});
      return all;
    });
  }
}

TEST(Router, EveryInstructionSetIsWithinTheBound) {
  const PoisonedContext ctx;
  const Shape shape{33, 4};
  const std::vector<std::int32_t> ids = some_ids(kTokens, shape);
  const ConstI32Mat id_view(ids.data(), {kTokens, shape.active});
  Rows logits = Rows::normal(kTokens, shape.experts, 1);
  RefTensor logits_ref(logits.values<double>());
  RefTensor weights = RefTensor::zeros(kTokens * shape.active);
  RefTensor scores = RefTensor::zeros(kTokens * shape.experts);
  ref::route_replay<double>(weights.mat(shape.active), scores.mat(shape.experts),
                            logits_ref.mat(shape.experts), id_view, {});
  for_each_simd_target([&](const char* target) {
    MoeOps table{};
    cpu_add_router_ops(table);
    Routed out(kTokens, shape);
    table.route_replay(*ctx, out.weights.mat(), out.scores.mat(), logits.mat(), id_view, {});
    EXPECT_TRUE(close(out.weights.values().data(), weights.values(), tolerance(4, 1.0))) << target;
  });
}

}  // namespace
}  // namespace tandem::test
