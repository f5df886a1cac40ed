#include "engine/warm_up.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <vector>

#include "core/checked_cast.h"
#include "engine/batch.h"
#include "engine/cache/cache_manager.h"
#include "engine/sampler.h"

namespace tandem {
namespace {

/// Kept free for what a device's library takes itself: code, recordings, rounding of allocations.
std::int64_t reserve_of(const DeviceMemory& memory) {
  return std::min(std::int64_t{512} << 20, memory.total / 64);
}

/// A batch of sequences that hold nothing: no slot, no keys. They cost what a real batch of the
/// same extents costs, since nothing that the host decides depends on more than extents.
class Padding {
 public:
  Padding(const BatchLimits& limits, Device& device)
      : limits_(limits), device_(device), ints_(limits.num_ints() * 4, device) {}

  ModelBatch batch(std::int64_t rows, std::int64_t seqs) {
    std::vector<std::int32_t> ints;
    const std::int32_t* const base = ints_.as<std::int32_t>().data();
    const auto place = [&](std::int64_t count, auto&& value) {
      const std::int32_t* const at = base + ints.size();
      for (std::int64_t i = 0; i < count; ++i) {
        ints.push_back(checked_cast<std::int32_t>(value(i)));
      }
      return at;
    };
    const auto all = [](std::int64_t value) { return [value](std::int64_t) { return value; }; };
    const std::int64_t pages = limits_.pages_per_seq;
    const ModelBatch batch{
        .token_ids = {place(rows, all(0)), {rows}},
        .seqs = {.cu_seqlens = {place(seqs + 1, [&](std::int64_t b) { return b * rows / seqs; }),
                                {seqs + 1}},
                 .state_slots = {place(seqs, all(-1)), {seqs}},
                 .one_row_each = rows == seqs},
        .kv_lens = {place(seqs, all(0)), {seqs}},
        .slot_mapping = {place(rows, all(-1)), {rows}},
        .page_table = {place(seqs * pages, all(-1)), {seqs, pages}},
        .logit_rows = {place(seqs, [&](std::int64_t b) { return (b + 1) * rows / seqs - 1; }),
                       {seqs}}};
    device_.upload(ints_.data(), ints.data(), ints.size() * sizeof(std::int32_t));
    return batch;
  }

 private:
  BatchLimits limits_;
  Device& device_;
  Storage ints_;
};

/// 0 for 1.
std::int64_t largest_power_below(std::int64_t n) {
  return static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(n - 1)));
}

/// Bytes of workspace that any pass within the limits takes.
std::int64_t measure_workspace(const Model& model, const ExecCtx& ctx, const CacheSpec& spec,
                               const BatchLimits& limits, std::int64_t page_size) {
  Device& device = *ctx.device;
  // Few large blocks, so that little is lost at their ends.
  const std::int64_t free = device.memory().value_or(DeviceMemory{}).free;
  Arena workspace(static_cast<std::size_t>(std::max(free / 8, std::int64_t{1} << 20)), device);
  ExecCtx own = ctx;
  own.workspace = &workspace;
  own.profiler = nullptr;
  const CacheManager cache(spec, 1, page_size, 1, device);
  Padding padding(limits, device);
  Sampler sampler(limits.seqs, model.vocab_size(), device);
  Storage logits(limits.seqs * model.vocab_size() * 4, device);
  const auto run = [&](std::int64_t rows, std::int64_t seqs) {
    const ModelBatch batch = padding.batch(rows, seqs);
    const F32Mat out(logits.as<float>().data(), {seqs, model.vocab_size()});
    model.forward(own, out, batch, cache.buffers(), nullptr);
    const ArenaScope scope(workspace);
    static_cast<void>(workspace.take<float>(out.numel()));  // of logits under rules
    sampler.prepare({}, seqs);
    sampler.run(own, out);
  };
  // One prompt, or as many sequences as there may be; the largest first, whose blocks hold the
  // rest.
  for (std::int64_t rows = limits.rows; rows > 0; rows = largest_power_below(rows)) {
    run(rows, 1);
    run(rows, std::min(rows, limits.seqs));
  }
  device.synchronize();
  // Between those shapes an op may cut its work into a few more pieces.
  const auto peak = checked_cast<std::int64_t>(workspace.peak_bytes());
  return peak + peak / 16 + (std::int64_t{1} << 20);
}

/// Takes checkpoints and pages off a plan that is free to have fewer, or says what would fit.
Status fit(MemoryPlan& plan, const EngineOptions& options, const DeviceMemory& memory) {
  const std::int64_t reserve = reserve_of(memory);
  std::int64_t fixed =
      plan.num_slots * plan.slot_bytes + plan.batch_bytes + plan.workspace_bytes + reserve;
  if (options.num_checkpoint_slots == 0) {
    plan.num_checkpoint_slots = std::min(plan.num_checkpoint_slots,
                                         default_checkpoints(options, plan, memory.free - fixed));
  }
  fixed += plan.num_checkpoint_slots * plan.slot_bytes;
  const std::int64_t left = memory.free - fixed;
  if (left >= plan.num_pages * plan.page_bytes) {
    return Ok{};
  }
  const std::int64_t pages =
      plan.page_bytes == 0 ? 0 : std::max<std::int64_t>(left, 0) / plan.page_bytes;
  const std::int64_t least = (options.max_seq_len + options.page_size - 1) / options.page_size;
  if (left >= 0 && options.num_pages == 0 && pages >= least) {
    plan.num_pages = pages;
    return Ok{};
  }
  return fail(
      "device memory: {} bytes are needed and {} of {} are free: {} state slots of {} bytes, {} "
      "pages of {}, {} for batches, {} of workspace, {} in reserve. With these options {} pages "
      "fit, and one sequence of {} tokens takes {}; take fewer running sequences, batch tokens or "
      "layers, or a shorter context",
      fixed + plan.num_pages * plan.page_bytes, memory.free, memory.total,
      plan.num_slots + plan.num_checkpoint_slots, plan.slot_bytes, plan.num_pages, plan.page_bytes,
      plan.batch_bytes, plan.workspace_bytes, reserve, pages, options.max_seq_len, least);
}

}  // namespace

Expected<MemoryPlan> plan_serving(const Model& model, const ExecCtx& ctx,
                                  const EngineOptions& options) {
  Expected<MemoryPlan> plan = plan_memory(model, options);
  if (!plan || !ctx.device->memory()) {
    return plan;
  }
  ctx.workspace->trim();  // what loading took
  std::optional<DeviceMemory> memory = ctx.device->memory();
  const auto spec = cache_spec_for(model, options.kv_cache_dtype);
  if (!spec) {
    return spec.failure();
  }
  const BatchLimits limits = batch_limits(options, *ctx.device);
  plan->batch_bytes = batch_bytes(model, limits);
  plan->device = *memory;
  if (Status fits = fit(*plan, options, *memory); !fits) {
    return fits.failure();
  }
  try {
    plan->workspace_bytes = measure_workspace(model, ctx, *spec, limits, options.page_size);
  } catch (const Error& error) {
    return fail("device memory: a pass of max_batch_tokens {} does not fit beside the weights: {}",
                options.max_batch_tokens, error.what());
  }
  memory = ctx.device->memory();
  if (Status fits = fit(*plan, options, *memory); !fits) {
    return fits.failure();
  }
  return plan;
}

}  // namespace tandem
