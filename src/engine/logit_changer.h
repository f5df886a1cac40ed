// logit_changer.h — brings the rules and constraints of responses to the logits of a step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/checked_cast.h"
#include "engine/scheduler/scheduler.h"
#include "ops/exec_ctx.h"
#include "ops/sample.h"
#include "tensor/storage.h"
#include "tensor/view.h"

namespace tandem {

/// What the rules say is gathered in a buffer that holds the largest row there can be, and goes to
/// the device as often as it is full. No allocation.
class LogitChanger {
 public:
  LogitChanger(std::int64_t max_rows, std::int64_t vocab, Device& device);
  /// Of device memory.
  [[nodiscard]] static std::int64_t bytes(std::int64_t vocab);

  /// Changes row i of logits [num_targets, V] by the rules of targets[i].seq; asks its constraint
  /// which tokens may come next.
  void apply(const ExecCtx& ctx, F32Mat logits, std::span<const SampleTarget> targets);
  /// Whether a mask of the last apply() left no token for targets[i].
  [[nodiscard]] bool forbids_all(std::int64_t i) const { return forbids_all_[usize(i)] != 0; }

 private:
  struct Piece;  // rows that go to the device together

  [[nodiscard]] Piece next_piece(std::span<const SampleTarget> targets, std::int64_t begin) const;
  void fill(const Piece& piece, std::span<const SampleTarget> targets);
  void fill_mask(std::span<std::uint32_t> bits, const SampleTarget& target, std::int64_t row);
  [[nodiscard]] LogitChanges views(const Piece& piece, std::byte* base) const;
  [[nodiscard]] std::int64_t mask_words() const { return (vocab_ + 31) / 32; }

  Device& device_;
  std::int64_t vocab_;
  Storage host_;       // on the device itself where the host sees it
  Storage on_device_;  // else this is
  std::vector<char> forbids_all_;
};

}  // namespace tandem
