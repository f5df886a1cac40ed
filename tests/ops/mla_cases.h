// mla_cases.h — random MLA problems, their pages and their oracle, shared by the MLA tests.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "ops/mla.h"
#include "ops/ref/mla_ref.h"
#include "support/op_test.h"

namespace tandem::test {

struct MlaDims {
  std::int64_t heads = 4;
  std::int64_t latent = 32;
  std::int64_t shared = 8;
  [[nodiscard]] std::int64_t dim() const { return latent + shared; }
};

struct MlaSeqSize {
  std::int64_t rows = 0;  // query rows of this call
  std::int64_t keys = 0;  // keys the last row sees; 0 is padding
};

struct MlaCase {
  MlaDims dims;
  std::vector<std::int32_t> cu_seqlens{0};
  std::vector<std::int32_t> kv_lens;
  std::vector<Tensor> kv;  // [keys, dim] of each sequence
  Tensor q{0};             // [T, H, dim]
  float scale = 0;

  MlaCase(MlaDims sizes, const std::vector<MlaSeqSize>& seqs, std::uint64_t seed)
      : dims(sizes), scale(1.0F / std::sqrt(static_cast<float>(sizes.dim()))) {
    for (const MlaSeqSize& seq : seqs) {
      cu_seqlens.push_back(checked_cast<std::int32_t>(cu_seqlens.back() + seq.rows));
      kv_lens.push_back(checked_cast<std::int32_t>(seq.keys));
      kv.push_back(Tensor::normal(seq.keys * dims.dim(), mix_key({seed, kv.size()})));
    }
    q = Tensor::normal(rows() * dims.heads * dims.dim(), seed);
  }

  [[nodiscard]] std::int64_t rows() const { return cu_seqlens.back(); }
  [[nodiscard]] std::int64_t num_seqs() const { return isize(kv_lens); }
  [[nodiscard]] MlaQuery query() {
    const F32Cube cube = q.cube(rows(), dims.heads, dims.dim());
    return {cube.cols(0, dims.latent), cube.cols(dims.latent, dims.shared)};
  }
  [[nodiscard]] MlaBatch batch() const {
    return {{cu_seqlens.data(), {isize(cu_seqlens)}}, {kv_lens.data(), {isize(kv_lens)}}};
  }
  /// Rows [begin, begin + count) of sequence 0, whose later rows are not there yet.
  [[nodiscard]] MlaCase rows_of_first(std::int64_t begin, std::int64_t count) const {
    const std::int64_t keys = kv_lens[0] - (cu_seqlens[1] - (begin + count));
    MlaCase out(dims, {{count, keys}}, 0);
    std::copy_n(kv[0].begin(), out.kv[0].numel(), out.kv[0].begin());
    std::copy_n(q.begin() + begin * dims.heads * dims.dim(), out.q.numel(), out.q.begin());
    return out;
  }
  /// With the keys as rows of a format hold them.
  [[nodiscard]] MlaCase rounded(LatentFormat format) const;
  [[nodiscard]] MlaCase only(std::int64_t b) const {
    const std::int64_t begin = cu_seqlens[usize(b)];
    MlaCase out(dims, {{cu_seqlens[usize(b + 1)] - begin, kv_lens[usize(b)]}}, 0);
    out.kv[0] = kv[usize(b)];
    std::copy_n(q.begin() + begin * dims.heads * dims.dim(), out.q.numel(), out.q.begin());
    return out;
  }
  [[nodiscard]] ref::MlaSeq<double> seq(std::int64_t b) const {
    const MlaCase c = only(b);
    return {c.rows(),          dims.heads,      dims.dim(),          dims.latent,
            kv_lens[usize(b)], c.q.as_double(), c.kv[0].as_double(), static_cast<double>(scale)};
  }
};

inline constexpr std::array kLatentFormats{LatentFormat::kF32, LatentFormat::kBF16,
                                           LatentFormat::kFp8};

/// [q_lat | q_s] of a cube as the two parts an op takes.
template <typename T>
[[nodiscard]] MlaQueryParts<T> query_parts(const TensorView<T, 3>& q, std::int64_t latent) {
  return {q.cols(0, latent), q.cols(latent, q.size(2) - latent)};
}

/// `count` values as rows of a format hold them.
inline void round_to_format(float* values, std::int64_t count, LatentFormat format) {
  std::vector<std::byte> row(usize(count * element_bytes(format)));
  encode_latent(row.data(), format, {values, usize(count)});
  decode_latent({values, usize(count)}, row.data(), format);
}

inline MlaCase MlaCase::rounded(LatentFormat format) const {
  MlaCase out = *this;
  for (Tensor& keys : out.kv) {
    round_to_format(keys.data(), keys.numel(), format);
  }
  return out;
}

/// The keys of a case scattered over pages in a shuffled order; unused rows are NaN.
struct PagedCache {
  std::int64_t page_size = 1;
  std::int64_t max_pages = 1;
  std::int64_t num_seqs = 0;
  std::int64_t dim = 0;
  LatentFormat format = LatentFormat::kF32;
  std::vector<std::byte> bytes;
  std::vector<std::int32_t> table;

  PagedCache(const MlaCase& c, std::int64_t size, LatentFormat rows_as = LatentFormat::kF32)
      : page_size(size), num_seqs(c.num_seqs()), dim(c.dims.dim()), format(rows_as) {
    for (const std::int32_t keys : c.kv_lens) {
      max_pages = std::max(max_pages, (keys + page_size - 1) / page_size);
    }
    const std::int64_t pages = num_seqs * max_pages;
    std::vector<std::int32_t> order(usize(pages));
    std::iota(order.begin(), order.end(), 0);
    Rng rng(mix_key({99, static_cast<std::uint64_t>(size)}));
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[rng.below(i)]);
    }
    bytes.assign(usize(pages * page_size * dim * element_bytes(format)), std::byte{0xFF});
    table.assign(usize(pages), -1);
    for (std::int64_t b = 0; b < num_seqs; ++b) {
      for (std::int64_t j = 0; j < c.kv_lens[usize(b)]; ++j) {
        const std::int64_t entry = b * max_pages + j / page_size;
        table[usize(entry)] = order[usize(entry)];
        encode_latent(rows().row(table[usize(entry)] * page_size + j % page_size), format,
                      {c.kv[usize(b)].begin() + j * dim, usize(dim)});
      }
    }
  }
  [[nodiscard]] LatentRows rows() {
    return {bytes.data(), format, num_seqs * max_pages * page_size, dim};
  }
  [[nodiscard]] MlaCacheView view() {
    return {rows(), {table.data(), {num_seqs, max_pages}}, page_size};
  }
};

struct MlaExpected {
  std::vector<double> o, lse;
};

inline MlaExpected mla_expected(const MlaCase& c) {
  MlaExpected out;
  for (std::int64_t b = 0; b < c.num_seqs(); ++b) {
    const ref::MlaSeqOut<double> seq = ref::mla_absorbed_ref(c.seq(b));
    out.o.insert(out.o.end(), seq.o.begin(), seq.o.end());
    out.lse.insert(out.lse.end(), seq.lse.begin(), seq.lse.end());
  }
  return out;
}

/// Bound on the fp32 error of softmax attention (and of the log-sum, which is smaller). A score of
/// magnitude up to `score` = scale |q||k| summed over channels errs by sum_tolerance(dim, score);
/// a weight's relative error is twice that (its own score and the sum's); the weighted average of
/// values up to `value` adds one rounding a key.
inline double attend_tolerance(std::int64_t dim, std::int64_t keys, double score, double value) {
  return 2.0 * sum_tolerance(dim, score) * value + sum_tolerance(2 * keys, value);
}

inline double mla_tolerance(const MlaCase& c) {
  double largest = 0;
  std::int64_t keys = 1;
  for (std::int64_t b = 0; b < c.num_seqs(); ++b) {
    largest = std::max(largest, max_abs(c.kv[usize(b)]));
    keys = std::max<std::int64_t>(keys, c.kv_lens[usize(b)]);
  }
  // sum_d |q_d k_d| <= |q|_2 |k|_2; both are close to dim^1/2 for normal data, taken with a margin
  // of 2 each so that the bound holds for every row.
  const double score = 4.0 * static_cast<double>(c.scale) * static_cast<double>(c.dims.dim());
  return attend_tolerance(c.dims.dim(), keys, score, largest);
}

}  // namespace tandem::test
