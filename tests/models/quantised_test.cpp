// Checkpoints with 4- and 8-bit weights: the packed kernels and the dequantised masters give the
// same bits, and both what the independent fp64 reference gets from the same file.
#include "support/golden_checkpoint.h"
#include "support/model_session.h"

namespace tandem::test {
namespace {

struct Quantised {
  const char* name;  // in quantised.*
  kimi_k3::ExpertFormat experts;
  bool fp8_attention;

  friend std::ostream& operator<<(std::ostream& out, const Quantised& q) { return out << q.name; }
};

class QuantisedCheckpoint : public ::testing::TestWithParam<Quantised> {
 protected:
  void SetUp() override {
    kimi_k3::write_initial_checkpoint(
        *kimi_k3::find_preset("k3-tiny"),
        {.seed = 1, .experts = GetParam().experts, .fp8_attention = GetParam().fp8_attention},
        dir_.path());
  }
  /// Logits [2, V] of the last position of both golden prompts.
  [[nodiscard]] std::vector<float> logits(bool trainable) const {
    TestContext context;
    const auto model =
        kimi_k3::KimiK3::load(*context, dir_.path(), {.trainable = trainable}).value_or_throw();
    std::vector<float> all;
    for (const auto& prompt : golden_prompts()) {
      ModelSession session(*context, *model, 1);
      const std::vector<float> last = session.feed({prompt}, ModelSession::kLastRows);
      all.insert(all.end(), last.begin(), last.end());
    }
    return all;
  }

  TempDir dir_;
};

TEST_P(QuantisedCheckpoint, PackedAndDequantisedWeightsGiveTheSameBits) {
  const std::vector<float> packed = logits(false);
  const std::vector<float> dequantised = logits(true);
  ASSERT_EQ(packed.size(), dequantised.size());
  EXPECT_TRUE(same_bits(packed.data(), dequantised.data(), isize(packed)));
}

// Bound of issue 2, as for plain weights; the reference's fp32 run shows 2e-6 to 3e-6
// (quantised.json, fp32_noise_logits).
TEST_P(QuantisedCheckpoint, LogitsOfTheReference) {
  const auto golden = golden_json("quantised.json")[GetParam().name];
  const Checkpoint checkpoint = Checkpoint::open(dir_.path()).value_or_throw();
  std::uint32_t sum = 0;
  for (const std::string& name : checkpoint.names()) {
    sum += word_hash(checkpoint.find(name)->bytes);
  }
  ASSERT_EQ(checkpoint.num_tensors(), golden["tensors"]);
  ASSERT_EQ(sum, golden["sum_of_word_hashes"]) << "initial weights or quantisation changed; make "
                                                  "the fixtures anew with make_golden.py";
  expect_within(
      GetParam().name,
      worst_relative(
          logits(false),
          GoldenFile("quantised.safetensors").floats(fmt::format("{}.logits", GetParam().name))),
      1e-5);
}

INSTANTIATE_TEST_SUITE_P(Formats, QuantisedCheckpoint,
                         ::testing::Values(Quantised{"mxfp4", kimi_k3::ExpertFormat::kMxFp4, false},
                                           Quantised{"nvfp4_fp8", kimi_k3::ExpertFormat::kNvFp4,
                                                     true}),
                         [](const auto& format) { return std::string(format.param.name); });

}  // namespace
}  // namespace tandem::test
