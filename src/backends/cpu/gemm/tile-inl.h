// tile-inl.h — the micro-kernel, compiled once per SIMD target. R rows of x times P panels of 16
// outputs; the accumulators stay in registers over a block of k. All rows, panels and lanes are
// independent chains, so the choice of R, P and the vector width never changes a bit.

#if defined(TDM_GEMM_TILE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef TDM_GEMM_TILE_INL_H
#undef TDM_GEMM_TILE_INL_H
#else
#define TDM_GEMM_TILE_INL_H
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include <hwy/highway.h>

#include "backends/cpu/gemm/formats-inl.h"
#include "backends/cpu/gemm/panel.h"

HWY_BEFORE_NAMESPACE();
namespace tandem::gemm::HWY_NAMESPACE {

// Tile heights and the panels that go with them, by the number of vector registers (32, 16, 32).
inline constexpr int kTileRows = kVectors == 1 ? 12 : kVectors <= 4 ? 6 : 4;
inline constexpr int kTilePanels = kVectors == 1 ? 2 : 1;
static_assert(kMaxTile % kTileRows == 0);

/// The smallest compiled tile that holds `rows` rows: kTileRows, 8, 4, 2 or 1.
constexpr std::int64_t tile_height(std::int64_t rows) {
  const std::int64_t height = rows > 8 ? 16 : rows > 4 ? 8 : rows > 2 ? 4 : rows;
  return height < kTileRows ? height : kTileRows;
}

/// Panels of one weight from some k on; the next panel lies a stride further.
struct PanelRef {
  const std::uint32_t* words = nullptr;
  std::int64_t word_stride = 0;
  const std::uint8_t* scales = nullptr;
  std::int64_t scale_stride = 0;  // bytes
  float scale_2 = 1.0F;
};

/// Rows copied to a dense scratch: x(r, k) = x[r * kXStride + k], panels as packed.
struct CopiedRows {
  static constexpr std::int64_t row() { return kXStride; }
  static constexpr bool kStrided = false;
};
/// Both operands where they are, the reduction running over rows: x(r, k) = x[k * x_step + r], and
/// the panels' 16 lanes at words + k * word_step.
struct InPlace {
  static constexpr std::int64_t row() { return 1; }
  static constexpr bool kStrided = true;
};

struct TileArgs {
  const float* x = nullptr;  // see CopiedRows and InPlace
  PanelRef panels;
  std::int64_t depth = 0;  // reduction indices
  float* y = nullptr;
  std::int64_t y_stride = 0;
  std::int64_t x_step = 1;          // InPlace
  std::int64_t word_step = kPanel;  // InPlace
  int rows = 0;                     // valid rows, <= R
  int cols = 0;                     // valid outputs, <= 16 P
  const char* prefetch = nullptr;   // weights of a later tile, 64 bytes every 4 indices
  bool from_y = false;              // start the chains at y instead of 0
};

template <typename Format, typename Layout, int R, int P>
struct Tile {
  static constexpr int kWidth = P * kVectors;
  using Row = VF[std::size_t{kWidth}];
  using WordRow = VU[std::size_t{kWidth}];
  using Acc = Row[std::size_t{R}];
  static constexpr std::size_t kEdge = std::size_t{16} * P;

  static HWY_INLINE void begin(const TileArgs& args, Acc& acc) {
    const Floats d;
    TDM_UNROLL for (int r = 0; r < R; ++r) {
      TDM_UNROLL for (int i = 0; i < kWidth; ++i) {
        acc[r][i] = hn::Zero(d);
      }
    }
    if (!args.from_y) {
      return;
    }
    HWY_ALIGN float edge[kEdge] = {};
    TDM_UNROLL for (int r = 0; r < R; ++r) {
      if (r < args.rows) {
        const float* from = args.y + r * args.y_stride;
        if (args.cols < 16 * P) {
          std::copy_n(from, args.cols, edge);
          from = edge;
        }
        TDM_UNROLL for (int i = 0; i < kWidth; ++i) {
          acc[r][i] = hn::LoadU(d, from + i * kLanes);
        }
      }
    }
  }

  static HWY_INLINE void end(const TileArgs& args, const Acc& acc) {
    const Floats d;
    HWY_ALIGN float edge[kEdge];
    TDM_UNROLL for (int r = 0; r < R; ++r) {
      if (r < args.rows) {
        float* to = args.y + r * args.y_stride;
        float* out = args.cols < 16 * P ? edge : to;
        TDM_UNROLL for (int i = 0; i < kWidth; ++i) {
          hn::StoreU(acc[r][i], d, out + i * kLanes);
        }
        if (args.cols < 16 * P) {
          std::copy_n(edge, args.cols, to);
        }
      }
    }
  }

  template <int kIndex>
  static HWY_INLINE void step_one(const float* x, const std::uint32_t* words, std::int64_t stride,
                                  const Row& scales, Acc& acc) {
    Row w;
    TDM_UNROLL for (int i = 0; i < kWidth; ++i) {
      w[i] = Format::template take<kIndex>(
          words + (i / kVectors) * stride + (i % kVectors) * kLanes, scales[i]);
    }
    TDM_UNROLL for (int r = 0; r < R; ++r) {
      const VF value = hn::Set(Floats(), x[r * Layout::row() + kIndex]);
      TDM_UNROLL for (int i = 0; i < kWidth; ++i) {
        acc[r][i] = fma(value, w[i], acc[r][i]);
      }
    }
  }

  /// The first `count` indices of a group.
  template <int... kIndex>
  static HWY_INLINE void step(std::integer_sequence<int, kIndex...>, int count, const float* x,
                              const std::uint32_t* words, std::int64_t stride, const Row& scales,
                              Acc& acc) {
    ((kIndex < count ? step_one<kIndex>(x, words, stride, scales, acc) : void()), ...);
  }

  static HWY_INLINE void load_scales(const PanelRef& panels, const std::uint8_t* from,
                                     Row& scales) {
    TDM_UNROLL for (int i = 0; i < kWidth; ++i) {
      scales[i] = Format::scale(from + (i / kVectors) * panels.scale_stride +
                                    (i % kVectors) * kLanes * scale_bytes(Format::kFormat),
                                panels.scale_2);
    }
  }

  /// Turns sums in units of `from` into sums in units of `to`, powers of two.
  static HWY_INLINE void rescale(const Row& from, const Row& to, Acc& acc) {
    TDM_UNROLL for (int i = 0; i < kWidth; ++i) {
      const VF factor = hn::Mul(from[i], power_of_two_inverse(to[i]));
      TDM_UNROLL for (int r = 0; r < R; ++r) {
        acc[r][i] = hn::Mul(acc[r][i], factor);
      }
    }
  }

  static HWY_NOINLINE void run(const TileArgs& args) {
    constexpr int kGroup = Format::kGroup;
    constexpr auto kIndices = std::make_integer_sequence<int, kGroup>();
    constexpr std::int64_t kScaleBlock = scale_block(Format::kFormat);
    Acc acc;
    begin(args, acc);
    Row scales;
    Row unit;  // kScaledSums: of the sums
    TDM_UNROLL for (int i = 0; i < kWidth; ++i) {
      unit[i] = hn::Set(Floats(), 1.0F);
    }
    const std::int64_t chunk = kScaleBlock == 0 ? args.depth : kScaleBlock;
    const float* x = args.x;
    const std::uint32_t* words = args.panels.words;
    const std::int64_t stride = args.panels.word_stride;
    const std::int64_t x_step = Layout::kStrided ? args.x_step : kGroup;
    const std::int64_t word_step = Layout::kStrided ? args.word_step : kPanel;
    const std::uint8_t* scale_bytes_at = args.panels.scales;
    for (std::int64_t k = 0; k < args.depth; k += chunk) {
      load_scales(args.panels, scale_bytes_at, scales);
      if constexpr (Format::kScaledSums) {
        // fma(x, code * s, y) = s fma(x, code, y / s) for a power of two s, so a block's chain runs
        // on y / s and no code needs a multiplication.
        rescale(unit, scales, acc);
        TDM_UNROLL for (int i = 0; i < kWidth; ++i) {
          unit[i] = scales[i];
        }
      }
      scale_bytes_at += kPanel * scale_bytes(Format::kFormat);
      const std::int64_t count = std::min(chunk, args.depth - k);
      std::int64_t group = count / kGroup;
      if constexpr (kGroup == 1 && !Layout::kStrided && R == kTileRows) {
        for (const char* next = args.prefetch; next != nullptr && group >= 4; group -= 4) {
          __builtin_prefetch(next, 0, 2);
          next += 64;
          TDM_UNROLL for (int i = 0; i < 4; ++i) {
            step(kIndices, kGroup, x, words, stride, scales, acc);
            x += x_step;
            words += word_step;
          }
        }
      }
      for (; group > 0; --group) {
        step(kIndices, kGroup, x, words, stride, scales, acc);
        x += x_step;
        words += word_step;
      }
      if constexpr (kGroup > 1) {
        const int rest = static_cast<int>(count % kGroup);
        if (rest > 0) {
          step(kIndices, rest, x, words, stride, scales, acc);
          x += rest;
          words += kPanel;
        }
      }
    }
    if constexpr (Format::kScaledSums) {
      TDM_UNROLL for (int i = 0; i < kWidth; ++i) {
        scales[i] = hn::Set(Floats(), 1.0F);
      }
      rescale(unit, scales, acc);
    }
    end(args, acc);
  }
};

/// Whether a tile's accumulators, values and scales, and three more, fit the register file; a
/// single panel always may.
template <typename Format>
constexpr bool fits(int rows, int panels) {
  constexpr int kRegisters = kVectors == 2 ? 16 : 32;
  const bool scaled = scale_block(Format::kFormat) > 0 && !Format::kScaledSums;
  const int operands = scaled ? 2 * panels : panels;
  return panels == 1 || (rows * panels + operands) * kVectors + 3 <= kRegisters;
}

/// The most panels that a tile of this height takes at once.
template <typename Format>
constexpr int widest(int rows) {
  return fits<Format>(rows, 4) ? 4 : fits<Format>(rows, 2) ? 2 : 1;
}

/// Runs `panels` panels at the compiled widths.
template <typename Format, typename Layout, int R>
HWY_INLINE void run_panels(TileArgs args, int panels) {
  const int cols = args.cols;
  const auto advance = [&](int done) {
    args.panels.words += done * args.panels.word_stride;
    args.panels.scales += done * args.panels.scale_stride;
    args.y += done * kPanel;
    panels -= done;
  };
  int left = cols;
  const auto take_cols = [&](int width) {
    args.cols = std::min(left, 16 * width);
    left -= args.cols;
  };
  while (panels > 0) {
    if constexpr (fits<Format>(R, 4)) {
      if (panels >= 4) {
        take_cols(4);
        Tile<Format, Layout, R, 4>::run(args);
        advance(4);
        continue;
      }
    }
    if constexpr (fits<Format>(R, 2)) {
      if (panels >= 2) {
        take_cols(2);
        Tile<Format, Layout, R, 2>::run(args);
        advance(2);
        continue;
      }
    }
    take_cols(1);
    Tile<Format, Layout, R, 1>::run(args);
    advance(1);
  }
}

/// Runs the tile of height tile_height(args.rows).
template <typename Format, typename Layout>
HWY_INLINE void run_tile(const TileArgs& args, int panels) {
  switch (tile_height(args.rows)) {
    case 1:
      return run_panels<Format, Layout, 1>(args, panels);
    case 2:
      return run_panels<Format, Layout, 2>(args, panels);
    case 4:
      return run_panels<Format, Layout, 4>(args, panels);
    case 8:
      return run_panels < Format, Layout, kTileRows < 8 ? 4 : 8 > (args, panels);
    default:
      if constexpr (Format::kGroup == 1) {
        return run_panels<Format, Layout, kTileRows>(args, panels);
      }
  }
}

}  // namespace tandem::gemm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
