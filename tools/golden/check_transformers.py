#!/usr/bin/env python3
"""Cross-checks the oracle against the transformers library, in fp64.

transformers (checked: 5.24.0) has no Kimi K3, but it has Kimi-Linear (KDA, NoPE MLA, sigmoid router with correction bias:
the same code family) and GLM-5-Next, whose forget gate has the bounded form. So two things are compared:

  1. the whole Kimi-Linear model (logits and cached greedy decoding), with and without q_lora_rank, random weights;
  2. on a K3 checkpoint, each KDA mixer, MLA mixer and router, assembled from the library's modules and fed with the oracle's
     own layer inputs, outputs and input gradients.

Not covered by any library module, hence only by hand numbers and by our own two readings: Attention Residuals, SiTU, the
LatentMoE order. The library hard-codes fp32 in places; its source is loaded with float32 replaced by float64.

    python check_transformers.py --checkpoint DIR
"""
from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import k3_oracle as k3

Tensor = torch.Tensor
TOLERANCE = 1e-10


class _DoubleLoader(importlib.machinery.SourceFileLoader):
    """Loads a module with every fp32 upcast turned into fp64."""

    def source_to_code(self, data: bytes, path: str, *, _optimize: int = -1):
        text = data.decode() if isinstance(data, bytes) else data
        text = text.replace("torch.float32", "torch.float64").replace(".float()", ".double()")
        return compile(text, path, "exec", dont_inherit=True)

    def get_code(self, fullname: str):
        return self.source_to_code(self.get_data(self.path), self.path)


def load_double(model: str) -> ModuleType:
    name = f"transformers.models.{model}.modeling_{model}_double"
    path = Path(transformers.__file__).parent / "models" / model / f"modeling_{model}.py"
    spec = importlib.util.spec_from_loader(name, _DoubleLoader(name, str(path)), origin=str(path))
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def report(name: str, got: Tensor, want: Tensor, failures: list[str]) -> None:
    err = k3.worst(got.detach(), want.detach())
    print(f"{'ok  ' if err < TOLERANCE else 'FAIL'} {name:44s} relative {err:.2e}")
    if err >= TOLERANCE:
        failures.append(name)


# ----------------------------------------------------------------------------------------------- whole model: Kimi-Linear

def linear_config(q_lora: int | None) -> dict[str, Any]:
    """Config dictionary in the released Kimi-Linear spelling; small odd sizes."""
    return {"model_type": "kimi_linear", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80,
            "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu",
            "rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": 8,
            "num_experts_per_token": 3, "num_shared_experts": 2, "moe_intermediate_size": 24, "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
            "q_lora_rank": q_lora, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
            "mla_use_nope": True, "tie_word_embeddings": False,
            "linear_attn_config": {"head_dim": 16, "num_heads": 3, "short_conv_kernel_size": 4,
                                   "full_attn_layers": [3, 5], "kda_layers": [1, 2, 4]}}


def random_parameters(model: nn.Module, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    tensors = list(model.named_parameters()) + [b for b in model.named_buffers() if "correction_bias" in b[0]]
    with torch.no_grad():
        for name, p in tensors:
            x = torch.randn(p.shape, generator=gen, dtype=torch.float64)
            if "norm" in name:
                x = 1 + 0.2 * x
            elif p.dim() >= 2 and "A_log" not in name and "embed" not in name:
                x = x / p.shape[-1] ** 0.5
            p.copy_(x)


def linear_names(state: dict[str, Tensor], inner: int) -> dict[str, Tensor]:
    """Library names -> checkpoint names."""
    out: dict[str, Tensor] = {}
    for name, x in state.items():
        name = name.replace("forget_gate.", "")
        if ".mlp." in name and (".experts." in name or ".gate." in name or ".shared_experts." in name):
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("self_attn.conv1d.weight"):
            for s, part in zip("qkv", x.split(inner)):
                out[name.replace("conv1d", f"{s}_conv1d")] = part
        elif name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(x_e.chunk(2) for x_e in x):
                base = name.removesuffix("gate_up_proj")
                out[f"{base}{e}.w1.weight"], out[f"{base}{e}.w3.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for e, down in enumerate(x):
                out[f"{name.removesuffix('down_proj')}{e}.w2.weight"] = down
        else:
            out[name] = x
    return out


def check_kimi_linear(lib: ModuleType, failures: list[str]) -> None:
    from transformers import KimiLinearConfig
    for q_lora in (None, 28):
        top = linear_config(q_lora)
        config = KimiLinearConfig(**{k: v for k, v in top.items() if k != "model_type"}, attn_implementation="eager",
                                  experts_implementation="eager",
                                  pad_token_id=0, bos_token_id=1, eos_token_id=None)
        torch.manual_seed(0)
        model = lib.KimiLinearForCausalLM(config).double().eval()
        random_parameters(model, 11)
        cfg = k3.parse_config(top)
        weights = linear_names(dict(model.state_dict()), cfg.kda_heads * cfg.kda_dim)
        ids = torch.tensor([(7 * i * i + 3 * i + 5) % cfg.vocab for i in range(70)])
        oracle, label = k3.Oracle(cfg, weights), f"kimi-linear q_lora={q_lora}"
        with torch.no_grad():
            report(f"{label}: logits, 70 tokens", model(ids[None]).logits[0], oracle.forward(ids), failures)
            tokens, _ = oracle.greedy(ids[:19], 24)
            got = model.generate(ids[None, :19], max_new_tokens=24, do_sample=False)[0, 19:].tolist()
        print(f"{'ok  ' if got == tokens else 'FAIL'} {label}: greedy, 24 tokens with cache")
        if got != tokens:
            failures.append(f"{label} greedy")


# ------------------------------------------------------------------------------------------------- K3 layers from its parts

class _GatedOut(nn.Module):
    """o_proj with the K3 output gate in front: o * sigmoid(x gate^T), then the projection."""

    def __init__(self, gate: Tensor, proj: Tensor):
        super().__init__()
        self.gate, self.proj, self.x = gate, proj, None

    def forward(self, o: Tensor) -> Tensor:
        return (o * torch.sigmoid(self.x @ self.gate.T)) @ self.proj.T


def _fill(module: nn.Module, oracle: k3.Oracle, layer: int, names: dict[str, str]) -> None:
    with torch.no_grad():
        for attr, name in names.items():
            module.get_parameter(attr).copy_(oracle.layer_weight(layer, name).reshape(module.get_parameter(attr).shape))


def _library_config(cfg: k3.K3Config):
    from transformers import KimiLinearConfig
    return KimiLinearConfig(
        vocab_size=cfg.vocab, hidden_size=cfg.hidden, intermediate_size=64, num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads, num_key_value_heads=cfg.heads, rms_norm_eps=cfg.rms_eps, q_lora_rank=cfg.q_lora,
        kv_lora_rank=cfg.kv_lora, qk_nope_head_dim=cfg.nope, qk_rope_head_dim=cfg.rope, v_head_dim=cfg.v_dim, hidden_act="silu",
        n_group=1, topk_group=1, num_experts=cfg.experts, num_experts_per_token=cfg.top_k, moe_renormalize=cfg.renormalize,
        routed_scaling_factor=cfg.routed_scale, pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation="eager",
                                  experts_implementation="eager",
        linear_attn_config={"head_dim": cfg.kda_dim, "num_heads": cfg.kda_heads, "short_conv_kernel_size": cfg.conv,
                            "full_attn_layers": list(cfg.full_attn_layers), "kda_layers": list(cfg.kda_layers)})


def library_kda(lib: ModuleType, glm: ModuleType, config, oracle: k3.Oracle, layer: int):
    cfg = oracle.cfg
    mixer = lib.KimiLinearDeltaAttention(config, layer).double()
    config.linear_lower_bound = cfg.gate_lower_bound
    mixer.forget_gate = glm.Glm5NextTextForgetGate(config).double()
    mixer.g_a_proj = nn.Identity()
    mixer.g_b_proj = nn.Linear(cfg.hidden, cfg.kda_heads * cfg.kda_dim, bias=False).double()
    names = {f"{n}_proj.weight": f"self_attn.{n}_proj.weight" for n in ("q", "k", "v", "b", "o")}
    names |= {f"forget_gate.f_{n}_proj.weight": f"self_attn.f_{n}_proj.weight" for n in "ab"}
    names |= {"forget_gate.dt_bias": "self_attn.dt_bias", "g_b_proj.weight": "self_attn.g_proj.weight",
              "o_norm.weight": "self_attn.o_norm.weight"}
    _fill(mixer, oracle, layer, names)
    with torch.no_grad():
        mixer.forget_gate.A_log.copy_(oracle.layer_weight(layer, "self_attn.A_log").flatten()[:cfg.kda_heads])
        mixer.conv1d.weight.copy_(torch.cat([oracle.layer_weight(layer, f"self_attn.{s}_conv1d.weight") for s in "qkv"]))
    return lambda x: mixer(x[None])[0]


def library_mla(lib: ModuleType, config, oracle: k3.Oracle, layer: int):
    attention = lib.KimiLinearAttention(config, layer).double()
    names = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    _fill(attention, oracle, layer, {f"{n}.weight": f"self_attn.{n}.weight" for n in names})
    attention.o_proj = _GatedOut(*(oracle.layer_weight(layer, f"self_attn.{n}_proj.weight") for n in "go"))

    def run(x: Tensor) -> Tensor:
        attention.o_proj.x = x
        rows = torch.arange(x.shape[0])
        mask = torch.zeros(x.shape[0], x.shape[0], dtype=x.dtype).masked_fill(rows[None] > rows[:, None], -np.inf)
        return attention(x[None], attention_mask=mask[None, None])[0][0]
    return run


def check_k3_layers(lib: ModuleType, glm: ModuleType, folder: Path, failures: list[str]) -> None:
    cfg, weights = k3.load(folder, torch.float64)
    oracle, config, trace = k3.Oracle(cfg, weights), _library_config(cfg), {}
    ids = torch.tensor([(7 * i * i + 3 * i + 5) % cfg.vocab for i in range(70)])
    with torch.no_grad():
        oracle.forward(ids, trace=trace)
    gen, moe = torch.Generator().manual_seed(3), 0
    for layer in range(cfg.layers):
        h = trace["h_mixer"][layer]
        x = k3.rms_norm(h, oracle.layer_weight(layer, "input_layernorm.weight"), cfg.rms_eps).requires_grad_()
        kind = "kda" if cfg.is_kda(layer) else "mla"
        run = library_kda(lib, glm, config, oracle, layer) if kind == "kda" else library_mla(lib, config, oracle, layer)
        want, got = getattr(oracle, kind)(layer, x, k3.State()), run(x)
        bar = torch.randn(want.shape, generator=gen, dtype=torch.float64)
        report(f"layer {layer} {kind} output", got, want, failures)
        report(f"layer {layer} {kind} input gradient", torch.autograd.grad(got, x, bar)[0],
               torch.autograd.grad(want, x, bar)[0], failures)
        if not cfg.is_moe(layer):
            continue
        x = k3.rms_norm(trace["h_ffn"][layer], oracle.layer_weight(layer, "post_attention_layernorm.weight"), cfg.rms_eps)
        router = lib.KimiLinearTopkRouter(config).double()
        with torch.no_grad():
            router.weight.copy_(oracle.layer_weight(layer, "block_sparse_moe.gate.weight"))
            router.e_score_correction_bias.copy_(oracle.layer_weight(layer, "block_sparse_moe.gate.e_score_correction_bias"))
            logits, w, chosen = router(x)
            dense = torch.zeros_like(logits).scatter(1, chosen, w)
            ids_, w_ = k3.route(trace["router_logits"][moe], router.e_score_correction_bias, cfg.top_k)
        report(f"layer {layer} router weights, dense", dense, torch.zeros_like(logits).scatter(1, ids_, w_), failures)
        moe += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    lib, glm, failures = load_double("kimi_linear"), load_double("glm5_next"), []
    check_kimi_linear(lib, failures)
    check_k3_layers(lib, glm, args.checkpoint, failures)
    print("all agree" if not failures else f"{len(failures)} disagreements: {', '.join(failures)}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
