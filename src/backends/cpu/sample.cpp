// sample.cpp — token sampling. Contract: ops/sample.h. Oracle: ops/ref/sample_ref.h.
//
// Order: 1. numerical check: a NaN, a +inf, or no finite logit at all gives id -1. 2. temperature
// 0: the largest logit, ties to the lower id. 3. weights e = exp((logit - max) / T), so the largest
// is 1. 4. top_k: the k first in the order (logit falling, id rising). 5. top_p: the shortest
// prefix of that order whose mass reaches top_p of the mass left by top_k; at least one token. 6.
// min_p: weights below min_p are dropped (ratios to the largest, so renormalising does not
// matter). 7. one uniform number from the row's key; inverse CDF over ids in increasing order, sums
// in double.
//
// Ranks compare logits, never the rounded weights. top_p needs no full sort: mass is summed in
// buckets of z = (logit - max) / T, and only the bucket where it reaches top_p is sorted. A row is
// one thread's work in one fixed order.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/sample.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "backends/cpu/families.h"
#include "backends/cpu/row_blocks.h"
#include "backends/cpu/simd_loops-inl.h"
#include "backends/cpu/simd_math-inl.h"
#include "core/checked_cast.h"
#include "core/rng.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr double kNsPerElement = 1.5;
constexpr std::size_t kCdfBlock = 512;
constexpr std::size_t kBuckets = 2048;
constexpr float kBucketsPerUnit = 64.0F;  // of z: the last bucket begins at e^-32 of the largest

/// One thread's scratch.
struct Scratch {
  std::span<float> weights;       // [V]
  std::span<std::int32_t> order;  // [V]
  std::span<double> block_sums;   // [ceil(V / kCdfBlock)]
  std::span<double> bucket_mass;  // [kBuckets]
};

/// The largest logit; NaN when the row may not be sampled from.
HWY_INLINE float checked_max(const float* x, std::size_t n) {
  const FloatTag d;
  FloatVec top = hn::Set(d, -std::numeric_limits<float>::infinity());
  FloatVec nan = hn::Zero(d);  // turns to NaN in a lane that has seen one
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = hn::LoadU(d, x + i);
    top = hn::Max(top, v);
    nan = hn::IfThenElse(hn::IsNaN(v), v, nan);
  }
  float result = hn::GetLane(hn::MaxOfLanes(d, top));
  bool bad = !hn::AllFalse(d, hn::IsNaN(nan));
  for (; i < n; ++i) {
    bad = bad || std::isnan(x[i]);
    result = std::max(result, x[i]);
  }
  return bad || std::isinf(result) ? std::numeric_limits<float>::quiet_NaN() : result;
}

HWY_INLINE std::int32_t first_equal(const float* x, std::size_t n, float value) {
  const FloatTag d;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto hit = hn::Eq(hn::LoadU(d, x + i), hn::Set(d, value));
    if (!hn::AllFalse(d, hit)) {
      return static_cast<std::int32_t>(i) + static_cast<std::int32_t>(hn::FindFirstTrue(d, hit));
    }
  }
  while (x[i] != value) {
    ++i;
  }
  return static_cast<std::int32_t>(i);
}

/// weights = exp((logits - max) / T).
HWY_INLINE void fill_weights(std::span<float> weights, const float* logits, float max,
                             float inv_t) {
  const FloatTag d;
  for_each_vector(weights.size(), [&](std::size_t i, auto part) HWY_ATTR {
    const auto z = hn::Mul(hn::Sub(part.load(logits + i), hn::Set(d, max)), hn::Set(d, inv_t));
    part.store(vexp(d, z), weights.data() + i);
  });
}

/// Sums of blocks of kCdfBlock weights, each on 8 interleaved chains; returns their sum in order.
double sum_blocks(const Scratch& s) {
  double total = 0;
  for (std::size_t b = 0; b < s.block_sums.size(); ++b) {
    const std::size_t begin = b * kCdfBlock;
    const std::size_t end = std::min(s.weights.size(), begin + kCdfBlock);
    double chains[8] = {};
    for (std::size_t i = begin; i < end; ++i) {
      chains[i % 8] += static_cast<double>(s.weights[i]);
    }
    s.block_sums[b] = ((chains[0] + chains[1]) + (chains[2] + chains[3])) +
                      ((chains[4] + chains[5]) + (chains[6] + chains[7]));
    total += s.block_sums[b];
  }
  return total;
}

/// The id at which the running sum first exceeds u * total.
std::int32_t draw(const Scratch& s, double u) {
  const double target = u * sum_blocks(s);
  double before = 0;
  std::size_t block = 0;
  while (block + 1 < s.block_sums.size() && before + s.block_sums[block] <= target) {
    before += s.block_sums[block];
    ++block;
  }
  const std::size_t end = std::min(s.weights.size(), (block + 1) * kCdfBlock);
  std::int32_t last = -1;
  for (std::size_t i = block * kCdfBlock; i < end; ++i) {
    before += static_cast<double>(s.weights[i]);
    if (s.weights[i] > 0) {
      last = static_cast<std::int32_t>(i);
      if (before > target) {
        return last;
      }
    }
  }
  // The block's own order of summation differs by rounding: the draw falls on its end. An empty
  // last block (all dropped) leaves the last token before it.
  for (std::size_t i = block * kCdfBlock; last < 0 && i-- > 0;) {
    last = s.weights[i] > 0 ? static_cast<std::int32_t>(i) : -1;
  }
  return last;
}

/// Where a row's order (logit falling, id rising) is cut: tokens after (logit, id) are dropped.
struct Cut {
  float logit;
  std::int32_t id;
};

void drop_after(const Scratch& s, const float* logits, Cut cut) {
  for (std::size_t i = 0; i < s.weights.size(); ++i) {
    const bool kept =
        logits[i] > cut.logit || (logits[i] == cut.logit && static_cast<std::int32_t>(i) <= cut.id);
    s.weights[i] = kept ? s.weights[i] : 0.0F;
  }
}

/// The order of tokens: logit falling, id rising.
struct RanksBefore {
  const float* logits;
  bool operator()(std::int32_t a, std::int32_t b) const {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  }
};

void keep_top_k(const Scratch& s, const float* logits, std::size_t k) {
  for (std::size_t i = 0; i < s.order.size(); ++i) {
    s.order[i] = static_cast<std::int32_t>(i);
  }
  const auto last = s.order.begin() + static_cast<std::ptrdiff_t>(k) - 1;
  std::nth_element(s.order.begin(), last, s.order.end(), RanksBefore{logits});
  drop_after(s, logits, {logits[*last], *last});
}

/// Falls as the logit rises: every step of the formula is monotonic in floating point.
std::size_t bucket_of(float logit, float max, float inv_t) {
  const float distance = (max - logit) * inv_t * kBucketsPerUnit;
  return distance < static_cast<float>(kBuckets - 1) ? static_cast<std::size_t>(distance)
                                                     : kBuckets - 1;
}

/// Keeps the shortest prefix of the order that holds `top_p` of the present mass.
void keep_top_p(const Scratch& s, const float* logits, float max, float inv_t, float top_p) {
  const double wanted = static_cast<double>(top_p) * sum_blocks(s);
  std::fill(s.bucket_mass.begin(), s.bucket_mass.end(), 0.0);
  for (std::size_t i = 0; i < s.weights.size(); ++i) {
    if (s.weights[i] > 0) {
      s.bucket_mass[bucket_of(logits[i], max, inv_t)] += static_cast<double>(s.weights[i]);
    }
  }
  double mass = 0;
  std::size_t bucket = 0;
  while (bucket + 1 < kBuckets && mass + s.bucket_mass[bucket] < wanted) {
    mass += s.bucket_mass[bucket];
    ++bucket;
  }
  std::size_t count = 0;
  for (std::size_t i = 0; i < s.weights.size(); ++i) {
    if (s.weights[i] > 0 && bucket_of(logits[i], max, inv_t) == bucket) {
      s.order[count++] = static_cast<std::int32_t>(i);
    }
  }
  if (count == 0) {
    return;  // rounding left less than `wanted` in all: everything is kept
  }
  std::sort(s.order.begin(), s.order.begin() + static_cast<std::ptrdiff_t>(count),
            RanksBefore{logits});
  std::size_t last = 0;
  mass += static_cast<double>(s.weights[usize(s.order[0])]);
  while (last + 1 < count && mass < wanted) {
    ++last;
    mass += static_cast<double>(s.weights[usize(s.order[last])]);
  }
  drop_after(s, logits, {logits[s.order[last]], s.order[last]});
}

std::int32_t sample_row(const Scratch& s, const float* logits, const SampleRow& row) {
  const std::size_t n = s.weights.size();
  const float max = checked_max(logits, n);
  if (std::isnan(max)) {
    return -1;
  }
  const SamplingParams& params = row.params;
  if (params.temperature == 0.0F) {
    return first_equal(logits, n, max);
  }
  const float inv_t = 1.0F / params.temperature;
  fill_weights(s.weights, logits, max, inv_t);
  if (params.top_k > 0 && usize(params.top_k) < n) {
    keep_top_k(s, logits, usize(params.top_k));
  }
  if (params.top_p < 1.0F) {
    keep_top_p(s, logits, max, inv_t, params.top_p);
  }
  if (params.min_p > 0.0F) {
    for (float& weight : s.weights) {
      weight = weight >= params.min_p ? weight : 0.0F;
    }
  }
  return draw(s, Rng(row.key).uniform());
}

void sample(const ExecCtx& ctx, std::span<std::int32_t> ids, ConstF32Mat logits,
            std::span<const SampleRow> rows) {
  const std::int64_t n = logits.size(1);
  const std::int64_t num_sums =
      (n + static_cast<std::int64_t>(kCdfBlock) - 1) / static_cast<std::int64_t>(kCdfBlock);
  const std::int64_t threads = ctx.pool->num_threads();
  const ArenaScope scope(*ctx.workspace);
  const auto weights = ctx.workspace->take<float>(threads * n);
  const auto order = ctx.workspace->take<std::int32_t>(threads * n);
  const auto sums = ctx.workspace->take<double>(threads * num_sums);
  constexpr std::int64_t kNumBuckets = kBuckets;
  const auto buckets = ctx.workspace->take<double>(threads * kNumBuckets);
  const RowBlocks blocks = row_blocks(logits.size(0), kNsPerElement * static_cast<double>(n));
  ctx.pool->parallel_for(blocks.count(), [&](std::int64_t block, int thread) {
    const Scratch scratch{weights.subspan(usize(thread * n), usize(n)),
                          order.subspan(usize(thread * n), usize(n)),
                          sums.subspan(usize(thread * num_sums), usize(num_sums)),
                          buckets.subspan(usize(thread * kNumBuckets), kBuckets)};
    for (std::int64_t t = blocks.begin(block); t < blocks.end(block); ++t) {
      ids[usize(t)] = sample_row(scratch, logits.row(t), rows[usize(t)]);
    }
  });
}

SampleOps sample_ops() {
  SampleOps ops;
  ops.sample = sample;
  return ops;
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(sample_ops);
SampleOps cpu_sample_ops() {
  return HWY_DYNAMIC_DISPATCH(sample_ops)();
}

}  // namespace tandem
#endif  // HWY_ONCE
