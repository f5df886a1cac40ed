#include "nn/mla.h"

#include <array>
#include <cmath>

#include "core/check.h"
#include "core/checked_cast.h"
#include "nn/activations.h"
#include "ops/act.h"

namespace tandem::nn {

float Mla::scale() const {
  return 1.0F / std::sqrt(static_cast<float>(qk_nope_head_dim + qk_rope_head_dim));
}

std::int64_t Mla::kv_b_bytes() const {
  std::int64_t total = 0;
  for (const PackedWeight& w : w_uk_) {
    total += w.data.size_bytes();
  }
  for (const PackedWeight& w : w_uv_) {
    total += w.data.size_bytes();
  }
  return total;
}

/// Rows [begin, begin + count) of head `head` of kv_b_proj; fp32 or bf16 only.
WeightRef Mla::head_rows(const WeightRef& weight, std::int64_t head, std::int64_t begin,
                         std::int64_t count) const {
  TDM_CHECK(weight.format == WeightFormat::kF32 || weight.format == WeightFormat::kBF16);
  const std::int64_t element_bytes = weight.format == WeightFormat::kF32 ? 4 : 2;
  const std::int64_t first_row = head * (qk_nope_head_dim + v_head_dim) + begin;
  WeightRef part = weight;
  part.rows = count;
  part.data =
      static_cast<const std::byte*>(weight.data) + first_row * weight.row_stride * element_bytes;
  return part;
}

void Mla::set_kv_b(const ExecCtx& ctx, const WeightRef& weight) {
  w_uk_.resize(usize(num_heads));
  w_uv_.resize(usize(num_heads));
  for (std::int64_t h = 0; h < num_heads; ++h) {
    ops::pack(ctx, w_uk_[usize(h)], head_rows(weight, h, 0, qk_nope_head_dim),
              Orientation::kTransposed);
    ops::pack(ctx, w_uv_[usize(h)], head_rows(weight, h, qk_nope_head_dim, v_head_dim),
              Orientation::kNormal);
  }
}

void Mla::set_kv_b(const ExecCtx& ctx, Parameter& master) {
  kv_b_ = &master;
  w_uk_t_.resize(usize(num_heads));
  w_uv_t_.resize(usize(num_heads));
  refresh(ctx);
}

void Mla::refresh(const ExecCtx& ctx) {
  if (kv_b_ == nullptr) {
    return;
  }
  const WeightRef weight = WeightRef::of(kv_b_->value_mat());
  set_kv_b(ctx, weight);
  for (std::int64_t h = 0; h < num_heads; ++h) {
    ops::pack(ctx, w_uk_t_[usize(h)], head_rows(weight, h, 0, qk_nope_head_dim),
              Orientation::kNormal);
    ops::pack(ctx, w_uv_t_[usize(h)], head_rows(weight, h, qk_nope_head_dim, v_head_dim),
              Orientation::kTransposed);
  }
}

Mla::Saved Mla::forward(const ExecCtx& ctx, F32Mat y, ConstF32Mat base, ConstF32Mat x,
                        ConstI32Vec cu_seqlens, const MlaCacheUse* use, Arena& keep) const {
  const std::int64_t rows = x.size(0);
  const F32Mat cq_raw = take_mat(keep, rows, q_a_proj.out());
  const F32Mat cq = take_mat(keep, rows, q_a_proj.out());
  const F32Mat q = take_mat(keep, rows, q_b_proj.out());
  const F32Mat kv_raw = take_mat(keep, rows, cache_width());
  const F32Mat kv = use == nullptr ? take_mat(keep, rows, cache_width()) : F32Mat{};
  const F32Mat gate = take_mat(keep, rows, num_heads * v_head_dim);
  const F32Cube q_lat = take_cube(keep, rows, num_heads, kv_lora_rank);
  const F32Cube o_lat = take_cube(keep, rows, num_heads, kv_lora_rank);
  const F32Mat lse = use == nullptr ? take_mat(keep, rows, num_heads) : F32Mat{};
  // Without a backward, what was read for the last time gives its place: K3's prompts are long.
  const bool over_q = use != nullptr && v_head_dim <= qk_nope_head_dim + qk_rope_head_dim;
  const F32Mat o =
      over_q ? q.cols(0, num_heads * v_head_dim) : take_mat(keep, rows, num_heads * v_head_dim);
  const F32Mat gated = use != nullptr ? o : take_mat(keep, rows, num_heads * v_head_dim);
  const Saved saved{x, cq_raw, cq, q, kv_raw, kv, q_lat, o_lat, lse, o, gate, gated};

  ops::linear_group(
      ctx, std::array{q_a_proj.call(cq_raw, x), kv_a_proj.call(kv_raw, x), g_proj.call(gate, x)});
  prepare(ctx, cq, kv, saved, use);
  q_b_proj.forward(ctx, q, cq);
  ops::linear_heads(ctx, q_lat, as_heads(q, num_heads).cols(0, qk_nope_head_dim), w_uk_);
  attend(ctx, saved, o_lat, lse, cu_seqlens, use);
  ops::linear_heads(ctx, as_heads(o, num_heads), o_lat, w_uv_);
  ops::sigmoid_gate(ctx, gated, o, gate);
  ops::linear_sum(ctx, y, base, std::array{o_proj.term(gated)});
  return saved;
}

MlaQuery Mla::query_of(const Saved& saved) const {
  return {saved.q_lat, as_heads(saved.q, num_heads).cols(qk_nope_head_dim, qk_rope_head_dim)};
}

void Mla::prepare(const ExecCtx& ctx, F32Mat cq, F32Mat kv, const Saved& saved,
                  const MlaCacheUse* use) const {
  ops::mla_prepare(ctx, {.cq = cq,
                         .kv = kv,
                         .rows = use != nullptr ? use->rows : LatentRows(),
                         .cq_raw = saved.cq_raw,
                         .q_weight = q_a_norm.weight->value_vec(),
                         .kv_raw = saved.kv_raw,
                         .kv_weight = kv_a_norm.weight->value_vec(),
                         .slot_mapping = use != nullptr ? use->slot_mapping : ConstI32Vec(),
                         .q_eps = q_a_norm.eps,
                         .kv_eps = kv_a_norm.eps});
}

void Mla::attend(const ExecCtx& ctx, const Saved& saved, F32Cube o_lat, F32Mat lse,
                 ConstI32Vec cu_seqlens, const MlaCacheUse* use) const {
  if (use != nullptr) {
    const MlaCacheView keys{use->rows, use->page_table, use->page_size};
    ops::mla_absorbed(ctx, o_lat, lse, query_of(saved), keys, use->batch, scale());
    return;
  }
  ops::mla_absorbed(ctx, o_lat, lse, query_of(saved), {ConstLatentRows(saved.kv), {}, 1},
                    {cu_seqlens, {}}, scale());
}

void Mla::backward(const ExecCtx& ctx, F32Mat d_x, ConstF32Mat d_y, ConstI32Vec cu_seqlens,
                   const Saved& saved) const {
  using enum Linear::InputGrad;
  Arena& work = *ctx.workspace;
  const ArenaScope scope(work);
  const std::int64_t rows = d_y.size(0);
  const std::int64_t inner = num_heads * v_head_dim;

  const F32Mat d_gated = take_mat(work, rows, inner);
  const F32Mat d_o = take_mat(work, rows, inner);
  const F32Mat d_gate = take_mat(work, rows, inner);
  o_proj.backward(ctx, d_gated, d_y, saved.gated, kOverwrite);
  ops::sigmoid_gate_bwd(ctx, d_o, d_gate, d_gated, saved.o, saved.gate);
  g_proj.backward(ctx, d_x, d_gate, saved.x, kOverwrite);

  const F32Cube d_o_lat = take_cube(work, rows, num_heads, kv_lora_rank);
  const F32Cube d_q_lat = take_cube(work, rows, num_heads, kv_lora_rank);
  const F32Mat d_q = take_mat(work, rows, q_b_proj.out());
  const F32Cube d_q_heads = as_heads(d_q, num_heads);
  const F32Mat d_kv = take_mat(work, rows, cache_width());
  const ConstF32Cube d_o_heads = as_heads(ConstF32Mat(d_o), num_heads);
  ops::linear_heads(ctx, d_o_lat, d_o_heads, w_uv_t_);
  ops::mla_absorbed_bwd(ctx, {d_q_lat, d_q_heads.cols(qk_nope_head_dim, qk_rope_head_dim)}, d_kv,
                        d_o_lat, query_of(saved), saved.kv, saved.o_lat, saved.lse, cu_seqlens,
                        scale());
  backward_kv_b(ctx, d_q_heads.cols(0, qk_nope_head_dim), d_q_lat, d_o_heads, saved);

  const F32Mat d_cq = take_mat(work, rows, q_a_proj.out());
  const F32Mat d_cq_raw = take_mat(work, rows, q_a_proj.out());
  q_b_proj.backward(ctx, d_cq, d_q, saved.cq, kOverwrite);
  q_a_norm.backward(ctx, d_cq_raw, d_cq, saved.cq_raw);
  q_a_proj.backward(ctx, d_x, d_cq_raw, saved.x, kAccumulate);

  const F32Mat d_kv_raw = take_mat(work, rows, cache_width());
  kv_a_norm.backward(ctx, d_kv_raw.cols(0, kv_lora_rank), d_kv.cols(0, kv_lora_rank),
                     saved.kv_raw.cols(0, kv_lora_rank));
  ops::copy(ctx, as_heads(d_kv_raw.cols(kv_lora_rank, qk_rope_head_dim), 1),
            as_heads(ConstF32Mat(d_kv.cols(kv_lora_rank, qk_rope_head_dim)), 1));
  kv_a_proj.backward(ctx, d_x, d_kv_raw, saved.x, kAccumulate);
}

/// Gradients of W_UK and W_UV (slices of kv_b_proj), and of q_n from q_lat.
void Mla::backward_kv_b(const ExecCtx& ctx, F32Cube d_q_n, ConstF32Cube d_q_lat, ConstF32Cube d_o,
                        const Saved& saved) const {
  ops::linear_heads(ctx, d_q_n, d_q_lat, w_uk_t_);

  const F32Mat grad = kv_b_->grad_mat();
  const ConstF32Cube q_heads = as_heads(saved.q, num_heads);
  const auto head = [](ConstF32Cube x, std::int64_t h, std::int64_t width) {
    return ConstF32Mat{x.data() + h * x.stride(1), {x.size(0), width}, {x.stride(0), 1}};
  };
  for (std::int64_t h = 0; h < num_heads; ++h) {
    const std::int64_t first = h * (qk_nope_head_dim + v_head_dim);
    // q_lat = q_n W_UK, so d_W_UK[n, c] = sum_t q_n[t, n] d_q_lat[t, c].
    ops::weight_grad(ctx, grad.rows(first, qk_nope_head_dim), head(q_heads, h, qk_nope_head_dim),
                     head(d_q_lat, h, kv_lora_rank));
    ops::weight_grad(ctx, grad.rows(first + qk_nope_head_dim, v_head_dim), head(d_o, h, v_head_dim),
                     head(saved.o_lat, h, kv_lora_rank));
  }
}

}  // namespace tandem::nn
