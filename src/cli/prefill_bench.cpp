#include "cli/prefill_bench.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "core/checked_cast.h"
#include "core/rng.h"
#include "core/timing.h"

namespace tandem::cli {
namespace {

constexpr std::int64_t kPageSize = 64;

std::int64_t pages_of(std::int64_t tokens) {
  return (tokens + kPageSize - 1) / kPageSize;
}

/// A pass of `rows` tokens of a prompt with a workspace of its own; its peak in bytes.
std::int64_t workspace_of(const ExecCtx& ctx, const Model& model, const CacheSpec& spec,
                          std::int64_t rows) {
  Arena workspace(std::size_t{64} << 20, *ctx.device);
  ExecCtx own = ctx;
  own.workspace = &workspace;
  static_cast<void>(PrefillBench(own, model, spec, rows, rows).run());
  return checked_cast<std::int64_t>(workspace.peak_bytes());
}

/// Bytes of workspace as a line over the rows of a pass.
struct WorkspaceLine {
  double base = 0;
  double per_row = 0;

  /// From passes of an eighth and of a quarter of `tokens`: ops that cut long prompts do so there.
  WorkspaceLine(const ExecCtx& ctx, const Model& model, const CacheSpec& spec,
                std::int64_t tokens) {
    const std::int64_t few_rows = std::max<std::int64_t>(tokens / 8, 1);
    const std::int64_t more_rows = 2 * few_rows;
    const auto few = static_cast<double>(workspace_of(ctx, model, spec, few_rows));
    const auto more = static_cast<double>(workspace_of(ctx, model, spec, more_rows));
    per_row = (more - few) / static_cast<double>(few_rows);
    base = std::max(few - per_row * static_cast<double>(few_rows), 0.0);
  }
  /// A few percent more than the line, as tiles and splits are rounded up, and what attention over
  /// many keys may take for its partial results.
  [[nodiscard]] double bytes(std::int64_t rows) const {
    return 1.03 * (base + per_row * static_cast<double>(rows)) + (std::int64_t{1} << 30);
  }
};

/// Caches, batch arrays and logits of a prompt, in one piece.
double other_bytes(const Model& model, const CacheSpec& spec, std::int64_t tokens) {
  return static_cast<double>(spec.bytes_per_sequence() +
                             pages_of(tokens) * kPageSize * spec.bytes_per_token() + 16 * tokens +
                             4 * model.vocab_size());
}

std::string gib(double bytes) {
  return fmt::format("{:.1f} GiB", bytes / (1 << 30));
}

/// The most rows, in whole pages, whose pass fits into what the device has free.
std::int64_t rows_at_once(const WorkspaceLine& line, const Model& model, const CacheSpec& spec,
                          double free, std::int64_t tokens) {
  std::int64_t pages = pages_of(tokens);
  while (pages > 1 &&
         line.bytes(pages * kPageSize) + other_bytes(model, spec, pages * kPageSize) > free) {
    --pages;
  }
  return std::min(pages * kPageSize, tokens);
}

}  // namespace

std::optional<std::string> PrefillImage::difference(const PrefillImage& other) const {
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const auto [mine, its] = std::ranges::mismatch(parts[p].bytes, other.parts[p].bytes);
    if (mine != parts[p].bytes.end() || its != other.parts[p].bytes.end()) {
      return fmt::format("{}: byte {} of {}", parts[p].name,
                         std::distance(parts[p].bytes.begin(), mine), parts[p].bytes.size());
    }
  }
  return std::nullopt;
}

PrefillBench::PrefillBench(const ExecCtx& ctx, const Model& model, const CacheSpec& spec,
                           std::int64_t tokens, std::int64_t piece)
    : ctx_(ctx),
      model_(model),
      spec_(spec),
      tokens_(tokens),
      piece_(std::min(piece, tokens)),
      cache_(spec, pages_of(tokens), kPageSize, 1, *ctx.device),
      builder_(piece_, 1, pages_of(tokens), *ctx.device),
      logits_(model.vocab_size() * 4, *ctx.device) {
  Rng rng(7);
  sequence_.all_tokens.resize(usize(tokens));
  std::ranges::generate(sequence_.all_tokens, [&] {
    return static_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(model.vocab_size())));
  });
}

double PrefillBench::run() {
  cache_.release(sequence_.cache);
  TDM_CHECK(cache_.open(sequence_.cache, tokens_), tokens_);
  ctx_.device->synchronize();
  const auto start = Clock::now();
  for (std::int64_t begin = 0; begin < tokens_; begin += piece_) {
    const std::array chunks{ScheduledChunk{&sequence_, begin, std::min(piece_, tokens_ - begin)}};
    const ModelBatch batch = builder_.build(chunks, cache_);
    const ArenaScope scope(*ctx_.workspace);
    model_.forward(ctx_,
                   {logits_.as<float>().data(), {batch.logit_rows.size(0), model_.vocab_size()}},
                   batch, cache_.buffers(), nullptr);
  }
  ctx_.device->synchronize();
  return seconds_since(start);
}

PrefillImage PrefillBench::image() const {
  PrefillImage image;
  const auto add = [&](std::string name, const void* data, std::int64_t bytes) {
    image.parts.push_back({std::move(name), std::vector<std::byte>(usize(bytes))});
    if (bytes > 0) {
      ctx_.device->download(image.parts.back().bytes.data(), data, usize(bytes));
    }
  };
  add("logits", logits_.data(), logits_.size_bytes());
  const CacheBuffers& buffers = cache_.buffers();
  for (std::size_t i = 0; i < buffers.state_layers.size(); ++i) {
    add(fmt::format("state of KDA layer {}", i), buffers.state_layers[i].states,
        spec_.state_layers[i].state_floats() * 4);
    add(fmt::format("convolution window of KDA layer {}", i), buffers.state_layers[i].conv.data(),
        spec_.state_layers[i].conv_floats() * 4);
  }
  for (std::size_t i = 0; i < buffers.latent_layers.size(); ++i) {
    const LatentRows& rows = buffers.latent_layers[i];
    add(fmt::format("latent rows of MLA layer {}", i), rows.data, tokens_ * rows.row_bytes);
  }
  return image;
}

PieceCheck check_pieces(const ExecCtx& ctx, const Model& model, const CacheSpec& spec,
                        std::int64_t tokens, std::int64_t piece) {
  PieceCheck check;
  check.tokens = tokens;
  ExecCtx own = ctx;
  std::optional<Arena> workspace;
  if (const auto memory = ctx.device->memory()) {
    const WorkspaceLine line(ctx, model, spec, tokens);
    const double free = static_cast<double>(ctx.device->memory()->free) - (512 << 20);
    check.tokens = rows_at_once(line, model, spec, free, tokens);
    if (check.tokens < tokens) {
      check.cut_reason = fmt::format(
          "{} tokens at once take {} of workspace and {} of caches beside the weights, and {} of "
          "{} "
          "are free",
          tokens, gib(line.bytes(tokens)), gib(other_bytes(model, spec, tokens)), gib(free),
          gib(static_cast<double>(memory->total)));
    }
    workspace = Arena::fixed(static_cast<std::size_t>(line.bytes(check.tokens)), *ctx.device);
    own.workspace = &*workspace;
  }
  PrefillImage whole;
  {
    PrefillBench bench(own, model, spec, check.tokens, check.tokens);
    check.whole_s = bench.run();
    whole = bench.image();
  }
  PrefillBench bench(own, model, spec, check.tokens, piece);
  check.pieces_s = bench.run();
  check.difference = whole.difference(bench.image());
  return check;
}

}  // namespace tandem::cli
