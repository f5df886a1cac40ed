// cache_spec.h — what a model needs to remember, so that engine/ can own and page it without
// knowing the model.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/latent_rows.h"
#include "tensor/view.h"

namespace tandem {

/// Per-sequence recurrent memory of one layer: KDA states and the convolution window.
struct StateSpec {
  std::int64_t num_heads = 0;
  std::int64_t key_dim = 0;
  std::int64_t value_dim = 0;
  std::int64_t conv_rows = 0;  // W - 1
  std::int64_t conv_channels = 0;

  [[nodiscard]] std::int64_t state_floats() const { return num_heads * key_dim * value_dim; }
  [[nodiscard]] std::int64_t conv_floats() const { return conv_rows * conv_channels; }
};

struct CacheSpec {
  std::vector<StateSpec> state_layers;  // one an KDA layer, in layer order
  std::vector<std::int64_t>
      latent_widths;  // one an MLA layer, in layer order: elements per cached token
  /// Of the cached rows. A model says what suits its weights; the engine may take another one,
  /// unless `trainable`: training attends over fp32 rows, so its rollouts must as well.
  LatentFormat latent_format = LatentFormat::kF32;
  bool trainable = false;

  [[nodiscard]] std::int64_t bytes_per_token() const {
    std::int64_t elements = 0;
    for (const std::int64_t width : latent_widths) {
      elements += width;
    }
    return elements * element_bytes(latent_format);
  }
  [[nodiscard]] std::int64_t bytes_per_sequence() const {
    std::int64_t floats = 0;
    for (const StateSpec& layer : state_layers) {
      floats += layer.state_floats() + layer.conv_floats();
    }
    return floats * 4;
  }
};

/// The memory of one state layer: `num_slots` records.
struct StateBuffer {
  float* states = nullptr;  // [slots, H, K, V]
  F32Cube conv;             // [slots, W-1, channels]
};

/// All cache memory of a model. Owned by the engine's cache manager; a model only sees it during a
/// call.
struct CacheBuffers {
  std::int64_t num_slots = 0;
  std::int64_t num_pages = 0;
  std::int64_t page_size = 0;
  std::vector<StateBuffer> state_layers;  // parallel to CacheSpec::state_layers
  std::vector<LatentRows>
      latent_layers;  // [pages * page_size, width], parallel to CacheSpec::latent_widths
};

}  // namespace tandem
