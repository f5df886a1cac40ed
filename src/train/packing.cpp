#include "train/packing.h"

#include "core/check.h"
#include "core/checked_cast.h"

namespace tandem {
namespace {

void append(MicroBatch& batch, const TrainSequence& sequence, std::int64_t index) {
  const std::int64_t num_rows = isize(sequence.tokens) - 1;
  const std::int64_t first_row = isize(batch.token_ids);
  batch.token_ids.insert(batch.token_ids.end(), sequence.tokens.begin(), sequence.tokens.end() - 1);
  batch.cu_seqlens.push_back(checked_cast<std::int32_t>(first_row + num_rows));
  for (std::int64_t target = sequence.num_prompt; target <= num_rows; ++target) {
    batch.rows.push_back(checked_cast<std::int32_t>(first_row + target - 1));
    batch.targets.push_back(sequence.tokens[usize(target)]);
  }
  batch.cu_targets.push_back(isize(batch.targets));
  batch.sequences.push_back(index);
}

}  // namespace

std::vector<MicroBatch> pack_sequences(std::span<const TrainSequence> sequences,
                                       std::int64_t max_tokens) {
  std::vector<MicroBatch> batches;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const TrainSequence& sequence = sequences[i];
    TDM_CHECK(sequence.num_prompt >= 1 && isize(sequence.tokens) >= 2, sequence.num_prompt,
              sequence.tokens.size());
    const std::int64_t num_rows = isize(sequence.tokens) - 1;
    if (batches.empty() || isize(batches.back().token_ids) + num_rows > max_tokens) {
      MicroBatch& batch = batches.emplace_back();
      batch.cu_seqlens.push_back(0);
      batch.cu_targets.push_back(0);
    }
    append(batches.back(), sequence, static_cast<std::int64_t>(i));
  }
  return batches;
}

}  // namespace tandem
