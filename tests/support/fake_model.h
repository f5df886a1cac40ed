// fake_model.h — a deterministic model for engine tests, without weights or matrix products.
//
// Its logits are a hash of every token so far, and it knows those tokens only through the caches it
// is given: a running hash and the last tokens in the state slots, one record a token in the latent
// rows, found through the page table. A page, slot, row or length that is wrong, stale or shared by
// mistake changes the output. expected_logits() computes the same from the plain token list.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <stdexcept>
#include <vector>

#include "core/checked_cast.h"
#include "core/rng.h"
#include "models/model.h"

namespace tandem::test {

class FakeModel final : public Model {
 public:
  static constexpr std::int64_t kVocab = 37;
  static constexpr std::int64_t kMoeLayers = 2;
  static constexpr std::int64_t kTopK = 3;
  static constexpr std::int64_t kExperts = 16;
  static constexpr std::int64_t kWindow = 3;  // tokens in the convolution window of layer 0

  std::uint64_t weights = 1;                // a test changes them to act as a weight update
  std::int32_t nan_after_token = -1;        // logits after this token are NaN
  bool check_batches = true;                // the arrays of a batch agree with each other
  mutable std::int64_t throw_at_call = -1;  // forward call that throws, counted from 0
  mutable std::int64_t num_calls = 0;
  mutable std::int64_t num_rows = 0;
  mutable std::int64_t most_rows = 0;  // of one call

  FakeModel() {
    spec_.state_layers = {
        {.num_heads = 2, .key_dim = 3, .value_dim = 1, .conv_rows = kWindow, .conv_channels = 2},
        {.num_heads = 1, .key_dim = 2, .value_dim = 2, .conv_rows = 1, .conv_channels = 1}};
    spec_.latent_widths = {3, 2};
  }

  [[nodiscard]] const CacheSpec& cache_spec() const override { return spec_; }
  [[nodiscard]] std::int64_t vocab_size() const override { return kVocab; }
  [[nodiscard]] std::int64_t moe_layers() const override { return kMoeLayers; }
  [[nodiscard]] std::int64_t experts_per_token() const override { return kTopK; }
  [[nodiscard]] ModelFootprint footprint() const override { return {.weight_bytes = 1 << 20}; }

  void forward(const ExecCtx&, F32Mat logits, const ModelBatch& batch, const CacheBuffers& cache,
               RoutedExperts* routed) const override {
    if (num_calls++ == throw_at_call) {
      throw std::runtime_error("fake model: told to throw");
    }
    num_rows += batch.token_ids.size(0);
    most_rows = std::max(most_rows, batch.token_ids.size(0));
    if (check_batches) {
      check_batch(logits, batch, cache);
    }
    std::int64_t next_logits = 0;
    for (std::int64_t b = 0; b < batch.seqs.num_seqs(); ++b) {
      for (std::int64_t t = batch.seqs.begin(b); t < batch.seqs.begin(b + 1); ++t) {
        const std::int64_t position = batch.kv_lens(b) - (batch.seqs.begin(b + 1) - t);
        const bool is_padding = batch.seqs.state_slots(b) == -1;
        const std::uint64_t hash = is_padding ? 0 : read_token(batch, cache, b, t, position);
        if (routed != nullptr) {
          write_experts(routed->ids.row(t), hash, weights);
        }
        if (next_logits < batch.logit_rows.size(0) && batch.logit_rows(next_logits) == t) {
          write_logits(logits.row(next_logits++), hash, batch.token_ids(t));
        }
      }
    }
    TDM_CHECK(next_logits == batch.logit_rows.size(0), next_logits);
  }

  /// Logits after `tokens`.
  [[nodiscard]] std::vector<float> expected_logits(std::span<const std::int32_t> tokens) const {
    std::vector<float> logits(usize(kVocab));
    write_logits(logits.data(), expected_hash(tokens), tokens.back());
    return logits;
  }
  /// [tokens, moe_layers * top_k]
  [[nodiscard]] std::vector<std::int32_t> expected_experts(
      std::span<const std::int32_t> tokens) const {
    const std::int64_t width = kMoeLayers * kTopK;
    std::vector<std::int32_t> ids(tokens.size() * usize(width));
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      write_experts(ids.data() + isize(ids) / isize(tokens) * static_cast<std::int64_t>(i),
                    expected_hash(tokens.first(i + 1)), weights);
    }
    return ids;
  }

  // The engine never trains.
  [[nodiscard]] nn::ParameterStore& parameters() override {
    return no_training<nn::ParameterStore&>();
  }
  void refresh(const ExecCtx&) override { no_training<void>(); }
  ConstF32Mat forward_train(const ExecCtx&, const TrainBatch&, Arena&) override {
    return no_training<ConstF32Mat>();
  }
  void head(const ExecCtx&, F32Mat, ConstF32Mat) const override { no_training<void>(); }
  void head_backward(const ExecCtx&, F32Mat, ConstF32Mat, ConstF32Mat) override {
    no_training<void>();
  }
  void backward(const ExecCtx&, ConstF32Mat, const TrainBatch&) override { no_training<void>(); }

 private:
  template <typename T>
  [[noreturn]] static T no_training() {
    throw std::logic_error("fake model: cannot train");
  }

  static void check_batch(F32Mat logits, const ModelBatch& batch, const CacheBuffers& cache) {
    const std::int64_t num_seqs = batch.seqs.num_seqs();
    TDM_CHECK(num_seqs > 0 && batch.seqs.begin(0) == 0 &&
                  batch.seqs.num_rows() == batch.token_ids.size(0),
              num_seqs);
    TDM_CHECK(logits.size(0) == batch.logit_rows.size(0) && logits.size(1) == kVocab);
    std::set<std::int32_t> slots;
    std::set<std::int32_t> rows;
    for (std::int64_t b = 0; b < num_seqs; ++b) {
      const std::int32_t slot = batch.seqs.state_slots(b);
      if (slot == -1) {  // padding
        TDM_CHECK(batch.kv_lens(b) == 0, b);
        continue;
      }
      TDM_CHECK(slot >= 0 && slot < cache.num_slots && slots.insert(slot).second, slot);
      TDM_CHECK(batch.seqs.length(b) > 0 && batch.kv_lens(b) >= batch.seqs.length(b));
      for (std::int64_t i = 0; i < batch.page_table.size(1); ++i) {
        const std::int32_t page = batch.page_table(b, i);
        TDM_CHECK(page >= -1 && page < cache.num_pages, page);
      }
    }
    for (std::int64_t t = 0; t < batch.slot_mapping.size(0); ++t) {
      const std::int32_t row = batch.slot_mapping(t);
      TDM_CHECK(row == -1 || rows.insert(row).second, row);
    }
  }

  // 16-bit pieces are exact in a float.
  static float piece(std::uint64_t hash, int i) {
    return static_cast<float>((hash >> (16 * i)) & 0xFFFFU);
  }
  static std::uint64_t as_int(float value) { return static_cast<std::uint64_t>(value); }

  static std::uint64_t next_hash(std::uint64_t hash, std::int32_t token, std::uint64_t salt) {
    return mix_key({hash, static_cast<std::uint64_t>(token), salt});
  }

  /// Adds a token to the state record of `layer`, whose first four floats hold the hash.
  static std::uint64_t advance_state(float* state, std::int32_t token, std::uint64_t salt) {
    std::uint64_t hash = 0;
    for (int i = 0; i < 4; ++i) {
      hash |= as_int(state[i]) << (16 * i);
    }
    hash = next_hash(hash, token, salt);
    for (int i = 0; i < 4; ++i) {
      state[i] = piece(hash, i);
    }
    return hash;
  }

  /// The hash of what a window [rows, channels] holds; the token (plus 1, so that empty differs)
  /// then becomes its last row.
  static std::uint64_t advance_window(float* window, std::int64_t rows, std::int64_t channels,
                                      std::int32_t token) {
    std::uint64_t hash = 0;
    for (std::int64_t i = 0; i < rows * channels; ++i) {
      hash = mix_key({hash, as_int(window[i])});
    }
    std::copy(window + channels, window + rows * channels, window);
    std::fill_n(window + (rows - 1) * channels, channels, static_cast<float>(token + 1));
    return hash;
  }

  std::uint64_t read_token(const ModelBatch& batch, const CacheBuffers& cache, std::int64_t b,
                           std::int64_t t, std::int64_t position) const {
    const std::int32_t token = batch.token_ids(t);
    const std::int64_t slot = batch.seqs.state_slots(b);
    std::uint64_t hash = 0;
    for (std::size_t layer = 0; layer < spec_.state_layers.size(); ++layer) {
      const StateSpec& spec = spec_.state_layers[layer];
      const StateBuffer& buffer = cache.state_layers[layer];
      hash = mix_key(
          {hash, advance_state(buffer.states + slot * spec.state_floats(), token, layer),
           advance_window(buffer.conv.row(slot), spec.conv_rows, spec.conv_channels, token)});
    }
    const std::int64_t written = batch.slot_mapping(t);
    for (std::size_t layer = 0; layer < spec_.latent_widths.size(); ++layer) {
      const LatentRows& rows = cache.latent_layers[layer];
      TDM_CHECK(position < 256, position);  // a record of two bytes fits any format
      std::fill_n(rows.row(written), rows.row_bytes, std::byte(layer));
      rows.row(written)[0] = std::byte(token);
      rows.row(written)[1] = std::byte(position);
      std::uint64_t keys = 0;
      for (std::int64_t j = 0; j <= position; ++j) {
        const std::int64_t page = batch.page_table(b, j / cache.page_size);
        const std::byte* key = rows.row(page * cache.page_size + j % cache.page_size);
        keys = mix_key(
            {keys, std::to_integer<std::uint64_t>(key[0]), std::to_integer<std::uint64_t>(key[1])});
      }
      hash = mix_key({hash, keys});
    }
    return mix_key({hash, weights});
  }

  [[nodiscard]] std::uint64_t expected_hash(std::span<const std::int32_t> tokens) const {
    std::uint64_t hash = 0;
    for (std::size_t layer = 0; layer < spec_.state_layers.size(); ++layer) {
      const StateSpec& spec = spec_.state_layers[layer];
      std::uint64_t state = 0;
      for (const std::int32_t token : tokens) {
        state = next_hash(state, token, layer);
      }
      std::uint64_t window = 0;
      for (std::int64_t r = 0; r < spec.conv_rows; ++r) {
        const std::int64_t at = isize(tokens) - 1 - spec.conv_rows + r;
        for (std::int64_t c = 0; c < spec.conv_channels; ++c) {
          window =
              mix_key({window, at < 0 ? 0U : static_cast<std::uint64_t>(tokens[usize(at)] + 1)});
        }
      }
      hash = mix_key({hash, state, window});
    }
    for (std::size_t layer = 0; layer < spec_.latent_widths.size(); ++layer) {
      std::uint64_t keys = 0;
      for (std::size_t j = 0; j < tokens.size(); ++j) {
        keys = mix_key({keys, static_cast<std::uint64_t>(tokens[j]), j});
      }
      hash = mix_key({hash, keys});
    }
    return mix_key({hash, weights});
  }

  void write_logits(float* logits, std::uint64_t hash, std::int32_t last_token) const {
    Rng rng(hash);
    for (std::int64_t v = 0; v < kVocab; ++v) {
      logits[v] = last_token == nan_after_token ? std::numeric_limits<float>::quiet_NaN()
                                                : static_cast<float>(2.0 * rng.normal());
    }
  }
  static void write_experts(std::int32_t* ids, std::uint64_t hash, std::uint64_t weights) {
    Rng rng(mix_key({hash, weights, 0xE49E}));
    for (std::int64_t i = 0; i < kMoeLayers * kTopK; ++i) {
      ids[i] = static_cast<std::int32_t>(rng.below(kExperts));
    }
  }

  CacheSpec spec_;
};

}  // namespace tandem::test
