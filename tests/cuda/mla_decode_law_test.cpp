// The law of splits and the choice of columns of the Hopper kernel of absorbed MLA, without a GPU.
#include <gtest/gtest.h>

#include "backends/cuda/mla/mla_decode.h"

namespace tandem::cuda {
namespace {

constexpr int kHeads[] = {1, 8, 12, 16, 48, 49, 64, 96};

DeviceInfo gpu(std::int64_t smem_per_block) {
  DeviceInfo info;
  info.major = 9;
  info.num_sms = 132;
  info.smem_per_block = smem_per_block;
  return info;
}

TEST(MlaDecodeLaw, SplitsCoverTheKeysExactly) {
  for (const int heads : kHeads) {
    for (int keys = 1; keys <= 1 << 20; keys += keys < 70000 ? 1 : 4095) {
      const int size = split_tiles(heads, keys) * kDecodeTile;
      const int splits = num_splits(heads, keys);
      ASSERT_GE(splits, 1);
      ASSERT_LE(splits, split_law(heads).most_splits);
      ASSERT_GE(std::int64_t{splits} * size, keys);
      ASSERT_LT(std::int64_t{splits - 1} * size, keys);  // none is empty
    }
    EXPECT_EQ(num_splits(heads, 0), 0);
  }
}

TEST(MlaDecodeLaw, ABoundHoldsForAllShorterRows) {
  for (const int heads : kHeads) {
    for (const std::int64_t most : {1, 64, 255, 256, 257, 4096, 32768, 33000, 131072, 1 << 20}) {
      const int bound = max_splits(heads, most);
      for (int keys = 1; keys <= most; keys += keys < 40000 ? 1 : 977) {
        ASSERT_LE(num_splits(heads, keys), bound) << keys << " of " << most;
      }
    }
  }
}

/// What bits depend on: these figures change only with a new law.
TEST(MlaDecodeLaw, IsWrittenDown) {
  struct Row {
    int heads, keys, tiles, splits;
  };
  constexpr Row kRows[] = {{12, 1, 4, 1},         {12, 256, 4, 1},         {12, 257, 4, 2},
                           {12, 4096, 4, 16},     {12, 32768, 4, 128},     {12, 32769, 5, 103},
                           {12, 131072, 16, 128}, {12, 1048576, 128, 128}, {96, 512, 8, 1},
                           {96, 513, 8, 2},       {96, 4096, 8, 8},        {96, 32768, 8, 64},
                           {96, 32769, 9, 57},    {96, 131072, 32, 64},    {96, 1048576, 256, 64}};
  for (const Row& row : kRows) {
    EXPECT_EQ(split_tiles(row.heads, row.keys), row.tiles) << row.heads << ", " << row.keys;
    EXPECT_EQ(num_splits(row.heads, row.keys), row.splits) << row.heads << ", " << row.keys;
  }
}

TEST(MlaDecodeLaw, OneLongRowFillsAnH200) {
  EXPECT_GE(num_splits(12, 131072), 128);      // CTAs
  EXPECT_GE(2 * num_splits(96, 131072), 128);  // pairs
}

TEST(ChooseDecode, ColumnsHoldTheGroupAndMemoryTheStages) {
  for (const std::int64_t limit : {101376, 232448, 334848}) {
    for (const int heads : kHeads) {
      for (const std::int64_t rows : {1, 2, 5, 8, 64, 4096}) {
        for (const std::int64_t sequences : {1, 3, 64}) {
          const auto config = choose_decode({heads, rows, sequences}, gpu(limit));
          if (limit == 101376) {
            EXPECT_FALSE(config.has_value());  // two tiles of keys do not fit
            continue;
          }
          ASSERT_TRUE(config.has_value());
          EXPECT_GE(config->group_rows, 1);
          EXPECT_TRUE(config->ctas == 1 || config->ctas == 2);
          EXPECT_EQ(config->columns % 16, 0);
          EXPECT_LE(config->columns, kDecodeColumns);
          EXPECT_GE(config->ctas * config->columns, config->group_rows * heads);
          EXPECT_TRUE(config->ctas == 1 || config->columns > 16);  // has a kernel
          EXPECT_GE(config->stages, 2);
          EXPECT_LE(config->smem_bytes, limit);
          EXPECT_EQ(config->smem_bytes, DecodeShared(config->columns, config->stages).total);
        }
      }
    }
  }
}

TEST(ChooseDecode, MoreSharedMemoryIsMoreStages) {
  const auto stages = [](int heads, std::int64_t limit) {
    return choose_decode({heads, 1, 1}, gpu(limit))->stages;
  };
  EXPECT_EQ(stages(12, 232448), 2);
  EXPECT_EQ(stages(96, 232448), 2);
  EXPECT_EQ(stages(12, 334848), 4);
  EXPECT_EQ(stages(96, 334848), 3);
}

TEST(ChooseDecode, GroupsOfRowsFollowTheBatch) {
  const DeviceInfo info = gpu(232448);
  EXPECT_EQ(choose_decode({12, 16, 16}, info)->group_rows, 1);
  EXPECT_EQ(choose_decode({12, 16, 16}, info)->columns, 16);
  EXPECT_EQ(choose_decode({12, 16 * 4, 16}, info)->group_rows, 4);
  EXPECT_EQ(choose_decode({12, 16 * 4, 16}, info)->ctas, 1);
  EXPECT_EQ(choose_decode({12, 16 * 8, 16}, info)->group_rows, 8);
  EXPECT_EQ(choose_decode({12, 16 * 8, 16}, info)->ctas, 2);
  EXPECT_EQ(choose_decode({96, 4096, 1}, info)->group_rows, 1);
  EXPECT_EQ(choose_decode({96, 4096, 1}, info)->ctas, 2);
}

TEST(ChooseDecode, RefusesWhatItCannotDo) {
  EXPECT_FALSE(choose_decode({97, 1, 1}, gpu(232448)).has_value());
  EXPECT_FALSE(choose_decode({0, 1, 1}, gpu(232448)).has_value());
  EXPECT_FALSE(choose_decode({12, 0, 1}, gpu(232448)).has_value());
}

TEST(DecodeShared, OperandsAreAligned) {
  for (const int columns : {16, 32, 48}) {
    for (const int stages : {2, 3, 4}) {
      const DecodeShared at(columns, stages);
      for (const int operand : {at.tiles, at.q, at.weights}) {
        EXPECT_EQ(operand % 1024, 0);
      }
      EXPECT_EQ(at.exchange % 16, 0);
      EXPECT_EQ(at.partials % 8, 0);
      EXPECT_EQ(at.shrink % 8, 0);
      EXPECT_EQ(at.sums % 8, 0);
      EXPECT_EQ(at.barriers % 8, 0);
    }
  }
}

}  // namespace
}  // namespace tandem::cuda
