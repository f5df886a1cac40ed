#include "engine/logit_changer.h"

#include <algorithm>

namespace tandem {

/// Targets [begin, end) and the sizes of their parts, which lie in the buffer in this order; those
/// without rules have none.
struct LogitChanger::Piece {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t num_rows = 0;
  std::int64_t num_seen = 0;
  std::int64_t num_biases = 0;
  std::int64_t num_masks = 0;

  [[nodiscard]] Piece with(const Sequence& seq) const {
    Piece more = *this;
    ++more.end;
    if (seq.changes_logits()) {
      more.num_rows += 1;
      more.num_seen += isize(seq.counts.seen());
      more.num_biases += isize(seq.request.rules.logit_bias);
      more.num_masks += seq.restricts_tokens() ? 1 : 0;
    }
    return more;
  }
  [[nodiscard]] std::int64_t bytes(std::int64_t mask_words) const {
    return num_rows * static_cast<std::int64_t>(sizeof(LogitRow)) +
           num_seen * static_cast<std::int64_t>(sizeof(SeenToken)) +
           num_biases * static_cast<std::int64_t>(sizeof(LogitBias)) + num_masks * mask_words * 4;
  }
};

std::int64_t LogitChanger::bytes(std::int64_t vocab) {
  const Piece largest_row{
      .end = 1, .num_rows = 1, .num_seen = vocab, .num_biases = vocab, .num_masks = 1};
  return largest_row.bytes((vocab + 31) / 32);
}

LogitChanger::LogitChanger(std::int64_t max_rows, std::int64_t vocab, Device& device)
    : device_(device),
      vocab_(vocab),
      host_(bytes(vocab), device.host_visible() ? device : host_device()),
      forbids_all_(usize(max_rows)) {
  if (!device.host_visible()) {
    on_device_ = Storage(bytes(vocab), device);
  }
}

void LogitChanger::apply(const ExecCtx& ctx, F32Mat logits, std::span<const SampleTarget> targets) {
  std::ranges::fill(forbids_all_, 0);
  for (std::int64_t begin = 0; begin < isize(targets);) {
    const Piece piece = next_piece(targets, begin);
    fill(piece, targets);
    std::byte* base = host_.data();
    if (!device_.host_visible()) {
      base = on_device_.data();
      device_.upload(base, host_.data(), usize(piece.bytes(mask_words())));
    }
    ops::adjust_logits(ctx, logits, views(piece, base));
    begin = piece.end;
  }
}

LogitChanger::Piece LogitChanger::next_piece(std::span<const SampleTarget> targets,
                                             std::int64_t begin) const {
  Piece piece{.begin = begin, .end = begin};
  while (piece.end < isize(targets)) {
    const Piece longer = piece.with(*targets[usize(piece.end)].seq);
    if (longer.bytes(mask_words()) > host_.size_bytes()) {
      break;
    }
    piece = longer;
  }
  TDM_CHECK(piece.end > begin, begin, host_.size_bytes());
  return piece;
}

LogitChanges LogitChanger::views(const Piece& piece, std::byte* base) const {
  const auto* const rows = reinterpret_cast<const LogitRow*>(base);
  const auto* const seen = reinterpret_cast<const SeenToken*>(rows + piece.num_rows);
  const auto* const biases = reinterpret_cast<const LogitBias*>(seen + piece.num_seen);
  const auto* const masks = reinterpret_cast<const std::uint32_t*>(biases + piece.num_biases);
  return {.rows = {rows, usize(piece.num_rows)},
          .seen = {seen, usize(piece.num_seen)},
          .biases = {biases, usize(piece.num_biases)},
          .masks = {masks, {piece.num_masks, mask_words()}}};
}

void LogitChanger::fill(const Piece& piece, std::span<const SampleTarget> targets) {
  auto* row = reinterpret_cast<LogitRow*>(host_.data());
  auto* const seen = reinterpret_cast<SeenToken*>(row + piece.num_rows);
  auto* const biases = reinterpret_cast<LogitBias*>(seen + piece.num_seen);
  auto* const masks = reinterpret_cast<std::uint32_t*>(biases + piece.num_biases);
  std::int32_t num_seen = 0;
  std::int32_t num_biases = 0;
  std::int32_t num_masks = 0;
  for (std::int64_t i = piece.begin; i < piece.end; ++i) {
    const SampleTarget& target = targets[usize(i)];
    const Sequence& seq = *target.seq;
    if (!seq.changes_logits()) {
      continue;
    }
    const LogitRules& rules = seq.request.rules;
    *row = {.row = checked_cast<std::int32_t>(i),
            .repetition_penalty = rules.repetition_penalty,
            .frequency_penalty = rules.frequency_penalty,
            .presence_penalty = rules.presence_penalty,
            .seen_begin = num_seen,
            .bias_begin = num_biases};
    std::ranges::copy(seq.counts.seen(), seen + num_seen);
    std::ranges::copy(rules.logit_bias, biases + num_biases);
    num_seen += checked_cast<std::int32_t>(isize(seq.counts.seen()));
    num_biases += checked_cast<std::int32_t>(isize(rules.logit_bias));
    row->seen_end = num_seen;
    row->bias_end = num_biases;
    if (seq.restricts_tokens()) {
      fill_mask({masks + num_masks * mask_words(), usize(mask_words())}, target, i);
      row->mask = num_masks++;
    }
    ++row;
  }
}

void LogitChanger::fill_mask(std::span<std::uint32_t> bits, const SampleTarget& target,
                             std::int64_t row) {
  const Sequence& seq = *target.seq;
  constexpr std::uint32_t kAll = ~std::uint32_t{0};
  if (seq.is_constrained()) {
    seq.request.constraint->fill_mask(bits);
  } else {
    std::ranges::fill(bits, kAll);
  }
  if (seq.must_go_on()) {
    for (const std::int32_t id : seq.stop_ids) {
      bits[usize(id / 32)] &= ~(std::uint32_t{1} << (id % 32));
    }
  }
  const std::uint32_t in_last = vocab_ % 32 == 0 ? kAll : (std::uint32_t{1} << (vocab_ % 32)) - 1;
  bits.back() &= in_last;  // what stands beyond the vocabulary is no token
  const bool none = std::ranges::all_of(bits, [](std::uint32_t word) { return word == 0; });
  forbids_all_[usize(row)] = none ? 1 : 0;
}

}  // namespace tandem
