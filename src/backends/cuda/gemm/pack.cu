// pack.cu — a WeightRef into gemm/layout.h's layout.   Contract: ops/gemm.h
// Traffic   the weight once in, once out; from the host through a bounded staging buffer.
// Launch    fp32: tiles of 32 x 32 through shared memory. Others: one thread 16 bytes of a tile,
// and
//           one a scale byte. A device source is graph-safe; a host source waits for its copies.
#include <algorithm>

#include "backends/cuda/gemm/layout.h"
#include "backends/cuda/gemm/pack.h"
#include "backends/cuda/launch.cuh"
#include "backends/cuda/runtime/check.h"
#include "backends/cuda/runtime/cuda_device.h"

namespace tandem::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSquare = 32;
constexpr int kSquareRows = kThreads / kSquare;

/// Rows [begin, end) of a stored weight in device memory, and where they go.
struct PackArgs {
  const std::uint8_t* data;    // of row `begin`
  const std::uint8_t* scales;  // of row `begin`; FP4 only
  std::int64_t stride;         // elements between rows
  std::int64_t begin, end;
  std::int64_t rows, cols;  // of the whole weight
  bool transposed;
  float scale_2;
  std::uint8_t* packed;
  std::int64_t out, in;
  std::int64_t scales_at, scale_2_at;  // offsets in `packed`

  /// The stored element of output n and input k: its row and column, or false beyond the weight.
  __device__ bool find(std::int64_t n, std::int64_t k, std::int64_t* at) const {
    const std::int64_t row = transposed ? k : n;
    const std::int64_t col = transposed ? n : k;
    *at = (row - begin) * stride + col;
    return row < end && col < cols;
  }
};

__global__ void __launch_bounds__(kThreads) pack_f32_kernel(const PackArgs args) {
  begin_kernel();
  __shared__ float square[kSquare][kSquare + 1];
  const auto* from = reinterpret_cast<const float*>(args.data);
  auto* to = reinterpret_cast<float*>(args.packed);
  const int x = static_cast<int>(threadIdx.x) % kSquare;
  const int y = static_cast<int>(threadIdx.x) / kSquare;
  const std::int64_t row = args.begin + std::int64_t{blockIdx.x} * kSquare;
  const std::int64_t col = std::int64_t{blockIdx.y} * kSquare;
  for (int i = y; i < kSquare; i += kSquareRows) {
    if (row + i < args.end && col + x < args.cols) {
      const float value = from[(row + i - args.begin) * args.stride + col + x];
      if (args.transposed) {
        square[i][x] = value;
      } else {
        to[(row + i) * args.cols + col + x] = value;
      }
    }
  }
  if (!args.transposed) {
    return;
  }
  __syncthreads();  // the square is whole
  for (int i = y; i < kSquare; i += kSquareRows) {
    if (col + i < args.cols && row + x < args.end) {
      to[(col + i) * args.rows + row + x] = square[x][i];
    }
  }
}

/// Element a(index) of a lane in a step, as layout.h counts them: 16 bits for BF16, a byte for FP8,
/// 4 bits for FP4; zero beyond the weight.
template <WeightFormat kFormat>
__device__ unsigned stored(const PackArgs& args, std::int64_t n, std::int64_t k, int lane, int step,
                           int index) {
  n += lane / 4 + index / 2 % 2 * 8;
  k += step * 16 + lane % 4 * 2 + index % 2 + index / 4 * 8;
  std::int64_t at = 0;
  if (!args.find(n, k, &at)) {
    return 0;
  }
  if constexpr (kFormat == WeightFormat::kBF16) {
    return reinterpret_cast<const std::uint16_t*>(args.data)[at];
  } else if constexpr (kFormat == WeightFormat::kFp8Block) {
    return args.data[at];
  } else {
    const unsigned pair = args.data[at / 2];  // rows are of even length
    return at % 2 == 0 ? pair & 15U : pair >> 4;
  }
}

/// Word `w` (0 .. 3) of a tile's 16-byte chunk.
template <WeightFormat kFormat>
__device__ unsigned tile_word(const PackArgs& args, std::int64_t n, std::int64_t k, int chunk,
                              int w) {
  const int lane = chunk % 32;
  unsigned word = 0;
  if constexpr (kFormat == WeightFormat::kBF16) {  // [step][lane] of 8 elements
    for (int i = 0; i < 2; ++i) {
      word |= stored<kFormat>(args, n, k, lane, chunk / 32, 2 * w + i) << 16 * i;
    }
  } else if constexpr (kFormat == WeightFormat::kFp8Block) {  // [step / 2][lane] of 2 steps' 8
    for (int i = 0; i < 4; ++i) {
      const int step = chunk / 32 * 2 + w / 2;
      word |= stored<kFormat>(args, n, k, lane, step, w % 2 * 4 + i) << 8 * i;
    }
  } else {  // [lane] of a word a step
    for (int i = 0; i < 8; ++i) {
      word |= fp4_word(stored<kFormat>(args, n, k, lane, w, i), i);
    }
  }
  return word;
}

/// Tiles [first_row, first_row + row_blocks) x [first_col, first_col + col_blocks).
struct TileRange {
  std::int64_t first_row, row_blocks, first_col, col_blocks;

  [[nodiscard]] __host__ __device__ std::int64_t count() const { return row_blocks * col_blocks; }
};

template <WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    pack_tiles_kernel(const PackArgs args, const TileRange range) {
  begin_kernel();
  constexpr int kChunks = static_cast<int>(tile_bytes(kFormat) / 16);
  const std::int64_t id = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (id == 0) {
    *reinterpret_cast<float*>(args.packed + args.scale_2_at) = args.scale_2;
  }
  const std::int64_t in_range = id / kChunks;
  const int chunk = static_cast<int>(id % kChunks);
  if (in_range >= range.count()) {
    return;
  }
  const std::int64_t row_block = range.first_row + in_range / range.col_blocks;
  const std::int64_t col_block = range.first_col + in_range % range.col_blocks;
  const std::int64_t n = row_block * kTileRows;
  const std::int64_t k = col_block * kTileInputs;
  const std::int64_t tile = row_block * tiles_of(args.in, kTileInputs) + col_block;
  const uint4 words = make_uint4(
      tile_word<kFormat>(args, n, k, chunk, 0), tile_word<kFormat>(args, n, k, chunk, 1),
      tile_word<kFormat>(args, n, k, chunk, 2), tile_word<kFormat>(args, n, k, chunk, 3));
  *reinterpret_cast<uint4*>(args.packed + tile * tile_bytes(kFormat) + chunk * 16) = words;
}

/// FP4: the record of a tile is [row % 8][row / 8][block of the row].
template <WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    pack_scales_kernel(const PackArgs args, const TileRange range) {
  begin_kernel();
  constexpr int kRecord = static_cast<int>(tile_scale_bytes(kFormat));
  constexpr int kPerRow = kRecord / static_cast<int>(kTileRows);
  constexpr std::int64_t kGroup = kTileInputs / kPerRow;
  const std::int64_t id = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const std::int64_t in_range = id / kRecord;
  const int byte = static_cast<int>(id % kRecord);
  if (in_range >= range.count()) {
    return;
  }
  const std::int64_t row_block = range.first_row + in_range / range.col_blocks;
  const std::int64_t col_block = range.first_col + in_range % range.col_blocks;
  const std::int64_t tile = row_block * tiles_of(args.in, kTileInputs) + col_block;
  const std::int64_t n = row_block * kTileRows + byte / (2 * kPerRow) + byte / kPerRow % 2 * 8;
  const std::int64_t block = col_block * kPerRow + byte % kPerRow;
  const std::int64_t blocks = args.cols / kGroup;
  const bool inside = n < args.end && block < blocks;
  args.packed[args.scales_at + tile * kRecord + byte] =
      inside ? args.scales[(n - args.begin) * blocks + block] : std::uint8_t{0};
}

template <WeightFormat kFormat>
void launch_tiles(const ExecCtx& ctx, const PackArgs& args) {
  const std::int64_t row_tile = args.transposed ? kTileInputs : kTileRows;
  const std::int64_t first = args.begin / row_tile;
  const std::int64_t blocks = tiles_of(args.end, row_tile) - first;
  const TileRange range = args.transposed
                              ? TileRange{0, tiles_of(args.out, kTileRows), first, blocks}
                              : TileRange{first, blocks, 0, tiles_of(args.in, kTileInputs)};
  const auto grid = [&](std::int64_t per_tile) {
    return static_cast<unsigned>(tiles_of(range.count() * per_tile, kThreads));
  };
  launch(ctx, "pack", pack_tiles_kernel<kFormat>,
         {.grid = grid(tile_bytes(kFormat) / 16), .block = kThreads, .writes_weights = true}, args,
         range);
  if constexpr (tile_scale_bytes(kFormat) > 0) {
    launch(ctx, "pack", pack_scales_kernel<kFormat>,
           {.grid = grid(tile_scale_bytes(kFormat)), .block = kThreads, .writes_weights = true},
           args, range);
  }
}

void launch_rows(const ExecCtx& ctx, WeightFormat format, const PackArgs& args) {
  switch (format) {
    case WeightFormat::kF32: {
      const dim3 grid(static_cast<unsigned>(tiles_of(args.end - args.begin, kSquare)),
                      static_cast<unsigned>(tiles_of(args.cols, kSquare)));
      return launch(ctx, "pack", pack_f32_kernel,
                    {.grid = grid, .block = kThreads, .writes_weights = true}, args);
    }
    case WeightFormat::kBF16:
      return launch_tiles<WeightFormat::kBF16>(ctx, args);
    case WeightFormat::kMxFp4:
      return launch_tiles<WeightFormat::kMxFp4>(ctx, args);
    case WeightFormat::kNvFp4:
      return launch_tiles<WeightFormat::kNvFp4>(ctx, args);
    case WeightFormat::kFp8Block:
      return launch_tiles<WeightFormat::kFp8Block>(ctx, args);
  }
}

/// The pointer by which kernels read `pointer`; null where only the host can.
const void* device_pointer(const void* pointer) {
  if (pointer == nullptr) {
    return nullptr;
  }
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, pointer), "asking where a weight lies");
  return attributes.type == cudaMemoryTypeUnregistered ? nullptr : attributes.devicePointer;
}

std::int64_t bits_of(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return 32;
    case WeightFormat::kBF16:
      return 16;
    case WeightFormat::kFp8Block:
      return 8;
    case WeightFormat::kMxFp4:
    case WeightFormat::kNvFp4:
      return 4;
  }
  return 0;
}

/// Inputs that share a scale byte; 0 where scales are no bytes.
std::int64_t group_of(WeightFormat format) {
  return format == WeightFormat::kMxFp4 ? 32 : format == WeightFormat::kNvFp4 ? 16 : 0;
}

bool is_strided(WeightFormat format) {
  return format == WeightFormat::kF32 || format == WeightFormat::kBF16;
}

void check_weight(const WeightRef& weight, Orientation orientation) {
  TDM_CHECK(weight.rows >= 0 && weight.cols >= 0, weight.rows, weight.cols);
  TDM_CHECK(weight.data != nullptr || weight.rows * weight.cols == 0);
  if (is_strided(weight.format)) {
    TDM_CHECK(weight.row_stride >= weight.cols || weight.rows <= 1, weight.row_stride, weight.cols);
    return;
  }
  TDM_CHECK(orientation == Orientation::kNormal, "only kF32 and kBF16 can be transposed");
  TDM_CHECK(weight.scales != nullptr || weight.rows * weight.cols == 0);
  const std::int64_t group = group_of(weight.format);
  TDM_CHECK(group == 0 || weight.cols % group == 0, weight.cols, group);
}

/// `bytes` from the host, in the staging buffer at `to`; or where they are.
const std::uint8_t* staged(const ExecCtx& ctx, const void* on_device, const std::uint8_t* on_host,
                           std::int64_t offset, std::int64_t bytes, std::uint8_t* to) {
  if (on_device != nullptr) {
    return static_cast<const std::uint8_t*>(on_device) + offset;
  }
  device_of(ctx).upload(to, on_host + offset, static_cast<std::size_t>(bytes));
  return to;
}

/// Packs the weight in pieces of rows, so that a host weight needs little staging memory. Pieces
/// start at multiples of 128 rows: whole tiles in either orientation.
void pack_pieces(const ExecCtx& ctx, const WeightRef& weight, PackArgs args) {
  constexpr std::int64_t kStagingBytes = std::int64_t{16} << 20;
  constexpr std::int64_t kPieceRows = 128;
  const std::int64_t row_bytes = args.stride * bits_of(weight.format) / 8;
  const std::int64_t last_row_bytes = weight.cols * bits_of(weight.format) / 8;
  const std::int64_t group = group_of(weight.format);
  const std::int64_t scale_bytes = group == 0 ? 0 : weight.cols / group;
  const void* data = device_pointer(weight.data);
  const void* scales = scale_bytes == 0 ? nullptr : device_pointer(weight.scales);
  const bool all_there = data != nullptr && (scales != nullptr || scale_bytes == 0);
  const std::int64_t fitting = kStagingBytes / std::max<std::int64_t>(1, row_bytes + scale_bytes);
  const std::int64_t piece =
      all_there ? weight.rows : std::max(kPieceRows, fitting / kPieceRows * kPieceRows);
  const std::int64_t most = std::min(piece, weight.rows);
  std::uint8_t* data_staging = nullptr;
  std::uint8_t* scale_staging = nullptr;
  if (!all_there) {
    data_staging = ctx.workspace->take<std::uint8_t>(most * row_bytes).data();
    scale_staging = ctx.workspace->take<std::uint8_t>(most * scale_bytes).data();
  }
  for (std::int64_t begin = 0; begin < weight.rows; begin += piece) {
    args.begin = begin;
    args.end = std::min(weight.rows, begin + piece);
    const std::int64_t rows = args.end - begin;
    args.data = staged(ctx, data, static_cast<const std::uint8_t*>(weight.data), begin * row_bytes,
                       (rows - 1) * row_bytes + last_row_bytes, data_staging);
    args.scales = scale_bytes == 0
                      ? nullptr
                      : staged(ctx, scales, static_cast<const std::uint8_t*>(weight.scales),
                               begin * scale_bytes, rows * scale_bytes, scale_staging);
    launch_rows(ctx, weight.format, args);
  }
}

void copy_fp8_scales(const ExecCtx& ctx, const WeightRef& weight, std::uint8_t* to) {
  const auto bytes =
      static_cast<std::size_t>(tiles_of(weight.rows, 128) * tiles_of(weight.cols, 128) * 4);
  if (const void* from = device_pointer(weight.scales)) {
    device_of(ctx).copy(to, from, bytes);
  } else {
    device_of(ctx).upload(to, weight.scales, bytes);
  }
}

}  // namespace

void pack(const ExecCtx& ctx, PackedWeight& packed, const WeightRef& weight,
          Orientation orientation) {
  check_weight(weight, orientation);
  const bool transposed = orientation == Orientation::kTransposed;
  packed.format = weight.format;
  packed.out = transposed ? weight.cols : weight.rows;
  packed.in = transposed ? weight.rows : weight.cols;
  packed.scale_2 = weight.scale_2;
  const std::int64_t scales_at = scales_offset(packed.format, packed.out, packed.in);
  const std::int64_t scale_2_at = scale_2_offset(packed.format, packed.out, packed.in);
  const std::int64_t bytes = scale_2_at + (packed.format == WeightFormat::kF32 ? 0 : 4);
  if (packed.data.size_bytes() != bytes) {
    packed.data = Storage(bytes, *ctx.device);
  }
  if (weight.rows == 0 || weight.cols == 0) {
    return;
  }
  const ArenaScope scope(*ctx.workspace);
  auto* const to = reinterpret_cast<std::uint8_t*>(packed.data.data());
  const PackArgs args{
      .data = nullptr,
      .scales = nullptr,
      .stride = is_strided(weight.format) && weight.rows > 1 ? weight.row_stride : weight.cols,
      .begin = 0,
      .end = 0,
      .rows = weight.rows,
      .cols = weight.cols,
      .transposed = transposed,
      .scale_2 = weight.scale_2,
      .packed = to,
      .out = packed.out,
      .in = packed.in,
      .scales_at = scales_at,
      .scale_2_at = scale_2_at};
  if (weight.format == WeightFormat::kFp8Block) {
    copy_fp8_scales(ctx, weight, to + scales_at);
  }
  pack_pieces(ctx, weight, args);
}

}  // namespace tandem::cuda
