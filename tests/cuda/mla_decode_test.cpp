// The Hopper kernel of absorbed MLA on the GPU: against fp64, and against itself in other batches,
// pages, formats, row groups and runs, bit for bit. Skipped on GPUs that cannot run it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "backends/cuda/cuda_backend.h"
#include "backends/cuda/mla/mla_decode_host.h"
#include "core/checked_cast.h"
#include "core/rng.h"
#include "core/thread_pool.h"
#include "tensor/dtype.h"
#include "tensor/storage.h"

namespace tandem::cuda {
namespace {

constexpr std::int64_t kDim = 576;
constexpr std::int64_t kLatent = 512;
constexpr float kScale = 0.0721687836F;

/// Uniform in [-1.7, 1.7), the same wherever the element is stored; exact in bf16.
float value_at(std::uint64_t stream, std::uint64_t row, std::uint64_t element) {
  std::uint64_t z = (stream * 0x632BE59BD9B4E019ULL) ^ (row * 0x9E3779B97F4A7C15ULL + element);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  const float x = static_cast<float>(z >> 40) * 0x1p-24F - 0.5F;
  return BF16::from_float(3.4F * x).to_float();
}
float key_at(std::uint64_t seq, std::int64_t position, std::int64_t channel) {
  return value_at(2 * seq, static_cast<std::uint64_t>(position),
                  static_cast<std::uint64_t>(channel));
}
/// Of the row that sees `visible` keys.
float query_at(std::uint64_t seq, std::int64_t visible, std::int64_t head, std::int64_t channel) {
  return value_at(2 * seq + 1, static_cast<std::uint64_t>(visible),
                  static_cast<std::uint64_t>(head * kDim + channel));
}

struct Seq {
  std::uint64_t id = 0;  // what its keys and queries are
  std::int64_t rows = 1;
  std::int64_t keys = 0;
};

struct Case {
  std::int64_t heads = 12;
  std::int64_t page_size = 64;
  LatentFormat format = LatentFormat::kBF16;
  std::vector<Seq> seqs;
  std::uint64_t page_order = 1;
  bool own_rows = false;   // no pages: rows of the batch, in fp32
  std::int64_t spare = 0;  // columns of the page table beyond what is needed

  [[nodiscard]] std::int64_t rows() const {
    return std::accumulate(seqs.begin(), seqs.end(), std::int64_t{0},
                           [](std::int64_t sum, const Seq& s) { return sum + s.rows; });
  }
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << latent_format_name(c.format) << ", " << c.heads << " heads, pages of " << c.page_size
      << ", " << c.seqs.size() << " sequences:";
  for (const Seq& seq : c.seqs) {
    out << ' ' << seq.rows << '/' << seq.keys;
  }
  return out;
}

struct Result {
  bool ran = false;
  std::vector<float> o;    // [T, H, 512]
  std::vector<float> lse;  // [T, H]
};

bool same_bits(const float* a, const float* b, std::int64_t count) {
  return std::memcmp(a, b, usize(count) * sizeof(float)) == 0;
}

class MlaDecode : public testing::Test {
 protected:
  MlaDecode()
      : device_(make_cuda_device({})),
        workspace_(std::size_t{64} << 20, *device_),
        ctx_{&cuda_backend(), &pool_, &workspace_, nullptr, device_.get()} {}

  template <typename T>
  Storage on_device(const std::vector<T>& host) {
    Storage storage(std::max<std::int64_t>(isize(host) * std::int64_t{sizeof(T)}, 16), *device_);
    device_->upload(storage.data(), host.data(), host.size() * sizeof(T));
    return storage;
  }

  /// Pages in a shuffled order; rows that no sequence sees are NaN.
  struct Pages {
    std::vector<std::byte> bytes;
    std::vector<std::int32_t> table;
    std::int64_t columns = 1;
    std::int64_t num_rows = 0;
  };
  static Pages pages_of(const Case& c) {
    Pages pages;
    for (const Seq& seq : c.seqs) {
      pages.columns = std::max(pages.columns, (seq.keys + c.page_size - 1) / c.page_size);
    }
    pages.columns += c.spare;
    const std::int64_t count = isize(c.seqs) * pages.columns;
    pages.table.resize(usize(count));
    std::iota(pages.table.begin(), pages.table.end(), 0);
    Rng rng(c.page_order);
    for (std::size_t i = pages.table.size(); i > 1; --i) {
      const auto j = static_cast<std::size_t>(rng.uniform() * static_cast<double>(i));
      std::swap(pages.table[i - 1], pages.table[std::min(j, i - 1)]);
    }
    pages.num_rows = count * c.page_size;
    const std::int64_t row_bytes = kDim * element_bytes(c.format);
    pages.bytes.assign(usize(pages.num_rows * row_bytes), std::byte{0xFF});
    std::vector<float> row(kDim);
    for (std::size_t b = 0; b < c.seqs.size(); ++b) {
      for (std::int64_t j = 0; j < c.seqs[b].keys; ++j) {
        for (std::int64_t d = 0; d < kDim; ++d) {
          row[usize(d)] = key_at(c.seqs[b].id, j, d);
        }
        const std::int64_t page = pages.table[b * usize(pages.columns) + usize(j / c.page_size)];
        encode_latent(&pages.bytes[usize((page * c.page_size + j % c.page_size) * row_bytes)],
                      c.format, row);
      }
    }
    return pages;
  }

  Result run(const Case& c, bool exact_queries = true) {
    const std::int64_t rows = c.rows();
    std::vector<float> q;
    std::vector<float> own;
    std::vector<std::int32_t> cu{0};
    std::vector<std::int32_t> lens;
    for (const Seq& seq : c.seqs) {
      cu.push_back(checked_cast<std::int32_t>(cu.back() + seq.rows));
      lens.push_back(checked_cast<std::int32_t>(seq.keys));
      for (std::int64_t i = 0; i < seq.rows; ++i) {
        const std::int64_t visible = seq.keys - (seq.rows - 1 - i);
        for (std::int64_t e = 0; e < c.heads * kDim; ++e) {
          const float value = query_at(seq.id, visible, e / kDim, e % kDim);
          q.push_back(exact_queries ? value : value * (1.0F + 0x1p-12F));
        }
        for (std::int64_t d = 0; c.own_rows && d < kDim; ++d) {
          own.push_back(key_at(seq.id, i, d));
        }
      }
    }
    const Pages pages = c.own_rows ? Pages{} : pages_of(c);
    const Storage q_there = on_device(q);
    const Storage own_there = on_device(own);
    const Storage rows_there = on_device(pages.bytes);
    const Storage table_there = on_device(pages.table);
    const Storage cu_there = on_device(cu);
    const Storage lens_there = on_device(lens);
    Storage o(rows * c.heads * kLatent * 4, *device_);
    Storage lse(rows * c.heads * 4, *device_);

    const ConstF32Cube q_cube(q_there.as<float>().data(), {rows, c.heads, kDim});
    const MlaQuery query{q_cube.cols(0, kLatent), q_cube.cols(kLatent, kDim - kLatent)};
    MlaCacheView cache;
    if (c.own_rows) {
      cache.rows = ConstLatentRows(ConstF32Mat(own_there.as<float>().data(), {rows, kDim}));
    } else {
      cache.rows = ConstLatentRows(rows_there.data(), c.format, pages.num_rows, kDim);
      cache.page_table = {table_there.as<std::int32_t>().data(), {isize(c.seqs), pages.columns}};
      cache.page_size = c.page_size;
    }
    const MlaBatch batch{{cu_there.as<std::int32_t>().data(), {isize(cu)}},
                         {lens_there.as<std::int32_t>().data(), {isize(lens)}}};
    Result result;
    result.ran = mla_decode(ctx_, {o.as<float>().data(), {rows, c.heads, kLatent}},
                            {lse.as<float>().data(), {rows, c.heads}}, query, cache, batch, kScale);
    if (result.ran) {
      result.o.resize(usize(rows * c.heads * kLatent));
      result.lse.resize(usize(rows * c.heads));
      device_->download(result.o.data(), o.data(), result.o.size() * 4);
      device_->download(result.lse.data(), lse.data(), result.lse.size() * 4);
    }
    return result;
  }

  std::unique_ptr<Device> device_;
  ThreadPool pool_;
  Arena workspace_;
  ExecCtx ctx_;
};

/// A head of a row in fp64, over keys as their format holds them.
struct Expected {
  std::vector<double> o;
  double lse = 0;
};
Expected expected_of(const Case& c, const Seq& seq, std::int64_t visible, std::int64_t head) {
  std::vector<float> keys(usize(visible * kDim));
  std::vector<std::byte> encoded(usize(kDim * element_bytes(c.format)));
  std::vector<double> scores(usize(visible));
  std::vector<double> query(usize(kDim));
  for (std::int64_t d = 0; d < kDim; ++d) {
    query[usize(d)] = double{query_at(seq.id, visible, head, d)};
  }
  double top = -1e300;
  for (std::int64_t j = 0; j < visible; ++j) {
    const std::span<float> key{&keys[usize(j * kDim)], usize(kDim)};
    double dot = 0;
    for (std::int64_t d = 0; d < kDim; ++d) {
      key[usize(d)] = key_at(seq.id, j, d);
    }
    encode_latent(encoded.data(), c.format, key);
    decode_latent(key, encoded.data(), c.format);
    for (std::int64_t d = 0; d < kDim; ++d) {
      dot += double{key[usize(d)]} * query[usize(d)];
    }
    scores[usize(j)] = dot * double{kScale};
    top = std::max(top, scores[usize(j)]);
  }
  Expected out{std::vector<double>(usize(kLatent)), 0};
  double sum = 0;
  for (std::int64_t j = 0; j < visible; ++j) {
    const double p = std::exp(scores[usize(j)] - top);
    sum += p;
    for (std::int64_t d = 0; d < kLatent; ++d) {
      out.o[usize(d)] += p * double{keys[usize(j * kDim + d)]};
    }
  }
  for (double& x : out.o) {
    x /= sum;
  }
  out.lse = top + std::log(sum);
  return out;
}

/// Compares some heads of the first and the last row of some sequences: fewer if they are long.
void expect_close(const Case& c, const Result& result) {
  std::int64_t first = 0;
  int compared = 0;
  for (const Seq& seq : c.seqs) {
    const std::int64_t step = std::max<std::int64_t>(seq.rows - 1, 1);
    for (std::int64_t i = 0; i < seq.rows; i += step) {
      const std::int64_t visible = seq.keys - (seq.rows - 1 - i);
      const bool is_long = visible > 1000;
      for (const std::int64_t head : {std::int64_t{0}, c.heads / 2 + 1, c.heads - 1}) {
        if (visible <= 0 || compared >= (is_long ? 1 : 3) || (is_long && head == 0)) {
          continue;
        }
        const Expected expected = expected_of(c, seq, visible, head);
        const std::int64_t index = (first + i) * c.heads + head;
        double largest = 0;
        double error = 0;
        for (std::int64_t d = 0; d < kLatent; ++d) {
          const double wanted = expected.o[usize(d)];
          const double got = double{result.o[usize(index * kLatent + d)]};
          largest = std::max(largest, std::abs(wanted));
          error = std::max(error, std::isnan(got) ? 1e30 : std::abs(got - wanted));
        }
        ASSERT_LE(error, largest * 0x1p-8) << c << ": row " << i << ", head " << head;
        ASSERT_NEAR(double{result.lse[usize(index)]}, expected.lse, 1e-3)
            << c << ": row " << i << ", head " << head;
      }
    }
    compared += seq.keys > 0 ? 1 : 0;
    first += seq.rows;
  }
}

Case uniform_case(std::int64_t batch, std::int64_t rows, std::int64_t keys, std::int64_t heads,
                  std::int64_t page_size, LatentFormat format) {
  Case c{.heads = heads, .page_size = page_size, .format = format, .seqs = {}};
  for (std::int64_t b = 0; b < batch; ++b) {
    c.seqs.push_back({static_cast<std::uint64_t>(b), rows, keys});
  }
  return c;
}

constexpr std::int64_t kLengths[] = {1, 63, 64, 65, 127, 1000, 4095, 4096, 20000};
constexpr LatentFormat kFormats[] = {LatentFormat::kBF16, LatentFormat::kFp8, LatentFormat::kF32};

TEST_F(MlaDecode, MatchesTheOracle) {
  for (const LatentFormat format : kFormats) {
    for (const std::int64_t keys : kLengths) {
      for (const std::int64_t heads : {8, 12, 96}) {
        for (const std::int64_t rows : {1, 2, 5, 8}) {
          for (const auto& [batch, page_size] :
               {std::pair{1, 64}, std::pair{3, 16}, std::pair{16, 1}}) {
            const bool large = keys * batch > 40000 || (keys > 4096 && rows == 5);
            if (rows > keys || large || (format != LatentFormat::kBF16 && rows == 2)) {
              continue;
            }
            const Case c = uniform_case(batch, rows, keys, heads, page_size, format);
            const Result result = run(c);
            if (!result.ran) {
              GTEST_SKIP() << "not on this GPU";
            }
            ASSERT_NO_FATAL_FAILURE(expect_close(c, result));
          }
        }
      }
    }
  }
}

TEST_F(MlaDecode, LongRowsOfManySplits) {
  for (const std::int64_t heads : {12, 48, 64, 96}) {
    for (const std::int64_t keys : {40000, 131072}) {
      const Case c = uniform_case(1, 1, keys, heads, 64, LatentFormat::kBF16);
      const Result result = run(c);
      if (!result.ran) {
        GTEST_SKIP() << "not on this GPU";
      }
      ASSERT_NO_FATAL_FAILURE(expect_close(c, result));
    }
  }
}

const std::vector<Seq> kMixed = {{1, 1, 700}, {2, 3, 65},  {3, 1, 0},   {4, 8, 4100},
                                 {5, 1, 1},   {6, 5, 512}, {7, 2, 8194}};

/// The sequences of kMixed one by one give what they give together.
TEST_F(MlaDecode, BatchOfManyEqualsEachAlone) {
  for (const LatentFormat format : kFormats) {
    for (const std::int64_t heads : {8, 12, 40, 96}) {
      const Case c{.heads = heads, .page_size = 16, .format = format, .seqs = kMixed};
      const Result all = run(c);
      if (!all.ran) {
        GTEST_SKIP() << "not on this GPU";
      }
      std::int64_t first = 0;
      for (const Seq& seq : kMixed) {
        Case alone = c;
        alone.seqs = {seq};
        alone.page_order = 99;
        const Result one = run(alone);
        EXPECT_TRUE(same_bits(one.o.data(), &all.o[usize(first * heads * kLatent)], isize(one.o)))
            << alone;
        EXPECT_TRUE(same_bits(one.lse.data(), &all.lse[usize(first * heads)], isize(one.lse)))
            << alone;
        first += seq.rows;
      }
    }
  }
}

/// Boxes, single keys, and conversion from fp32 load the same tiles.
TEST_F(MlaDecode, PagesAndFormatsOfTheSameValuesDoNotChangeBits) {
  for (const std::int64_t heads : {12, 96}) {
    Case c{.heads = heads, .page_size = 64, .seqs = kMixed};
    const Result expected = run(c);
    if (!expected.ran) {
      GTEST_SKIP() << "not on this GPU";
    }
    for (const std::int64_t page_size : {1, 3, 8, 16, 24, 64, 128}) {
      for (const LatentFormat format : {LatentFormat::kBF16, LatentFormat::kF32}) {
        c.page_size = page_size;
        c.format = format;
        c.page_order += 1;
        c.spare = page_size % 2 * 1000;  // an emptier table: more splits are possible
        const Result result = run(c);
        EXPECT_TRUE(same_bits(result.o.data(), expected.o.data(), isize(result.o))) << c;
        EXPECT_TRUE(same_bits(result.lse.data(), expected.lse.data(), isize(result.lse))) << c;
      }
    }
  }
}

/// Rows of a prompt, of its parts, of decode steps and of a training batch.
TEST_F(MlaDecode, EveryRowOfAPromptIsTheSameWhereverItIsComputed) {
  constexpr std::int64_t kLength = 700;
  for (const std::int64_t heads : {12, 40, 96}) {
    Case c{.heads = heads, .page_size = 16, .format = LatentFormat::kF32, .seqs = {}};
    c.seqs = {{1, kLength, kLength}};
    const Result whole = run(c);
    if (!whole.ran) {
      GTEST_SKIP() << "not on this GPU";
    }
    c.own_rows = true;
    const Result training = run(c);
    EXPECT_TRUE(same_bits(training.o.data(), whole.o.data(), isize(whole.o))) << heads;
    EXPECT_TRUE(same_bits(training.lse.data(), whole.lse.data(), isize(whole.lse))) << heads;
    c.own_rows = false;
    for (const std::int64_t end : {1, 64, 257, 300, 513, 700}) {
      for (const std::int64_t count : {1, 2, 3, 8, 40}) {
        if (count > end) {
          continue;
        }
        c.seqs = {{1, count, end}};
        const Result part = run(c);
        EXPECT_TRUE(same_bits(part.o.data(), &whole.o[usize((end - count) * heads * kLatent)],
                              isize(part.o)))
            << c;
      }
    }
  }
}

TEST_F(MlaDecode, SplitsChangeWithLengthInsideAGroup) {
  // 512 and 1024 tiles are where a split of 12 and of 96 heads grows; the rows lie on both sides.
  for (const auto& [heads, keys] : {std::pair{12, 512 * 64 + 3}, std::pair{96, 512 * 64 + 3}}) {
    const Case c = uniform_case(1, 8, keys, heads, 64, LatentFormat::kBF16);
    const Result all = run(c);
    if (!all.ran) {
      GTEST_SKIP() << "not on this GPU";
    }
    for (std::int64_t i = 0; i < 8; ++i) {
      Case alone = c;
      alone.seqs[0].rows = 1;
      alone.seqs[0].keys = keys - (7 - i);
      const Result one = run(alone);
      EXPECT_TRUE(same_bits(one.o.data(), &all.o[usize(i * heads * kLatent)], isize(one.o))) << i;
    }
  }
}

TEST_F(MlaDecode, RunsAgree) {
  for (const std::int64_t heads : {12, 96}) {
    const Case c{.heads = heads, .page_size = 16, .seqs = kMixed};
    const Result first = run(c);
    if (!first.ran) {
      GTEST_SKIP() << "not on this GPU";
    }
    for (int i = 0; i < 20; ++i) {
      const Result again = run(c);
      ASSERT_TRUE(same_bits(again.o.data(), first.o.data(), isize(first.o))) << i;
    }
  }
}

TEST_F(MlaDecode, QueriesAreRoundedToBf16) {
  const Case c{.heads = 12, .page_size = 16, .seqs = kMixed};
  const Result exact = run(c, true);
  if (!exact.ran) {
    GTEST_SKIP() << "not on this GPU";
  }
  const Result nearly = run(c, false);
  EXPECT_TRUE(same_bits(exact.o.data(), nearly.o.data(), isize(exact.o)));
}

}  // namespace
}  // namespace tandem::cuda
