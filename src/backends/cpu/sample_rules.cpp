// sample_rules.cpp — rules on logits, and the most likely tokens. Contract: ops/sample.h. Oracle:
// ops/ref/sample_ref.h. Plain loops: the rules touch few elements, a mask is read word by word, and
// the search for the largest tokens compares each logit with the least of those it has.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "backends/cpu/families.h"
#include "backends/cpu/row_blocks.h"
#include "core/checked_cast.h"

namespace tandem {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr double kNsPerElement = 1.0;

void penalize(float& logit, const SeenToken& seen, const LogitRow& row) {
  logit = logit > 0 ? logit / row.repetition_penalty : logit * row.repetition_penalty;
  logit = std::fma(-static_cast<float>(seen.num_in_response), row.frequency_penalty, logit);
  logit -= seen.num_in_response > 0 ? row.presence_penalty : 0.0F;
}

void forbid(std::span<float> logits, const std::uint32_t* mask) {
  constexpr std::size_t kBits = 32;
  for (std::size_t begin = 0; begin < logits.size(); begin += kBits) {
    const std::uint32_t word = mask[begin / kBits];
    if (word == ~std::uint32_t{0}) {
      continue;
    }
    const std::size_t count = std::min(kBits, logits.size() - begin);
    for (std::size_t i = 0; i < count; ++i) {
      float& logit = logits[begin + i];
      const bool is_usable = logit < kInf;  // not for a NaN
      logit = ((word >> i) & 1U) == 0 && is_usable ? -kInf : logit;
    }
  }
}

void adjust_logits(const ExecCtx& ctx, F32Mat logits, const LogitChanges& changes) {
  const std::int64_t vocab = logits.size(1);
  const RowBlocks blocks =
      row_blocks(isize(changes.rows), kNsPerElement * static_cast<double>(vocab));
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t i = begin; i < end; ++i) {
      const LogitRow& row = changes.rows[usize(i)];
      float* const z = logits.row(row.row);
      for (std::int32_t at = row.seen_begin; at < row.seen_end; ++at) {
        const SeenToken& seen = changes.seen[usize(at)];
        penalize(z[seen.token], seen, row);
      }
      for (std::int32_t at = row.bias_begin; at < row.bias_end; ++at) {
        const LogitBias& bias = changes.biases[usize(at)];
        z[bias.token] += bias.bias;
      }
      if (row.mask >= 0) {
        forbid({z, usize(vocab)}, changes.masks.row(row.mask));
      }
    }
  });
}

/// Keeps ids sorted by falling logit while ids rise, so that ties stay in order.
void find_top(std::span<std::int32_t> ids, std::span<const float> logits) {
  const auto value = [&](std::int32_t id) {
    const float logit = logits[usize(id)];
    return std::isnan(logit) ? -kInf : logit;
  };
  std::size_t count = 0;
  for (std::int32_t id = 0; usize(id) < logits.size(); ++id) {
    const float logit = value(id);
    if (count == ids.size() && !(logit > value(ids[count - 1]))) {
      continue;
    }
    std::size_t at = count < ids.size() ? count++ : count - 1;
    for (; at > 0 && logit > value(ids[at - 1]); --at) {
      ids[at] = ids[at - 1];
    }
    ids[at] = id;
  }
}

void top_tokens(const ExecCtx& ctx, I32Mat ids, ConstF32Mat logits) {
  const std::int64_t vocab = logits.size(1);
  const std::int64_t count = ids.size(1);
  if (count == 0) {
    return;
  }
  const RowBlocks blocks = row_blocks(logits.size(0), kNsPerElement * static_cast<double>(vocab));
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t) {
    for (std::int64_t t = begin; t < end; ++t) {
      find_top({ids.row(t), usize(count)}, {logits.row(t), usize(vocab)});
    }
  });
}

}  // namespace

void cpu_add_sample_rule_ops(SampleOps& ops) {
  ops.adjust_logits = adjust_logits;
  ops.top_tokens = top_tokens;
}

}  // namespace tandem
