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

/// Decides the numbers of pages and checkpoints that the caller left open. No pages: cache_bytes
/// does not even hold the state slots.
void choose_numbers(MemoryPlan& plan, const EngineOptions& options, std::int64_t pages_per_seq) {
  const std::int64_t enough = options.num_seats() * pages_per_seq;
  const std::int64_t wanted = options.num_pages == 0 ? enough : options.num_pages;
  // More pages than that are refused below, so that their bytes need not fit into int64.
  const std::int64_t pages = std::min(wanted, std::int64_t{1} << 31) * plan.page_bytes;
  constexpr std::int64_t kFew = 4;  // even if pages take little
  std::int64_t left =
      options.cache_bytes == 0
          ? 2 * std::max(pages, kFew * plan.slot_bytes)
          : std::max<std::int64_t>(options.cache_bytes - plan.num_slots * plan.slot_bytes, 0);
  plan.num_checkpoint_slots = options.num_checkpoint_slots == 0 || !options.prefix_cache
                                  ? default_checkpoints(options, plan, left)
                                  : options.num_checkpoint_slots;
  plan.num_pages = wanted;
  if (options.num_pages == 0 && options.cache_bytes != 0 && plan.page_bytes > 0) {
    left = std::max<std::int64_t>(left - plan.num_checkpoint_slots * plan.slot_bytes, 0);
    plan.num_pages = std::min(enough, left / plan.page_bytes);
  }
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
  require("max_prefill_tokens", max_prefill_tokens, 0);
  require("max_queued", max_queued, 0);
  require("checkpoint_tokens", checkpoint_tokens, 0);
  require("num_checkpoint_slots", num_checkpoint_slots, 0);
  require("preempt_every", preempt_every, 0);
  if (page_size > 0 && checkpoint_tokens % page_size != 0) {
    problems += fmt::format("{}checkpoint_tokens is {}: expected a multiple of page_size {}",
                            problems.empty() ? "" : "; ", checkpoint_tokens, page_size);
  }
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

std::int64_t EngineOptions::checkpoint_grid() const {
  constexpr std::int64_t kLeast = 16;
  return checkpoint_tokens == 0 ? ceil_div(kLeast, page_size) * page_size : checkpoint_tokens;
}

std::int64_t default_checkpoints(const EngineOptions& options, const MemoryPlan& plan,
                                 std::int64_t bytes) {
  // The longest prompt leaves room for one new token, and its last token is always computed.
  if (!options.prefix_cache || options.max_seq_len < options.checkpoint_grid() + 2) {
    return 0;
  }
  constexpr std::int64_t kConversations = 8;  // of a single user
  const std::int64_t most = std::max(2 * options.num_seats(), kConversations);
  if (plan.slot_bytes == 0) {
    return most;
  }
  const std::int64_t pages =
      options.num_pages == 0 ? ceil_div(options.max_seq_len, options.page_size) : options.num_pages;
  const std::int64_t left = std::min(bytes / 2, bytes - pages * plan.page_bytes);
  return std::clamp<std::int64_t>(left / plan.slot_bytes, 0, most);
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
  plan.checkpoint_tokens = options.checkpoint_grid();
  choose_numbers(plan, options, pages_per_seq);
  const std::int64_t num_states = plan.num_slots + plan.num_checkpoint_slots;
  const std::int64_t state_bytes = num_states * plan.slot_bytes;
  const std::int64_t needed = state_bytes + pages_per_seq * plan.page_bytes;
  if (options.cache_bytes != 0 &&
      state_bytes + plan.num_pages * plan.page_bytes > options.cache_bytes) {
    return fail(
        "engine options: cache_bytes is {}: expected at least {} for {} state slots and {} "
        "pages",
        options.cache_bytes, std::max(needed, state_bytes + plan.num_pages * plan.page_bytes),
        num_states, std::max(plan.num_pages, pages_per_seq));
  }
  if (plan.num_pages < pages_per_seq) {
    return fail(
        "engine options: {} pages of {} tokens: expected at least {} pages ({} bytes of "
        "cache with {} state slots), so that one sequence of max_seq_len {} fits",
        plan.num_pages, plan.page_size, pages_per_seq, needed, num_states, options.max_seq_len);
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
      "checkpoints  {:>14}  {}\n"
      "batches      {:>14}  logits and batch arrays\n",
      mib(weight_bytes), mib(num_pages * page_bytes), num_pages, page_size, page_bytes,
      latent_format_name(latent_format), mib(num_slots * slot_bytes), num_slots, slot_bytes,
      mib(num_checkpoint_slots * slot_bytes),
      num_checkpoint_slots == 0
          ? "no prefix cache"
          : fmt::format("{} slots: prefixes of a multiple of {} tokens are computed once",
                        num_checkpoint_slots, checkpoint_tokens),
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
