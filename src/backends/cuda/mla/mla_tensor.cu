// mla_tensor.cu — chunks of absorbed MLA on the tensor cores.   Contract: ops/mla.h, mla.cuh
// Oracle: ops/ref/mla_ref.h
// Math      s = scale q . row; p = exp(s - max); sums of p and of p c per row, head and chunk
// Schedule  An item is (row, chunk, group of up to 48 heads); one block an SM walks over the items.
//           Groups are the smaller the fewer chunks there are. 4 warps load cache rows, as bf16,
//           into a ring of two tiles of 64 keys. 8 warps multiply, for each tile:
//             scores   [heads, 64]: a warp has 16 keys and half of the channels (that reads less
//                      shared memory than 8 keys and all channels); the halves meet there
//             softmax  a warp a row of scores; weights in bf16 into shared memory
//             sums     [heads, latent]: a warp has latent / 8 channels, in registers for the chunk
// Barriers  full[stage]: loaders to math (mbarriers); empty[stage]: math to loaders; one among the
//           math warps.
// Traffic   K3 (96 heads, 2 groups), a key: 2,304, 1,152 or 576 bytes from memory, twice that from
//           L2, 209 kFLOP.
// Numerics  bf16 products, fp32 sums; weights unnormalised in bf16, their sum in fp32. The result
//           of a head does not depend on the other heads, rows or sequences.
// Launch    grid depends on shapes only; graph-safe.
#include <algorithm>
#include <cmath>

#include "backends/cuda/launch.cuh"
#include "backends/cuda/mla/mla_tensor_load.cuh"
#include "backends/cuda/ptx/ldmatrix.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/named_barrier.cuh"
#include "backends/cuda/runtime/cuda_device.h"

namespace tandem::cuda {
namespace {

constexpr float kLog2e = 1.44269504F;

__device__ __forceinline__ void math_barrier() {
  ptx::named_barrier_sync(kMathBarrier, kMathThreads);
}

__device__ __forceinline__ int math_warp() {
  return static_cast<int>(threadIdx.x) / kWarp;
}
__device__ __forceinline__ int lane_id() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

/// The item's queries in bf16; heads that do not exist are zeros.
template <int kHeadTiles>
__device__ __forceinline__ void load_queries(const Block& block, const Item& item) {
  constexpr int kRows = kHeadTiles * kMmaRows / kMathWarps;
  const Attention& x = block.x;
  for (int channel = lane_id() * 4; channel < x.dim; channel += kWarp * 4) {
    float4 data[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int head = item.head + math_warp() + i * kMathWarps;
      data[i] = head < x.num_heads
                    ? load_4(x.query(x.first_row + item.row, head, channel), x.queries_aligned)
                    : float4{};
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      char* const to = block.shared + block.at.q +
                       (math_warp() + i * kMathWarps) * block.at.row_bytes + channel * 2;
      *reinterpret_cast<uint2*>(to) = {ptx::cvt_bf16x2(data[i].x, data[i].y),
                                       ptx::cvt_bf16x2(data[i].z, data[i].w)};
    }
  }
}

// Warp w multiplies keys 16 (w % 4) .. + 15 over half w / 4 of the channels.
constexpr int kScoreKeys = 16;
constexpr int kKeyGroups = kTileKeys / kScoreKeys;

template <int kHeadTiles>
__device__ __forceinline__ void multiply_scores(const Block& block, const char* tile,
                                                float (&s)[kHeadTiles][2][4]) {
  const int lane = lane_id();
  const int bytes = block.at.row_bytes;
  const int steps = block.x.dim / 16;
  const int middle = (steps + 1) / 2;
  const bool upper = math_warp() >= kKeyGroups;
  const int key = math_warp() % kKeyGroups * kScoreKeys + lane / 16 * 8 + lane % 8;
  const char* const a_row = block.shared + block.at.q + lane % 16 * bytes + lane / 16 * 16;
  const char* const b_row = tile + key * bytes + lane / 8 % 2 * 16;
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[m][0][i] = 0.0F;
      s[m][1][i] = 0.0F;
    }
  }
  constexpr int kUnroll = kHeadTiles == 1 ? 6 : 3;  // of one dependent chain of products
#pragma unroll kUnroll
  for (int step = upper ? middle : 0; step < (upper ? steps : middle); ++step) {
    std::uint32_t b[4];
    ptx::ldmatrix_x4(b, b_row + step * 32);
    const std::uint32_t low[2] = {b[0], b[1]};
    const std::uint32_t high[2] = {b[2], b[3]};
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m) {
      std::uint32_t a[4];
      ptx::ldmatrix_x4(a, a_row + m * kMmaRows * bytes + step * 32);
      ptx::mma_m16n8k16_bf16(s[m][0], a, low);
      ptx::mma_m16n8k16_bf16(s[m][1], a, high);
    }
  }
}

/// Adds the two halves: the lower warp of a pair finishes its first 8 keys, the upper one the
/// others.
template <int kHeadTiles>
__device__ __forceinline__ void add_halves(const Block& block, float (&s)[kHeadTiles][2][4]) {
  const bool upper = math_warp() >= kKeyGroups;
  float* const row = reinterpret_cast<float*>(block.shared + block.at.scores) +
                     lane_id() / 4 * kScoreStride + math_warp() % kKeyGroups * kScoreKeys +
                     lane_id() % 4 * 2;
  float* const given = row + (upper ? 0 : 8);
  float* const kept = row + (upper ? 8 : 0);
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(given + (m * kMmaRows + i * 8) * kScoreStride) =
          upper ? float2{s[m][0][2 * i], s[m][0][2 * i + 1]}
                : float2{s[m][1][2 * i], s[m][1][2 * i + 1]};
    }
  }
  math_barrier();  // both halves have given
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2& sum = *reinterpret_cast<float2*>(kept + (m * kMmaRows + i * 8) * kScoreStride);
      const float first = upper ? s[m][1][2 * i] : s[m][0][2 * i];
      const float second = upper ? s[m][1][2 * i + 1] : s[m][0][2 * i + 1];
      sum = {sum.x + first, sum.y + second};
    }
  }
  math_barrier();  // the scores are complete
}

/// warp_max and warp_sum of several values side by side, so that their latencies overlap.
template <int kCount>
__device__ __forceinline__ void each_warp_max(float (&x)[kCount]) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = fmaxf(x[i], __shfl_xor_sync(kFullWarp, x[i], offset));
    }
  }
}
template <int kCount>
__device__ __forceinline__ void each_warp_sum(float (&x)[kCount]) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] += __shfl_xor_sync(kFullWarp, x[i], offset);
    }
  }
}

/// Lane i's maximum and sum of row w + 8 i of the scores, warp w's i-th.
struct RowSums {
  float top = -INFINITY;
  float sum = 0.0F;
};

/// Weights, shrinks and sums of the warp's rows; a lane has keys 2 lane and 2 lane + 1.
template <int kRows>
__device__ __forceinline__ void softmax(const Block& block, int count, RowSums& mine) {
  const int lane = lane_id();
  const bool first_valid = 2 * lane < count;
  const bool second_valid = 2 * lane + 1 < count;
  const auto* const scores = reinterpret_cast<const float*>(block.shared + block.at.scores);
  auto* const weights = reinterpret_cast<std::uint32_t*>(block.shared + block.at.weights);
  auto* const shrinks = reinterpret_cast<float*>(block.shared + block.at.shrink);
  float first[kRows];
  float second[kRows];
  float next[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = math_warp() + i * kMathWarps;
    const auto s = *reinterpret_cast<const float2*>(scores + row * kScoreStride + 2 * lane);
    first[i] = first_valid ? s.x * block.x.scale : -INFINITY;
    second[i] = second_valid ? s.y * block.x.scale : -INFINITY;
    next[i] = fmaxf(first[i], second[i]);
  }
  each_warp_max(next);
  float total[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = math_warp() + i * kMathWarps;
    next[i] = fmaxf(__shfl_sync(kFullWarp, mine.top, i), next[i]);
    first[i] = first_valid ? exp2f((first[i] - next[i]) * kLog2e) : 0.0F;
    second[i] = second_valid ? exp2f((second[i] - next[i]) * kLog2e) : 0.0F;
    weights[row * (kWeightStride / 2) + lane] = ptx::cvt_bf16x2(first[i], second[i]);
    total[i] = first[i] + second[i];
  }
  each_warp_sum(total);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (lane == i) {
      const float shrink = exp2f((mine.top - next[i]) * kLog2e);
      mine.sum = fmaf(mine.sum, shrink, total[i]);
      mine.top = next[i];
      shrinks[math_warp() + i * kMathWarps] = shrink;
    }
  }
}

/// o = o * shrink + weights . tile, on the warp's 8 * kLatentTiles channels.
template <int kHeadTiles, int kLatentTiles>
__device__ __forceinline__ void add_values(const Block& block, const char* tile,
                                           float (&o)[kHeadTiles][kLatentTiles][4]) {
  const int lane = lane_id();
  const int bytes = block.at.row_bytes;
  const auto* const shrinks = reinterpret_cast<const float*>(block.shared + block.at.shrink);
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m) {
    const float upper = shrinks[m * kMmaRows + lane / 4];
    const float lower = shrinks[m * kMmaRows + lane / 4 + 8];
    if (__any_sync(kFullWarp, upper != 1.0F || lower != 1.0F)) {
#pragma unroll
      for (int n = 0; n < kLatentTiles; ++n) {
        o[m][n][0] *= upper;
        o[m][n][1] *= upper;
        o[m][n][2] *= lower;
        o[m][n][3] *= lower;
      }
    }
  }
  const char* const a_row =
      block.shared + block.at.weights + lane % 16 * (kWeightStride * 2) + lane / 16 * 16;
  const char* const b_row =
      tile + (lane / 8 % 2 * 8 + lane % 8) * bytes + (math_warp() * kLatentTiles + lane / 16) * 16;
#pragma unroll
  for (int step = 0; step < kTileKeys / 16; ++step) {
    std::uint32_t a[kHeadTiles][4];
#pragma unroll
    for (int m = 0; m < kHeadTiles; ++m) {
      ptx::ldmatrix_x4(a[m], a_row + m * kMmaRows * (kWeightStride * 2) + step * 32);
    }
#pragma unroll
    for (int n = 0; n < kLatentTiles; n += 2) {
      std::uint32_t b[4];
      ptx::ldmatrix_x4_trans(b, b_row + step * 16 * bytes + n * 16);
      const std::uint32_t low[2] = {b[0], b[1]};
      const std::uint32_t high[2] = {b[2], b[3]};
#pragma unroll
      for (int m = 0; m < kHeadTiles; ++m) {
        ptx::mma_m16n8k16_bf16(o[m][n], a[m], low);
        ptx::mma_m16n8k16_bf16(o[m][n + 1], a[m], high);
      }
    }
  }
}

template <int kHeadTiles, int kLatentTiles>
__device__ __forceinline__ void store_values(const Block& block, const Item& item,
                                             const float (&o)[kHeadTiles][kLatentTiles][4]) {
  const Attention& x = block.x;
  const int channel = math_warp() * kLatentTiles * 8 + lane_id() % 4 * 2;
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = item.head + m * kMmaRows + half * 8 + lane_id() / 4;
      if (head < x.num_heads) {
        float* const to = x.partial_o + x.partial(item.row, item.chunk, head) * x.latent + channel;
#pragma unroll
        for (int n = 0; n < kLatentTiles; ++n) {
          *reinterpret_cast<float2*>(to + n * 8) = {o[m][n][2 * half], o[m][n][2 * half + 1]};
        }
      }
    }
  }
}

template <int kRows>
__device__ __forceinline__ void store_sums(const Block& block, const Item& item, RowSums mine) {
  const int head = item.head + math_warp() + lane_id() * kMathWarps;
  if (lane_id() < kRows && head < block.x.num_heads) {
    block.x.partial_sum[block.x.partial(item.row, item.chunk, head)] = {mine.top, mine.sum};
  }
}

/// The result of a row of one chunk.
template <int kRows, int kHeadTiles, int kLatentTiles>
__device__ __forceinline__ void finish_row(const Block& block, const Item& item,
                                           const float (&o)[kHeadTiles][kLatentTiles][4],
                                           RowSums mine) {
  const Attention& x = block.x;
  const int t = x.first_row + item.row;
  auto* const sums = reinterpret_cast<float*>(block.shared + block.at.shrink);
  math_barrier();  // the shrinks have been read
  const int row = math_warp() + lane_id() * kMathWarps;
  if (lane_id() < kRows) {
    sums[row] = mine.sum;
    if (x.lse.data != nullptr && item.head + row < x.num_heads) {
      x.lse.row(t)[item.head + row] = mine.top + logf(mine.sum);
    }
  }
  math_barrier();  // the sums are there
  const int channel = math_warp() * kLatentTiles * 8 + lane_id() % 4 * 2;
#pragma unroll
  for (int m = 0; m < kHeadTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = m * kMmaRows + half * 8 + lane_id() / 4;
      if (item.head + head < x.num_heads) {
        float* const to = x.o.row(t, item.head + head) + channel;
        const float sum = sums[head];
#pragma unroll
        for (int n = 0; n < kLatentTiles; ++n) {
          to[n * 8] = o[m][n][2 * half] / sum;
          to[n * 8 + 1] = o[m][n][2 * half + 1] / sum;
        }
      }
    }
  }
}

template <int kRows, int kHeadTiles, int kLatentTiles>
__device__ __forceinline__ void store_item(const Block& block, const Item& item,
                                           const float (&o)[kHeadTiles][kLatentTiles][4],
                                           RowSums sums) {
  if (item.whole) {
    finish_row<kRows>(block, item, o, sums);
  } else {
    store_values(block, item, o);
    store_sums<kRows>(block, item, sums);
  }
}

/// Rows without keys: zeros.
__device__ __forceinline__ void clear_padding(const Attention& x, const Plan& plan) {
  for (int row = static_cast<int>(blockIdx.x); row < x.num_rows;
       row += static_cast<int>(gridDim.x)) {
    if (plan.visible[row] > 0) {
      continue;
    }
    const int t = x.first_row + row;
    for (int head = 0; head < x.num_heads; ++head) {
      for (int d = static_cast<int>(threadIdx.x); d < x.latent; d += kTensorThreads) {
        x.o.row(t, head)[d] = 0.0F;
      }
      if (x.lse.data != nullptr && threadIdx.x == 0) {
        x.lse.row(t)[head] = -INFINITY;
      }
    }
  }
}

template <int kHeadTiles, int kLatentTiles>
__device__ void multiply_tiles(const Block& block) {
  constexpr int kRows = kHeadTiles * kMmaRows / kMathWarps;
  int number = 0;  // of the tile
  for (int i = static_cast<int>(blockIdx.x); i < block.num_items;
       i += static_cast<int>(gridDim.x)) {
    const Item item = block.item(i);
    load_queries<kHeadTiles>(block, item);
    math_barrier();  // the queries are there; the last item's weights have been read
    float o[kHeadTiles][kLatentTiles][4] = {};
    RowSums sums;
    for (int left = item.end - item.begin; left > 0; left -= kTileKeys, ++number) {
      const char* const tile = block.tile(number);
      ptx::mbarrier_wait(block.full(number), static_cast<unsigned>(number / kStages) & 1U);
      float s[kHeadTiles][2][4];
      multiply_scores(block, tile, s);
      add_halves(block, s);
      softmax<kRows>(block, left, sums);
      math_barrier();  // weights and shrinks are there
      add_values(block, tile, o);
      ptx::named_barrier_arrive(kEmptyBarrier + number % kStages, kTensorThreads);
    }
    store_item<kRows>(block, block.item(i), o, sums);  // found again: it need not stay in registers
  }
}

template <int kHeadTiles, int kLatentTiles>
__global__ void __launch_bounds__(kTensorThreads, 1)
    attend_chunks(const __grid_constant__ Attention x) {
  begin_kernel();
  extern __shared__ uint4 bytes[];
  Block block{x, HeadGroups(x.num_heads, kHeadTiles), TensorShared(kHeadTiles, x.dim),
              reinterpret_cast<char*>(bytes), 0};
  Plan& plan = *reinterpret_cast<Plan*>(block.shared + block.at.plan);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(block.full(stage), kLoadThreads);
    }
    ptx::mbarrier_init_fence();
  }
  plan.build(x);  // its barriers are for the above as well
  clear_padding(x, plan);
  block.num_items = plan.first_item[x.num_rows] * block.groups.count;
  if (static_cast<int>(blockIdx.x) >= block.num_items) {
    return;
  }
  if (math_warp() < kMathWarps) {
    multiply_tiles<kHeadTiles, kLatentTiles>(block);
  } else {
    load_tiles(block);
  }
}

using Kernel = void (*)(Attention);

template <int kHeadTiles>
Kernel kernel_of(int latent) {
  switch (latent) {
    case 128:
      return attend_chunks<kHeadTiles, 2>;
    case 256:
      return attend_chunks<kHeadTiles, 4>;
    case 512:
      return attend_chunks<kHeadTiles, 8>;
    default:
      return nullptr;
  }
}

Kernel kernel_of(int head_tiles, int latent) {
  switch (head_tiles) {
    case 1:
      return kernel_of<1>(latent);
    case 2:
      return kernel_of<2>(latent);
    default:
      return kernel_of<kMaxHeadTiles>(latent);
  }
}

}  // namespace

int mla_tensor_rows(const ExecCtx& ctx, const Attention& x) {
  const CudaDevice& device = device_of(ctx);
  const int tiles = HeadGroups::most_tiles(x.num_heads);
  const bool loads = x.keys_aligned || x.keys.format == LatentFormat::kF32;
  const bool fits = x.num_heads >= 8 && x.dim % 16 == 0 && x.dim >= x.latent && loads &&
                    kernel_of(tiles, x.latent) != nullptr &&
                    TensorShared(tiles, x.dim).total <= device.info().smem_per_block;
  return fits && !device.options().exact_linear ? kTensorRows : 0;
}

void mla_tensor_chunks(const ExecCtx& ctx, const Attention& x) {
  CudaDevice& device = device_of(ctx);
  const int num_sms = device.info().num_sms;
  const int chunks = x.num_rows * x.max_chunks;
  const HeadGroups groups(x.num_heads, HeadGroups::tiles_for(x.num_heads, chunks, num_sms));
  const Kernel kernel = kernel_of(groups.tiles, x.latent);
  const int bytes = TensorShared(groups.tiles, x.dim).total;
  const int blocks = std::min(chunks * groups.count, num_sms);
  launch(ctx, "mla_absorbed", kernel, {static_cast<unsigned>(blocks), kTensorThreads, bytes}, x);
}

}  // namespace tandem::cuda
