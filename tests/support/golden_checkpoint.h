// golden_checkpoint.h — the checkpoint behind the fixtures: k3-tiny of seed 1, written anew by the
// test and compared with what the fixtures were made from. Link tdm_models.
#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "models/kimi_k3/init.h"
#include "models/kimi_k3/model.h"
#include "support/golden.h"
#include "support/op_test.h"
#include "support/temp_dir.h"

namespace tandem::test {

inline constexpr std::string_view kGoldenPrefix = "language_model.";
inline constexpr std::int64_t kGoldenVocab = 512;

/// manifest.json, checkpoint.word_hash_rule.
[[nodiscard]] inline std::uint32_t word_hash(std::span<const std::byte> bytes) {
  std::uint32_t sum = 0;
  for (std::size_t i = 0; i * 4 < bytes.size(); ++i) {
    std::uint32_t word = 0;
    std::memcpy(&word, bytes.data() + i * 4, std::min<std::size_t>(4, bytes.size() - i * 4));
    sum += hash32(word ^ hash32(static_cast<std::uint32_t>(i)));
  }
  return sum;
}

/// Empty when the folder holds the tensors that the fixtures were made from.
[[nodiscard]] inline std::string difference_from_golden(const std::string& dir) {
  const Checkpoint checkpoint = Checkpoint::open(dir).value_or_throw();
  const auto expected =
      golden_json("manifest.json")["checkpoint"]["word_hashes"].get<std::vector<std::uint32_t>>();
  const std::vector<std::string> names = checkpoint.names();
  constexpr std::string_view kHint =
      "the initial weights of k3-tiny changed; make the fixtures anew with "
      "tools/golden/make_golden.py";
  if (names.size() != expected.size()) {
    return fmt::format("{} tensors, expected {}: {}", names.size(), expected.size(), kHint);
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (word_hash(checkpoint.find(names[i])->bytes) != expected[i]) {
      return fmt::format("tensor {}: other values than in the fixtures: {}", names[i], kHint);
    }
  }
  return "";
}

/// Test fixture: the checkpoint, once for all tests of a suite.
class GoldenCheckpoint : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new TempDir;
    kimi_k3::write_initial_checkpoint(*kimi_k3::find_preset("k3-tiny"), {.seed = 1}, dir());
  }
  static void TearDownTestSuite() {
    delete dir_;
    dir_ = nullptr;
  }
  void SetUp() override { ASSERT_EQ(difference_from_golden(dir()), ""); }

  static const std::string& dir() { return dir_->path(); }
  static std::unique_ptr<kimi_k3::KimiK3> load(const ExecCtx& ctx, bool trainable) {
    return kimi_k3::KimiK3::load(ctx, dir(), {.trainable = trainable}).value_or_throw();
  }

 private:
  static inline TempDir* dir_ = nullptr;
};

/// rules.prompt_ids, both prompts.
[[nodiscard]] inline std::vector<std::vector<std::int32_t>> golden_prompts() {
  std::vector<std::vector<std::int32_t>> prompts;
  for (std::uint32_t p = 0; p < 2; ++p) {
    std::vector<std::int32_t>& ids = prompts.emplace_back();
    for (std::uint32_t i = 0; i < (p == 0 ? 21U : 37U); ++i) {
      ids.push_back(static_cast<std::int32_t>(hash32(1000 * p + i + 1) % kGoldenVocab));
    }
  }
  return prompts;
}

}  // namespace tandem::test
