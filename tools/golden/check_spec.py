#!/usr/bin/env python3
"""Checks the oracle's operators against the hand-computed numbers and the hand-derived gradients of the specification.

    python check_spec.py            # prints one line per check; exit status 1 if any fails
"""
from __future__ import annotations

import sys

import torch

import k3_oracle as k3

Tensor = torch.Tensor
D = torch.float64
FAILED: list[str] = []


def check(name: str, got: Tensor | list | float, want: Tensor | list | float, tol: float) -> None:
    got, want = torch.as_tensor(got, dtype=D), torch.as_tensor(want, dtype=D)
    err = float((got - want).abs().max())
    ok = err <= tol and got.shape == want.shape
    print(f"{'ok  ' if ok else 'FAIL'} {name:34s} worst difference {err:.2e}")
    if not ok:
        FAILED.append(name)
        print(f"     got {got.tolist()}\n     want {want.tolist()}")


def t(*rows) -> Tensor:
    return torch.tensor(rows[0] if len(rows) == 1 else rows, dtype=D)


# ----------------------------------------------------------------------------------------------------- hand-checkable numbers

def hand_numbers() -> None:
    tol = 6e-9      # numbers are printed with eight or nine decimals
    situ = k3.situ(t(1, -1, 0.5, 10, -8, 6), t(1, 2, -30, 10, 4, 50))
    check("SiTU", situ, t(0.715817828, -0.525828896, -6.452877335, 37.484606074, -0.005128896, 87.043029957), tol)
    a_log, f, dt = t(0, 0.5, 1, -1), t(0, 1, -2, 3), t(0, 0.25, 0.5, -1)
    gate = lambda lb: k3.decay_gate(f[None, :, None], a_log, dt[:, None], lb).flatten()
    check("bounded gate", gate(-5.0), t(-2.5, -4.435222687, -0.083342733, -3.380338726), tol)
    check("softplus gate", gate(None), t(-0.693147181, -2.476262423, -0.547498054, -0.782453088), tol)

    v = t([1, 2, 3, 4], [0.5, -1, 0, 2], [-2, 1, 1, 0])
    w, u = t(1, 0.5, 2, 1), t(0.3, -0.2, 0.1, 0.4)
    s = torch.rsqrt(v.square().mean(-1) + 1e-5) * (v @ (w * u))
    check("AttnRes scores", s, t(0.83984069, 0.91651165, -0.40824693), tol)
    check("AttnRes probabilities", s.softmax(0), t(0.42252212, 0.45619154, 0.12128634), tol)
    check("AttnRes out", k3.attn_res(v[:, None], w, u, 1e-5)[0], t(0.40804522, 0.51013905, 1.38885271, 2.60247157), tol)

    q, k = t([0.2, 1], [1, 1], [-1, 0.5]), t([1, 2], [0.5, -1], [2, 0.3])
    val, beta, g = t([1, -1], [2, 0.5], [0, 3]), t(0.6, 0.3, 0.9), t([-0.1, -1], [-2, -0.05], [-0.5, -0.5])
    args = [k3.l2_norm(q)[:, None], k3.l2_norm(k)[:, None], val[:, None], g[:, None], beta[:, None]]
    want_o = t([0.40931439, -0.40931439], [0.10969515, -0.27740014], [-0.06037102, -1.68570985])
    want_s = t([0.03798788, 2.71023173], [-0.11493425, 0.08977874])
    for name, run in (("recurrent", k3.kda_recurrent), ("chunked", k3.kda_chunked)):
        o, state = run(*args, torch.zeros(1, 2, 2, dtype=D))
        check(f"KDA o ({name})", o[:, 0], want_o, tol)
        check(f"KDA final S ({name})", state[0], want_s, tol)
    states = [k3.kda_recurrent(*[x[:n] for x in args], torch.zeros(1, 2, 2, dtype=D))[1][0] for n in (1, 2)]
    for n, want_u in ((1, t(0.7321049, 0.0178951)), (2, t(-0.18466337, 2.75791637))):
        decayed = g[n].exp()[:, None] * states[n - 1]
        check(f"KDA u_{n + 1}", beta[n] * (val[n] - decayed.T @ args[1][n, 0]), want_u, tol)

    y = k3.gated_norm(t(1, -2, 0.5, 3), t(1, 1.5, 0.5, 1), t(0, 1, -1, 2), 1e-5)
    check("gated norm", y, t(0.2649061, -1.16197126, 0.03562211, 1.39997111), tol)
    ids, weights = k3.route(t(0.2, -1, 1.5, 0.9, -0.3, 2)[None], t(0.5, 0.9, -0.4, 0, 0.1, -0.6), 3)
    check("router ids", ids[0].double(), t(1, 0, 3), 0)
    check("router weights", weights[0], t(0.17581032, 0.35943325, 0.46475644), tol)
    ids, _ = k3.route(t(0.2, -1, 1.5, 0.9, -0.3, 2)[None], torch.zeros(6, dtype=D), 3)
    check("router ids without bias", ids[0].double(), t(5, 2, 3), 0)
    check("scales", t(128 ** -0.5, 192 ** -0.5), t(0.08838834764831845, 0.07216878364870322), 1e-16)


# --------------------------------------------------------------------------------------------------- hand-derived gradients

def autograd(outs: list[Tensor], grads: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(outs, leaves, grads))


def rand(gen: torch.Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=gen, dtype=D) * scale).requires_grad_()


def gradient_formulas() -> None:
    gen = torch.Generator().manual_seed(7)
    tol = 1e-11
    # L2 norm
    x, y_bar = rand(gen, 5, 8), rand(gen, 5, 8).detach()
    y = k3.l2_norm(x)
    rho = torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    check("grad L2 norm", (rho * (y_bar - y * (y * y_bar).sum(-1, keepdim=True))).detach(), autograd([y], [y_bar], [x])[0], tol)
    # bounded gate
    f, a_log, dt = rand(gen, 6, 3, 4), rand(gen, 3, scale=0.5), rand(gen, 3, 4)
    g_bar = rand(gen, 6, 3, 4).detach()
    grads = autograd([k3.decay_gate(f, a_log, dt, -5.0)], [g_bar], [f, a_log, dt])
    with torch.no_grad():
        a, z = a_log.exp()[:, None], f + dt
        sig = torch.sigmoid(a * z)
        c = g_bar * -5.0 * sig * (1 - sig)
        for name, got, want in zip(("f", "A_log", "dt_bias"), (c * a, (c * a * z).sum((0, 2)), (c * a).sum(0)), grads):
            check(f"grad gate {name}", got, want, tol)
    # SiTU
    g, u, y_bar = rand(gen, 40, scale=5), rand(gen, 40, scale=20), rand(gen, 40).detach()
    grads = autograd([k3.situ(g, u)], [y_bar], [g, u])
    with torch.no_grad():
        b, lam = 4.0, 25.0
        th, s, w = torch.tanh(g / b), torch.sigmoid(g), torch.tanh(u / lam)
        check("grad SiTU gate", y_bar * lam * w * ((1 - th ** 2) * s + b * th * s * (1 - s)), grads[0], 1e-10)
        check("grad SiTU up", y_bar * b * th * s * (1 - w ** 2), grads[1], tol)
    # AttnRes
    v, wn, q, o_bar = rand(gen, 4, 3, 16), rand(gen, 16), rand(gen, 16), rand(gen, 3, 16).detach()
    grads = autograd([k3.attn_res(v, wn, q, 1e-5)], [o_bar], [v, wn, q])
    with torch.no_grad():
        c, d = wn * q, 16
        r = torch.rsqrt(v.square().mean(-1) + 1e-5)
        s = r * (v @ c)
        p = s.softmax(0)
        p_bar = (v * o_bar).sum(-1)
        s_bar = p * (p_bar - (p * p_bar).sum(0))
        v_bar = p[..., None] * o_bar + (s_bar * r)[..., None] * (c - (s * r / d)[..., None] * v)
        c_bar = ((s_bar * r)[..., None] * v).sum((0, 1))
        for name, got, want in zip(("V", "w", "u"), (v_bar, c_bar * q, c_bar * wn), grads):
            check(f"grad AttnRes {name}", got, want, tol)
    # router
    logits, w_bar = rand(gen, 5, 8, scale=2), rand(gen, 5, 3).detach()
    bias = rand(gen, 8, scale=0.2).detach()
    ids, w = k3.route(logits, bias, 3)
    grad = autograd([w], [w_bar], [logits])[0]
    with torch.no_grad():
        s = torch.sigmoid(logits).gather(1, ids)
        s_bar = (w_bar - (w * w_bar).sum(1, keepdim=True)) / s.sum(1, keepdim=True)
        check("grad router", torch.zeros_like(logits).scatter(1, ids, s_bar * s * (1 - s)), grad, tol)
    kda_gradients(gen)


def kda_gradients(gen: torch.Generator) -> None:
    steps, h, dk, dv = 7, 2, 5, 3
    q, k, v = rand(gen, steps, h, dk), rand(gen, steps, h, dk, scale=0.5), rand(gen, steps, h, dv)
    g = (-5 * torch.rand(steps, h, dk, generator=gen, dtype=D)).requires_grad_()
    beta = torch.rand(steps, h, generator=gen, dtype=D).requires_grad_()
    s0 = rand(gen, h, dk, dv)
    o_bar, s_bar = rand(gen, steps, h, dv).detach(), rand(gen, h, dk, dv).detach()
    leaves, final_bar = [q, k, v, g, beta, s0], s_bar
    want = autograd(list(k3.kda_recurrent(*leaves)), [o_bar, s_bar], leaves)
    with torch.no_grad():
        got = [torch.zeros_like(x) for x in leaves]
        states, scale = [s0], dk ** -0.5
        for n in range(1, steps + 1):
            states.append(k3.kda_recurrent(*[x[:n] for x in leaves[:5]], s0)[1])
        for n in reversed(range(steps)):
            tilde = g[n].exp()[..., None] * states[n]
            r = v[n] - torch.einsum("hkv,hk->hv", tilde, k[n])
            u = beta[n][:, None] * r
            s_bar = s_bar + (scale * q[n])[..., None] * o_bar[n][:, None]
            got[0][n] = scale * torch.einsum("hkv,hv->hk", states[n + 1], o_bar[n])
            u_bar = torch.einsum("hkv,hk->hv", s_bar, k[n])
            got[1][n] = torch.einsum("hkv,hv->hk", s_bar, u)
            got[4][n] = (u_bar * r).sum(-1)
            r_bar = beta[n][:, None] * u_bar
            got[2][n] = r_bar
            z = s_bar - k[n][..., None] * r_bar[:, None]
            got[1][n] -= torch.einsum("hkv,hv->hk", tilde, r_bar)
            got[3][n] = (z * tilde).sum(-1)
            s_bar = g[n].exp()[..., None] * z
        got[5] = s_bar
    for name, a, b in zip(("q", "k", "v", "g", "beta", "S_0"), got, want):
        check(f"grad KDA {name}", a, b, 1e-11)
    chunked = autograd(list(k3.kda_chunked(*leaves, chunk=4)), [o_bar, final_bar], leaves)
    for name, a, b in zip(("q", "k", "v", "g", "beta", "S_0"), chunked, want):
        check(f"grad KDA {name} (chunked)", a, b, 1e-11)


def main() -> None:
    torch.set_num_threads(1)
    hand_numbers()
    gradient_formulas()
    print("all checks passed" if not FAILED else f"{len(FAILED)} FAILED: {', '.join(FAILED)}")
    sys.exit(1 if FAILED else 0)


if __name__ == "__main__":
    main()
