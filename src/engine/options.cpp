#include "engine/options.h"

#include <algorithm>
#include <limits>

#include "core/checked_cast.h"
#include "engine/sampler.h"
#include "engine/scorer.h"

namespace tandem {

namespace {

// Ids and rows are int32 in the ops contract; with every extent below 2^30 no product of two here
// leaves int64.
constexpr std::int64_t kMaxExtent = std::int64_t{1} << 30;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

/// Pages when the caller gave none. 0: cache_bytes does not even hold the state slots.
std::int64_t default_pages(const EngineOptions& options, std::int64_t page_bytes,
                           std::int64_t state_bytes, std::int64_t pages_per_seq) {
  const std::int64_t enough = options.num_seats() * pages_per_seq;
  if (options.cache_bytes == 0) {
    return enough;
  }
  const std::int64_t left = std::max<std::int64_t>(options.cache_bytes - state_bytes, 0);
  return page_bytes == 0 ? enough : std::min(enough, left / page_bytes);
}

std::string mib(std::int64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1024.0 * 1024.0));
}

}  // namespace

Status EngineOptions::validate() const {
  std::string problems;
  const auto require = [&](const char* field, std::int64_t value, std::int64_t least) {
    if (value < least || value > kMaxExtent) {
      problems += fmt::format("{}{} is {}: expected {} to {}", problems.empty() ? "" : "; ", field,
                              value, least, kMaxExtent);
    }
  };
  require("max_batch_tokens", max_batch_tokens, 1);
  require("max_running_seqs", max_running_seqs, 1);
  require("max_seq_len", max_seq_len, 2);
  require("page_size", page_size, 1);
  require("num_pages", num_pages, 0);
  require("num_state_slots", num_state_slots, 0);
  if (cache_bytes < 0) {
    problems += fmt::format("{}cache_bytes is {}: expected 0 (no limit) or a number of bytes",
                            problems.empty() ? "" : "; ", cache_bytes);
  }
  if (!problems.empty()) {
    return fail("engine options: {}", problems);
  }
  return Ok{};
}

std::int64_t EngineOptions::num_seats() const {
  const std::int64_t seats = std::min(max_running_seqs, max_batch_tokens);
  return num_state_slots == 0 ? seats : std::min(seats, num_state_slots);
}

Expected<CacheSpec> cache_spec_for(const Model& model, std::optional<LatentFormat> kv_cache_dtype) {
  CacheSpec spec = model.cache_spec();
  const LatentFormat format = kv_cache_dtype.value_or(spec.latent_format);
  if (spec.trainable && format != LatentFormat::kF32) {
    return fail(
        "engine options: kv_cache_dtype is {}: expected fp32 (or none) for a trainable model, "
        "whose "
        "training attends over fp32 rows: rollouts over rounded ones would be of another model",
        latent_format_name(format));
  }
  spec.latent_format = format;
  return spec;
}

Expected<MemoryPlan> plan_memory(const Model& model, const EngineOptions& options) {
  if (Status status = options.validate(); !status) {
    return status.failure();
  }
  for (const std::int32_t id : options.eos_ids) {
    if (id < 0 || id >= model.vocab_size()) {
      return fail("engine options: eos_ids has {}: expected token ids in [0, {})", id,
                  model.vocab_size());
    }
  }
  const Expected<CacheSpec> checked_spec = cache_spec_for(model, options.kv_cache_dtype);
  if (!checked_spec) {
    return checked_spec.failure();
  }
  const CacheSpec& spec = *checked_spec;
  const std::int64_t pages_per_seq = ceil_div(options.max_seq_len, options.page_size);
  MemoryPlan plan;
  plan.weight_bytes = model.footprint().weight_bytes;
  plan.page_size = options.page_size;
  plan.latent_format = spec.latent_format;
  plan.page_bytes = options.page_size * spec.bytes_per_token();
  plan.num_slots = options.num_state_slots == 0 ? options.num_seats() : options.num_state_slots;
  plan.slot_bytes = spec.bytes_per_sequence();
  const std::int64_t state_bytes = plan.num_slots * plan.slot_bytes;
  plan.num_pages = options.num_pages != 0
                       ? options.num_pages
                       : default_pages(options, plan.page_bytes, state_bytes, pages_per_seq);
  const std::int64_t needed = state_bytes + pages_per_seq * plan.page_bytes;
  if (options.cache_bytes != 0 &&
      state_bytes + plan.num_pages * plan.page_bytes > options.cache_bytes) {
    return fail(
        "engine options: cache_bytes is {}: expected at least {} for {} state slots and {} "
        "pages",
        options.cache_bytes, std::max(needed, state_bytes + plan.num_pages * plan.page_bytes),
        plan.num_slots, std::max(plan.num_pages, pages_per_seq));
  }
  if (plan.num_pages < pages_per_seq) {
    return fail(
        "engine options: {} pages of {} tokens: expected at least {} pages ({} bytes of "
        "cache with {} state slots), so that one sequence of max_seq_len {} fits",
        plan.num_pages, plan.page_size, pages_per_seq, needed, plan.num_slots, options.max_seq_len);
  }
  if (plan.num_pages * plan.page_size > std::numeric_limits<std::int32_t>::max()) {
    return fail("engine options: {} pages of {} tokens: expected fewer than 2^31 cached tokens",
                plan.num_pages, plan.page_size);
  }
  plan.batch_bytes =
      batch_bytes(model, {options.max_batch_tokens, options.num_seats(), pages_per_seq});
  return plan;
}

std::int64_t BatchLimits::num_ints() const {
  return 2 * rows + seqs * (pages_per_seq + 3) + seqs + 1;
}

std::int64_t batch_bytes(const Model& model, const BatchLimits& limits) {
  // Logits, batch arrays, routed experts, and what sampler and scorer are told and tell.
  return 4 * (limits.seqs * model.vocab_size() + limits.num_ints() +
              limits.rows * model.moe_layers() * model.experts_per_token()) +
         Sampler::bytes(limits.seqs, model.vocab_size()) + Scorer::bytes(limits.seqs);
}

std::string MemoryPlan::to_string() const {
  std::string text = fmt::format(
      "weights      {:>14}\n"
      "latent pages {:>14}  {} pages of {} tokens, {} bytes each ({})\n"
      "state slots  {:>14}  {} slots, {} bytes each\n"
      "batches      {:>14}  logits and batch arrays\n",
      mib(weight_bytes), mib(num_pages * page_bytes), num_pages, page_size, page_bytes,
      latent_format_name(latent_format), mib(num_slots * slot_bytes), num_slots, slot_bytes,
      mib(batch_bytes));
  text += device ? fmt::format("workspace    {:>14}  activations of the largest pass\n",
                               mib(workspace_bytes))
                 : fmt::format("workspace    {:>14}  activations, as they come\n", "-");
  text += fmt::format("total        {:>14}\n", mib(total_bytes()));
  if (device) {
    text += fmt::format("device       {:>14}  {} free beside the weights\n", mib(device->total),
                        mib(device->free));
  }
  return text;
}

}  // namespace tandem
