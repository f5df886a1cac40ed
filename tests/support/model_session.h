// model_session.h — drives a model directly, without the engine: a few sequences, each with one
// state slot and pages handed out in an order that makes neighbours in a sequence lie far apart.
#pragma once

#include <cstdint>
#include <vector>

#include "core/checked_cast.h"
#include "models/model.h"

namespace tandem::test {

class ModelSession {
 public:
  enum RowChoice { kAllRows, kLastRows };

  ModelSession(const ExecCtx& ctx, const Model& model, std::int64_t num_seqs,
               std::int64_t page_size = 4, std::int64_t max_len = 256)
      : ctx_(ctx),
        model_(model),
        page_size_(page_size),
        pages_per_seq_((max_len + page_size - 1) / page_size),
        lens_(usize(num_seqs), 0) {
    const CacheSpec& spec = model.cache_spec();
    const std::int64_t pages = num_seqs * pages_per_seq_;
    buffers_.num_slots = num_seqs;
    buffers_.num_pages = pages;
    buffers_.page_size = page_size;
    memory_.reserve(2 * spec.state_layers.size() + spec.latent_widths.size());
    const auto take = [&](std::int64_t floats) {
      return memory_.emplace_back(usize(floats), 0.0F).data();
    };
    for (const StateSpec& layer : spec.state_layers) {
      float* states = take(num_seqs * layer.state_floats());
      buffers_.state_layers.push_back({states,
                                       {take(num_seqs * layer.conv_floats()),
                                        {num_seqs, layer.conv_rows, layer.conv_channels}}});
    }
    for (const std::int64_t width : spec.latent_widths) {
      buffers_.latent_layers.push_back(
          LatentRows(F32Mat(take(pages * page_size * width), {pages * page_size, width})));
    }
    for (std::int64_t b = 0; b < num_seqs; ++b) {
      for (std::int64_t p = 0; p < pages_per_seq_; ++p) {
        page_table_.push_back(static_cast<std::int32_t>((pages_per_seq_ - 1 - p) * num_seqs + b));
      }
    }
  }

  /// Feeds new tokens of every sequence; returns the logits of all new rows, or of each sequence's
  /// last.
  std::vector<float> feed(const std::vector<std::vector<std::int32_t>>& tokens, RowChoice choice) {
    std::vector<std::int32_t> ids, cu_seqlens{0}, slots, kv_lens, mapping, rows;
    for (std::size_t b = 0; b < tokens.size(); ++b) {
      for (const std::int32_t token : tokens[b]) {
        const std::int64_t position = lens_[b]++;
        const std::int32_t page =
            page_table_[b * usize(pages_per_seq_) + usize(position / page_size_)];
        mapping.push_back(static_cast<std::int32_t>(page * page_size_ + position % page_size_));
        if (choice == kAllRows) {
          rows.push_back(static_cast<std::int32_t>(ids.size()));
        }
        ids.push_back(token);
      }
      if (choice == kLastRows) {
        rows.push_back(static_cast<std::int32_t>(ids.size() - 1));
      }
      cu_seqlens.push_back(static_cast<std::int32_t>(ids.size()));
      slots.push_back(static_cast<std::int32_t>(b));
      kv_lens.push_back(static_cast<std::int32_t>(lens_[b]));
    }
    const auto vec = [](const std::vector<std::int32_t>& v) {
      return ConstI32Vec{v.data(), {isize(v)}};
    };
    std::vector<float> logits(rows.size() * usize(model_.vocab_size()));
    model_.forward(ctx_, {logits.data(), {isize(rows), model_.vocab_size()}},
                   {vec(ids),
                    {vec(cu_seqlens), vec(slots)},
                    vec(kv_lens),
                    vec(mapping),
                    {page_table_.data(), {isize(tokens), pages_per_seq_}},
                    vec(rows)},
                   buffers_, nullptr);
    return logits;
  }

 private:
  const ExecCtx& ctx_;
  const Model& model_;
  std::int64_t page_size_;
  std::int64_t pages_per_seq_;
  std::vector<std::int64_t> lens_;
  std::vector<std::int32_t> page_table_;
  std::vector<std::vector<float>> memory_;
  CacheBuffers buffers_;
};

}  // namespace tandem::test
