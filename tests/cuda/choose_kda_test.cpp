// The choosers of the KDA kernels, for GPUs that are not here.
#include "backends/cuda/kda/choose_kda.h"

#include <gtest/gtest.h>

#include "ops/kda.h"

namespace tandem::cuda {
namespace {

constexpr std::int64_t kValues = 128;

DeviceInfo gpu(int sms) {
  DeviceInfo info;
  info.num_sms = sms;
  return info;
}

std::int64_t warps(const RecurrencePlan& plan, std::int64_t items) {
  return items * plan.column_blocks(kValues) * plan.state_warps;
}

TEST(ChooseRecurrence, OneLongSequenceFillsTheSms) {
  // 8 and 12 heads: a column a lane, and as many blocks as there are SMs.
  EXPECT_EQ(choose_recurrence({1, 4096, 8, kValues, 4}, gpu(132)), (RecurrencePlan{1, 2, 16}));
  EXPECT_EQ(choose_recurrence({1, 4096, 12, kValues, 4}, gpu(132)), (RecurrencePlan{1, 3, 16}));
  EXPECT_EQ(choose_recurrence({1, 4096, 96, kValues, 4}, gpu(132)), (RecurrencePlan{2, 4, 16}));
}

TEST(ChooseRecurrence, DecodeMovesWideWordsOnceThereIsEnoughOfIt) {
  EXPECT_EQ(choose_recurrence({1, 1, 12, kValues, 4}, gpu(132)), (RecurrencePlan{1, 3, 1}));
  EXPECT_EQ(choose_recurrence({16, 16, 96, kValues, 4}, gpu(132)), (RecurrencePlan{4, 4, 1}));
  EXPECT_EQ(choose_recurrence({64, 64, 12, kValues, 4}, gpu(132)), (RecurrencePlan{4, 4, 1}));
  EXPECT_EQ(choose_recurrence({64, 64, 12, kValues, 2}, gpu(132)).columns, 2);
}

TEST(ChooseRecurrence, DecodesBesideAPromptDoNotSlowItDown) {
  EXPECT_EQ(choose_recurrence({64, 4096 + 63, 12, kValues, 4}, gpu(132)).columns, 1);
}

TEST(ChooseRecurrence, EveryPlanCoversTheState) {
  for (const int sms : {1, 132, 148, 152, 212}) {
    for (const std::int64_t seqs : {1, 3, 64, 1000}) {
      for (const std::int64_t rows : {seqs, 3 * seqs, 4096 + seqs}) {
        for (const std::int64_t heads : {1, 12, 96}) {
          for (const int adjacent : {1, 2, 4}) {
            const RecurrencePlan plan =
                choose_recurrence({seqs, rows, heads, kValues, adjacent}, gpu(sms));
            EXPECT_LE(plan.columns, adjacent);
            EXPECT_GE(plan.state_warps, 1);
            EXPECT_LE(plan.state_warps, kMostStateWarps);
            EXPECT_EQ(kKdaCheckpointRows % plan.chunk, 0);
            EXPECT_GE(warps(plan, 1) * kColumnLanesOfWarp * plan.columns, kValues);
          }
        }
      }
    }
  }
}

TEST(ChooseDecode, FewStatesAreSpreadOverMoreSms) {
  EXPECT_EQ(choose_decode_columns(12, gpu(132)), 1);
  EXPECT_EQ(choose_decode_columns(33, gpu(132)), 1);
  EXPECT_EQ(choose_decode_columns(34, gpu(132)), 2);
  EXPECT_EQ(choose_decode_columns(96, gpu(132)), 2);
  EXPECT_EQ(choose_decode_columns(16 * 12, gpu(132)), 4);
  EXPECT_EQ(choose_decode_columns(16 * 96, gpu(132)), 4);
}

}  // namespace
}  // namespace tandem::cuda
