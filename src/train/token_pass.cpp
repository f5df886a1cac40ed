#include "train/token_pass.h"

#include <algorithm>

#include "core/check.h"
#include "core/checked_cast.h"
#include "ops/embed.h"
#include "ops/loss.h"
#include "tensor/arena_views.h"

namespace tandem {
namespace {

/// Host values where ops can read them.
template <typename T>
TensorView<const T, 1> place(const ExecCtx& ctx, Arena& arena, std::span<const T> values) {
  T* const copy = arena.take<T>(isize(values)).data();
  ctx.device->upload(copy, values.data(), values.size_bytes());
  return {copy, {isize(values)}};
}

F32Mat zeros(const ExecCtx& ctx, std::int64_t rows, std::int64_t cols) {
  const F32Mat out = take_mat(*ctx.workspace, rows, cols);
  ctx.device->zero(out.data(), usize(out.numel()) * sizeof(float));
  return out;
}

}  // namespace

TokenPass::HeadRows TokenPass::head_rows(std::int64_t begin) const {
  const std::int64_t count = std::min(kHeadRows, rows_.size(0) - begin);
  return {count,
          {rows_.data() + begin, {count}},
          {targets_.data() + begin, {count}},
          {temperatures_.data() + begin, {count}}};
}

void TokenPass::run_layers(const ExecCtx& ctx, RoutedExperts* routed) {
  if (routed == nullptr) {
    hidden_ = model_.forward_train(ctx, input_, activations_);
    return;
  }
  const std::span<std::int32_t> ids(routed->ids.data(), usize(routed->ids.numel()));
  const std::span<std::int32_t> placed = activations_.take<std::int32_t>(isize(ids));
  routed_ = {I32Mat{placed.data(), routed->ids.shape()}, routed->replay};
  input_.routed = &routed_;
  if (routed->replay) {
    ctx.device->upload(placed.data(), ids.data(), ids.size_bytes());
  }
  hidden_ = model_.forward_train(ctx, input_, activations_);
  if (!routed->replay) {
    ctx.device->download(ids.data(), placed.data(), ids.size_bytes());
  }
}

TokenPass::Result TokenPass::forward(const ExecCtx& ctx, const MicroBatch& batch, float temperature,
                                     RoutedExperts* routed) {
  activations_.reset();
  rows_ = place(ctx, activations_, std::span(batch.rows));
  targets_ = place(ctx, activations_, std::span(batch.targets));
  const std::vector<float> temperatures(batch.targets.size(), temperature);
  temperatures_ = place(ctx, activations_, std::span(temperatures));
  input_ = {place(ctx, activations_, std::span(batch.token_ids)),
            place(ctx, activations_, std::span(batch.cu_seqlens)), nullptr};
  run_layers(ctx, routed);

  const std::int64_t num_rows = rows_.size(0);
  const F32Mat results = take_mat(activations_, 2, num_rows);  // log-probabilities, entropies
  for (std::int64_t begin = 0; begin < num_rows; begin += kHeadRows) {
    const ArenaScope scope(*ctx.workspace);
    const HeadRows rows = head_rows(begin);
    const F32Mat picked = take_mat(*ctx.workspace, rows.count, hidden_.size(1));
    const F32Mat logits = take_mat(*ctx.workspace, rows.count, model_.vocab_size());
    ops::embed(ctx, picked, WeightRef::of(hidden_), rows.ids);
    model_.head(ctx, logits, picked);
    ops::log_prob(ctx, {results.row(0) + begin, {rows.count}},
                  {results.row(1) + begin, {rows.count}}, logits, rows.targets, rows.temperatures);
  }
  Result result{std::vector<float>(usize(num_rows)), std::vector<float>(usize(num_rows))};
  ctx.device->download(result.logprobs.data(), results.row(0), usize(num_rows) * sizeof(float));
  ctx.device->download(result.entropies.data(), results.row(1), usize(num_rows) * sizeof(float));
  return result;
}

void TokenPass::backward(const ExecCtx& ctx, std::span<const float> d_logprobs,
                         std::span<const float> d_entropies) {
  TDM_CHECK(isize(d_logprobs) == rows_.size(0), d_logprobs.size(), rows_.size(0));
  Arena& work = *ctx.workspace;
  const ArenaScope scope(work);
  const ConstF32Vec d_logprob = place(ctx, work, d_logprobs);
  const ConstF32Vec d_entropy = place(ctx, work, d_entropies);
  const F32Mat d_hidden = zeros(ctx, hidden_.size(0), hidden_.size(1));
  const auto part = [](ConstF32Vec all, std::int64_t begin, std::int64_t count) {
    return all.empty() ? ConstF32Vec{} : ConstF32Vec{all.data() + begin, {count}};
  };
  for (std::int64_t begin = 0; begin < rows_.size(0); begin += kHeadRows) {
    const ArenaScope chunk(work);
    const HeadRows rows = head_rows(begin);
    const F32Mat picked = take_mat(work, rows.count, hidden_.size(1));
    const F32Mat logits = take_mat(work, rows.count, model_.vocab_size());
    const F32Mat d_picked = zeros(ctx, rows.count, hidden_.size(1));
    ops::embed(ctx, picked, WeightRef::of(hidden_), rows.ids);
    model_.head(ctx, logits, picked);
    ops::log_prob_bwd(ctx, logits, part(d_logprob, begin, rows.count),
                      part(d_entropy, begin, rows.count), logits, rows.targets, rows.temperatures);
    model_.head_backward(ctx, d_picked, logits, picked);
    ops::embed_bwd(ctx, d_hidden, d_picked, rows.ids);
  }
  model_.backward(ctx, d_hidden, input_);
}

}  // namespace tandem
