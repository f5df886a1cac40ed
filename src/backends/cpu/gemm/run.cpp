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

// Rows of d_y and x that a weight gradient reads again and again: 768 KiB.
constexpr std::int64_t kSlabFloats = 196608;

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

/// Block `block` (counted over all jobs) of a job with these extents.
LinearBlock part_of(const Cut& cut, std::int64_t block, std::int64_t rows, std::int64_t panels) {
  const std::int64_t row = (block - cut.first) / cut.num_cols * cut.height;
  const std::int64_t panel = (block - cut.first) % cut.num_cols * cut.width;
  return {row, std::min(rows, row + cut.height), panel, std::min(panels, panel + cut.width)};
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

Cut cut_weight_grad(const WeightGradJob& job, std::int64_t rows) {
  const std::int64_t panels = num_panels(job.k);
  Cut cut;
  cut.height = std::min(ceil_div(job.n, kMaxTile) * kMaxTile, kMaxGradRows);
  cut.width = std::min(panels, kMaxGradPanels);
  for (;;) {
    cut.num_rows = ceil_div(job.n, cut.height);
    cut.num_cols = ceil_div(panels, cut.width);
    const double ns =
        2.0 * static_cast<double>(cut.height * cut.width * kPanel * rows) / kFlopsPerNs;
    if (cut.count() >= kManyBlocks || ns < 2 * kSmallBlockNs) {
      return cut;
    }
    if (cut.height > 4 * kMaxTile) {
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
    linear_block(jobs[j], part_of(cuts[j], block, jobs[j].rows, num_panels(jobs[j].weight->out)),
                 scratch.data() + thread * kLinearScratch);
  });
}

void run_weight_grad(const ExecCtx& ctx, std::span<const WeightGradJob> jobs) {
  const ArenaScope scope(*ctx.workspace);
  const std::span<Cut> cuts = ctx.workspace->take<Cut>(isize(jobs));
  const std::span<float> scratch =
      ctx.workspace->take<float>(kGradScratch * ctx.pool->num_threads());
  std::int64_t rows = 0;
  std::int64_t floats = 1;  // of a row of d_y and x, the widest job
  double total_ns = 0;
  for (const WeightGradJob& job : jobs) {
    rows = std::max(rows, job.rows);
    floats = std::max(floats, job.n + job.k);
    total_ns += weight_grad_ns(job);
  }
  // Rows are visited in slabs that stay in the second-level cache while every block reads them.
  const std::int64_t slab = std::max<std::int64_t>(1, kSlabFloats / (floats * kKBlock)) * kKBlock;
  for (std::int64_t begin = 0; begin < rows; begin += slab) {
    std::int64_t total = 0;
    for (std::size_t j = 0; j < jobs.size(); ++j) {
      cuts[j] = Cut{};
      if (jobs[j].rows > begin && jobs[j].n > 0 && jobs[j].k > 0) {
        cuts[j] = cut_weight_grad(jobs[j], std::min(slab, jobs[j].rows - begin));
      }
      cuts[j].first = total;
      total += cuts[j].count();
    }
    run_blocks(ctx, total, total_ns, [&](std::int64_t block, int thread) {
      const std::size_t j = find_job(cuts, block);
      WeightGradJob part = jobs[j];
      part.rows = std::min(slab, part.rows - begin);
      part.d_y += begin * part.d_y_stride;
      if (part.x_rows != nullptr) {
        part.x_rows += begin;
      } else {
        part.x += begin * part.x_stride;
      }
      weight_grad_block(part, part_of(cuts[j], block, part.n, num_panels(part.k)),
                        scratch.data() + thread * kGradScratch);
    });
  }
}

}  // namespace tandem::gemm
