// mla.cuh — what the MLA kernels share: where keys lie, how they are cut into chunks, partial sums.
//
// The law of chunks. A query row that sees n keys is attended in chunks of chunk_keys(n) keys from
// position 0; each chunk gives its own maximum, sum and weighted sum, and the chunks are merged in
// order of position. A row of one chunk is finished by the kernel that attends it, and so are rows
// without keys (zeros). Chunks run in parallel, and since their bounds depend on n alone, decode,
// prefill, any split of a prompt and training give a row the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/device_view.cuh"
#include "backends/cuda/reduce.cuh"
#include "ops/mla.h"

namespace tandem::cuda {

inline constexpr int kChunkUnit = 64;     // chunks are whole numbers of tiles of every kernel
inline constexpr int kWholeUnits = 4;     // up to here one chunk: faster than a merge
inline constexpr int kMinChunkUnits = 2;  // below, writing and merging partials costs too much
inline constexpr int kMaxChunks = 64;     // two groups of heads of 64 chunks fill an H200

[[nodiscard]] __host__ __device__ constexpr int chunk_keys(int keys) {
  const int units = (keys + kChunkUnit - 1) / kChunkUnit;
  if (units <= kWholeUnits) {
    return kChunkUnit * kWholeUnits;
  }
  const int per_chunk = (units + kMaxChunks - 1) / kMaxChunks;
  return kChunkUnit * (per_chunk > kMinChunkUnits ? per_chunk : kMinChunkUnits);
}
[[nodiscard]] __host__ __device__ constexpr int num_chunks(int keys) {
  return (keys + chunk_keys(keys) - 1) / chunk_keys(keys);
}
/// A bound of num_chunks(n) for n <= keys.
[[nodiscard]] constexpr int max_chunks(std::int64_t keys) {
  constexpr std::int64_t kShortest = kChunkUnit * kMinChunkUnits;
  if (keys <= kChunkUnit * kWholeUnits) {
    return 1;
  }
  const std::int64_t chunks = (keys + kShortest - 1) / kShortest;
  return static_cast<int>(chunks < kMaxChunks ? chunks : kMaxChunks);
}

/// Of `count` ranges one behind the other, range i from begins[i] to begins[i + 1], the one `at` is
/// in: the first with begins[i + 1] > at.
__device__ __forceinline__ int range_of(const int* begins, int count, int at) {
  int low = 0;
  int high = count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (begins[middle + 1] > at) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}
/// begins[i + 1] holds the length of range i; from lengths to begins. The first warp of a block.
__device__ __forceinline__ void place_ranges(int* begins, int count) {
  const int lane = static_cast<int>(threadIdx.x);
  int before = 0;
  for (int first = 0; first < count; first += kWarp) {
    const int i = first + lane;
    const int sum = before + warp_running_sum(i < count ? begins[i + 1] : 0);
    if (i < count) {
      begins[i + 1] = sum;
    }
    before = __shfl_sync(kFullWarp, sum, kWarp - 1);
  }
  if (lane == 0) {
    begins[0] = 0;
  }
}

/// Sequence of row t: cu_seqlens[b] <= t < cu_seqlens[b + 1]. In decode it is t itself.
__device__ __forceinline__ int sequence_of(const std::int32_t* cu_seqlens, int num_seqs, int t) {
  if (t < num_seqs && cu_seqlens[t] == t && cu_seqlens[t + 1] > t) {
    return t;
  }
  return range_of(cu_seqlens, num_seqs, t);
}

/// What row t of a call attends: sequence and number of visible keys.
struct RowKeys {
  int seq;
  int visible;
  /// Of the row's chunks; 0 without keys.
  __device__ int chunks() const { return visible > 0 ? num_chunks(visible) : 0; }
};

struct PagedKeys {
  const std::byte* rows;
  std::int64_t row_bytes;
  LatentFormat format;
  Mat<const std::int32_t> page_table;  // data null: the keys are the batch's own rows
  int page_size;
  const std::int32_t* cu_seqlens;
  const std::int32_t* kv_lens;
  int num_seqs;

  /// In decode row t is the only one of sequence t: what it needs is loaded side by side.
  __device__ RowKeys of_row(int t) const {
    if (page_table.data != nullptr && t < num_seqs) {
      const int begin = cu_seqlens[t];
      const int end = cu_seqlens[t + 1];
      const int keys = kv_lens[t];
      if (begin == t && end > t) {
        return {t, keys == 0 ? 0 : keys - (end - 1 - t)};
      }
    }
    const int b = sequence_of(cu_seqlens, num_seqs, t);
    if (page_table.data == nullptr) {
      return {b, t - cu_seqlens[b] + 1};
    }
    const int keys = kv_lens[b];
    return {b, keys == 0 ? 0 : keys - (cu_seqlens[b + 1] - 1 - t)};
  }
  /// The number of the row that holds key `position` of sequence b.
  __device__ std::int64_t row(int b, int position) const {
    if (page_table.data == nullptr) {
      return static_cast<std::int64_t>(cu_seqlens[b]) + position;
    }
    const int page = page_table.row(b)[position / page_size];
    return static_cast<std::int64_t>(page) * page_size + position % page_size;
  }
  __device__ const std::byte* key(int b, int position) const {
    return rows + row(b, position) * row_bytes;
  }
};

/// A call, and the rows of it that one launch attends. Partials are laid out [row, chunk, head].
struct Attention {
  Cube<float> o;
  Mat<float> lse;  // data null: not wanted
  Cube<const float> q_latent;
  Cube<const float> q_shared;
  PagedKeys keys;
  float scale;
  int num_heads;
  int dim;
  int latent;
  int first_row;
  int num_rows;
  int max_chunks;
  bool queries_aligned;  // start at multiples of 16 bytes
  bool keys_aligned;
  float* partial_o;     // [..., latent] sum of p c
  float2* partial_sum;  // {maximum of the scores, sum of p}

  /// Channel `channel` of the query [q_lat | q_s].
  __device__ const float* query(int t, int head, int channel) const {
    return channel < latent ? q_latent.row(t, head) + channel
                            : q_shared.row(t, head) + (channel - latent);
  }
  __device__ std::int64_t partial(int row, int chunk, int head) const {
    return (static_cast<std::int64_t>(row) * max_chunks + chunk) * num_heads + head;
  }
};

/// The most rows that one launch of the tensor-core kernel takes; 0 when it cannot do the shape.
[[nodiscard]] int mla_tensor_rows(const ExecCtx& ctx, const Attention& x);
/// Fills the partials of x's rows on the tensor cores, and finishes rows of one chunk or none.
void mla_tensor_chunks(const ExecCtx& ctx, const Attention& x);

void mla_prepare(const ExecCtx& ctx, const MlaPrepare& args);
void mla_absorbed(const ExecCtx& ctx, F32Cube o_lat, F32Mat lse, const MlaQuery& q,
                  const MlaCacheView& cache, const MlaBatch& batch, float scale);
void mla_absorbed_bwd(const ExecCtx& ctx, const MlaQueryGrad& d_q, F32Mat d_kv,
                      ConstF32Cube d_o_lat, const MlaQuery& q, ConstF32Mat kv, ConstF32Cube o_lat,
                      ConstF32Mat lse, ConstI32Vec cu_seqlens, float scale);

}  // namespace tandem::cuda
