// linear.h — y = x W^T. Holds the backend's packed forms of one weight; a trainable one also points
// to its fp32 master.
#pragma once

#include "nn/parameter.h"
#include "ops/gemm.h"

namespace tandem::nn {

class Linear {
 public:
  Linear() = default;
  /// Inference only: packs what the checkpoint holds, in the format it holds it.
  Linear(const ExecCtx& ctx, const WeightRef& weight);
  /// Trainable: packs `master` now and again at every refresh().
  Linear(const ExecCtx& ctx, Parameter& master);

  /// Shapes: y [T, out], x [T, in].
  void forward(const ExecCtx& ctx, F32Mat y, ConstF32Mat x) const {
    ops::linear(ctx, y, x, forward_);
  }
  /// The same as one call of ops::linear_group(); good as long as this layer is.
  [[nodiscard]] LinearCall call(F32Mat y, ConstF32Mat x) const { return {y, x, &forward_}; }
  /// The same of one term of ops::linear_sum().
  [[nodiscard]] LinearTerm term(ConstF32Mat x) const { return {x, &forward_}; }
  enum class InputGrad { kOverwrite, kAccumulate };
  /// d_W += d_y^T x, and d_x (+)= d_y W.
  void backward(const ExecCtx& ctx, F32Mat d_x, ConstF32Mat d_y, ConstF32Mat x,
                InputGrad mode) const;
  /// Re-packs after the master changed.
  void refresh(const ExecCtx& ctx);

  [[nodiscard]] std::int64_t out() const { return forward_.out; }
  [[nodiscard]] std::int64_t in() const { return forward_.in; }
  [[nodiscard]] Parameter* master() const { return master_; }
  [[nodiscard]] const PackedWeight& packed() const { return forward_; }
  [[nodiscard]] const PackedWeight& packed_transposed() const { return backward_; }
  [[nodiscard]] std::int64_t packed_bytes() const {
    return forward_.data.size_bytes() + forward_.scales.size_bytes();
  }

 private:
  PackedWeight forward_;
  PackedWeight backward_;        // trainable only
  Parameter* master_ = nullptr;  // owned by the model's ParameterStore
};

}  // namespace tandem::nn
