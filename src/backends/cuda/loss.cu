// loss.cu — log-probability and entropy of one token a row.   Contract: ops/loss.h
// Oracle    ops/ref/loss_ref.h
// Math      z = (logit - max) / T, S = sum e^z, B = sum e^z z:
//           logprob = z_target - ln S,  H = ln S - B / S
// Traffic   the logits once: up to 163,840 columns (131,072 in the backward) stay in registers from
//           the maximum to the sums and to the gradient; what is beyond is read again for each.
// Numerics  each warp sums relative to its own maximum, in fp32, a thread's quads in order, then
//           lanes; the warps' sums are brought to the row's maximum and added in double. How a row
//           is cut depends on the vocabulary alone, so that the sampler's few rows and the
//           trainer's many get the same bits. A logit of -inf has probability 0; a NaN shows in
//           every result.
// Launch    a cluster of 2 to 8 blocks a row, for one SM reads 50-100 GB/s; graph-safe.
#include <cmath>
#include <cstdint>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/families.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/quad.cuh"
#include "backends/cuda/reduce.cuh"
#include "core/checked_cast.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMostBlocks = 8;  // of a cluster, everywhere
constexpr int kBlocksPerSm = 2;
constexpr int kHeld = 10;    // quads of a thread in registers
constexpr int kBwdHeld = 8;  // as many as two blocks an SM leave registers for

/// The logits of all rows and how each is cut: a quad a thread of the cluster, then the next.
struct Rows {
  Mat<const float> logits;   // [T, V]
  const float* temperature;  // [T]
  int vocab;
  int log_blocks = 1;  // of a row; 2 at least, for then every launch is one of clusters
  int quads = 0;       // of a thread

  Rows(const ConstF32Mat& all, const ConstF32Vec& temperatures)
      : logits(device_mat(all)),
        temperature(temperatures.data()),
        vocab(checked_cast<int>(all.size(1))) {
    while (blocks() < kMostBlocks && cols() < vocab) {
      ++log_blocks;
    }
    quads = (vocab + cols() - 1) / cols();
  }
  __host__ __device__ int blocks() const { return 1 << log_blocks; }
  __host__ __device__ int cols() const { return blocks() * kThreads * kQuad; }
};

/// Where a block stands.
struct Place {
  std::int64_t row;
  int rank;
  int first;  // column of the thread's first quad

  __device__ explicit Place(const Rows& rows)
      : row(blockIdx.x >> rows.log_blocks),
        rank(static_cast<int>(blockIdx.x) & (rows.blocks() - 1)),
        first((rank * kThreads + static_cast<int>(threadIdx.x)) * kQuad) {}
};

/// The calling thread's logits of a row; kMost quads of them are held in registers.
template <bool kAligned, int kMost>
class OwnLogits {
 public:
  __device__ __forceinline__ OwnLogits(const Rows& rows, const Place& place)
      : rows_(rows), row_(rows.logits.row(place.row)), first_(place.first) {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i >= rows.quads) {
        return;
      }
      held_[i] = load(i);
    }
  }

  /// fn(column, quad); elements beyond the row's end are -inf.
  template <typename Fn>
  __device__ __forceinline__ void each(const Fn& fn) const {
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i >= rows_.quads) {
        return;
      }
      fn(column(i), held_[i]);
    }
#pragma unroll 1  // no registers for more
    for (int i = kMost; i < rows_.quads; ++i) {
      fn(column(i), load(i));
    }
  }

 private:
  __device__ __forceinline__ int column(int i) const {
    return first_ + i * rows_.cols();
  }
  __device__ __forceinline__ Quad load(int i) const {
    return load_quad<kAligned>(row_, column(i), rows_.vocab, -INFINITY);
  }

  const Rows& rows_;
  const float* row_;
  int first_;
  Quad held_[kMost];
};

/// A warp's part of S and B, relative to its own maximum (0 in place of -inf).
struct Part {
  float max;
  float sum;
  float weighted;
};

struct Parts {
  Part of_warp[kMostBlocks * kWarps];  // written by the warps of all blocks
  std::uint64_t written;               // one phase: all of them

  /// All threads call, first of all.
  __device__ __forceinline__ void expect(int blocks) {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(&written, 1);
      ptx::mbarrier_init_fence();
      ptx::mbarrier_expect(&written, static_cast<unsigned>(blocks * kWarps * sizeof(Part)));
    }
    __syncwarp();
    ptx::cluster_arrive();
  }

  /// The warp's part to the blocks of rank below `receivers`. All threads call.
  __device__ __forceinline__ void send(int rank, const Part& part, int receivers) {
    ptx::cluster_wait();  // all blocks expect their parts
    const unsigned lane = threadIdx.x % kWarp;
    Part& own = of_warp[rank * kWarps + static_cast<int>(threadIdx.x) / kWarp];
    if (lane < static_cast<unsigned>(receivers)) {
      ptx::store_to_rank(&own.max, &written, lane, part.max);
      ptx::store_to_rank(&own.sum, &written, lane, part.sum);
      ptx::store_to_rank(&own.weighted, &written, lane, part.weighted);
    }
    __syncwarp();
  }

  /// In a block that receives.
  __device__ __forceinline__ void wait() { ptx::mbarrier_wait_cluster(&written, 0); }
};

/// Every lane gets the warp's part.
template <typename Logits>
__device__ __forceinline__ Part warp_part(const Logits& own, float inv_t) {
  Part part{-INFINITY, 0.0F, 0.0F};
  own.each([&](int, const Quad& x) {
#pragma unroll
    for (const float logit : x.v) {
      part.max = fmaxf(part.max, logit);  // a NaN is passed over: the sum shows it
    }
  });
  part.max = warp_max(part.max);
  const float base = part.max == -INFINITY ? 0.0F : part.max;
  own.each([&](int, const Quad& x) {
#pragma unroll
    for (const float logit : x.v) {
      const float z = (logit - base) * inv_t;
      const float e = expf(z);
      part.sum += e;
      // e z -> 0 as z -> -inf; a NaN must stay, so the test is for "is zero", not "is positive".
      part.weighted += e == 0.0F ? 0.0F : e * z;
    }
  });
  part.sum = warp_sum(part.sum);
  part.weighted = warp_sum(part.weighted);
  return part;
}

/// What a row's softmax needs; the same bits in every thread.
struct RowSoftmax {
  float max;
  float inv_t;
  double sum;       // S
  double weighted;  // B

  __device__ float log_sum() const { return static_cast<float>(log(sum)); }
  __device__ float entropy() const { return static_cast<float>(log(sum) - weighted / sum); }
};

/// From the warps' parts to the row's. Whole warps call.
__device__ __forceinline__ RowSoftmax row_softmax(const Parts& parts, int count, float inv_t) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  RowSoftmax row{-INFINITY, inv_t, 0.0, 0.0};
  for (int i = lane; i < count; i += kWarp) {
    row.max = fmaxf(row.max, parts.of_warp[i].max);
  }
  row.max = warp_max(row.max);
  for (int i = lane; i < count; i += kWarp) {
    const Part part = parts.of_warp[i];
    const float z = (part.max - row.max) * inv_t;
    const float scale = expf(z);
    const double sum = static_cast<double>(scale) * static_cast<double>(part.sum);
    row.sum += sum;
    // As above; a NaN is in the sum too.
    row.weighted += scale == 0.0F
                        ? 0.0
                        : static_cast<double>(scale) * static_cast<double>(part.weighted) +
                              sum * static_cast<double>(z);
  }
  row.sum = warp_sum(row.sum);
  row.weighted = warp_sum(row.weighted);
  return row;
}

struct LogProbArgs {
  float* logprob;               // [T]
  float* entropy;               // [T] or null
  const std::int32_t* targets;  // [T]
  Rows rows;
};

template <bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    log_prob_kernel(const __grid_constant__ LogProbArgs args) {
  __shared__ Parts parts;
  parts.expect(args.rows.blocks());
  begin_kernel();
  const Place place(args.rows);
  const OwnLogits<kAligned, kHeld> own(args.rows, place);
  // A skipped row is summed too: a branch would put the target's latency before the logits'.
  const std::int32_t target = args.targets[place.row];
  const float hit = target >= 0 ? args.rows.logits.row(place.row)[target] : 0.0F;
  const float inv_t = 1.0F / args.rows.temperature[place.row];
  parts.send(place.rank, warp_part(own, inv_t), 1);
  if (place.rank != 0 || threadIdx.x >= kWarp) {
    return;
  }
  parts.wait();
  const RowSoftmax row = row_softmax(parts, args.rows.blocks() * kWarps, inv_t);
  if (threadIdx.x == 0) {
    args.logprob[place.row] = target >= 0 ? (hit - row.max) * inv_t - row.log_sum() : 0.0F;
    if (args.entropy != nullptr) {
      args.entropy[place.row] = target >= 0 ? row.entropy() : 0.0F;
    }
  }
}

struct LogProbBwdArgs {
  Mat<float> d_logits;          // [T, V], may be the logits
  const float* d_logprob;       // [T]
  const float* d_entropy;       // [T] or null
  const std::int32_t* targets;  // [T]
  Rows rows;
};

/// d_logit = (d_logprob (hit - p) - d_entropy p (ln p + H)) / T. A thread writes where it alone
/// reads, so that d_logits may be the logits.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    log_prob_bwd_kernel(const __grid_constant__ LogProbBwdArgs args) {
  __shared__ Parts parts;
  parts.expect(args.rows.blocks());
  begin_kernel();
  const Place place(args.rows);
  const OwnLogits<kAligned, kBwdHeld> own(args.rows, place);
  const float inv_t = 1.0F / args.rows.temperature[place.row];
  parts.send(place.rank, warp_part(own, inv_t), args.rows.blocks());
  parts.wait();
  const RowSoftmax row = row_softmax(parts, args.rows.blocks() * kWarps, inv_t);
  const float log_sum = row.log_sum();
  const float entropy = row.entropy();
  const std::int32_t target = args.targets[place.row];
  const float d_logprob = args.d_logprob[place.row];
  const float d_entropy = args.d_entropy != nullptr ? args.d_entropy[place.row] : 0.0F;
  own.each([&](int column, const Quad& x) {
    Quad d{};
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      const float log_p = (x.v[k] - row.max) * inv_t - log_sum;
      const float p = expf(log_p);
      const float slope = fmaf(d_entropy, log_p + entropy, d_logprob);
      // p (ln p + H) -> 0 as p -> 0, where ln p may be -inf.
      const float grad = p == 0.0F ? 0.0F : p * slope;
      const float hit = column + k == target ? d_logprob * inv_t : 0.0F;
      d.v[k] = target >= 0 ? hit - grad * inv_t : 0.0F;
    }
    store_quad<kAligned>(args.d_logits.row(place.row), column, args.rows.vocab, d);
  });
}

Launch launch_of(const Rows& rows, std::int64_t count) {
  return {.grid = checked_cast<unsigned>(count * rows.blocks()),
          .block = kThreads,
          .cluster = rows.blocks()};
}

void log_prob(const ExecCtx& ctx, F32Vec logprob, F32Vec entropy, ConstF32Mat logits,
              ConstI32Vec targets, ConstF32Vec temperature) {
  if (logits.size(0) == 0) {
    return;
  }
  const LogProbArgs args{logprob.data(), entropy.empty() ? nullptr : entropy.data(), targets.data(),
                         Rows(logits, temperature)};
  launch(ctx, "log_prob", whole_quads(logits) ? log_prob_kernel<true> : log_prob_kernel<false>,
         launch_of(args.rows, logits.size(0)), args);
}

void log_prob_bwd(const ExecCtx& ctx, F32Mat d_logits, ConstF32Vec d_logprob, ConstF32Vec d_entropy,
                  ConstF32Mat logits, ConstI32Vec targets, ConstF32Vec temperature) {
  if (logits.size(0) == 0) {
    return;
  }
  const LogProbBwdArgs args{device_mat(d_logits), d_logprob.data(),
                            d_entropy.empty() ? nullptr : d_entropy.data(), targets.data(),
                            Rows(logits, temperature)};
  const bool aligned = whole_quads(logits) && whole_quads(d_logits);
  launch(ctx, "log_prob_bwd", aligned ? log_prob_bwd_kernel<true> : log_prob_bwd_kernel<false>,
         launch_of(args.rows, logits.size(0)), args);
}

}  // namespace

LossOps loss_ops() {
  return {.log_prob = log_prob, .log_prob_bwd = log_prob_bwd};
}

}  // namespace tandem::cuda
