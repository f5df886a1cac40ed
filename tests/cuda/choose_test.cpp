// The choosers of tensor-core products, for GPUs that are not here: every choice must fit the GPU
// and the kernels' bounds, cover the work exactly, and fill the SMs where there is work for them.
#include <algorithm>
#include <bit>
#include <span>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backends/cuda/experts/choose_experts.h"
#include "backends/cuda/gemm/choose_linear.h"

namespace tandem::cuda {
namespace {

constexpr WeightFormat kFormats[] = {WeightFormat::kBF16, WeightFormat::kFp8Block,
                                     WeightFormat::kMxFp4, WeightFormat::kNvFp4};
constexpr int kSms[] = {132, 148, 152, 212};

DeviceInfo gpu(int sms) {
  DeviceInfo info;
  info.num_sms = sms;
  info.smem_per_block = 232448;
  info.smem_per_sm = 233472;
  return info;
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

struct Shape {
  std::int64_t out, in;
};
constexpr Shape kK3[] = {{12288, 7168}, {7168, 12288}, {896, 7168},   {6144, 7168},
                         {7168, 6144},  {3584, 7168},  {7168, 3584},  {163840, 7168},
                         {128, 7168},   {96, 7168},    {7168, 33792}, {33792, 7168},
                         {2112, 7168},  {12288, 128},  {512, 128},    {128, 512}};
constexpr Shape kOdd[] = {{1, 1}, {17, 33}, {300, 260}, {80, 530}, {16, 64}, {129, 70000}};

/// Segments of all CTAs of a cluster together, and the most that one has.
void expect_split(int segments, int cluster, int slots) {
  int begin = 0;
  for (int rank = 0; rank < cluster; ++rank) {
    EXPECT_EQ(split(segments, rank, cluster), begin);
    const int end = split(segments, rank + 1, cluster);
    EXPECT_LE(end - begin, slots);
    begin = end;
  }
  EXPECT_EQ(begin, segments);
}

void expect_stream_plan(const StreamPlan& plan, int segments, std::int64_t tokens) {
  EXPECT_TRUE(std::has_single_bit(static_cast<unsigned>(plan.row_warps)));
  EXPECT_GE(plan.k_warps, 1);
  EXPECT_LE(plan.threads(), kStreamThreads);
  EXPECT_TRUE(plan.cluster == 1 || plan.cluster == 2 || plan.cluster == 4 || plan.cluster == 8);
  EXPECT_LE(plan.k_warps, std::max<std::int64_t>(1, ceil_div(segments, plan.cluster)));
  EXPECT_EQ(plan.segments, std::max(1, segments));
  EXPECT_TRUE(plan.tokens % 2 == 0 && plan.tokens >= tokens && plan.tokens <= kStreamTokens);
  expect_split(segments, plan.cluster, static_cast<int>(ceil_div(segments, plan.cluster)));
}

void expect_covers(const LinearConfig& config, const LinearDesc& desc, const DeviceInfo& info) {
  const TensorShape shape = tensor_shape(desc.format, desc.out, desc.in);
  EXPECT_LE(config.smem_bytes, info.smem_per_block);
  EXPECT_LE(config.grid_y, 65535);
  if (config.stream) {
    EXPECT_LE(desc.tokens, kMaxStreamRows);
    expect_stream_plan(config.plan, shape.segments, desc.tokens);
    EXPECT_EQ(config.threads, config.plan.threads());
    EXPECT_EQ(config.grid_x % config.plan.cluster, 0);
    const std::int64_t blocks = std::int64_t{stream_blocks(desc.format)} * config.plan.row_warps;
    EXPECT_EQ(config.grid_x / config.plan.cluster, ceil_div(shape.row_blocks, blocks));
    EXPECT_EQ(config.smem_bytes, config.plan.smem_bytes(stream_blocks(desc.format)));
    return;
  }
  const TileVariant& v = kLinearTiles[config.variant];
  EXPECT_EQ(config.threads, v.threads());
  EXPECT_EQ(config.grid_x % config.cluster, 0);
  EXPECT_EQ(config.grid_x / config.cluster, ceil_div(desc.tokens, v.tokens()));
  EXPECT_EQ(config.grid_y, ceil_div(desc.out, v.outputs()));
  if (config.cluster > 1) {
    expect_split(shape.segments, config.cluster, config.slots);
    EXPECT_EQ(config.smem_bytes, v.smem_bytes(desc.format, config.slots));
  }
}

TEST(ChooseLinear, EveryChoiceCoversTheWorkAndFitsTheGpu) {
  for (const int sms : kSms) {
    const DeviceInfo info = gpu(sms);
    for (const WeightFormat format : kFormats) {
      for (const std::int64_t tokens : {1, 2, 8, 9, 16, 17, 33, 64, 65, 200, 512, 4096, 100000}) {
        for (const auto& shapes : {std::span<const Shape>(kK3), std::span<const Shape>(kOdd)}) {
          for (const Shape& s : shapes) {
            for (const std::int64_t heads : {1, 96}) {
              const LinearDesc desc{format, s.out, s.in, tokens, heads};
              const auto config = choose_linear(desc, info);
              ASSERT_TRUE(config.has_value()) << s.out << " x " << s.in << ", " << tokens;
              expect_covers(*config, desc, info);
            }
          }
        }
      }
    }
  }
}

TEST(ChooseLinear, DecodeFillsTheSms) {
  for (const int sms : kSms) {
    for (const WeightFormat format : kFormats) {
      for (const Shape& s : kK3) {
        const auto config = choose_linear({format, s.out, s.in, 1, 1}, gpu(sms));
        ASSERT_TRUE(config.has_value() && config->stream);
        const TensorShape shape = tensor_shape(format, s.out, s.in);
        const std::int64_t work = std::int64_t{shape.row_blocks} * shape.segments;
        // An SM's worth of CTAs each, or as many as a cluster of 8 gives.
        const std::int64_t blocks = ceil_div(shape.row_blocks, stream_blocks(format));
        EXPECT_GE(config->grid_x, std::min({std::int64_t{sms}, blocks * 8, ceil_div(work, 16)}))
            << s.out << " x " << s.in;
      }
    }
  }
}

TEST(ChooseLinear, AGroupFollowsItsLongestSum) {
  // KDA's projections of one input, and layers of unlike widths.
  const std::vector<std::vector<Shape>> groups{
      {{12288, 7168}, {12288, 7168}, {12288, 7168}, {12288, 7168}, {128, 7168}, {96, 7168}},
      {{896, 7168}, {3584, 7168}, {6144, 7168}, {6144, 7168}},
      {{16, 64}, {33, 7168}, {17, 300}},
      {{1, 1}}};
  for (const int sms : kSms) {
    for (const WeightFormat format : kFormats) {
      for (const std::vector<Shape>& group : groups) {
        for (const bool gated : {false, true}) {
          LinearGroupDesc desc;
          desc.format = format;
          desc.tokens = 3;
          desc.gated = gated;
          int segments = 0;
          for (const Shape& s : group) {
            desc.layers.push_back(tensor_shape(format, s.out, s.in));
            segments = std::max(segments, desc.layers.back().segments);
          }
          const auto config = choose_linear_group(desc, gpu(sms));
          ASSERT_TRUE(config.has_value() && config->stream);
          const StreamPlan& plan = config->plan;
          expect_stream_plan(plan, segments, desc.tokens);
          EXPECT_TRUE(!gated || plan.row_warps >= 2);  // half of them for the second ones of pairs
          EXPECT_EQ(config->threads, plan.threads());
          EXPECT_EQ(config->smem_bytes, plan.smem_bytes(stream_blocks(format)));
          EXPECT_LE(config->smem_bytes, gpu(sms).smem_per_block);
        }
      }
    }
  }
}

TEST(ChooseLinear, ASumOfTwoProductsHasRoomForBoth) {
  for (const int sms : kSms) {
    for (const WeightFormat format : kFormats) {
      const LinearDesc desc{
          .format = format, .out = 7168, .in = 3584, .tokens = 8, .second_in = 6144};
      const auto config = choose_linear(desc, gpu(sms));
      ASSERT_TRUE(config.has_value() && config->stream);
      expect_stream_plan(
          config->plan,
          tensor_shape(format, 7168, 3584).segments + tensor_shape(format, 7168, 6144).segments,
          desc.tokens);
      EXPECT_LE(config->smem_bytes, gpu(sms).smem_per_block);
    }
  }
}

TEST(ChooseLinear, WarpsShareSegmentsEvenly) {
  // K3's widths: 7168 = 28 segments of bf16, 12288 = 48, 3584 = 14, 3072 = 12.
  for (const auto& [in, warps] : {std::pair{7168, 7}, {12288, 8}, {3584, 7}, {3072, 6}}) {
    const auto config = choose_linear({WeightFormat::kBF16, 163840, in, 1, 1}, gpu(132));
    ASSERT_TRUE(config.has_value());
    EXPECT_EQ(config->plan.k_warps, warps) << in;
    EXPECT_EQ(config->plan.cluster, 1);
  }
}

TEST(ChooseLinear, ShortSumsTakeSeveralRowBlocks) {
  const auto config = choose_linear({WeightFormat::kBF16, 512, 128, 1, 96}, gpu(132));
  ASSERT_TRUE(config.has_value());
  EXPECT_EQ(config->plan.k_warps, 1);
  EXPECT_GT(config->plan.row_warps, 1);
}

TEST(ChooseLinear, TilesGrowWithRows) {
  const auto variant = [](std::int64_t tokens) {
    return choose_linear({WeightFormat::kBF16, 7168, 7168, tokens, 1}, gpu(132))->variant;
  };
  EXPECT_EQ(variant(16), 0);
  EXPECT_EQ(variant(32), 1);
  EXPECT_EQ(variant(64), 2);
  EXPECT_EQ(variant(128), 2);  // 56 large tiles would leave half of the SMs idle
  EXPECT_EQ(variant(4096), 3);
}

TEST(ChooseLinear, LongSumsThatNoCtaHoldsGoThroughTiles) {
  const auto config = choose_linear({WeightFormat::kBF16, 16, 2000000, 1, 1}, gpu(132));
  ASSERT_TRUE(config.has_value());
  EXPECT_FALSE(config->stream);
}

TEST(ChooseLinear, NoSharedMemoryNoChoice) {
  DeviceInfo info = gpu(132);
  info.smem_per_block = 16384;
  EXPECT_FALSE(choose_linear({WeightFormat::kBF16, 7168, 7168, 64, 1}, info).has_value());
}

ExpertsDesc k3_experts(std::int64_t tokens) {
  return {.gate_up = WeightFormat::kNvFp4,
          .down = WeightFormat::kNvFp4,
          .experts = 896,
          .tokens = tokens,
          .slots = 16,
          .dim = 3584,
          .width = 3072};
}

TEST(ChooseExperts, DecodeStreamsAndPrefillTiles) {
  for (const int sms : kSms) {
    for (const std::int64_t tokens : {1, 2, 8, 64, 224}) {
      const auto config = choose_experts(k3_experts(tokens), gpu(sms));
      ASSERT_TRUE(config.has_value());
      EXPECT_TRUE(config->stream) << tokens;
      EXPECT_EQ(config->chunk, std::min(tokens, kMaxStreamRows));
      const std::int64_t rows = std::min(tokens, kMaxStreamRows);
      expect_stream_plan(config->gate_up, tensor_shape(WeightFormat::kNvFp4, 3072, 3584).segments,
                         rows);
      expect_stream_plan(config->down, tensor_shape(WeightFormat::kNvFp4, 3584, 3072).segments,
                         rows);
      EXPECT_EQ(config->gate_up.cluster, 1);
      EXPECT_EQ(config->down.cluster, 1);
    }
    EXPECT_EQ(choose_experts(k3_experts(512), gpu(sms))->variant, 0);
    EXPECT_EQ(choose_experts(k3_experts(4096), gpu(sms))->variant, 1);
    EXPECT_FALSE(choose_experts(k3_experts(512), gpu(sms))->stream);
  }
}

/// CTAs of a ring plan on an SM; all of them fit there together.
std::int64_t expect_ring_plan(const RingPlan& plan, const DeviceInfo& info) {
  constexpr std::int64_t kSmemOfSystem = 1024;
  const std::int64_t on_sm = ceil_div(plan.ctas, info.num_sms);
  EXPECT_GE(plan.stages, 2);
  EXPECT_LE(on_sm * plan.warps * 32, kRingThreads);
  EXPECT_LE(plan.smem_bytes, info.smem_per_block);
  EXPECT_LE(on_sm * (plan.smem_bytes + kSmemOfSystem), info.smem_per_sm);
  return on_sm;
}

TEST(ChooseExperts, RingsOfFewTokensShareAnSm) {
  for (const int sms : kSms) {
    for (const std::int64_t tokens : {1, 2, 3, 4, 5, 8, 64}) {
      const auto config = choose_experts(k3_experts(tokens), gpu(sms));
      ASSERT_TRUE(config.has_value() && config->ring) << tokens;
      const std::int64_t on_sm = tokens <= 4 ? 2 : 1;
      EXPECT_EQ(expect_ring_plan(config->ring_gate_up, gpu(sms)), on_sm) << tokens;
      EXPECT_EQ(expect_ring_plan(config->ring_down, gpu(sms)), on_sm) << tokens;
      // 14 and 12 segments, in two turns or one.
      EXPECT_EQ(config->ring_gate_up.warps, 14 / on_sm) << tokens;
      EXPECT_EQ(config->ring_down.warps, 12 / on_sm) << tokens;
    }
  }
}

TEST(ChooseExperts, RingsAreForFp4ThatFits) {
  ExpertsDesc desc = k3_experts(8);
  desc.dim *= 8;  // eight such rows of inputs are more than an SM holds
  const auto wide = choose_experts(desc, gpu(132));
  ASSERT_TRUE(wide.has_value());
  EXPECT_TRUE(wide->stream);
  EXPECT_FALSE(wide->ring);
  desc = k3_experts(8);
  desc.gate_up = WeightFormat::kFp8Block;
  EXPECT_FALSE(choose_experts(desc, gpu(132))->ring);
}

TEST(ChooseExperts, AnItemOfOneTokenIsASlot) {
  EXPECT_EQ(choose_experts(k3_experts(1), gpu(132))->items, 16);
}

TEST(ChooseExperts, ItemsSufficeHoweverTokensAreSpread) {
  for (const std::int64_t tokens : {1, 3, 8, 64, 512, 4096}) {
    const auto config = choose_experts(k3_experts(tokens), gpu(132));
    ASSERT_TRUE(config.has_value());
    const std::int64_t pairs = tokens * 16;
    // All tokens at 16 experts; or one token too many at as many experts as possible.
    EXPECT_GE(config->items, 16 * ceil_div(tokens, config->chunk));
    const std::int64_t filled = std::min<std::int64_t>(896, pairs / (config->chunk + 1));
    EXPECT_GE(config->items, 2 * filled);
    EXPECT_GE(config->items, std::min<std::int64_t>(896, pairs));
    EXPECT_LE(config->items, 65535);
  }
}

TEST(ChooseExperts, EveryFormatFits) {
  for (const WeightFormat gate_up : kFormats) {
    for (const WeightFormat down : kFormats) {
      for (const std::int64_t tokens : {1, 300, 5000}) {
        ExpertsDesc desc = k3_experts(tokens);
        desc.gate_up = gate_up;
        desc.down = down;
        EXPECT_TRUE(choose_experts(desc, gpu(132)).has_value());
      }
    }
  }
}

}  // namespace
}  // namespace tandem::cuda
