// act.cu — element-wise activations.   Contract: ops/act.h   Oracle: ops/ref/act_ref.h
// Traffic   each operand once; memory bound.   Numerics  fp32, full-precision exp and tanh.
// Launch    map_rows.cuh; graph-safe.
#include <cmath>

#include "backends/cuda/families.h"
#include "backends/cuda/map_rows.cuh"
#include "backends/cuda/sigmoid.cuh"
#include "backends/cuda/situ.cuh"

namespace tandem::cuda {
namespace {

struct Situ {
  SituParams p;
  __device__ void operator()(const float (&x)[2], float (&y)[1], std::int64_t) const {
    y[0] = situ_value(x[0], x[1], p);
  }
};

void situ(const ExecCtx& ctx, F32Mat y, ConstF32Mat gate, ConstF32Mat up, SituParams params) {
  const bool aligned = whole_quads(y) && whole_quads(gate) && whole_quads(up);
  launch_map<2, 1>(ctx, "situ", aligned, {{one_slice(gate), one_slice(up)}, {one_slice(y)}},
                   {y.size(0), 1, y.size(1)}, Situ{params});
}

struct SituBwd {  // x: d_y, gate, up; y: d_gate, d_up
  SituParams p;
  __device__ void operator()(const float (&x)[3], float (&y)[2], std::int64_t) const {
    const float t = tanhf(x[1] / p.beta);
    const SigmoidPair s = sigmoid_pair(x[1]);
    const bool bounded = p.linear_beta > 0;
    const float w = bounded ? tanhf(x[2] / p.linear_beta) : 0.0F;
    const float second = bounded ? p.linear_beta * w : x[2];
    const float slope = fmaf(-t, t, 1.0F) * s.value + p.beta * t * s.value * s.complement;
    y[0] = x[0] * (second * slope);
    y[1] = x[0] * (p.beta * t * s.value * fmaf(-w, w, 1.0F));
  }
};

void situ_bwd(const ExecCtx& ctx, F32Mat d_gate, F32Mat d_up, ConstF32Mat d_y, ConstF32Mat gate,
              ConstF32Mat up, SituParams params) {
  const bool aligned = whole_quads(d_gate) && whole_quads(d_up) && whole_quads(d_y) &&
                       whole_quads(gate) && whole_quads(up);
  launch_map<3, 2>(
      ctx, "situ_bwd", aligned,
      {{one_slice(d_y), one_slice(gate), one_slice(up)}, {one_slice(d_gate), one_slice(d_up)}},
      {gate.size(0), 1, gate.size(1)}, SituBwd{params});
}

struct SigmoidGate {
  __device__ void operator()(const float (&x)[2], float (&y)[1], std::int64_t) const {
    y[0] = x[0] * sigmoid(x[1]);
  }
};

void sigmoid_gate(const ExecCtx& ctx, F32Mat y, ConstF32Mat o, ConstF32Mat gate) {
  const bool aligned = whole_quads(y) && whole_quads(o) && whole_quads(gate);
  launch_map<2, 1>(ctx, "sigmoid_gate", aligned, {{one_slice(o), one_slice(gate)}, {one_slice(y)}},
                   {y.size(0), 1, y.size(1)}, SigmoidGate{});
}

struct SigmoidGateBwd {  // x: d_y, o, gate; y: d_o, d_gate
  __device__ void operator()(const float (&x)[3], float (&y)[2], std::int64_t) const {
    const SigmoidPair s = sigmoid_pair(x[2]);
    y[0] = x[0] * s.value;
    y[1] = x[0] * x[1] * s.value * s.complement;
  }
};

void sigmoid_gate_bwd(const ExecCtx& ctx, F32Mat d_o, F32Mat d_gate, ConstF32Mat d_y, ConstF32Mat o,
                      ConstF32Mat gate) {
  const bool aligned = whole_quads(d_o) && whole_quads(d_gate) && whole_quads(d_y) &&
                       whole_quads(o) && whole_quads(gate);
  launch_map<3, 2>(
      ctx, "sigmoid_gate_bwd", aligned,
      {{one_slice(d_y), one_slice(o), one_slice(gate)}, {one_slice(d_o), one_slice(d_gate)}},
      {o.size(0), 1, o.size(1)}, SigmoidGateBwd{});
}

struct Add {
  __device__ void operator()(const float (&x)[2], float (&y)[1], std::int64_t) const {
    y[0] = x[0] + x[1];
  }
};

void add(const ExecCtx& ctx, F32Mat y, ConstF32Mat a, ConstF32Mat b) {
  const bool aligned = whole_quads(y) && whole_quads(a) && whole_quads(b);
  launch_map<2, 1>(ctx, "add", aligned, {{one_slice(a), one_slice(b)}, {one_slice(y)}},
                   {y.size(0), 1, y.size(1)}, Add{});
}

void copy(const ExecCtx& ctx, F32Cube y, ConstF32Cube x) {
  launch_map<1, 1>(ctx, "copy", whole_quads(y) && whole_quads(x),
                   {{device_cube(x)}, {device_cube(y)}}, {y.size(0), y.size(1), y.size(2)}, Same{});
}

}  // namespace

ActOps act_ops() {
  return {.situ = situ,
          .situ_bwd = situ_bwd,
          .sigmoid_gate = sigmoid_gate,
          .sigmoid_gate_bwd = sigmoid_gate_bwd,
          .add = add,
          .copy = copy};
}

}  // namespace tandem::cuda
