"""The RL fixtures of make_golden.py: losses, KL estimators and advantages, with gradients by autograd."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from golden_common import D, Tensor, plain

CONSTANT_LENGTH = 8                                   # L_max of the "constant" aggregation


def rl_group() -> dict[str, Any]:
    """Hand inputs -> per-token losses, aggregated losses and gradients with respect to the current log-probs."""
    logp = torch.tensor([-1.2, -0.4, -2.5, -0.05, -3.1, -0.7, -1.9, -0.3, -2.2, -1.0, -0.6, -4.0], dtype=D)
    shift = torch.tensor([0.0, 0.35, -0.4, 0.01, 1.6, -0.15, 0.25, -0.9, 0.05, -0.02, 0.3, 30.0], dtype=D)
    old = (logp - shift).round(decimals=6)
    behave = old - torch.tensor([0, .1, -.9, .3, 0, 1.2, -.05, 0, .8, -.3, 0, 0], dtype=D)
    behave = behave.round(decimals=6)
    ref = logp + torch.tensor([0.1, -0.2, 0.5, 0.0, -1.0, 0.3, -0.05, 0.7, 0.0, 25.0, -0.4, 0.2], dtype=D)
    ref = ref.round(decimals=6)
    adv = torch.tensor([1.3, 1.3, 1.3, 1.3, 1.3, -0.8, -0.8, -0.8, 0.5, 0.5, 0.5, 0.5], dtype=D)
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0], dtype=D)
    batch = RlBatch((5, 3, 4), logp, old, behave, adv, mask)
    losses: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, float]]] = {
        "ppo_clip": (lambda x: ppo(batch, x, 0.2, 0.28), {"eps_low": 0.2, "eps_high": 0.28}),
        "ppo_dual_clip": (lambda x: ppo(batch, x, 0.2, 0.28, 3.0), {"eps_low": 0.2, "eps_high": 0.28, "c": 3.0}),
        "ppo_dual_clip_tight": (lambda x: ppo(batch, x, 0.2, 0.2, 1.05), {"eps_low": 0.2, "eps_high": 0.2, "c": 1.05}),
        "gspo": (lambda x: gspo(batch, x, 3e-4, 4e-4), {"eps_low": 3e-4, "eps_high": 4e-4}),
        "gspo_wide": (lambda x: gspo(batch, x, 0.5, 0.5), {"eps_low": 0.5, "eps_high": 0.5}),
        "cispo_upper": (lambda x: cispo(batch, x, 1.0, 0.28), {"eps_low": 1.0, "eps_high": 0.28}),
        "cispo": (lambda x: cispo(batch, x, 0.2, 0.28), {"eps_low": 0.2, "eps_high": 0.28}),
        "sapo": (lambda x: sapo(batch, x), {"tau_positive": 1.0, "tau_negative": 1.05}),
        "reinforce": (lambda x: -adv * x, {"w": 1.0})}
    for name, (lo, hi) in (("tis", (0.0, 2.0)), ("icepop", (0.5, 2.0))):
        weight = tis if name == "tis" else icepop
        losses[f"ppo_clip_{name}"] = (lambda x, f=weight, a=lo, b=hi: f(batch, a, b) * ppo(batch, x, 0.2, 0.28),
                                      {"eps_low": 0.2, "eps_high": 0.28, "weight_low": lo, "weight_high": hi})
    out: dict[str, Any] = {
        "notes": ["rows are concatenated sequences; masked tokens have their log-ratio set to 0 before exp, their loss and "
                  "gradient are 0", "rho = exp(clamp(logp - old_logp, -20, 20)); gradient outside the clamp is 0",
                  "dual clip: for A < 0 the loss is -max(min(rho A, clip(rho) A), c A)",
                  "gspo: s = exp(mean over unmasked tokens of logp - old_logp), per token sg(s) exp(logp - sg(logp))",
                  "cispo: -sg(clip(rho, 1-eps_low, 1+eps_high)) A logp",
                  "tis / icepop: w = exp(old_logp - behaviour_logp), constant in the gradient; times the ppo_clip loss",
                  "kl: all tokens, mask not applied; grad_logp is the derivative of the sum"],
        "lengths": batch.lengths, "constant_length": CONSTANT_LENGTH, "logp": plain(logp, 17), "old_logp": plain(old, 17),
        "behaviour_logp": plain(behave, 17), "ref_logp": plain(ref, 17), "advantage": plain(adv, 17), "mask": mask.int().tolist(),
        "losses": {}, "kl": kl_table(batch, ref), "advantages": advantage_table()}
    for name, (fn, settings) in losses.items():
        out["losses"][name] = settings | rl_case(batch, fn)
    return out


class RlBatch:
    def __init__(self, lengths: tuple[int, ...], logp: Tensor, old: Tensor, behave: Tensor, adv: Tensor, mask: Tensor):
        self.lengths, self.logp, self.old, self.behave, self.adv, self.mask = lengths, logp, old, behave, adv, mask
        self.seq = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def seq_sum(self, x: Tensor) -> Tensor:
        return torch.zeros(len(self.lengths), dtype=D).index_add(0, self.seq, x)

    def masked(self, x: Tensor) -> Tensor:
        return torch.where(self.mask > 0, x, torch.zeros_like(x))


def _ratio(b: RlBatch, logp: Tensor) -> Tensor:
    return b.masked(logp - b.old).clamp(-20, 20).exp()


def _clipped(ratio: Tensor, adv: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)


def ppo(b: RlBatch, logp: Tensor, low: float, high: float, c: float | None = None) -> Tensor:
    value = _clipped(_ratio(b, logp), b.adv, low, high)
    if c is not None:
        value = torch.where(b.adv < 0, torch.maximum(value, c * b.adv), value)
    return -value


def gspo(b: RlBatch, logp: Tensor, low: float, high: float) -> Tensor:
    mean = b.seq_sum(b.masked(logp - b.old)) / b.seq_sum(b.mask)
    ratio = mean.detach().exp()[b.seq] * (logp - logp.detach()).exp()
    return -_clipped(ratio, b.adv, low, high)


def cispo(b: RlBatch, logp: Tensor, low: float, high: float) -> Tensor:
    return -_ratio(b, logp).clamp(1 - low, 1 + high).detach() * b.adv * logp


def sapo(b: RlBatch, logp: Tensor) -> Tensor:
    tau = torch.where(b.adv > 0, torch.tensor(1.0, dtype=D), torch.tensor(1.05, dtype=D))
    return -(4 / tau) * torch.sigmoid(tau * (_ratio(b, logp) - 1)) * b.adv


def tis(b: RlBatch, low: float, high: float) -> Tensor:
    return b.masked(b.old - b.behave).exp().clamp(low, high)


def icepop(b: RlBatch, low: float, high: float) -> Tensor:
    w = b.masked(b.old - b.behave).exp()
    return torch.where((w >= low) & (w <= high), w, torch.zeros_like(w))


def rl_case(b: RlBatch, fn: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    n, t_i = len(b.lengths), b.seq_sum(b.mask)
    modes = {"token_mean": lambda x: x.sum() / b.mask.sum(), "seq_mean_token_mean": lambda x: (b.seq_sum(x) / t_i).sum() / n,
             "seq_mean_token_sum": lambda x: x.sum() / n, "constant": lambda x: x.sum() / (n * CONSTANT_LENGTH)}
    logp = b.logp.clone().requires_grad_()
    out: dict[str, Any] = {"per_token": plain(b.masked(fn(logp)))}
    for name, mode in modes.items():
        loss = mode(b.masked(fn(logp)))
        out[name] = {"loss": plain(loss.item()), "grad_logp": plain(torch.autograd.grad(loss, logp)[0])}
    return out


def kl_table(b: RlBatch, ref: Tensor) -> dict[str, Any]:
    """Per-token KL estimators and the derivative of their sum with respect to logp; x = logp - ref_logp."""
    forms = {"k1": lambda x: x, "k2": lambda x: 0.5 * x * x, "k3": lambda x: torch.exp(-x) - 1 + x,
             "low_var_kl": lambda x: _k3(x.clamp(-20, 20)).clamp(-10, 10)}
    out = {}
    for name, fn in forms.items():
        logp = b.logp.clone().requires_grad_()
        value = fn(logp - ref)
        out[name] = {"value": plain(value), "grad_logp": plain(torch.autograd.grad(value.sum(), logp)[0])}
    return out


def _k3(x: Tensor) -> Tensor:
    return torch.exp(-x) - 1 + x


def advantage_table() -> dict[str, Any]:
    """Group advantages and GAE. std has n-1 in the denominator."""
    groups = [[1.0, 0.0, 0.0, 1.0, 1.0], [0.25, -0.5, 1.5], [1.0, 1.0, 1.0]]
    rewards, values, gamma, lam = [0.0, 0.1, 0.0, 1.0], [0.2, 0.3, 0.1, 0.6], 0.99, 0.95
    gae, running = [], 0.0
    for i in reversed(range(4)):
        delta = rewards[i] + gamma * (values[i + 1] if i < 3 else 0.0) - values[i]
        running = delta + gamma * lam * running
        gae.insert(0, running)
    raw, mask = torch.tensor([0.5, -1.0, 2.0, 0.25, 7.0], dtype=D), torch.tensor([1, 1, 1, 1, 0], dtype=D)
    live = raw[mask > 0]
    white = (raw - live.mean()) / (live.var() + 1e-8).sqrt() * mask
    v, old_v, target = (torch.tensor(x, dtype=D) for x in ([0.5, 1.2, -0.3], [0.2, 1.1, 0.4], [1.0, 0.9, 0.0]))
    critic = 0.5 * torch.maximum((v - target) ** 2, (v.clamp(old_v - 0.2, old_v + 0.2) - target) ** 2)
    rows = []
    for g in groups:
        r = torch.tensor(g, dtype=D)
        centred = r - r.mean()
        rows.append({"rewards": g, "grpo_eps_1e-6": plain(centred / (r.std() + 1e-6)), "dr_grpo": plain(centred),
                     "rloo": plain(len(g) / (len(g) - 1) * centred)})
    return {"groups": rows, "gae": {"gamma": gamma, "lambda": lam, "rewards": rewards, "values": values,
                                    "advantages": plain(gae)},
            "whiten": {"values": raw.tolist(), "mask": mask.int().tolist(), "result_zero_where_masked": plain(white)},
            "critic": {"value": v.tolist(), "old_value": old_v.tolist(), "target": target.tolist(), "clip": 0.2,
                       "per_token": plain(critic)}}
