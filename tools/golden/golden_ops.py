"""The operator fixtures of make_golden.py: inputs, outputs and gradients of each operator of the reference."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import k3_oracle as k3
from golden_common import D, Tensor, Tensors, f32, i32, plain, uniform


def run_case(fn: Callable[..., Any], inputs: dict[str, Tensor], key: int) -> tuple[dict[str, Tensor], ...]:
    """Outputs, output gradients (hash-made) and input gradients of one operator, in the inputs' precision."""
    leaves = {n: x.clone().requires_grad_() for n, x in inputs.items()}
    outs = fn(**leaves)
    outs = outs if isinstance(outs, dict) else {"y": outs}
    bars = {n: uniform(key + 500 + i, *o.shape).to(o.dtype) for i, (n, o) in enumerate(outs.items())}
    grads = torch.autograd.grad(list(outs.values()), list(leaves.values()), list(bars.values()))
    return outs, bars, dict(zip(leaves, grads))


def op_case(tensors: Tensors, noise: dict[str, float], name: str, fn: Callable[..., Any], inputs: dict[str, Tensor],
            key: int) -> None:
    """Stores one operator, and the largest error of each result when the same code runs in fp32."""
    outs, bars, grads = run_case(fn, inputs, key)
    outs32, _, grads32 = run_case(fn, {n: x.float() for n, x in inputs.items()}, key)
    for n, x in inputs.items():
        tensors[f"{name}.{n}"] = f32(x)
    for n, o in outs.items():
        tensors[f"{name}.{n}"] = f32(o)
        tensors[f"{name}.{n}_grad"] = f32(bars[n])
        noise[f"{name}.{n}"] = plain(float((outs32[n].double() - o).detach().abs().max()), 3)
    for n, g in grads.items():
        tensors[f"{name}.{n}_grad"] = f32(g)
        noise[f"{name}.{n}_grad"] = plain(float((grads32[n].double() - g).abs().max()), 3)


def ops_group() -> tuple[Tensors, dict[str, Any]]:
    t: Tensors = {}
    noise: dict[str, float] = {}
    edge = torch.tensor([0.0, 1.0, -1.0, 0.5, 10.0, -8.0, 6.0, 60.0, -60.0, 1e-4, 4.0, -0.25], dtype=D)
    up = torch.tensor([1.0, 1.0, 2.0, -30.0, 10.0, 4.0, 50.0, -300.0, 3.0, 1e-4, 0.0, 25.0], dtype=D)
    op_case(t, noise, "situ", k3.situ, {"gate": torch.cat([edge, uniform(1, 20, low=-9, high=9)]),
                                 "up": torch.cat([up, uniform(2, 20, low=-60, high=60)]).float().double()}, 1)
    gate_in = {"f": uniform(3, 5, 3, 4, low=-4, high=4), "a_log": uniform(4, 3), "dt_bias": uniform(5, 3, 4, low=-2, high=2)}
    op_case(t, noise, "bounded_gate", lambda f, a_log, dt_bias: k3.decay_gate(f, a_log, dt_bias, -5.0), gate_in, 3)
    op_case(t, noise, "softplus_gate", lambda f, a_log, dt_bias: k3.decay_gate(f, a_log, dt_bias, None), gate_in, 4)
    for n in (1, 2, 4):
        op_case(t, noise, f"attn_res{n}", lambda v, norm, query: k3.attn_res(v, norm, query, 1e-5),
                {"v": uniform(10 + n, n, 3, 16, low=-3, high=3), "norm": uniform(20 + n, 16, low=0.5, high=1.5),
                 "query": uniform(30 + n, 16)}, 10 + n)
    op_case(t, noise, "rms_norm", lambda x, w: k3.rms_norm(x, w, 1e-5),
            {"x": uniform(40, 4, 24), "w": uniform(41, 24, low=.5, high=1.5)}, 40)
    op_case(t, noise, "rms_norm_small", lambda x, w: k3.rms_norm(x, w, 1e-6),
            {"x": uniform(42, 2, 24, low=-2e-3, high=2e-3), "w": uniform(43, 24, low=.5, high=1.5)}, 41)
    op_case(t, noise, "l2_norm", k3.l2_norm, {"x": torch.cat([uniform(44, 3, 8), uniform(45, 1, 8, low=-1e-3, high=1e-3)])}, 42)
    op_case(t, noise, "gated_norm", lambda o, w, gate: k3.gated_norm(o, w, gate, 1e-5),
            {"o": uniform(46, 5, 2, 8), "w": uniform(47, 8, low=0.5, high=1.5), "gate": uniform(48, 5, 2, 8, low=-4, high=4)}, 43)
    op_case(t, noise, "short_conv", _conv, {"x": uniform(50, 9, 5), "w": uniform(51, 5, 1, 4), "window": uniform(52, 3, 5)}, 50)
    op_case(t, noise, "kda", _kda, {
        "q": k3.l2_norm(uniform(60, 19, 2, 8)).float().double(), "k": k3.l2_norm(uniform(61, 19, 2, 8)).float().double(),
        "v": uniform(62, 19, 2, 6, low=-2, high=2), "g": -5 * uniform(63, 19, 2, 8, low=0, high=1).square().float().double(),
        "beta": uniform(64, 19, 2, low=0.02, high=0.98), "state": uniform(65, 2, 8, 6)}, 60)
    dims = k3.MlaDims(heads=2, nope=8, rope=4, v=6)
    for name, rows, first in (("mla", 7, 0), ("mla_cached", 3, 4)):
        op_case(t, noise, name, lambda q, c, k_s, kv_b, first=first: k3.mla_attend_expanded(q, c, k_s, kv_b, dims, first),
                {"q": uniform(70, rows, 2, 12, low=-2, high=2), "c": uniform(71, 7, 12, low=-2, high=2), "k_s": uniform(72, 7, 4),
                 "kv_b": uniform(73, 28, 12)}, 70)
    bias = uniform(81, 8, low=-0.3, high=0.3)
    for name, scale in (("router", 1.0), ("router_scaled", 2.446)):
        logits = uniform(80, 6, 8, low=-3, high=3)
        op_case(t, noise, name, lambda logits, scale=scale: k3.route(logits, bias, 3, True, scale)[1], {"logits": logits}, 80)
        t[f"{name}.bias"], t[f"{name}.ids"] = f32(bias), i32(k3.route(logits, bias, 3)[0])
    _check_ops(t)
    return t, {"layout": "NAME.INPUT, NAME.OUTPUT, and *_grad of each; the gradient of an output is an input of the backward",
               "situ": {"beta": 4, "lambda": 25}, "kda": "q, k are L2-normalised already, q is not scaled; outputs o, "
               "final_state [H, Dk, Dv]; T = 19, H = 2, Dk = 8, Dv = 6", "short_conv": "SiLU included; x [T, C], window [3, C] "
               "oldest first; output next_window", "mla": "causal, heads 2, nope 8, rope 4, v 6; scale 12^-1/2; kv_b rows per "
               "head = [8 key | 6 value]; mla_cached: 3 query rows at positions 4..6 over 7 cached rows",
               "router": "top 3 of 8, ids in descending biased score; weights y in the order of ids", "eps":
               {"attn_res": 1e-5, "rms_norm": 1e-5, "rms_norm_small": 1e-6, "gated_norm": 1e-5, "l2_norm": 1e-6},
               "fp32_noise": noise}


def _conv(x: Tensor, w: Tensor, window: Tensor) -> dict[str, Tensor]:
    y, following = k3.short_conv(x, w, window)
    return {"y": y, "next_window": following}


def _kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> dict[str, Tensor]:
    o, final = k3.kda_recurrent(q, k, v, g, beta, state)
    for chunk in (4, 16) if q.dtype == D else ():                            # the second algorithm must agree
        o2, final2 = k3.kda_chunked(q, k, v, g, beta, state, chunk)
        assert k3.worst(o2, o) < 1e-12 and k3.worst(final2, final) < 1e-12
    return {"o": o, "final_state": final}


def _check_ops(t: Tensors) -> None:
    """The absorbed MLA reproduces the stored expanded result."""
    q, c, k_s, kv_b = (torch.from_numpy(t[f"mla.{n}"][1]).double() for n in ("q", "c", "k_s", "kv_b"))
    y = k3.mla_attend_absorbed(q, c, k_s, kv_b, k3.MlaDims(2, 8, 4, 6), 0)
    assert k3.worst(y, torch.from_numpy(t["mla.y"][1]).double()) < 1e-6
