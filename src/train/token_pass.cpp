#include "train/token_pass.h"

#include <algorithm>

#include "core/check.h"
#include "core/checked_cast.h"
#include "ops/loss.h"

namespace tandem {
namespace {

ConstI32Vec i32_vec(const std::vector<std::int32_t>& values) {
  return {values.data(), {isize(values)}};
}

F32Mat take_mat(Arena& arena, std::int64_t rows, std::int64_t cols) {
  return {arena.take<float>(rows * cols).data(), {rows, cols}};
}

F32Mat gather_rows(Arena& arena, ConstF32Mat from, std::span<const std::int32_t> rows) {
  const F32Mat out = take_mat(arena, isize(rows), from.size(1));
  for (std::int64_t r = 0; r < isize(rows); ++r) {
    std::copy_n(from.row(rows[usize(r)]), from.size(1), out.row(r));
  }
  return out;
}

/// `temperature` for each row.
ConstF32Vec constant_vec(Arena& arena, std::int64_t count, float value) {
  const auto out = arena.take<float>(count);
  std::ranges::fill(out, value);
  return {out.data(), {count}};
}

}  // namespace

TokenPass::Result TokenPass::forward(const ExecCtx& ctx, const MicroBatch& batch, float temperature,
                                     RoutedExperts* routed) {
  activations_.reset();
  batch_ = &batch;
  routed_ = routed;
  temperature_ = temperature;
  hidden_ = model_.forward_train(ctx, {i32_vec(batch.token_ids), i32_vec(batch.cu_seqlens), routed},
                                 activations_);

  const std::int64_t num_rows = isize(batch.rows);
  Result result{std::vector<float>(usize(num_rows)), std::vector<float>(usize(num_rows))};
  for (std::int64_t begin = 0; begin < num_rows; begin += kHeadRows) {
    const ArenaScope scope(*ctx.workspace);
    const std::int64_t count = std::min(kHeadRows, num_rows - begin);
    const F32Mat picked = gather_rows(*ctx.workspace, hidden_,
                                      std::span(batch.rows).subspan(usize(begin), usize(count)));
    const F32Mat logits = take_mat(*ctx.workspace, count, model_.vocab_size());
    model_.head(ctx, logits, picked);
    ops::log_prob(ctx, {result.logprobs.data() + begin, {count}},
                  {result.entropies.data() + begin, {count}}, logits,
                  {batch.targets.data() + begin, {count}},
                  constant_vec(*ctx.workspace, count, temperature));
  }
  return result;
}

void TokenPass::backward(const ExecCtx& ctx, std::span<const float> d_logprobs,
                         std::span<const float> d_entropies) {
  TDM_CHECK(batch_ != nullptr && isize(d_logprobs) == isize(batch_->rows));
  Arena& work = *ctx.workspace;
  const ArenaScope scope(work);
  const F32Mat d_hidden = take_mat(work, hidden_.size(0), hidden_.size(1));
  std::fill_n(d_hidden.data(), d_hidden.numel(), 0.0F);
  const std::int64_t num_rows = isize(batch_->rows);
  for (std::int64_t begin = 0; begin < num_rows; begin += kHeadRows) {
    const ArenaScope chunk(work);
    const std::int64_t count = std::min(kHeadRows, num_rows - begin);
    const auto rows = std::span(batch_->rows).subspan(usize(begin), usize(count));
    const F32Mat picked = gather_rows(work, hidden_, rows);
    const F32Mat logits = take_mat(work, count, model_.vocab_size());
    const F32Mat d_picked = take_mat(work, count, hidden_.size(1));
    std::fill_n(d_picked.data(), d_picked.numel(), 0.0F);
    model_.head(ctx, logits, picked);
    const ConstF32Vec d_entropy =
        d_entropies.empty() ? ConstF32Vec{} : ConstF32Vec{d_entropies.data() + begin, {count}};
    ops::log_prob_bwd(ctx, logits, {d_logprobs.data() + begin, {count}}, d_entropy, logits,
                      {batch_->targets.data() + begin, {count}},
                      constant_vec(work, count, temperature_));
    model_.head_backward(ctx, d_picked, logits, picked);
    for (std::int64_t r = 0; r < count; ++r) {
      std::copy_n(d_picked.row(r), d_picked.size(1), d_hidden.row(rows[usize(r)]));
    }
  }
  model_.backward(ctx, d_hidden,
                  {i32_vec(batch_->token_ids), i32_vec(batch_->cu_seqlens), routed_});
}

}  // namespace tandem
