// exact.h — products of matrices to the letter of ops/gemm.h: one chain of fused multiply-adds an
// output, bit for bit what the CPU backend computes. For every format; the only kernels for kF32.
#pragma once

#include <cstdint>
#include <span>

#include "ops/gemm.h"

namespace tandem::cuda {

/// Rows that belong to one weight each: weight e's are [begin[e], begin[e + 1]).
struct GroupedRows {
  const std::int32_t* begin;  // [E + 1], device
  const std::int32_t*
      pairs;  // device; row r of x is row pairs[r] / slots. Null: x has row r itself
  std::int32_t slots;
  std::int64_t total;  // at least begin[E]
};

void exact_linear(const ExecCtx& ctx, F32Mat y, ConstF32Mat x, const PackedWeight& w,
                  bool accumulate);
void exact_linear_heads(const ExecCtx& ctx, F32Cube y, ConstF32Cube x,
                        std::span<const PackedWeight> w, bool accumulate);
/// y[r] = x[r or its token] w_e^T (or +=) for every row r of expert e. Weights without rows are not
/// read.
void exact_linear_grouped(const ExecCtx& ctx, F32Mat y, ConstF32Mat x,
                          std::span<const PackedWeight> w, const GroupedRows& rows,
                          bool accumulate);

void exact_weight_grad(const ExecCtx& ctx, F32Mat d_w, ConstF32Mat d_y, ConstF32Mat x);
/// d_w[e] += the sum over expert e's rows r of d_y[r]^T x[r or its token].
void exact_weight_grad_grouped(const ExecCtx& ctx, std::span<const F32Mat> d_w, ConstF32Mat d_y,
                               ConstF32Mat x, const GroupedRows& rows);

}  // namespace tandem::cuda
