"""Config and weights of a Kimi-K3 checkpoint folder, for the reference: plain, MXFP4, and NVFP4 + block-FP8 tensors.

Part of k3_oracle.py, which re-exports the names; it shares no code with the C++ program.
"""
from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import quant_oracle

Tensor = torch.Tensor

PREFIX = "language_model."


# ----------------------------------------------------------------------------------------------------------- configuration

@dataclass(frozen=True)
class K3Config:
    """The text_config fields the arithmetic depends on. Layer lists are 1-based, as in the file."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    hidden_act: str
    situ_beta: float
    situ_linear_beta: float | None
    rms_eps: float
    attn_res_block: int
    first_dense: int
    moe_freq: int
    experts: int
    top_k: int
    latent: int | None
    latent_norm: bool
    renormalize: bool
    routed_scale: float
    q_lora: int | None
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    mla_gate: bool
    kda_heads: int
    kda_dim: int
    conv: int
    full_rank_gate: bool
    gate_lower_bound: float | None
    kda_layers: tuple[int, ...]
    full_attn_layers: tuple[int, ...]

    def is_kda(self, layer: int) -> bool:
        return layer + 1 in self.kda_layers

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_dense and layer % self.moe_freq == 0


def parse_config(top: dict[str, Any]) -> K3Config:
    """Reads the top-level config.json dictionary (or a bare text_config)."""
    c = top.get("text_config", top)
    lin = c["linear_attn_config"]
    if not c.get("mla_use_nope", False):
        raise ValueError("only mla_use_nope = true is defined for this model")
    if c.get("moe_router_activation_func") != "sigmoid":
        raise ValueError("only the sigmoid router is defined for this model")
    if c.get("num_expert_group", 1) != 1 or c.get("topk_group", 1) != 1:
        raise ValueError("only a single expert group is defined for this model")
    return K3Config(
        vocab=c["vocab_size"], hidden=c["hidden_size"], layers=c["num_hidden_layers"], heads=c["num_attention_heads"],
        hidden_act=c["hidden_act"], situ_beta=c.get("activation_situ_beta", 0.0),
        situ_linear_beta=c.get("activation_situ_linear_beta"), rms_eps=c["rms_norm_eps"],
        attn_res_block=c.get("attn_res_block_size") or 0, first_dense=c["first_k_dense_replace"],
        moe_freq=c["moe_layer_freq"], experts=c["num_experts"], top_k=c["num_experts_per_token"],
        latent=c.get("routed_expert_hidden_size"), latent_norm=c.get("latent_moe_use_norm", False),
        renormalize=c["moe_renormalize"], routed_scale=c["routed_scaling_factor"], q_lora=c["q_lora_rank"],
        kv_lora=c["kv_lora_rank"], nope=c["qk_nope_head_dim"], rope=c["qk_rope_head_dim"], v_dim=c["v_head_dim"],
        mla_gate=c.get("mla_use_output_gate", False), kda_heads=lin["num_heads"], kda_dim=lin["head_dim"],
        conv=lin["short_conv_kernel_size"], full_rank_gate=lin.get("use_full_rank_gate", False),
        gate_lower_bound=lin.get("gate_lower_bound"), kda_layers=tuple(lin["kda_layers"]),
        full_attn_layers=tuple(lin["full_attn_layers"]))


# ----------------------------------------------------------------------------------------------------------------- loading

_TORCH_DTYPE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
                "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
                "F8_E4M3": torch.uint8, "F8_E8M0": torch.uint8}


def read_safetensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """name -> (dtype string, shape, raw bytes). Written out, so the format is checked independently as well."""
    blob = path.read_bytes()
    size = struct.unpack("<Q", blob[:8])[0]
    header = json.loads(blob[8:8 + size])
    header.pop("__metadata__", None)
    base = 8 + size
    return {name: (t["dtype"], t["shape"], blob[base + t["data_offsets"][0]:base + t["data_offsets"][1]])
            for name, t in header.items()}


def read_checkpoint_raw(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = ["model.safetensors"]
    raw: dict[str, tuple[str, list[int], bytes]] = {}
    for name in files:
        raw.update(read_safetensors(folder / name))
    return raw


def _decode_plain(entry: tuple[str, list[int], bytes]) -> Tensor:
    dtype, shape, data = entry
    if not data:
        return torch.zeros(shape, dtype=_TORCH_DTYPE[dtype])
    return torch.frombuffer(bytearray(data), dtype=_TORCH_DTYPE[dtype]).reshape(shape)


def dequantize_all(raw: dict[str, tuple[str, list[int], bytes]]) -> dict[str, Tensor]:
    """Folds MXFP4 / NVFP4 / block-FP8 groups into one fp64 `.weight`; other tensors keep their stored type."""
    out: dict[str, Tensor] = {}
    suffixes = ("_packed", "_scale", "_scale_2", ".input_scale")
    for name, entry in raw.items():
        arr = lambda n: _decode_plain(raw[n]).numpy()
        if name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            out[base] = torch.from_numpy(quant_oracle.mxfp4_dequantize(arr(name), arr(base + "_scale")))
        elif name.endswith(".weight") and name + "_scale_2" in raw:
            out[name] = torch.from_numpy(quant_oracle.nvfp4_dequantize(
                arr(name), arr(name + "_scale"), float(arr(name + "_scale_2").reshape(-1)[0])))
        elif name.endswith(".weight") and entry[0] == "F8_E4M3":
            out[name] = torch.from_numpy(quant_oracle.fp8_block_dequantize(arr(name), arr(name + "_scale")))
        elif name.endswith(suffixes) and "layernorm" not in name:
            continue
        else:
            out[name] = _decode_plain(entry)
    return out


def load(folder: str | Path, dtype: torch.dtype) -> tuple[K3Config, dict[str, Tensor]]:
    """Config and weights (prefix `language_model.` removed, everything in `dtype`)."""
    folder = Path(folder)
    cfg = parse_config(json.loads((folder / "config.json").read_text()))
    raw = read_checkpoint_raw(folder)
    return cfg, {n.removeprefix(PREFIX): t.to(dtype) for n, t in dequantize_all(raw).items()}
