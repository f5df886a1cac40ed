// gemm.h — linear layers. Activations are fp32; weights are fp32, bf16 or packed 4/8-bit and are
// dequantised in the kernel.
//
// Determinism: batch-invariant. Every output element is one fused multiply-add chain over the
// reduction index in increasing order, in fp32, starting from 0 (or from y when accumulating):  y =
// fma(x[k], w[k], y), k = 0, 1, ... A row's result therefore depends neither on the other rows, nor
// on the number of threads, nor on tiles or packing. A weight's value is code * block scale; NVFP4:
// code * (block scale * scale_2); each product is rounded to fp32, as in tensor/quant.h.
#pragma once

#include <cstdint>
#include <span>

#include "ops/act.h"
#include "ops/exec_ctx.h"
#include "tensor/storage.h"
#include "tensor/view.h"

namespace tandem {

enum class WeightFormat { kF32, kBF16, kMxFp4, kNvFp4, kFp8Block };

/// One weight matrix [N, K] (out, in) as its checkpoint stores it. Not owned. Source:
/// spec/kimi-k3.md section 7.
struct WeightRef {
  WeightFormat format = WeightFormat::kF32;
  std::int64_t rows = 0;  // N
  std::int64_t cols = 0;  // K
  std::int64_t row_stride =
      0;  // elements between rows; kF32 and kBF16 only, the packed formats are contiguous
  const void* data = nullptr;  // kF32/kBF16 [N, K] · kMxFp4/kNvFp4 U8 [N, K/2], low nibble first ·
                               // kFp8Block E4M3 [N, K]
  const void* scales = nullptr;  // kMxFp4 E8M0 [N, K/32] · kNvFp4 E4M3 [N, K/16] · kFp8Block f32
                                 // [ceil(N/128), ceil(K/128)]
  float scale_2 = 1.0F;          // kNvFp4 only: the per-tensor scale

  static WeightRef of(ConstF32Mat w) {
    return {WeightFormat::kF32, w.size(0), w.size(1), w.stride(0), w.data(), nullptr, 1.0F};
  }
};

enum class Orientation {
  kNormal,      // computes y[T, N] = x[T, K] * W^T   (forward)
  kTransposed,  // computes y[T, K] = x[T, N] * W     (gradient of the input; kF32 and kBF16 only)
};

/// A weight matrix in the backend's own layout; only the backend looks inside. `out`/`in` are the
/// widths of y and x.
struct PackedWeight {
  WeightFormat format = WeightFormat::kF32;
  std::int64_t out = 0;
  std::int64_t in = 0;
  float scale_2 = 1.0F;
  Storage data;
  Storage scales;
};

/// y = x W^T, or y = SiTU(x W^T, x up^T): one of several independent layers. Not owned.
struct LinearCall {
  F32Mat y;       // [T, out]
  ConstF32Mat x;  // [T, in]
  const PackedWeight* w = nullptr;
  const PackedWeight* up = nullptr;  // of the shape and format of w
  SituParams act = {};
};

/// One product x W^T of a sum. Not owned.
struct LinearTerm {
  ConstF32Mat x;  // [T, in]
  const PackedWeight* w = nullptr;
};

struct GemmOps {
  void (*pack)(const ExecCtx&, PackedWeight& packed, const WeightRef& weight,
               Orientation orientation);
  void (*linear)(const ExecCtx&, F32Mat y, ConstF32Mat x, const PackedWeight& w, bool accumulate);
  void (*linear_group)(const ExecCtx&, std::span<const LinearCall> calls);
  void (*linear_sum)(const ExecCtx&, F32Mat y, ConstF32Mat base, std::span<const LinearTerm> terms);
  void (*linear_heads)(const ExecCtx&, F32Cube y, ConstF32Cube x, std::span<const PackedWeight> w,
                       bool accumulate);
  void (*weight_grad)(const ExecCtx&, F32Mat d_w, ConstF32Mat d_y, ConstF32Mat x);
};

namespace ops {

/// Packs `weight`; storage of the same size is reused, so re-packing after an optimizer step does
/// not allocate.
void pack(const ExecCtx& ctx, PackedWeight& packed, const WeightRef& weight,
          Orientation orientation);

/// y = x W^T, or y += x W^T when `accumulate`.
/// Shapes: y [T, out], x [T, in]; rows may be strided, the last axis is contiguous.   Aliasing:
/// none. Cost: 2 T out in FLOPs; the weight is read once per block of rows.
void linear(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, const PackedWeight& w,
            bool accumulate = false);

/// linear() of each call, and situ() of two, bit for bit, in any order or at once.   Aliasing: no y
/// may overlap another y or any x; calls may share an x.
void linear_group(const ExecCtx& ctx, std::span<const LinearCall> calls);
/// The same by other ops: plain products through `plain`, then the gates.
void linear_group_in_steps(const ExecCtx& ctx, std::span<const LinearCall> calls,
                           void (*plain)(const ExecCtx&, std::span<const LinearCall>));

/// y = ((base + x_0 W_0^T) + x_1 W_1^T) + ..., each product complete, as linear() gives it, before
/// it is added.   Shapes: y, base [T, out], or base empty; terms not empty.   Aliasing: base may be
/// y.
void linear_sum(const ExecCtx& ctx, F32Mat y, ConstF32Mat base, std::span<const LinearTerm> terms);
/// The same by other ops.
void linear_sum_in_steps(const ExecCtx& ctx, F32Mat y, ConstF32Mat base,
                         std::span<const LinearTerm> terms);

/// linear() per head: y[t, h, :] = x[t, h, :] W_h^T with one weight a head, all of one shape.
/// Shapes: y [T, H, out], x [T, H, in], w [H].
void linear_heads(const ExecCtx& ctx, F32Cube y, ConstF32Cube x, std::span<const PackedWeight> w,
                  bool accumulate = false);

/// d_w += d_y^T x, summed over rows in increasing order.
/// Shapes: d_w [N, K] (rows may be strided), d_y [T, N], x [T, K].
void weight_grad(const ExecCtx& ctx, F32Mat d_w, ConstF32Mat d_y, ConstF32Mat x);

}  // namespace ops
}  // namespace tandem
