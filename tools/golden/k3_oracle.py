#!/usr/bin/env python3
"""Independent PyTorch reference of the Kimi-K3 text model (fp32 or fp64, no bf16 rounding).

Written from the model specification only; it shares no code with the C++ program. Clarity beats speed: loops over tokens
(KDA), over experts (MoE) and over layers are spelled out. Every operator is a free function of plain tensors, so the same
code serves the op-level fixtures, the model forward, and autograd.

Shapes: T tokens, H heads, Dk / Dv KDA key / value width, n AttnRes sources, d model width.

    python k3_oracle.py --checkpoint DIR            # self checks: chunk = recurrent, absorbed = expanded, decode = prefill
"""
from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from k3_checkpoint import K3Config, load, parse_config, read_checkpoint_raw  # noqa: F401 (re-exported)

Tensor = torch.Tensor
Trace = dict[str, list[Tensor]]

LATENT_NORM_EPS = 1e-6   # MLA q_a_layernorm and kv_a_layernorm: the class default of the reference, not rms_norm_eps
L2_EPS = 1e-6            # added to the SUM of squares
ROUTER_EPS = 1e-20       # added to the sum of the chosen weights


# --------------------------------------------------------------------------------------------------------------- operators

def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def situ(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float | None = 25.0) -> Tensor:
    """[beta tanh(g/beta) sigmoid(g)] * [lambda tanh(u/lambda)]; sigmoid sees the uncapped gate."""
    up = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


def decay_gate(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Natural-log decay g[T,H,Dk] from f[T,H,Dk], a_log[H], dt_bias[H,Dk]. Bounded form iff lower_bound is set."""
    a = a_log.exp()[:, None]
    z = f + dt_bias
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(a * z)
    return -a * F.softplus(z, threshold=20.0)


def attn_res(sources: Tensor, norm_weight: Tensor, query: Tensor, eps: float) -> Tensor:
    """Depth attention over sources[n,T,d]: scores from normalised rows, mixture of the raw rows. Returns [T,d]."""
    combined = norm_weight * query.reshape(-1)
    inv_rms = torch.rsqrt(sources.square().mean(-1) + eps)
    scores = inv_rms * (sources @ combined)
    return (scores.softmax(0)[..., None] * sources).sum(0)


def gated_norm(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """normalise, then weight, then sigmoid gate."""
    return rms_norm(o, weight, eps) * torch.sigmoid(gate)


def short_conv(x: Tensor, weight: Tensor, window: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """SiLU(causal depthwise conv). x[T,C], weight[C,1,K] (last tap = current token), window[K-1,C] = raw inputs before x.

    Returns the activation [T,C] and the next window (the last K-1 raw inputs)."""
    taps = weight.shape[-1]
    window = x.new_zeros(taps - 1, x.shape[1]) if window is None else window
    padded = torch.cat([window, x], 0)
    y = sum(padded[j:j + x.shape[0]] * weight[:, 0, j] for j in range(taps))
    return y * torch.sigmoid(y), padded[padded.shape[0] - (taps - 1):]


def kda_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence. q, k, g [T,H,Dk] (q, k L2-normalised, q unscaled), v [T,H,Dv], beta [T,H], state [H,Dk,Dv]."""
    scale = q.shape[-1] ** -0.5
    outs = []
    for t in range(q.shape[0]):
        state = g[t].exp()[..., None] * state                               # 1 decay
        r = v[t] - torch.einsum("hkv,hk->hv", state, k[t])                  # 2 predict with the decayed state
        u = beta[t][:, None] * r
        state = state + k[t][..., None] * u[:, None, :]                     # 3 write
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * scale)        # 4 read, current token included
    return torch.stack(outs), state


def kda_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor,
                chunk: int = 16) -> tuple[Tensor, Tensor]:
    """The chunk (UT transform) form of kda_recurrent. Exponents are formed from differences, so any gate is safe."""
    scale = q.shape[-1] ** -0.5
    outs = []
    for start in range(0, q.shape[0], chunk):
        sl = slice(start, min(start + chunk, q.shape[0]))
        # Head-first views: [H,C,D].
        qc, kc, vc, gc = (x[sl].transpose(0, 1) for x in (q * scale, k, v, g))
        bc = beta[sl].T[..., None]
        cum = gc.cumsum(1)
        size = cum.shape[1]
        lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        # Above the diagonal the exponent would be positive: mask it before exp, not after.
        diff = (cum[:, :, None, :] - cum[:, None, :, :]).masked_fill(~lower[None, :, :, None], -math.inf).exp()
        a = bc * torch.einsum("hic,hjc,hijc->hij", kc, kc, diff).tril(-1)
        eye = torch.eye(size, dtype=q.dtype, device=q.device)
        rhs = torch.cat([bc * vc, bc * (kc * cum.exp())], -1)
        solved = torch.linalg.solve_triangular(eye + a, rhs, upper=False, unitriangular=True)
        u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
        delta = u - w @ state
        p = torch.einsum("hic,hjc,hijc->hij", qc, kc, diff).tril()
        outs.append(((qc * cum.exp()) @ state + p @ delta).transpose(0, 1))
        last = cum[:, -1:, :]
        state = last.transpose(1, 2).exp() * state + (kc * (last - cum).exp()).transpose(1, 2) @ delta
    return torch.cat(outs), state


def route(logits: Tensor, bias: Tensor, top_k: int, renormalize: bool = True,
          scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Chosen expert ids [T,k] (descending biased score, ties to the lower index) and their weights [T,k]."""
    scores = torch.sigmoid(logits)
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + ROUTER_EPS)
    return ids, weights * scale


@dataclass
class MlaDims:
    heads: int
    nope: int
    rope: int
    v: int


def mla_attend_expanded(q: Tensor, c: Tensor, k_s: Tensor, kv_b: Tensor, dims: MlaDims, first: int) -> Tensor:
    """Expanded form. q[T,H,nope+rope], c[S,kv_lora], k_s[S,rope]; query row i is position first+i. Returns [T,H,v]."""
    kv = (c @ kv_b.T).unflatten(-1, (dims.heads, dims.nope + dims.v))
    k_n, value = kv.split([dims.nope, dims.v], -1)
    q_n, q_s = q.split([dims.nope, dims.rope], -1)
    scores = torch.einsum("ihc,jhc->hij", q_n, k_n) + torch.einsum("ihc,jc->hij", q_s, k_s)
    return torch.einsum("hij,jhc->ihc", _causal_softmax(scores, dims, first), value)


def mla_attend_absorbed(q: Tensor, c: Tensor, k_s: Tensor, kv_b: Tensor, dims: MlaDims, first: int) -> Tensor:
    """Absorbed form: the cache row [c | k_s] is used directly; same arguments and result as the expanded form."""
    w_uk, w_uv = kv_b.unflatten(0, (dims.heads, dims.nope + dims.v)).split([dims.nope, dims.v], 1)
    q_n, q_s = q.split([dims.nope, dims.rope], -1)
    q_lat = torch.einsum("hnc,ihn->ihc", w_uk, q_n)
    scores = torch.einsum("ihc,jc->hij", q_lat, c) + torch.einsum("ihc,jc->hij", q_s, k_s)
    mixed = torch.einsum("hij,jc->ihc", _causal_softmax(scores, dims, first), c)
    return torch.einsum("hvc,ihc->ihv", w_uv, mixed)


def _causal_softmax(scores: Tensor, dims: MlaDims, first: int) -> Tensor:
    rows, cols = scores.shape[-2:]
    row = torch.arange(first, first + rows, device=scores.device)[:, None]
    hidden = torch.arange(cols, device=scores.device)[None, :] > row
    return (scores * (dims.nope + dims.rope) ** -0.5).masked_fill(hidden, -math.inf).softmax(-1)


# ------------------------------------------------------------------------------------------------------------------- model

@dataclass
class State:
    """Decode state of one sequence; one entry per layer that needs it."""

    tokens: int = 0
    kda: dict[int, Tensor] = field(default_factory=dict)                    # [H,Dk,Dv]
    conv: dict[tuple[int, str], Tensor] = field(default_factory=dict)       # [K-1,C] raw projections
    mla: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)     # normalised c [S,kv_lora], k_s [S,rope]


class Oracle:
    """The text model over a name -> tensor dictionary (names without the `language_model.` prefix)."""

    def __init__(self, cfg: K3Config, weights: dict[str, Tensor], kda_chunk: int = 0, absorbed: bool = False):
        self.cfg, self.w, self.kda_chunk, self.absorbed = cfg, weights, kda_chunk, absorbed

    def layer_weight(self, layer: int, name: str) -> Tensor:
        return self.w[f"model.layers.{layer}.{name}"]

    def linear(self, layer: int, name: str, x: Tensor) -> Tensor:
        return x @ self.layer_weight(layer, name + ".weight").T

    def activation(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.cfg.hidden_act == "situ":
            return situ(gate, up, self.cfg.situ_beta, self.cfg.situ_linear_beta)
        if self.cfg.hidden_act == "silu":
            return F.silu(gate) * up
        raise ValueError(f"unknown hidden_act {self.cfg.hidden_act}")

    def gated_mlp(self, layer: int, name: str, x: Tensor) -> Tensor:
        hidden = self.activation(self.linear(layer, name + ".gate_proj", x), self.linear(layer, name + ".up_proj", x))
        return self.linear(layer, name + ".down_proj", hidden)

    # -- mixers

    def kda(self, layer: int, x: Tensor, state: State) -> Tensor:
        cfg = self.cfg
        heads, dim = cfg.kda_heads, cfg.kda_dim
        streams = {}
        for s in "qkv":
            raw = self.linear(layer, f"self_attn.{s}_proj", x)
            act, state.conv[layer, s] = short_conv(raw, self.layer_weight(layer, f"self_attn.{s}_conv1d.weight"),
                                                   state.conv.get((layer, s)))
            streams[s] = act.unflatten(-1, (heads, dim))
        f = self.linear(layer, "self_attn.f_b_proj", self.linear(layer, "self_attn.f_a_proj", x))
        a_log = self.layer_weight(layer, "self_attn.A_log").reshape(-1)[:heads]
        dt_bias = self.layer_weight(layer, "self_attn.dt_bias").reshape(heads, dim)
        g = decay_gate(f.unflatten(-1, (heads, dim)), a_log, dt_bias, cfg.gate_lower_bound)
        beta = torch.sigmoid(self.linear(layer, "self_attn.b_proj", x))
        start = state.kda.get(layer)
        start = x.new_zeros(heads, dim, dim) if start is None else start
        args = (l2_norm(streams["q"]), l2_norm(streams["k"]), streams["v"], g, beta, start)
        o, state.kda[layer] = kda_chunked(*args, chunk=self.kda_chunk) if self.kda_chunk else kda_recurrent(*args)
        gate = (self.linear(layer, "self_attn.g_proj", x) if cfg.full_rank_gate else
                self.linear(layer, "self_attn.g_b_proj", self.linear(layer, "self_attn.g_a_proj", x)))
        y = gated_norm(o, self.layer_weight(layer, "self_attn.o_norm.weight"), gate.unflatten(-1, (heads, dim)), cfg.rms_eps)
        return self.linear(layer, "self_attn.o_proj", y.flatten(-2))

    def mla(self, layer: int, x: Tensor, state: State) -> Tensor:
        cfg = self.cfg
        dims = MlaDims(cfg.heads, cfg.nope, cfg.rope, cfg.v_dim)
        if cfg.q_lora:
            cq = rms_norm(self.linear(layer, "self_attn.q_a_proj", x),
                          self.layer_weight(layer, "self_attn.q_a_layernorm.weight"), LATENT_NORM_EPS)
            q = self.linear(layer, "self_attn.q_b_proj", cq)
        else:
            q = self.linear(layer, "self_attn.q_proj", x)
        q = q.unflatten(-1, (dims.heads, dims.nope + dims.rope))
        c, k_s = self.linear(layer, "self_attn.kv_a_proj_with_mqa", x).split([cfg.kv_lora, cfg.rope], -1)
        c = rms_norm(c, self.layer_weight(layer, "self_attn.kv_a_layernorm.weight"), LATENT_NORM_EPS)
        if layer in state.mla:
            old_c, old_k = state.mla[layer]
            c, k_s = torch.cat([old_c, c]), torch.cat([old_k, k_s])
        state.mla[layer] = (c, k_s)
        attend = mla_attend_absorbed if self.absorbed else mla_attend_expanded
        o = attend(q, c, k_s, self.layer_weight(layer, "self_attn.kv_b_proj.weight"), dims, state.tokens).flatten(-2)
        if cfg.mla_gate:
            o = o * torch.sigmoid(self.linear(layer, "self_attn.g_proj", x))
        return self.linear(layer, "self_attn.o_proj", o)

    # -- feed-forward

    def moe(self, layer: int, x: Tensor, trace: Trace | None) -> Tensor:
        cfg, name = self.cfg, "block_sparse_moe"
        logits = self.linear(layer, f"{name}.gate", x)
        bias = self.layer_weight(layer, f"{name}.gate.e_score_correction_bias").detach()
        ids, weights = route(logits, bias, cfg.top_k, cfg.renormalize, cfg.routed_scale)
        if trace is not None:
            trace.setdefault("router_logits", []).append(logits.detach())
            trace.setdefault("router_biased", []).append((torch.sigmoid(logits) + bias).detach())
            trace.setdefault("router_ids", []).append(ids)
        z = self.linear(layer, f"{name}.routed_expert_down_proj", x) if cfg.latent else x
        mixed = torch.zeros_like(z)
        for e in range(cfg.experts):
            token, slot = (ids == e).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            expert, rows = f"{name}.experts.{e}", z[token]
            hidden = self.activation(self.linear(layer, expert + ".w1", rows), self.linear(layer, expert + ".w3", rows))
            out = self.linear(layer, expert + ".w2", hidden) * weights[token, slot][:, None]
            mixed = mixed.index_add(0, token, out)
        if cfg.latent and cfg.latent_norm:
            mixed = rms_norm(mixed, self.layer_weight(layer, f"{name}.routed_expert_norm.weight"), cfg.rms_eps)
        routed = self.linear(layer, f"{name}.routed_expert_up_proj", mixed) if cfg.latent else mixed
        return routed + self.gated_mlp(layer, f"{name}.shared_experts", x)

    # -- stack

    def forward(self, ids: Tensor, state: State | None = None, trace: Trace | None = None) -> Tensor:
        """Logits [T,V] of one sequence; `state` carries a prefix and is updated. `trace` collects per-layer tensors:
        h_mixer, h_ffn (the vectors entering input_layernorm / post_attention_layernorm), prefix (P after the layer), and
        final_h, final_normed, router_* once each or once per MoE layer."""
        cfg = self.cfg
        state = State() if state is None else state
        body = self._attn_res_stack if cfg.attn_res_block else self._residual_stack
        h = body(self.w["model.embed_tokens.weight"][ids], state, trace)
        state.tokens += ids.shape[0]
        normed = rms_norm(h, self.w["model.norm.weight"], cfg.rms_eps)
        _record(trace, "final_h", h)
        _record(trace, "final_normed", normed)
        return normed @ self.w["lm_head.weight"].T

    def _mix(self, layer: int, h: Tensor, state: State) -> Tensor:
        x = rms_norm(h, self.layer_weight(layer, "input_layernorm.weight"), self.cfg.rms_eps)
        return self.kda(layer, x, state) if self.cfg.is_kda(layer) else self.mla(layer, x, state)

    def _feed(self, layer: int, h: Tensor, trace: Trace | None) -> Tensor:
        x = rms_norm(h, self.layer_weight(layer, "post_attention_layernorm.weight"), self.cfg.rms_eps)
        return self.moe(layer, x, trace) if self.cfg.is_moe(layer) else self.gated_mlp(layer, "mlp", x)

    def _res_site(self, layer: int, name: str) -> tuple[Tensor, Tensor]:
        return self.layer_weight(layer, name + "_norm.weight"), self.layer_weight(layer, name + "_proj.weight")

    def _attn_res_stack(self, prefix: Tensor | None, state: State, trace: Trace | None) -> Tensor:
        cfg = self.cfg
        bank: list[Tensor] = []

        def aggregate(norm: Tensor, proj: Tensor) -> Tensor:        # bank rows in order, the prefix last
            return attn_res(torch.stack(bank + [prefix]), norm, proj, cfg.rms_eps)

        for layer in range(cfg.layers):
            h = aggregate(*self._res_site(layer, "self_attention_res")) if bank else prefix
            if layer % cfg.attn_res_block == 0:
                bank.append(prefix)
                prefix = None
            _record(trace, "h_mixer", h)
            y = self._mix(layer, h, state)
            prefix = y if prefix is None else prefix + y
            h = aggregate(*self._res_site(layer, "mlp_res"))
            _record(trace, "h_ffn", h)
            prefix = prefix + self._feed(layer, h, trace)
            _record(trace, "prefix", prefix)
        return aggregate(self.w["model.output_attn_res_norm.weight"], self.w["model.output_attn_res_proj.weight"])

    def _residual_stack(self, h: Tensor, state: State, trace: Trace | None) -> Tensor:
        for layer in range(self.cfg.layers):
            _record(trace, "h_mixer", h)
            h = h + self._mix(layer, h, state)
            _record(trace, "h_ffn", h)
            h = h + self._feed(layer, h, trace)
            _record(trace, "prefix", h)
        return h

    def greedy(self, prompt: Tensor, count: int) -> tuple[list[int], list[float]]:
        """Greedy continuation by prefill then one-token steps, and the top-1 minus top-2 logit margin of each step."""
        state, tokens, margins = State(), [], []
        logits = self.forward(prompt, state)[-1]
        for step in range(count):
            top = logits.topk(2)
            tokens.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
            if step + 1 < count:
                logits = self.forward(top.indices[:1], state)[-1]
        return tokens, margins


def _record(trace: Trace | None, key: str, value: Tensor) -> None:
    if trace is not None:
        trace.setdefault(key, []).append(value)


# ------------------------------------------------------------------------------------------------------------- self checks

def worst(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest magnitude of b."""
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))


def self_check(folder: Path) -> dict[str, float]:
    """Relative differences that must be at fp64 rounding level."""
    cfg, w = load(folder, torch.float64)
    ids = torch.tensor([(7 * i * i + 3 * i + 5) % cfg.vocab for i in range(41)])
    with torch.no_grad():
        base_state = State()
        base = Oracle(cfg, w).forward(ids, base_state)
        report: dict[str, float] = {}
        for chunk in (1, 5, 16, 64):
            state = State()
            report[f"kda_chunk_{chunk}"] = worst(Oracle(cfg, w, kda_chunk=chunk).forward(ids, state), base)
            report[f"kda_chunk_{chunk}_state"] = max(worst(state.kda[i], s) for i, s in base_state.kda.items())
        report["mla_absorbed"] = worst(Oracle(cfg, w, absorbed=True).forward(ids), base)
        for cuts in (tuple(range(1, 41)), (17, 33)):
            state, parts, model = State(), [], Oracle(cfg, w)
            for a, b in zip((0,) + cuts, cuts + (41,)):
                parts.append(model.forward(ids[a:b], state))
            report["decode" if len(cuts) == 40 else "split_prefill"] = worst(torch.cat(parts), base)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = self_check(args.checkpoint)
    for name, value in report.items():
        print(f"{name:24s} {value:.2e}")
    if max(report.values()) > 1e-10:
        raise SystemExit("self check FAILED")


if __name__ == "__main__":
    main()
