// run.cpp — cuts jobs into blocks by their own sizes and hands them to the thread pool.

#include <algorithm>
#include <cstdint>

#include "backends/cpu/gemm/panel.h"
#include "core/checked_cast.h"

namespace tandem::gemm {
namespace {

// Rough speed of one core, for the size of blocks only.
constexpr double kFlopsPerNs = 60.0;
constexpr double kBytesPerNs = 10.0;
// Below this the caller does the work alone: waking a worker costs about as much.
constexpr double kWorthWakingNs = 30000.0;
// Blocks are not cut below this, nor beyond kManyBlocks: enough to balance a few threads.
constexpr double kSmallBlockNs = 8000.0;
constexpr std::int64_t kManyBlocks = 16;
// Up to this many rows the weight's bytes decide, and rows are not split.
constexpr std::int64_t kFewRows = 24;

/// A two-dimensional cut of one job.
struct Cut {
  std::int64_t first = 0;                   // index of its first block among all jobs'
  std::int64_t height = 1, width = 1;       // of a block
  std::int64_t num_rows = 0, num_cols = 0;  // blocks

  [[nodiscard]] std::int64_t count() const { return num_rows * num_cols; }
};

double linear_ns(const LinearJob& job, std::int64_t rows, std::int64_t panels) {
  const PackedWeight& w = *job.weight;
  const double flops = 2.0 * static_cast<double>(rows * panels * kPanel * w.in);
  const double bytes = static_cast<double>(
      panels * (panel_lanes(w.format, w.in) * 4 + panel_scale_bytes(w.format, w.in)));
  return std::max(flops / kFlopsPerNs, bytes / kBytesPerNs);
}

Cut cut_linear(const LinearJob& job) {
  const std::int64_t panels = num_panels(job.weight->out);
  const bool few = job.rows <= kFewRows;
  Cut cut;
  cut.height = std::min(job.rows, few ? kFewRows : kMaxBlockRows);
  cut.width = std::min<std::int64_t>(panels, 16);
  for (;;) {
    cut.num_rows = ceil_div(job.rows, cut.height);
    cut.num_cols = ceil_div(panels, cut.width);
    if (cut.count() >= kManyBlocks || linear_ns(job, cut.height, cut.width) < 2 * kSmallBlockNs) {
      return cut;
    }
    if (!few && cut.height > kFewRows) {
      cut.height = cut.height / 2;
    } else if (cut.width > kMaxGroup) {
      cut.width = ceil_div(cut.width / 2, kMaxGroup) * kMaxGroup;
    } else {
      return cut;
    }
  }
}

/// The job that block `block` belongs to.
std::size_t find_job(std::span<const Cut> cuts, std::int64_t block) {
  const auto after = std::upper_bound(cuts.begin(), cuts.end(), block,
                                      [](std::int64_t b, const Cut& cut) { return b < cut.first; });
  return static_cast<std::size_t>(after - cuts.begin()) - 1;
}

template <typename Fn>
void run_blocks(const ExecCtx& ctx, std::int64_t count, double total_ns, const Fn& fn) {
  if (total_ns < kWorthWakingNs) {
    for (std::int64_t block = 0; block < count; ++block) {
      fn(block, 0);
    }
  } else {
    ctx.pool->parallel_for(count, fn);
  }
}

Cut cut_weight_grad(const WeightGradJob& job) {
  const std::int64_t panels = num_panels(job.k);
  Cut cut;
  cut.height = std::min(ceil_div(job.n, kMaxTile), std::int64_t{16}) * kMaxTile;
  cut.width = std::min<std::int64_t>(panels, 16);
  for (;;) {
    cut.num_rows = ceil_div(job.n, cut.height);
    cut.num_cols = ceil_div(panels, cut.width);
    const double ns =
        2.0 * static_cast<double>(cut.height * cut.width * kPanel * job.rows) / kFlopsPerNs;
    if (cut.count() >= kManyBlocks || ns < 2 * kSmallBlockNs) {
      return cut;
    }
    if (cut.height > kMaxTile) {
      cut.height = ceil_div(cut.height / 2, kMaxTile) * kMaxTile;
    } else if (cut.width > 2) {
      cut.width = ceil_div(cut.width / 2, std::int64_t{2}) * 2;
    } else {
      return cut;
    }
  }
}

double weight_grad_ns(const WeightGradJob& job) {
  return 2.0 * static_cast<double>(job.rows * job.n * job.k) / kFlopsPerNs;
}

}  // namespace

void run_linear(const ExecCtx& ctx, std::span<const LinearJob> jobs) {
  const ArenaScope scope(*ctx.workspace);
  const std::span<Cut> cuts = ctx.workspace->take<Cut>(isize(jobs));
  std::int64_t total = 0;
  double total_ns = 0;
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    cuts[j] = Cut{};
    if (jobs[j].rows > 0 && jobs[j].weight->out > 0) {
      cuts[j] = cut_linear(jobs[j]);
      total_ns += linear_ns(jobs[j], jobs[j].rows, num_panels(jobs[j].weight->out));
    }
    cuts[j].first = total;
    total += cuts[j].count();
  }
  const std::span<float> scratch =
      ctx.workspace->take<float>(kLinearScratch * ctx.pool->num_threads());
  run_blocks(ctx, total, total_ns, [&](std::int64_t block, int thread) {
    const std::size_t j = find_job(cuts, block);
    const Cut& cut = cuts[j];
    const std::int64_t row = (block - cut.first) / cut.num_cols * cut.height;
    const std::int64_t panel = (block - cut.first) % cut.num_cols * cut.width;
    const LinearBlock part{row, std::min(jobs[j].rows, row + cut.height), panel,
                           std::min(num_panels(jobs[j].weight->out), panel + cut.width)};
    linear_block(jobs[j], part, scratch.data() + thread * kLinearScratch);
  });
}

void run_weight_grad(const ExecCtx& ctx, std::span<const WeightGradJob> jobs) {
  const ArenaScope scope(*ctx.workspace);
  const std::span<Cut> cuts = ctx.workspace->take<Cut>(isize(jobs));
  const std::span<Cut> packs = ctx.workspace->take<Cut>(isize(jobs));
  const std::span<WeightGradJob> packed = ctx.workspace->take<WeightGradJob>(isize(jobs));
  std::int64_t total = 0;
  std::int64_t total_packs = 0;
  double total_ns = 0;
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    WeightGradJob& job = packed[j];
    job = jobs[j];
    cuts[j] = Cut{};
    packs[j] = Cut{};
    if (job.rows > 0 && job.n > 0 && job.k > 0) {
      const std::int64_t blocks = ceil_div(job.rows, kKBlock);
      job.packed_d_y =
          ctx.workspace->take<float>(blocks * kKBlock * ceil_div(job.n, kMaxTile) * kMaxTile)
              .data();
      job.packed_x = ctx.workspace->take<float>(blocks * num_panels(job.k) * kXPanelFloats).data();
      cuts[j] = cut_weight_grad(job);
      packs[j].num_rows = blocks;
      packs[j].num_cols = 2;
      total_ns += weight_grad_ns(job);
    }
    cuts[j].first = total;
    packs[j].first = total_packs;
    total += cuts[j].count();
    total_packs += packs[j].count();
  }
  run_blocks(ctx, total_packs, total_ns, [&](std::int64_t block, int) {
    const std::size_t j = find_job(packs, block);
    const std::int64_t part = block - packs[j].first;
    if (part % 2 == 0) {
      pack_weight_grad_x(packed[j], part / 2);
    } else {
      pack_weight_grad_d_y(packed[j], part / 2);
    }
  });
  run_blocks(ctx, total, total_ns, [&](std::int64_t block, int) {
    const std::size_t j = find_job(cuts, block);
    const WeightGradJob& job = packed[j];
    const Cut& cut = cuts[j];
    const std::int64_t n = (block - cut.first) / cut.num_cols * cut.height;
    const std::int64_t panel = (block - cut.first) % cut.num_cols * cut.width;
    weight_grad_block(job, n, std::min(job.n, n + cut.height), panel,
                      std::min(num_panels(job.k), panel + cut.width));
  });
}

}  // namespace tandem::gemm
