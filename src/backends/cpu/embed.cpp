// embed.cpp — token embedding. Contract: ops/embed.h. Oracle: ops/ref/embed_ref.h.
//
// Forward: a copy, split over rows. Backward: split over columns, so that every element of the
// table sums its rows in order of t on one thread.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/embed.cpp"
#include "backends/cpu/simd_targets.h"
#include "hwy/foreach_target.h"
// Below foreach_target.h, which includes this file once per instruction set:
#include <algorithm>
#include <cstring>

#include "backends/cpu/families.h"
#include "backends/cpu/row_blocks.h"
#include "backends/cpu/simd_loops-inl.h"
#include "core/checked_cast.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::HWY_NAMESPACE {
namespace {

constexpr double kNsPerElement = 0.2;

void widen_row(float* y, const std::uint16_t* x, std::size_t n) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::Rebind<std::uint16_t, FloatTag> dh;
  const std::size_t lanes = hn::Lanes(d);
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(dh, x + i)));
    hn::StoreU(hn::BitCast(d, bits), d, y + i);
  }
  for (; i < n; ++i) {
    const std::uint32_t bits = std::uint32_t{x[i]} << 16;
    std::memcpy(y + i, &bits, sizeof bits);
  }
}

void embed(const ExecCtx& ctx, F32Mat y, const WeightRef& table, ConstI32Vec ids) {
  const std::size_t n = usize(y.size(1));
  const RowBlocks blocks = row_blocks(y.size(0), kNsPerElement * static_cast<double>(n));
  parallel_rows(ctx, blocks, [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t offset = std::int64_t{ids(t)} * table.row_stride;
      if (table.format == WeightFormat::kF32) {
        std::copy_n(static_cast<const float*>(table.data) + offset, n, y.row(t));
      } else {
        widen_row(y.row(t), static_cast<const std::uint16_t*>(table.data) + offset, n);
      }
    }
  });
}

void embed_bwd(const ExecCtx& ctx, F32Mat d_table, ConstF32Mat d_y, ConstI32Vec ids) {
  constexpr std::int64_t kMinCols = 64;  // whole cache lines, enough to hide the walk over ids
  const RowBlocks cols =
      row_blocks(d_y.size(1), kNsPerElement * static_cast<double>(ids.size(0)), kMinCols);
  parallel_rows(ctx, cols, [&](std::int64_t begin, std::int64_t end, std::int64_t) HWY_ATTR {
    for (std::int64_t t = 0; t < ids.size(0); ++t) {
      row_add(d_table.row(ids(t)) + begin, d_y.row(t) + begin, usize(end - begin));
    }
  });
}

EmbedOps embed_ops() {
  return {.embed = embed, .embed_bwd = embed_bwd};
}

}  // namespace
}  // namespace tandem::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tandem {

HWY_EXPORT(embed_ops);
EmbedOps cpu_embed_ops() {
  return HWY_DYNAMIC_DISPATCH(embed_ops)();
}

}  // namespace tandem
#endif  // HWY_ONCE
