// loss.cpp — log-probability and entropy of one token a row. Contract: ops/loss.h. Oracle:
// ops/ref/loss_ref.h.
//
// Per row, z = (logit - max) / T, S = sum e^z, B = sum e^z z:  logprob = z_target - ln S,
// H = ln S - B / S. The maximum is exact; S and B are summed in fp32 within chunks of 1024 and in
// double over the chunks, so the error does not grow with the vocabulary. A row is one thread's
// work, in one order: its bits depend on nothing else. A logit of -inf has probability 0.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/loss.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <algorithm>
#include <cmath>
#include <limits>

#include "backends/cpu/families.h"
#include "backends/cpu/row_blocks.h"
#include "backends/cpu/simd_loops-inl.h"
#include "backends/cpu/simd_math-inl.h"
#include "core/checked_cast.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr double kNsPerElement = 1.0;
constexpr std::size_t kChunk = 1024;

/// The largest element of a row (-inf for an empty one; a NaN may be passed over, S shows it).
HWY_INLINE float row_max(const float* x, std::size_t n) {
  const FloatTag d;
  const std::size_t lanes = hn::Lanes(d);
  const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  FloatVec top0 = lowest;
  FloatVec top1 = lowest;
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    top0 = hn::Max(top0, hn::LoadU(d, x + i));
    top1 = hn::Max(top1, hn::LoadU(d, x + i + lanes));
  }
  float top = hn::GetLane(hn::MaxOfLanes(d, hn::Max(top0, top1)));
  for (; i < n; ++i) {
    top = std::max(top, x[i]);
  }
  return top;
}

/// What a row's softmax needs: z = (logit - max) inv_t.
struct RowSoftmax {
  float max = 0;
  float inv_t = 1;
  double sum = 0;       // S
  double weighted = 0;  // B

  [[nodiscard]] float log_sum() const { return static_cast<float>(std::log(sum)); }
  [[nodiscard]] float entropy() const { return static_cast<float>(std::log(sum) - weighted / sum); }
};

/// One chunk's S and B. A partial vector's unused lanes (n not a multiple) are masked out.
HWY_INLINE void add_chunk(RowSoftmax& row, const float* x, std::size_t n) {
  const FloatTag d;
  const std::size_t lanes = hn::Lanes(d);
  const auto max = hn::Set(d, row.max);
  const auto inv_t = hn::Set(d, row.inv_t);
  FloatVec sum0 = hn::Zero(d);
  FloatVec sum1 = hn::Zero(d);
  FloatVec weighted0 = hn::Zero(d);
  FloatVec weighted1 = hn::Zero(d);
  const auto step = [&](FloatVec& sum, FloatVec& weighted, FloatVec logit) HWY_ATTR {
    const auto z = hn::Mul(hn::Sub(logit, max), inv_t);
    const auto e = vexp(d, z);
    sum = hn::Add(sum, e);
    // e z -> 0 as z -> -inf; a NaN must stay, so the test is for "is zero", not "is positive".
    weighted = hn::Add(weighted, hn::IfThenZeroElse(hn::Eq(e, hn::Zero(d)), hn::Mul(e, z)));
  };
  std::size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    step(sum0, weighted0, hn::LoadU(d, x + i));
    step(sum1, weighted1, hn::LoadU(d, x + i + lanes));
  }
  if (i + lanes <= n) {
    step(sum0, weighted0, hn::LoadU(d, x + i));
    i += lanes;
  }
  if (i < n) {
    const auto used = hn::FirstN(d, n - i);
    const auto logit = hn::IfThenElse(used, Tail{n - i}.load(x + i),
                                      hn::Set(d, -std::numeric_limits<float>::infinity()));
    step(sum1, weighted1, logit);
  }
  row.sum += static_cast<double>(hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1))));
  row.weighted +=
      static_cast<double>(hn::GetLane(hn::SumOfLanes(d, hn::Add(weighted0, weighted1))));
}

RowSoftmax row_softmax(const float* logits, std::size_t n, float temperature) {
  RowSoftmax row;
  row.max = row_max(logits, n);
  row.inv_t = 1.0F / temperature;
  for (std::size_t i = 0; i < n; i += kChunk) {
    add_chunk(row, logits + i, std::min(kChunk, n - i));
  }
  return row;
}

RowBlocks token_blocks(ConstF32Mat logits, double ns_per_element) {
  return row_blocks(logits.size(0), ns_per_element * static_cast<double>(logits.size(1)));
}

void log_prob(const ExecCtx& ctx, F32Vec logprob, F32Vec entropy, ConstF32Mat logits,
              ConstI32Vec targets, ConstF32Vec temperature) {
  const auto body = [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    for (std::int64_t t = begin; t < end; ++t) {
      float row_logprob = 0;
      float row_entropy = 0;
      if (targets(t) >= 0) {
        const RowSoftmax row = row_softmax(logits.row(t), usize(logits.size(1)), temperature(t));
        row_logprob = (logits.row(t)[targets(t)] - row.max) * row.inv_t - row.log_sum();
        row_entropy = row.entropy();
      }
      logprob(t) = row_logprob;
      if (!entropy.empty()) {
        entropy(t) = row_entropy;
      }
    }
  };
  parallel_rows(ctx, token_blocks(logits, kNsPerElement), body);
}

/// d_logit = (d_logprob (hit - p) - d_entropy p (ln p + H)) / T; d_row may be the logits' row.
void log_prob_bwd_row(float* d_row, const float* logits, std::size_t n, const RowSoftmax& row,
                      float d_logprob, float d_entropy) {
  const FloatTag d;
  const auto max = hn::Set(d, row.max);
  const auto inv_t = hn::Set(d, row.inv_t);
  const auto log_sum = hn::Set(d, row.log_sum());
  const auto entropy = hn::Set(d, row.entropy());
  const auto dl = hn::Set(d, d_logprob);
  const auto dh = hn::Set(d, d_entropy);
  for_each_vector(n, [&](std::size_t i, auto part) HWY_ATTR {
    const auto z = hn::Mul(hn::Sub(part.load(logits + i), max), inv_t);
    const auto log_p = hn::Sub(z, log_sum);
    const auto p = vexp(d, log_p);
    const auto slope = hn::MulAdd(dh, hn::Add(log_p, entropy), dl);
    // p (ln p + H) -> 0 as p -> 0, where ln p may be -inf.
    const auto grad = hn::IfThenZeroElse(hn::Eq(p, hn::Zero(d)), hn::Mul(p, slope));
    part.store(hn::Neg(hn::Mul(grad, inv_t)), d_row + i);
  });
}

void log_prob_bwd(const ExecCtx& ctx, F32Mat d_logits, ConstF32Vec d_logprob, ConstF32Vec d_entropy,
                  ConstF32Mat logits, ConstI32Vec targets, ConstF32Vec temperature) {
  const std::size_t n = usize(logits.size(1));
  const auto body = [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    for (std::int64_t t = begin; t < end; ++t) {
      if (targets(t) < 0) {
        std::fill_n(d_logits.row(t), n, 0.0F);
        continue;
      }
      const RowSoftmax row = row_softmax(logits.row(t), n, temperature(t));
      const float d_h = d_entropy.empty() ? 0.0F : d_entropy(t);
      log_prob_bwd_row(d_logits.row(t), logits.row(t), n, row, d_logprob(t), d_h);
      d_logits.row(t)[targets(t)] += d_logprob(t) * row.inv_t;
    }
  };
  parallel_rows(ctx, token_blocks(logits, 2 * kNsPerElement), body);
}

LossOps loss_ops() {
  return {.log_prob = log_prob, .log_prob_bwd = log_prob_bwd};
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(loss_ops);
LossOps cpu_loss_ops() {
  return HWY_DYNAMIC_DISPATCH(loss_ops)();
}

}  // namespace tandem
#endif  // HWY_ONCE
