#include "nn/moe.h"

#include <array>
#include <vector>

#include "nn/activations.h"

namespace tandem::nn {

void ExpertMatrix::add(const ExecCtx& ctx, const WeightRef& weight) {
  ops::pack(ctx, forward_.emplace_back(), weight, Orientation::kNormal);
}

void ExpertMatrix::add(const ExecCtx& ctx, Parameter& master) {
  masters_.push_back(&master);
  grads_.push_back(master.grad_mat());
  forward_.emplace_back();
  backward_.emplace_back();
  pack_one(ctx, masters_.size() - 1);
}

void ExpertMatrix::pack_one(const ExecCtx& ctx, std::size_t expert) {
  const WeightRef weight = WeightRef::of(masters_[expert]->value_mat());
  ops::pack(ctx, forward_[expert], weight, Orientation::kNormal);
  ops::pack(ctx, backward_[expert], weight, Orientation::kTransposed);
}

void ExpertMatrix::refresh(const ExecCtx& ctx) {
  for (std::size_t expert = 0; expert < masters_.size(); ++expert) {
    pack_one(ctx, expert);
  }
}

std::int64_t ExpertMatrix::packed_bytes() const {
  std::int64_t total = 0;
  for (const PackedWeight& weight : forward_) {
    total += weight.data.size_bytes() + weight.scales.size_bytes();
  }
  return total;
}

void LatentMoe::refresh(const ExecCtx& ctx) {
  for (Linear* linear :
       {&gate, &down_proj, &up_proj, &shared.gate_proj, &shared.up_proj, &shared.down_proj}) {
    linear->refresh(ctx);
  }
  for (ExpertMatrix* matrix : {&w1, &w3, &w2}) {
    matrix->refresh(ctx);
  }
}

LatentMoe::Saved LatentMoe::forward(const ExecCtx& ctx, F32Mat y, ConstF32Mat base, ConstF32Mat x,
                                    const Routing* routing, bool training, Arena& keep) const {
  const std::int64_t rows = x.size(0);
  const std::int64_t top_k = num_experts_per_token;
  const std::int64_t latent_width = down_proj.out();
  const F32Mat logits = take_mat(keep, rows, w1.size());
  const F32Mat scores = take_mat(keep, rows, w1.size());
  const F32Mat weights = take_mat(keep, rows, top_k);
  const I32Mat ids = routing != nullptr ? routing->ids : take_i32_mat(keep, rows, top_k);
  const F32Mat latent = take_mat(keep, rows, latent_width);
  const Mlp::Products shared_products = shared.take_products(x, training, keep);
  std::vector<LinearCall> group{gate.call(logits, x), down_proj.call(latent, x)};
  shared.add_calls(group, shared_products);
  ops::linear_group(ctx, group);
  if (routing != nullptr && routing->replay) {
    ops::route_replay(ctx, weights, scores, logits, ids, router);
  } else {
    ops::route(ctx, ids, weights, scores, logits, bias->value_vec(), router);
  }

  F32Mat combined;
  const F32Mat normed = take_mat(keep, rows, latent_width);
  ExpertsSaved saved_experts;
  if (training) {
    combined = take_mat(keep, rows, latent_width);
    saved_experts = {take_mat(keep, rows * top_k, w1.out()), take_mat(keep, rows * top_k, w1.out()),
                     take_mat(keep, rows * top_k, latent_width), take_i32_mat(keep, rows, top_k)};
  }
  ops::experts(ctx, combined, norm.of_rows(normed), training ? &saved_experts : nullptr, latent,
               ids, weights, {w1.packed(), w3.packed(), w2.packed()}, act);
  const Mlp::Saved saved_shared = shared.activate(ctx, shared_products);
  ops::linear_sum(ctx, y, base,
                  std::array{up_proj.term(normed), shared.down_proj.term(saved_shared.act)});
  return {x, ids, weights, scores, latent, combined, normed, saved_experts, saved_shared};
}

void LatentMoe::backward(const ExecCtx& ctx, F32Mat d_x, ConstF32Mat d_y,
                         const Saved& saved) const {
  using enum Linear::InputGrad;
  Arena& work = *ctx.workspace;
  const ArenaScope scope(work);
  const std::int64_t rows = d_y.size(0);
  const std::int64_t latent_width = down_proj.out();
  shared.backward(ctx, d_x, d_y, saved.shared, kOverwrite);

  const F32Mat d_normed = take_mat(work, rows, latent_width);
  const F32Mat d_combined = take_mat(work, rows, latent_width);
  const F32Mat d_latent = take_mat(work, rows, latent_width);
  const F32Mat d_weights = take_mat(work, rows, num_experts_per_token);
  const F32Mat d_logits = take_mat(work, rows, w1.size());
  up_proj.backward(ctx, d_normed, d_y, saved.normed, kOverwrite);
  norm.backward(ctx, d_combined, d_normed, saved.combined);
  ops::experts_bwd(ctx, d_latent, d_weights, {w1.grads(), w3.grads(), w2.grads()}, d_combined,
                   saved.latent, saved.ids, saved.weights,
                   {w1.packed_transposed(), w3.packed_transposed(), w2.packed_transposed()},
                   saved.experts, act);
  down_proj.backward(ctx, d_x, d_latent, saved.x, kAccumulate);
  ops::route_bwd(ctx, d_logits, d_weights, saved.ids, saved.scores, router);
  gate.backward(ctx, d_x, d_logits, saved.x, kAccumulate);
}

}  // namespace tandem::nn
