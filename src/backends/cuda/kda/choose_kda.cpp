#include "backends/cuda/kda/choose_kda.h"

namespace tandem::cuda {
namespace {

/// Rows from which a sequence is as long as a kernel of one token is short: then its own warps
/// count, not those of the sequences beside it.
constexpr std::int64_t kLongSequence = 64;

}  // namespace

RecurrencePlan choose_recurrence(const RecurrenceDesc& desc, const DeviceInfo& info) {
  RecurrencePlan plan;
  plan.chunk = desc.rows <= desc.seqs ? 1 : desc.rows <= 4 * desc.seqs ? 4 : 16;
  // Many columns a lane share the reads of q, k and g and move wide words; few give each SM more
  // warps and each token a shorter chain. A long sequence is bound by that chain.
  const bool one_is_long = desc.rows - desc.seqs >= kLongSequence;
  const std::int64_t columns = desc.heads * desc.values * (one_is_long ? 1 : desc.seqs);
  const std::int64_t enough_warps = (one_is_long ? 8 : 4) * std::int64_t{info.num_sms};
  plan.columns = desc.adjacent;
  while (plan.columns > 1 && columns / (kColumnLanesOfWarp * plan.columns) < enough_warps) {
    plan.columns /= 2;
  }
  // Warps of a block share its copies of q, k and g; but an SM's warps share its shared memory.
  plan.state_warps = kMostStateWarps;
  const auto blocks = [&](RecurrencePlan with, int warps) {
    with.state_warps = warps;
    return desc.seqs * desc.heads * with.column_blocks(desc.values);
  };
  while (plan.state_warps > 1 && blocks(plan, plan.state_warps - 1) <= info.num_sms) {
    --plan.state_warps;
  }
  return plan;
}

int choose_decode_columns(std::int64_t items, const DeviceInfo& info) {
  // More blocks an item as long as all of them run at once, of which two fit an SM. But clusters of
  // four only with an SM a block: 64 items in k3-mini take 14.3 us in clusters of four, 128 items
  // in clusters of two 8.3 us.
  const std::int64_t sms = info.num_sms;
  return 4 * items <= sms ? 1 : items <= sms ? 2 : 4;
}

}  // namespace tandem::cuda
