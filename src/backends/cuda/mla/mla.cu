// mla.cu — the MLA family's table, the cache write and the expanded form.   Contract: ops/mla.h
// Oracle: ops/ref/mla_ref.h
// Schedule  store: one thread an element. Expanded: a reference, one warp a (row, head); keys in
//           tiles of 32, one a lane for the scores; channels a lane each for the weighted sums.
// Numerics  fp32; keys in order of position.
// Launch    grids depend on shapes only; graph-safe.
#include <algorithm>
#include <cmath>

#include "backends/cuda/families.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/mla/latent_row.cuh"
#include "backends/cuda/mla/mla.cuh"
#include "backends/cuda/mla/mla_tile.cuh"
#include "backends/cuda/runtime/cuda_device.h"
#include "core/check.h"

namespace tandem::cuda {
namespace {

constexpr int kStoreThreads = 256;

__global__ void __launch_bounds__(kStoreThreads)
    store_rows(std::byte* rows, std::int64_t row_bytes, LatentFormat format, Mat<const float> kv,
               const std::int32_t* slots, std::int64_t count, std::int64_t width) {
  begin_kernel();
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kStoreThreads + threadIdx.x;
  if (column >= width) {
    return;
  }
  for (std::int64_t t = blockIdx.y; t < count; t += gridDim.y) {
    const std::int32_t slot = slots[t];
    if (slot >= 0) {
      store_latent(rows + slot * row_bytes, format, column, kv.row(t)[column]);
    }
  }
}

void store(const ExecCtx& ctx, const LatentRows& rows, ConstF32Mat kv, ConstI32Vec slot_mapping) {
  if (kv.empty()) {
    return;
  }
  const dim3 grid(static_cast<unsigned>((kv.size(1) + kStoreThreads - 1) / kStoreThreads),
                  static_cast<unsigned>(std::min<std::int64_t>(kv.size(0), 65535)));
  launch(ctx, "mla_store", store_rows, {grid, kStoreThreads}, rows.data, rows.row_bytes,
         rows.format, device_mat(kv), slot_mapping.data(), kv.size(0), kv.size(1));
}

struct Expanded {
  Cube<float> o;
  Cube<const float> q, k_nope, v;
  Mat<const float> k_shared;
  const std::int32_t* cu_seqlens;
  int num_seqs;
  int nope;
  int shared;
  int values;
  float scale;
};

/// Row t = blockIdx.x, head blockIdx.y.
__global__ void __launch_bounds__(kWarp) attend_expanded(const Expanded x) {
  begin_kernel();
  extern __shared__ float4 bytes[];
  float* const weights = reinterpret_cast<float*>(bytes);  // [32]
  float* const q_nope = weights + kWarp;                   // [padded_4(nope)]
  float* const q_shared = q_nope + padded_4(x.nope);       // [padded_4(shared)]
  float* const o = q_shared + padded_4(x.shared);          // [values]
  const int lane = static_cast<int>(threadIdx.x);
  const int t = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y);
  const int begin = x.cu_seqlens[sequence_of(x.cu_seqlens, x.num_seqs, t)];
  load_vector(q_nope, x.q.row(t, head), x.nope);
  load_vector(q_shared, x.q.row(t, head) + x.nope, x.shared);
  for (int c = lane; c < x.values; c += kWarp) {
    o[c] = 0.0F;
  }
  __syncwarp();
  Softmax softmax;
  for (int first = begin; first <= t; first += kWarp) {
    const int count = min(kWarp, t + 1 - first);
    const int key = first + min(lane, count - 1);
    const float dot = dot_row(q_nope, x.k_nope.row(key, head), x.nope) +
                      dot_row(q_shared, x.k_shared.row(key), x.shared);
    const float2 step = softmax.add(x.scale * dot, lane < count);
    weights[lane] = step.x;
    __syncwarp();
    for (int c = lane; c < x.values; c += kWarp) {
      float sum = o[c] * step.y;
      for (int j = 0; j < count; ++j) {
        sum = fmaf(weights[j], x.v.row(first + j, head)[c], sum);
      }
      o[c] = sum;
    }
    __syncwarp();  // the weights have been read
  }
  for (int c = lane; c < x.values; c += kWarp) {
    x.o.row(t, head)[c] = o[c] / softmax.sum;
  }
}

void expanded(const ExecCtx& ctx, F32Cube o, ConstF32Cube q, ConstF32Cube k_nope,
              ConstF32Mat k_shared, ConstF32Cube v, ConstI32Vec cu_seqlens, float scale) {
  if (o.empty()) {
    return;
  }
  TDM_CHECK(o.size(1) <= 65535, o.size(1));
  CudaDevice& device = device_of(ctx);
  const Expanded x{.o = device_cube(o),
                   .q = device_cube(q),
                   .k_nope = device_cube(k_nope),
                   .v = device_cube(v),
                   .k_shared = device_mat(k_shared),
                   .cu_seqlens = cu_seqlens.data(),
                   .num_seqs = static_cast<int>(cu_seqlens.size(0) - 1),
                   .nope = static_cast<int>(k_nope.size(2)),
                   .shared = static_cast<int>(k_shared.size(1)),
                   .values = static_cast<int>(o.size(2)),
                   .scale = scale};
  const std::int64_t bytes = (kWarp + padded_4(x.nope) + padded_4(x.shared) + x.values) * 4;
  TDM_CHECK(bytes <= device.info().smem_per_block, bytes, device.info().smem_per_block);
  const dim3 grid(static_cast<unsigned>(o.size(0)), static_cast<unsigned>(o.size(1)));
  launch(ctx, "mla_expanded", attend_expanded, {grid, kWarp, bytes}, x);
}

}  // namespace

MlaOps mla_ops() {
  return {
      .prepare = mla_prepare,
      .store = store,
      .absorbed = mla_absorbed,
      .absorbed_bwd = mla_absorbed_bwd,
      .expanded = expanded,
  };
}

}  // namespace tandem::cuda
