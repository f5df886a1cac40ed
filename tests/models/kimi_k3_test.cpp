// Properties of the K3 model that hold bit for bit, whatever its weights: how a prompt is cut, what
// shares its batch, training forward against decode.
#include <filesystem>
#include <numeric>

#include "models/kimi_k3/init.h"
#include "models/kimi_k3/model.h"
#include "support/model_session.h"
#include "support/op_test.h"
#include "support/temp_dir.h"

namespace tandem::test {
namespace {

class KimiK3Test : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new TempDir;
    kimi_k3::write_initial_checkpoint(*kimi_k3::find_preset("k3-tiny"), {.seed = 7}, dir_->path());
  }
  static void TearDownTestSuite() {
    delete dir_;
    dir_ = nullptr;
  }
  static std::unique_ptr<kimi_k3::KimiK3> load(const ExecCtx& ctx, bool trainable) {
    return kimi_k3::KimiK3::load(ctx, dir_->path(), {.trainable = trainable}).value_or_throw();
  }
  static std::vector<std::int32_t> prompt(std::int64_t length, std::int64_t salt = 0) {
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < length; ++i) {
      ids.push_back(static_cast<std::int32_t>((i * 31 + salt * 17 + 5) % 512));
    }
    return ids;
  }

  static TempDir* dir_;
};
TempDir* KimiK3Test::dir_ = nullptr;

// kimi-k3.md 10 counts A_log at its stored length 32; the model counts the 8 values it uses, in 6
// KDA layers.
TEST_F(KimiK3Test, HasTheParametersTheSpecCounts) {
  TestContext context;
  EXPECT_EQ(load(*context, false)->footprint().num_parameters, 4'915'296 - 6 * (32 - 8));
}

TEST_F(KimiK3Test, AnySplitOfAPromptGivesTheSameBits) {
  TestContext context;
  const auto model = load(*context, false);
  const auto ids = prompt(37);
  ModelSession whole(*context, *model, 1);
  const std::vector<float> expected = whole.feed({ids}, ModelSession::kAllRows);
  for (const std::int64_t split : {1, 2, 3, 4, 15, 16, 17, 31, 36}) {
    ModelSession session(*context, *model, 1);
    auto first = session.feed({{ids.begin(), ids.begin() + split}}, ModelSession::kAllRows);
    const auto second = session.feed({{ids.begin() + split, ids.end()}}, ModelSession::kAllRows);
    first.insert(first.end(), second.begin(), second.end());
    ASSERT_EQ(first.size(), expected.size());
    EXPECT_TRUE(same_bits(first.data(), expected.data(), isize(expected))) << "split " << split;
  }
}

TEST_F(KimiK3Test, TokenByTokenEqualsPrefill) {
  TestContext context;
  const auto model = load(*context, false);
  const auto ids = prompt(40);
  ModelSession whole(*context, *model, 1);
  const std::vector<float> expected = whole.feed({ids}, ModelSession::kAllRows);
  ModelSession session(*context, *model, 1);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto row = session.feed({{ids[i]}}, ModelSession::kAllRows);
    ASSERT_TRUE(same_bits(row.data(), expected.data() + i * 512, 512)) << "token " << i;
  }
}

TEST_F(KimiK3Test, ABatchOfManyEqualsEachAlone) {
  TestContext context;
  const auto model = load(*context, false);
  std::vector<std::vector<std::int32_t>> prompts;
  for (std::int64_t b = 0; b < 9; ++b) {
    prompts.push_back(prompt(1 + b * 5, b));
  }
  ModelSession together(*context, *model, isize(prompts));
  const std::vector<float> all = together.feed(prompts, ModelSession::kAllRows);
  const std::vector<float> all_next =
      together.feed(std::vector<std::vector<std::int32_t>>(9, {3, 4}), ModelSession::kAllRows);
  std::size_t row = 0;
  for (std::size_t b = 0; b < prompts.size(); ++b) {
    ModelSession alone(*context, *model, 1);
    const auto expected = alone.feed({prompts[b]}, ModelSession::kAllRows);
    EXPECT_TRUE(same_bits(all.data() + row * 512, expected.data(), isize(expected)))
        << "sequence " << b;
    row += prompts[b].size();
    const auto next = alone.feed({{3, 4}}, ModelSession::kAllRows);
    EXPECT_TRUE(same_bits(all_next.data() + b * 2 * 512, next.data(), isize(next)))
        << "sequence " << b;
  }
}

TEST_F(KimiK3Test, ThreadCountDoesNotMatter) {
  const auto ids = prompt(33);
  std::vector<float> expected;
  for (const int threads : {1, 2, 3}) {
    TestContext context(threads);
    const auto model = load(*context, false);
    ModelSession session(*context, *model, 1);
    const auto logits = session.feed({ids}, ModelSession::kAllRows);
    if (expected.empty()) {
      expected = logits;
    }
    EXPECT_TRUE(same_bits(logits.data(), expected.data(), isize(expected)))
        << threads << " threads";
  }
}

TEST_F(KimiK3Test, TrainingForwardEqualsDecodeBitForBit) {
  TestContext context;
  const auto model = load(*context, true);
  const std::vector<std::vector<std::int32_t>> sequences{prompt(29), prompt(1, 3), prompt(18, 9)};
  std::vector<std::int32_t> packed;
  std::vector<std::int32_t> cu_seqlens{0};
  for (const auto& ids : sequences) {
    packed.insert(packed.end(), ids.begin(), ids.end());
    cu_seqlens.push_back(static_cast<std::int32_t>(packed.size()));
  }
  Arena keep = arena_under_test();
  const std::int64_t rows = isize(packed);
  const ConstF32Mat hidden = model->forward_train(
      *context, {{packed.data(), {rows}}, {cu_seqlens.data(), {isize(cu_seqlens)}}}, keep);
  std::vector<float> trained(usize(rows * 512));
  model->head(*context, {trained.data(), {rows, 512}}, hidden);

  for (std::size_t b = 0; b < sequences.size(); ++b) {
    ModelSession session(*context, *model, 1);
    for (std::size_t i = 0; i < sequences[b].size(); ++i) {
      const auto row = session.feed({{sequences[b][i]}}, ModelSession::kAllRows);
      const std::size_t at = static_cast<std::size_t>(cu_seqlens[b]) + i;
      ASSERT_TRUE(same_bits(row.data(), trained.data() + at * 512, 512))
          << "sequence " << b << " token " << i;
    }
  }
}

/// Layer 0 (KDA, dense), 3 (MLA), 4 (KDA, pushes a bank row), 8 (MLA, last) and what is outside the
/// layers; of the experts, two.
bool is_checked(const std::string& name) {
  const bool layer =
      name.find(".layers.") == std::string::npos || name.find(".layers.0.") != std::string::npos ||
      name.find(".layers.3.") != std::string::npos ||
      name.find(".layers.4.") != std::string::npos || name.find(".layers.8.") != std::string::npos;
  const bool expert = name.find(".experts.") == std::string::npos ||
                      name.find(".experts.1.") != std::string::npos ||
                      name.find(".experts.6.") != std::string::npos;
  return layer && expert;
}

// d loss / d parameters along a random direction against central differences. fp32 forwards bound
// what the differences can resolve: about eps * |loss| / h = 1e-7 * 6 / 1e-3, against directional
// derivatives of order 1.
TEST_F(KimiK3Test, GradientMatchesDirectionalDifferences) {
  TestContext context;
  const auto model = load(*context, true);
  const auto ids = prompt(24);
  const std::vector<std::int32_t> cu_seqlens{0, 11, 24};
  // Expert choice is piecewise constant: record it once and replay it, or a difference across a tie
  // measures the jump.
  std::vector<std::int32_t> expert_ids(24 * 8 * 4);
  RoutedExperts routed{{expert_ids.data(), {24, 8 * 4}}, false};
  const TrainBatch batch{{ids.data(), {24}}, {cu_seqlens.data(), {3}}, &routed};
  const Tensor probe = Tensor::normal(24 * 512, 11, 0.05);  // loss = sum(probe * logits)
  Arena keep = arena_under_test();
  const auto loss = [&] {
    keep.reset();
    const ConstF32Mat hidden = model->forward_train(*context, batch, keep);
    std::vector<float> logits(24 * 512);
    model->head(*context, {logits.data(), {24, 512}}, hidden);
    return std::inner_product(logits.begin(), logits.end(), probe.begin(), 0.0);
  };
  keep.reset();
  const ConstF32Mat hidden = model->forward_train(*context, batch, keep);
  model->parameters().zero_grads();
  Tensor d_hidden = Tensor::filled(24 * 128, 0.0F);
  model->head_backward(*context, d_hidden.mat(24, 128), {probe.data(), {24, 512}}, hidden);
  model->backward(*context, d_hidden.mat(24, 128), batch);
  routed.replay = true;

  std::size_t checked = 0;
  for (nn::Parameter& parameter : model->parameters().all()) {
    if (parameter.frozen || !is_checked(parameter.name)) {
      continue;
    }
    // Direction = the gradient itself, scaled to a small relative change of the weight: the
    // strongest signal there is.
    const std::vector<float> grad(parameter.grad().begin(), parameter.grad().end());
    const double norm = std::sqrt(std::inner_product(grad.begin(), grad.end(), grad.begin(), 0.0));
    if (norm < 1e-3) {
      continue;
    }
    const std::vector<float> saved(parameter.value().begin(), parameter.value().end());
    const double h = std::min(
        2e-3, 0.05 / norm);  // a change of the loss of at most 0.1, where it is still linear
    const auto shifted = [&](double sign) {
      for (std::size_t i = 0; i < saved.size(); ++i) {
        parameter.value()[i] = static_cast<float>(saved[i] + sign * h * grad[i] / norm);
      }
      model->refresh(*context);
      return loss();
    };
    const double difference = (shifted(1) - shifted(-1)) / (2 * h);
    std::ranges::copy(saved, parameter.value().begin());
    EXPECT_NEAR(difference, norm, 0.03 * norm + 0.02) << parameter.name;
    ++checked;
  }
  EXPECT_GT(checked, 70U);
}

}  // namespace
}  // namespace tandem::test
