#!/usr/bin/env python3
"""Writes a random tiny Kimi-K3 checkpoint (config.json + model.safetensors), every feature of the model alive.

    python make_checkpoint.py --out DIR [--config tiny-a|tiny-b] [--format f32|bf16|mxfp4|nvfp4] [--seed 0]

Formats come from the same fp32 master: bf16 rounds it; mxfp4 also packs the routed experts (compressed-tensors names);
nvfp4 packs the routed experts in NVFP4 and the attention projections in block FP8. In the last three, the tensors that are
F32 in the released checkpoint stay F32.
"""
from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import quant_oracle
from quant_oracle import write_safetensors

TINY: dict[str, dict[str, Any]] = {
    "tiny-a": dict(hidden=128, layers=9, vocab=512, full=[4, 8, 9], block=4, dense=320, kda_heads=8, kda_dim=32, a_log=32,
                   heads=8, q_lora=96, kv_lora=64, nope=32, rope=16, v=32, experts=16, top_k=4, latent=64, width=96, shared=2),
    "tiny-b": dict(hidden=256, layers=5, vocab=1024, full=[4, 5], block=2, dense=512, kda_heads=2, kda_dim=128, a_log=128,
                   heads=2, q_lora=128, kv_lora=512, nope=128, rope=64, v=128, experts=8, top_k=2, latent=128, width=128,
                   shared=2),
}
EXPECTED = {"tiny-a": (4_915_296, 618), "tiny-b": (5_994_528, 224)}     # parameters, tensors
FP8_SUFFIXES = tuple(f"self_attn.{n}.weight" for n in (
    "q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "b_proj", "f_a_proj", "f_b_proj", "q_a_proj", "q_b_proj",
    "kv_a_proj_with_mqa", "kv_b_proj"))
LATENT_GAIN = 1.0 / 32.0
F32_SUFFIXES = ("_conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")


def config_json(t: dict[str, Any], fmt: str) -> dict[str, Any]:
    text: dict[str, Any] = {
        "model_type": "kimi_linear", "vocab_size": t["vocab"], "hidden_size": t["hidden"], "intermediate_size": t["dense"],
        "num_hidden_layers": t["layers"], "num_attention_heads": t["heads"], "num_key_value_heads": t["heads"],
        "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576, "tie_word_embeddings": False, "attn_res_block_size": t["block"],
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_experts": t["experts"], "num_experts_per_token": t["top_k"],
        "num_shared_experts": t["shared"], "moe_intermediate_size": t["width"], "routed_expert_hidden_size": t["latent"],
        "latent_moe_use_norm": True, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc", "use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "q_lora_rank": t["q_lora"], "kv_lora_rank": t["kv_lora"],
        "qk_nope_head_dim": t["nope"], "qk_rope_head_dim": t["rope"], "v_head_dim": t["v"], "mla_use_nope": True,
        "mla_use_output_gate": True, "num_nextn_predict_layers": 0, "dtype": "float32" if fmt == "f32" else "bfloat16",
        "linear_attn_config": {
            "head_dim": t["kda_dim"], "num_heads": t["kda_heads"], "short_conv_kernel_size": 4, "use_full_rank_gate": True,
            "gate_lower_bound": -5.0, "full_attn_layers": t["full"],
            "kda_layers": [i for i in range(1, t["layers"] + 1) if i not in t["full"]]}}
    top = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "bos_token_id": t["vocab"] - 4,
           "eos_token_id": t["vocab"] - 3, "pad_token_id": t["vocab"] - 1, "media_placeholder_token_id": t["vocab"] - 2,
           "tie_word_embeddings": False, "text_config": text}
    if fmt == "mxfp4":
        text["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "weights": {
                "num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True, "dynamic": False,
                "observer": "minmax", "scale_dtype": "torch.uint8"}}},
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
                       "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"]}
    if fmt == "nvfp4":
        top["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
    return top


def shapes(t: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the text model: name without prefix, shape."""
    d, kda, mla = t["hidden"], t["kda_heads"] * t["kda_dim"], t["heads"]
    yield "model.embed_tokens.weight", (t["vocab"], d)
    yield "lm_head.weight", (t["vocab"], d)
    yield "model.norm.weight", (d,)
    yield "model.output_attn_res_norm.weight", (d,)
    yield "model.output_attn_res_proj.weight", (1, d)
    for layer in range(t["layers"]):
        p = f"model.layers.{layer}."
        for n in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            yield p + n + ".weight", (d,)
        for n in ("self_attention_res_proj", "mlp_res_proj"):
            yield p + n + ".weight", (1, d)
        a = p + "self_attn."
        if layer + 1 not in t["full"]:
            for n in "qkvg":
                yield f"{a}{n}_proj.weight", (kda, d)
            for n in "qkv":
                yield f"{a}{n}_conv1d.weight", (kda, 1, 4)
            yield a + "f_a_proj.weight", (t["kda_dim"], d)
            yield a + "f_b_proj.weight", (kda, t["kda_dim"])
            yield a + "A_log", (t["a_log"],)
            yield a + "dt_bias", (kda,)
            yield a + "b_proj.weight", (t["kda_heads"], d)
            yield a + "o_norm.weight", (t["kda_dim"],)
            yield a + "o_proj.weight", (d, kda)
        else:
            yield a + "q_a_proj.weight", (t["q_lora"], d)
            yield a + "q_a_layernorm.weight", (t["q_lora"],)
            yield a + "q_b_proj.weight", (mla * (t["nope"] + t["rope"]), t["q_lora"])
            yield a + "kv_a_proj_with_mqa.weight", (t["kv_lora"] + t["rope"], d)
            yield a + "kv_a_layernorm.weight", (t["kv_lora"],)
            yield a + "kv_b_proj.weight", (mla * (t["nope"] + t["v"]), t["kv_lora"])
            yield a + "g_proj.weight", (mla * t["v"], d)
            yield a + "o_proj.weight", (d, mla * t["v"])
        if layer == 0:
            yield from _mlp(p + "mlp.", d, t["dense"])
            continue
        m = p + "block_sparse_moe."
        yield m + "gate.weight", (t["experts"], d)
        yield m + "gate.e_score_correction_bias", (t["experts"],)
        yield m + "routed_expert_down_proj.weight", (t["latent"], d)
        yield m + "routed_expert_norm.weight", (t["latent"],)
        yield m + "routed_expert_up_proj.weight", (d, t["latent"])
        yield from _mlp(m + "shared_experts.", d, t["shared"] * t["width"])
        for e in range(t["experts"]):
            for n, shape in (("w1", (t["width"], t["latent"])), ("w2", (t["latent"], t["width"])),
                             ("w3", (t["width"], t["latent"]))):
                yield f"{m}experts.{e}.{n}.weight", shape


def _mlp(prefix: str, d: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (width, d)
    yield prefix + "up_proj.weight", (width, d)
    yield prefix + "down_proj.weight", (d, width)


def init_tensor(name: str, shape: tuple[int, ...], t: dict[str, Any], seed: int) -> np.ndarray:
    """The initialisation that keeps every feature alive; one generator per tensor, so order does not matter."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("A_log"):
        values = np.log(rng.uniform(0.5, 4.0, shape))
        values[t["kda_heads"]:] = 0.0
        return values
    if name.endswith("dt_bias"):
        return rng.uniform(-2.0, 2.0, shape)
    if name.endswith("e_score_correction_bias"):
        return rng.uniform(-0.3, 0.3, shape)
    normal = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * normal
    if name.endswith("_conv1d.weight"):
        return 0.5 * normal
    if name.endswith("embed_tokens.weight"):
        return normal
    if "_res_proj" in name:
        return normal * 2.0 / math.sqrt(shape[-1])
    gain = 1.0
    if name.endswith(("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight")) and "routed_expert" not in name:
        gain = 4.0                                                      # SiTU must saturate sometimes
    if name.endswith("block_sparse_moe.gate.weight"):
        gain = 3.0
    out = normal * gain / math.sqrt(shape[-1])
    # Small latents, so that the epsilon of the MLA latent norms (1e-6, not rms_norm_eps) is visible in fp32 logits.
    if name.endswith("self_attn.q_a_proj.weight"):
        out *= LATENT_GAIN
    if name.endswith("self_attn.kv_a_proj_with_mqa.weight"):
        out[:t["kv_lora"]] *= LATENT_GAIN
    return out


def to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 -> bf16 bits, nearest even (finite input)."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def encode(master: dict[str, np.ndarray], fmt: str) -> dict[str, tuple[str, np.ndarray]]:
    out: dict[str, tuple[str, np.ndarray]] = {}
    for name, x in master.items():
        full = "language_model." + name
        if fmt == "f32" or name.endswith(F32_SUFFIXES):
            out[full] = ("F32", x)
        elif fmt == "mxfp4" and ".experts." in name:
            packed, scale = quant_oracle.mxfp4_quantize(x)
            out |= {full + "_packed": ("U8", packed), full + "_scale": ("U8", scale)}
        elif fmt == "nvfp4" and ".experts." in name:
            out |= _encode_nvfp4(full, name, master)
        elif fmt == "nvfp4" and name.endswith(FP8_SUFFIXES):
            codes, scale = quant_oracle.fp8_block_quantize(x)
            out |= {full: ("F8_E4M3", codes), full + "_scale": ("F32", scale)}
        else:
            out[full] = ("BF16", to_bf16(x))
    return out


def _encode_nvfp4(full: str, name: str, master: dict[str, np.ndarray]) -> dict[str, tuple[str, np.ndarray]]:
    """w1 and w3 of an expert share weight_scale_2."""
    stem, which = name.removesuffix(".weight").rsplit(".", 1)
    group = ("w1", "w3") if which in ("w1", "w3") else ("w2",)
    amax = max(float(np.abs(master[f"{stem}.{g}.weight"]).max()) for g in group)
    packed, scale, scale_2 = quant_oracle.nvfp4_quantize(master[name], amax)
    base = full.removesuffix("weight")
    return {full: ("U8", packed), full + "_scale": ("F8_E4M3", scale),
            full + "_scale_2": ("F32", np.array(scale_2, np.float32).reshape(())),
            base + "input_scale": ("F32", np.array(1.0, np.float32).reshape(()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--config", choices=sorted(TINY), default="tiny-a")
    parser.add_argument("--format", choices=("f32", "bf16", "mxfp4", "nvfp4"), default="f32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    t = TINY[args.config]
    master = {n: init_tensor(n, s, t, args.seed).astype(np.float32) for n, s in shapes(t)}
    count = (sum(x.size for x in master.values()), len(master))
    if count != EXPECTED[args.config]:
        print(f"warning: {count[0]} parameters in {count[1]} tensors, the specification says {EXPECTED[args.config]}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(config_json(t, args.format), indent=2) + "\n")
    write_safetensors(args.out / "model.safetensors", encode(master, args.format))
    print(f"{args.config} {args.format} seed {args.seed}: {count[0]} parameters, {count[1]} tensors")


if __name__ == "__main__":
    main()
