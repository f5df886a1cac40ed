// sample_filter.cu — where top_k and top_p cut a row.   Contract: ops/sample.h
// Oracle    ops/ref/sample_ref.h
// Method    tokens have an order (rank_of) and a mass: 1 for top_k, the weight in fixed point for
//           top_p. Wanted is the token at which the mass, summed from the best on, reaches a
//           given value. Masses are summed in buckets of the distance to the largest logit; the
//           bucket where the sum gets there holds few tokens, whose rank is then found 11 bits at a
//           time. No sort, and integer sums: the result depends on no order.
// Traffic   two reads of the row per filter that is on; the list of a bucket lies in shared memory
//           (a bucket that does not fit, in a flat row, is read again for every 11 bits).
// Launch    one block a row; a row without filters costs a look at its peaks; graph-safe.
#include <cmath>
#include <cstdint>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/reduce.cuh"
#include "backends/cuda/sample_rows.cuh"
#include "core/checked_cast.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
constexpr int kListCapacity = 2048;
constexpr float kBucketsPerUnit = 64.0F;  // the last bucket begins 32 units below the maximum
// 2^20 tokens of the largest weight, 1, still fit into 64 bits. Weights below 2^-44 count as 0.
constexpr float kMassOfOne = 0x1p43F;
static_assert(kBins == 2 * kThreads);

struct Crossing {
  std::int32_t bin;         // where the running sum reaches what is wanted; -1: nowhere
  std::uint64_t remaining;  // what is wanted of this bin
};

struct Shared {
  std::uint32_t low[kBins];  // masses by bin, in two halves: 32-bit atomics are native
  std::uint32_t high[kBins];
  std::uint64_t warp_mass[kWarps];
  std::uint64_t list[kListCapacity];  // ranks of a bucket's tokens, in no order
  std::uint32_t list_size;            // may exceed the capacity
  Crossing crossing;
  RowHead head;
};

__device__ __forceinline__ void add_mass(Shared& s, int bin, std::uint64_t mass) {
  const auto low = static_cast<std::uint32_t>(mass);
  const std::uint32_t before = atomicAdd(&s.low[bin], low);
  const std::uint32_t carry = before + low < before ? 1U : 0U;
  const std::uint32_t high = static_cast<std::uint32_t>(mass >> 32) + carry;
  if (high != 0) {
    atomicAdd(&s.high[bin], high);
  }
}

/// Reads a bin and clears it for the next histogram.
__device__ __forceinline__ std::uint64_t take_mass(Shared& s, int bin) {
  const std::uint64_t mass = (std::uint64_t{s.high[bin]} << 32) | s.low[bin];
  s.low[bin] = 0;
  s.high[bin] = 0;
  return mass;
}

/// The first bin up to which the histogram holds wanted(its whole mass) >= 1. Leaves the histogram
/// empty. All threads of the block.
template <typename Wanted>
__device__ __forceinline__ Crossing find_crossing(Shared& s, const Wanted& wanted_of) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  __syncthreads();  // all masses are in; the last crossing has been read by all
  const int first = 2 * static_cast<int>(threadIdx.x);
  const std::uint64_t mass0 = take_mass(s, first);
  const std::uint64_t mass1 = take_mass(s, first + 1);
  const std::uint64_t through =  // of the warp's bins up to this thread's
      warp_running_sum(mass0 + mass1);
  if (lane == kWarp - 1) {
    s.warp_mass[warp] = through;
  }
  if (threadIdx.x == 0) {
    s.crossing = {-1, 0};
  }
  __syncthreads();  // every warp's mass is in
  std::uint64_t before = through - (mass0 + mass1);
  std::uint64_t total = 0;
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? s.warp_mass[w] : 0;
    total += s.warp_mass[w];
  }
  const std::uint64_t wanted = wanted_of(total);
  if (before < wanted && wanted <= before + mass0 + mass1) {  // true of one thread at most
    const bool second = before + mass0 < wanted;
    s.crossing = {first + (second ? 1 : 0), wanted - before - (second ? mass0 : 0)};
  }
  __syncthreads();  // the crossing is known
  return s.crossing;
}

/// fn(logit, rank) for every token of the row that `bound` keeps.
template <typename Fn>
__device__ __forceinline__ void each_kept(const TokenRow& row, std::uint64_t bound, const Fn& fn) {
  constexpr int kBatch = 8;  // loads in flight
  for (int base = static_cast<int>(threadIdx.x); base < row.vocab; base += kThreads * kBatch) {
    float logits[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int id = base + j * kThreads;
      logits[j] = id < row.vocab ? row.logits[id] : 0.0F;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int id = base + j * kThreads;
      const std::uint64_t rank = rank_of(logits[j], id);
      if (id < row.vocab && rank >= bound) {
        fn(logits[j], rank);
      }
    }
  }
}

/// Falls as the logit rises: every step of the formula is monotonic in floating point.
__device__ __forceinline__ int bucket_of(float max, float logit, float per_unit) {
  const float distance = (max - logit) * per_unit;
  return distance < static_cast<float>(kBins - 1) ? static_cast<int>(distance) : kBins - 1;
}

/// top_k: tokens whose weight is surely 0 need not be counted, they are never drawn.
struct CountMass {
  float per_unit;
  std::uint64_t wanted_count;
  __device__ std::uint64_t mass(const TokenRow& row, float logit) const {
    return row.z(logit) > -104.0F ? 1 : 0;
  }
  __device__ std::uint64_t wanted(std::uint64_t) const { return wanted_count; }
};

struct WeightMass {
  float per_unit;
  float top_p;
  __device__ std::uint64_t mass(const TokenRow& row, float logit) const {
    return __float2ull_rn(row.weight(logit) * kMassOfOne);
  }
  __device__ std::uint64_t wanted(std::uint64_t total) const {
    const double share = ceil(static_cast<double>(top_p) * static_cast<double>(total));
    // At least one token; rounding to double must not ask for more than there is.
    return share < 1.0 ? 1 : min(static_cast<std::uint64_t>(share), total);
  }
};

/// The rank of the token at which the mass of the kept tokens reaches what is wanted; `bound` when
/// it does not. The histogram is empty before and after. All threads of the block.
template <typename Mass>
__device__ std::uint64_t cut_row(Shared& s, const TokenRow& row, std::uint64_t bound,
                                 const Mass& measure) {
  if (threadIdx.x == 0) {
    s.list_size = 0;
  }
  each_kept(row, bound, [&](float logit, std::uint64_t) {
    const std::uint64_t mass = measure.mass(row, logit);
    if (mass != 0) {
      add_mass(s, bucket_of(row.max, logit, measure.per_unit), mass);
    }
  });
  Crossing crossing = find_crossing(s, [&](std::uint64_t total) { return measure.wanted(total); });
  if (crossing.bin < 0) {
    return bound;
  }
  const int bucket = crossing.bin;
  each_kept(row, bound, [&](float logit, std::uint64_t rank) {
    if (bucket_of(row.max, logit, measure.per_unit) == bucket && measure.mass(row, logit) != 0) {
      const std::uint32_t at = atomicAdd(&s.list_size, 1U);
      if (at < kListCapacity) {
        s.list[at] = rank;
      }
    }
  });
  __syncthreads();  // the list is complete
  const std::uint32_t size = s.list_size;
  std::uint64_t cut = 0;
  std::uint64_t known = 0;  // which bits of `cut` are settled
  for (int shift = 64 - kDigitBits;; shift = max(shift - kDigitBits, 0)) {
    const auto count = [&](std::uint64_t rank) {
      if (((rank ^ cut) & known) == 0) {
        const int digit = static_cast<int>((rank >> shift) & (kBins - 1));
        add_mass(s, kBins - 1 - digit, measure.mass(row, logit_of_rank(rank)));
      }
    };
    if (size <= kListCapacity) {
      for (std::uint32_t i = threadIdx.x; i < size; i += kThreads) {
        count(s.list[i]);
      }
    } else {
      each_kept(row, bound, [&](float logit, std::uint64_t rank) {
        if (bucket_of(row.max, logit, measure.per_unit) == bucket) {
          count(rank);
        }
      });
    }
    crossing = find_crossing(s, [&](std::uint64_t) { return crossing.remaining; });
    cut |= static_cast<std::uint64_t>(kBins - 1 - crossing.bin) << shift;
    known |= std::uint64_t{kBins - 1} << shift;
    if (shift == 0) {
      return cut;
    }
  }
}

/// The peak of a row from its chunks'. One warp.
__device__ __forceinline__ Peak row_peak(const Peak* chunks, int num_chunks) {
  Peak best{-INFINITY, INT32_MAX};
  bool bad = false;
  for (int c = static_cast<int>(threadIdx.x) % kWarp; c < num_chunks; c += kWarp) {
    bad = bad || isnan(chunks[c].max);
    best = better(chunks[c], best);
  }
  best = warp_best(best);
  bad = __any_sync(kFullWarp, bad) != 0 || isinf(best.max);
  return {bad ? NAN : best.max, best.id};
}

__global__ void __launch_bounds__(kThreads) row_head_kernel(const SampleArgs args) {
  begin_kernel();
  __shared__ Shared s;
  const std::int64_t t = blockIdx.x;
  const SamplingParams params = args.rows[t].params;
  if (threadIdx.x < kWarp) {
    const Peak peak = row_peak(args.peaks + t * args.num_chunks, args.num_chunks);
    if (threadIdx.x == 0) {
      s.head = {peak, 0};
    }
  }
  for (int bin = static_cast<int>(threadIdx.x); bin < kBins; bin += kThreads) {
    s.low[bin] = 0;
    s.high[bin] = 0;
  }
  __syncthreads();  // the peak is known, the histogram is empty
  RowHead head = s.head;
  if (!isnan(head.peak.max) && params.temperature != 0.0F) {
    const TokenRow row = token_row(args, t, head.peak.max, params.temperature);
    if (params.top_k > 0 && params.top_k < args.vocab) {
      head.bound = cut_row(s, row, head.bound,
                           CountMass{kBucketsPerUnit, static_cast<std::uint64_t>(params.top_k)});
    }
    if (params.top_p < 1.0F) {
      head.bound =
          cut_row(s, row, head.bound, WeightMass{row.inv_t * kBucketsPerUnit, params.top_p});
    }
  }
  if (threadIdx.x == 0) {
    args.heads[t] = head;
  }
}

}  // namespace

void launch_row_heads(const ExecCtx& ctx, const SampleArgs& args, std::int64_t rows) {
  launch(ctx, "sample: row heads", row_head_kernel, {checked_cast<unsigned>(rows), kThreads}, args);
}

}  // namespace tandem::cuda
