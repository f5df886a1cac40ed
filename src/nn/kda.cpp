#include "nn/kda.h"

#include <array>
#include <cmath>

#include "nn/activations.h"
#include "ops/conv1d.h"
#include "ops/norm.h"

namespace tandem::nn {
namespace {

constexpr float kL2Eps = 1e-6F;  // added to the sum of squares (kimi-k3.md 1.3)

}  // namespace

float Kda::q_scale() const {
  return 1.0F / std::sqrt(static_cast<float>(head_dim));
}

KdaInputs Kda::inputs(const Saved& saved) const {
  const std::int64_t p = width();
  return {as_heads(saved.qk.cols(0, p), num_heads), as_heads(saved.qk.cols(p, p), num_heads),
          as_heads(saved.qkv_conv.cols(2 * p, p), num_heads), as_heads(saved.g, num_heads),
          saved.beta};
}

std::array<ConstF32Mat, 3> Kda::filters() const {
  return {q_conv1d->value_mat(), k_conv1d->value_mat(), v_conv1d->value_mat()};
}

KdaDecode Kda::step(ConstF32Mat qkv, ConstF32Mat f_a, ConstF32Mat b, ConstF32Mat gate_out) const {
  return {.qkv = qkv,
          .f_a = f_a,
          .f_b = &f_b_proj.packed(),
          .b = b,
          .gate_out = as_heads(gate_out, num_heads),
          .filters = filters(),
          .a_log = a_log_used(),
          .dt_bias = dt_bias->value_vec(),
          .o_norm = o_norm->value_vec(),
          .gate = gate,
          .q_scale = q_scale(),
          .l2_eps = kL2Eps,
          .norm_eps = norm_eps};
}

Kda::Saved Kda::forward(const ExecCtx& ctx, F32Mat y, ConstF32Mat base, ConstF32Mat x,
                        const SeqBatch& seqs, const KdaCacheView* cache, Arena& keep) const {
  const std::int64_t rows = x.size(0);
  const std::int64_t p = width();
  const F32Mat qkv = take_mat(keep, rows, 3 * p);
  const F32Mat gate_out = take_mat(keep, rows, p);
  const F32Mat f_a = take_mat(keep, rows, f_a_proj.out());
  const F32Mat beta = take_mat(keep, rows, num_heads);
  ops::linear_group(ctx, std::array{q_proj.call(qkv.cols(0, p), x), k_proj.call(qkv.cols(p, p), x),
                                    v_proj.call(qkv.cols(2 * p, p), x), g_proj.call(gate_out, x),
                                    f_a_proj.call(f_a, x), b_proj.call(beta, x)});
  if (cache != nullptr && seqs.one_row_each) {
    const F32Mat normed = take_mat(keep, rows, p);
    if (ops::kda_decode(ctx, as_heads(normed, num_heads), step(qkv, f_a, beta, gate_out),
                        cache->states, cache->conv, seqs)) {
      ops::linear_sum(ctx, y, base, std::array{o_proj.term(normed)});
      return {};
    }
  }

  // Without a backward, what was read for the last time gives its place: K3's prompts are long.
  const bool training = cache == nullptr;
  const auto take_or = [&](F32Mat read) {
    return training ? take_mat(keep, rows, read.size(1)) : read;
  };
  const F32Mat qkv_conv = take_mat(keep, rows, 3 * p);
  ops::conv1d(ctx, qkv_conv, qkv, filters(), cache != nullptr ? cache->conv : F32Cube{}, seqs);
  const F32Mat qk = take_or(qkv_conv.cols(0, 2 * p));
  ops::l2_norm(ctx, as_heads(qk, 2 * num_heads), as_heads(qkv_conv.cols(0, 2 * p), 2 * num_heads),
               std::array{q_scale(), 1.0F}, kL2Eps);

  const F32Mat f = take_or(qkv.cols(0, p));
  const F32Mat g = take_or(qkv.cols(p, p));
  f_b_proj.forward(ctx, f, f_a);
  ops::kda_gate(ctx, as_heads(g, num_heads), beta, as_heads(f, num_heads), beta, a_log_used(),
                dt_bias->value_vec(), gate);

  const F32Mat o = take_or(qkv.cols(2 * p, p));
  const F32Mat normed = take_or(qkv_conv.cols(0, p));
  Saved saved{x, qkv, qkv_conv, qk, f_a, f, g, beta, o, gate_out, normed, nullptr};
  float* checkpoints = nullptr;
  if (cache == nullptr) {
    checkpoints =
        keep.take<float>(kda_num_checkpoints(ctx, seqs, rows) * num_heads * head_dim * head_dim)
            .data();
    saved.checkpoints = checkpoints;
  }
  ops::kda_recurrent(ctx, as_heads(o, num_heads), inputs(saved),
                     cache != nullptr ? cache->states : KdaStatePool{}, seqs, checkpoints);
  ops::rms_norm_gated(ctx, as_heads(normed, num_heads), as_heads(o, num_heads),
                      as_heads(gate_out, num_heads), o_norm->value_vec(), norm_eps);
  ops::linear_sum(ctx, y, base, std::array{o_proj.term(normed)});
  return saved;
}

void Kda::backward(const ExecCtx& ctx, F32Mat d_x, ConstF32Mat d_y, const SeqBatch& seqs,
                   const Saved& saved) const {
  using enum Linear::InputGrad;
  Arena& work = *ctx.workspace;
  const ArenaScope scope(work);
  const std::int64_t rows = d_y.size(0);
  const std::int64_t p = width();

  const F32Mat d_normed = take_mat(work, rows, p);
  const F32Mat d_o = take_mat(work, rows, p);
  const F32Mat d_gate_out = take_mat(work, rows, p);
  o_proj.backward(ctx, d_normed, d_y, saved.normed, kOverwrite);
  ops::rms_norm_gated_bwd(ctx, as_heads(d_o, num_heads), as_heads(d_gate_out, num_heads),
                          o_norm->grad_vec(), as_heads(ConstF32Mat(d_normed), num_heads),
                          as_heads(saved.o, num_heads), as_heads(saved.gate_out, num_heads),
                          o_norm->value_vec(), norm_eps);
  g_proj.backward(ctx, d_x, d_gate_out, saved.x, kOverwrite);

  const F32Mat d_qkv = take_mat(work, rows, 3 * p);
  const F32Mat d_g = take_mat(work, rows, p);
  const F32Mat d_beta = take_mat(work, rows, num_heads);
  backward_core(ctx, d_qkv, d_g, d_beta, d_o, seqs, saved);

  const std::array<const Linear*, 3> projections{&q_proj, &k_proj, &v_proj};
  const std::array<Parameter*, 3> filters{q_conv1d, k_conv1d, v_conv1d};
  const F32Mat d_raw = take_mat(work, rows, p);
  for (std::int64_t i = 0; i < 3; ++i) {
    const auto at = static_cast<std::size_t>(i);
    ops::conv1d_bwd(ctx, d_raw, filters[at]->grad_mat(), d_qkv.cols(i * p, p),
                    saved.qkv.cols(i * p, p), filters[at]->value_mat(), seqs);
    projections[at]->backward(ctx, d_x, d_raw, saved.x, kAccumulate);
  }

  const F32Mat d_f = take_mat(work, rows, p);
  const F32Mat d_f_a = take_mat(work, rows, f_a_proj.out());
  const F32Vec d_a_log{A_log->grad().data(), {num_heads}};
  ops::kda_gate_bwd(ctx, as_heads(d_f, num_heads), d_a_log, dt_bias->grad_vec(),
                    as_heads(ConstF32Mat(d_g), num_heads), as_heads(saved.f, num_heads),
                    a_log_used(), dt_bias->value_vec(), gate);
  f_b_proj.backward(ctx, d_f_a, d_f, saved.f_a, kOverwrite);
  f_a_proj.backward(ctx, d_x, d_f_a, saved.x, kAccumulate);
  const F32Mat d_b = take_mat(work, rows, num_heads);
  ops::kda_beta_bwd(ctx, d_b, d_beta, saved.beta);
  b_proj.backward(ctx, d_x, d_b, saved.x, kAccumulate);
}

/// From d_o to the gradients of the convolution outputs (q | k | v), of g and of beta.
void Kda::backward_core(const ExecCtx& ctx, F32Mat d_qkv, F32Mat d_g, F32Mat d_beta,
                        ConstF32Mat d_o, const SeqBatch& seqs, const Saved& saved) const {
  const std::int64_t p = width();
  const F32Cube d_q = as_heads(d_qkv.cols(0, p), num_heads);
  const F32Cube d_k = as_heads(d_qkv.cols(p, p), num_heads);
  const F32Cube d_v = as_heads(d_qkv.cols(2 * p, p), num_heads);
  ops::kda_recurrent_bwd(ctx, {d_q, d_k, d_v, as_heads(d_g, num_heads), d_beta},
                         as_heads(d_o, num_heads), inputs(saved), seqs, saved.checkpoints);
  ops::l2_norm_bwd(ctx, d_q, d_q, as_heads(saved.qkv_conv.cols(0, p), num_heads), q_scale(),
                   kL2Eps);
  ops::l2_norm_bwd(ctx, d_k, d_k, as_heads(saved.qkv_conv.cols(p, p), num_heads), 1.0F, kL2Eps);
}

}  // namespace tandem::nn
