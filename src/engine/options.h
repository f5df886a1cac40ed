// options.h — limits of an engine and the memory that follows from them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/error.h"
#include "engine/cache/prefix_tree.h"
#include "models/model.h"

namespace tandem {

/// None of these but kv_cache_dtype changes any result, only speed and memory.
struct EngineOptions {
  std::int64_t max_batch_tokens = 512;  // token rows of a step: decode rows first, then prefill
  std::int64_t max_prefill_tokens = 0;  // of these, rows of prompts; 0: all that decodes leave
  std::int64_t max_running_seqs = 32;   // sequences that hold cache memory at once
  std::int64_t max_seq_len = 4096;      // tokens, prompt and response together
  std::int64_t page_size = 16;          // tokens in a page of latent rows
  std::int64_t num_pages = 0;           // 0: from cache_bytes, or so many that nothing is preempted
  std::int64_t cache_bytes = 0;         // pages and state slots together; 0: no limit but num_pages
  std::int64_t num_state_slots = 0;     // 0: one for every running sequence
  std::int64_t max_queued = 0;          // waiting requests at once; 0: no limit

  bool prefix_cache = true;
  std::int64_t checkpoint_tokens = 0;  // multiple of page_size; 0: the least from 16 on
  std::int64_t num_checkpoint_slots =
      0;  // states kept for the prefix cache; 0: plan_memory chooses
  // For tests: every so many steps all running sequences that have drawn a token since they were
  // admitted are preempted; 0: never.
  std::int64_t preempt_every = 0;
  /// Elements of the latent rows, the cache of the MLA layers. None: fp32 for a model that is
  /// trainable or has fp32 matrices, else bf16, in which the released models were trained. fp8
  /// halves the cache again for a coarser attention.
  std::optional<LatentFormat> kv_cache_dtype = {};
  std::vector<std::int32_t> eos_ids = {};  // end a response unless Request::ignore_eos
  std::int64_t first_weight_version = 0;   // what tokens are stamped with until the weights change

  /// All problems at once, each naming the field and what was expected.
  [[nodiscard]] Status validate() const;
  /// Sequences that can run at once. Each running sequence is fed at least one row a step, so a
  /// prefill never starves decodes, nor they it.
  [[nodiscard]] std::int64_t num_seats() const;
  /// Lengths at which a prefix may be resumed are multiples of this.
  [[nodiscard]] std::int64_t checkpoint_grid() const;
};

/// The largest batch, padding included.
struct BatchLimits {
  std::int64_t rows = 0;
  std::int64_t seqs = 0;
  std::int64_t pages_per_seq = 0;

  /// int32 of all arrays of a batch.
  [[nodiscard]] std::int64_t num_ints() const;
};
/// Of logits, batch arrays, routed experts and the sampler.
[[nodiscard]] std::int64_t batch_bytes(const Model& model, const BatchLimits& limits);

/// What an engine allocates for a model, decided before any of it is allocated. On a device with
/// memory of its own (engine/warm_up.h) it is all that serving takes: nothing grows later.
struct MemoryPlan {
  std::int64_t weight_bytes = 0;  // the model's, already resident
  std::int64_t num_pages = 0;
  std::int64_t page_size = 0;
  std::int64_t page_bytes = 0;  // one page
  std::int64_t num_slots = 0;
  LatentFormat latent_format = LatentFormat::kF32;
  std::int64_t slot_bytes = 0;            // one state slot
  std::int64_t num_checkpoint_slots = 0;  // more slots, of the prefix cache; 0: it is off
  std::int64_t checkpoint_tokens = 0;     // between two of them
  std::int64_t batch_bytes = 0;           // logits, routed experts and batch arrays
  std::int64_t workspace_bytes = 0;       // activations of a pass; 0: as they come, in host memory
  std::optional<DeviceMemory> device;     // as it was when the plan was made, weights resident

  [[nodiscard]] std::int64_t total_bytes() const {
    return weight_bytes + num_pages * page_bytes + (num_slots + num_checkpoint_slots) * slot_bytes +
           batch_bytes + workspace_bytes;
  }
  /// What the prefix cache is made with.
  [[nodiscard]] PrefixTreeLimits prefix_limits() const {
    return {num_checkpoint_slots == 0 ? 0 : checkpoint_tokens, num_checkpoint_slots};
  }
  /// A table of a few lines for people.
  [[nodiscard]] std::string to_string() const;
};

/// The model's cache with the options' kv_cache_dtype. Errors: a trainable model takes fp32 only.
[[nodiscard]] Expected<CacheSpec> cache_spec_for(const Model& model,
                                                 std::optional<LatentFormat> kv_cache_dtype);

/// Errors: what validate() and cache_spec_for() say; eos ids outside the vocabulary; less cache
/// than one sequence of max_seq_len needs.
[[nodiscard]] Expected<MemoryPlan> plan_memory(const Model& model, const EngineOptions& options);

/// Checkpoints when the caller gave no number, of `bytes` for pages and checkpoints together: two
/// for each sequence that may run (at least 8), but no more than half of the bytes, and never so
/// many that num_pages, or one sequence of max_seq_len, would not fit. None where no prompt is long
/// enough.
[[nodiscard]] std::int64_t default_checkpoints(const EngineOptions& options, const MemoryPlan& plan,
                                               std::int64_t bytes);

}  // namespace tandem
