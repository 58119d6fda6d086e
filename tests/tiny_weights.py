"""Random weights of tiny checkpoints, under the tensor names of the published models."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

VISION_CONFIG: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}


class Draw:
    """Random tensors, each a function of the seed, its name and its shape."""

    def __init__(self, seed: int):
        self.seed = seed

    def __call__(self, name: str, *shape: int) -> np.ndarray:
        """Matrices (the last two axes) map a unit-variance input to a unit-variance output."""
        rng = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        value = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            return 0.1 * value
        width = shape[-1]
        column = np.exp(0.5 * rng.standard_normal(width)).astype(np.float32)
        column[rng.integers(0, width, 2)] *= 6.0
        return value * column / np.sqrt(np.mean(column * column) * width)


_Named = Iterator[tuple[str, np.ndarray]]


def text_tensors(c: dict[str, Any], draw: Draw, experts: str) -> _Named:
    kind, hidden = c["model_type"], c["hidden_size"]
    # Gemma multiplies embeddings by sqrt(hidden): any more here would drown its layers' outputs.
    gain = 1.0 if kind == "gemma3_text" else 4.0
    yield _linear(draw, "model.embed_tokens", c["vocab_size"], hidden, gain=gain)
    for n in range(c["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        if "kv_lora_rank" in c:
            yield from _latent_attention(c, draw, f"{layer}.self_attn")
        else:
            yield from _attention(c, draw, f"{layer}.self_attn")
        norms = ["input_layernorm", "post_attention_layernorm"]
        if kind == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for norm in norms:
            yield _norm(draw, f"{layer}.{norm}", hidden, centred=kind == "gemma3_text")
        yield from _FEED_FORWARD.get(kind, _dense)(c, draw, layer, n, experts)
    yield _norm(draw, "model.norm", hidden, centred=kind == "gemma3_text")
    if not c["tie_word_embeddings"]:
        yield _linear(draw, "lm_head", c["vocab_size"], hidden, gain=4.0)


def _linear(draw: Draw, path: str, *shape: int, gain: float = 1.0) -> tuple[str, np.ndarray]:
    return f"{path}.weight", gain * draw(f"{path}.weight", *shape)


def _norm(draw: Draw, path: str, width: int, centred: bool = False) -> tuple[str, np.ndarray]:
    """``centred``: the model itself adds one to the weight, as Gemma does."""
    return f"{path}.weight", draw(f"{path}.weight", width) + (0.0 if centred else 1.0)


def _attention(c: dict[str, Any], draw: Draw, path: str) -> _Named:
    kind, hidden = c["model_type"], c["hidden_size"]
    head_dim = c.get("head_dim") or hidden // c["num_attention_heads"]
    q_width, kv_width = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    for name, n_out, n_in in (
        ("q_proj", q_width, hidden),
        ("k_proj", kv_width, hidden),
        ("v_proj", kv_width, hidden),
        ("o_proj", hidden, q_width),
    ):
        yield _linear(draw, f"{path}.{name}", n_out, n_in)
        if c.get("attention_bias") or (kind == "qwen2" and name != "o_proj"):
            yield f"{path}.{name}.bias", draw(f"{path}.{name}.bias", n_out)
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        for name in ("q_norm", "k_norm"):
            yield _norm(draw, f"{path}.{name}", head_dim, centred=kind == "gemma3_text")
    if kind == "gpt_oss":
        yield f"{path}.sinks", 10 * draw(f"{path}.sinks", c["num_attention_heads"])


def _latent_attention(c: dict[str, Any], draw: Draw, path: str) -> _Named:
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    q_width = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    if c["q_lora_rank"] is None:
        yield _linear(draw, f"{path}.q_proj", q_width, hidden)
    else:
        yield _linear(draw, f"{path}.q_a_proj", c["q_lora_rank"], hidden)
        yield _norm(draw, f"{path}.q_a_layernorm", c["q_lora_rank"])
        yield _linear(draw, f"{path}.q_b_proj", q_width, c["q_lora_rank"])
    rank = c["kv_lora_rank"]
    yield _linear(draw, f"{path}.kv_a_proj_with_mqa", rank + c["qk_rope_head_dim"], hidden)
    yield _norm(draw, f"{path}.kv_a_layernorm", rank)
    kv_width = heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
    yield _linear(draw, f"{path}.kv_b_proj", kv_width, rank)
    yield _linear(draw, f"{path}.o_proj", hidden, heads * c["v_head_dim"])


def _gated(draw: Draw, path: str, names: tuple[str, str, str], hidden: int, inner: int) -> _Named:
    gate, up, down = names
    yield _linear(draw, f"{path}.{gate}", inner, hidden)
    yield _linear(draw, f"{path}.{up}", inner, hidden)
    yield _linear(draw, f"{path}.{down}", hidden, inner)


_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
# Routers are given a gain so that their choices are clear-cut and survive rounding.
_ROUTER_GAIN = 3.0


def _dense(c: dict[str, Any], draw: Draw, layer: str, n: int, experts: str) -> _Named:
    yield from _gated(draw, f"{layer}.mlp", _GATE_UP_DOWN, c["hidden_size"], c["intermediate_size"])


def _qwen3_moe(c: dict[str, Any], draw: Draw, layer: str, n: int, experts: str) -> _Named:
    if n in c["mlp_only_layers"]:
        yield from _dense(c, draw, layer, n, experts)
        return
    yield _linear(draw, f"{layer}.mlp.gate", c["num_experts"], c["hidden_size"], gain=_ROUTER_GAIN)
    for e in range(c["num_experts"]):
        path = f"{layer}.mlp.experts.{e}"
        yield from _gated(draw, path, _GATE_UP_DOWN, c["hidden_size"], c["moe_intermediate_size"])


def _mixtral(c: dict[str, Any], draw: Draw, layer: str, n: int, experts: str) -> _Named:
    path = f"{layer}.block_sparse_moe"
    yield _linear(draw, f"{path}.gate", c["num_local_experts"], c["hidden_size"], gain=_ROUTER_GAIN)
    for e in range(c["num_local_experts"]):
        yield from _gated(
            draw,
            f"{path}.experts.{e}",
            ("w1", "w3", "w2"),
            c["hidden_size"],
            c["intermediate_size"],
        )


def _granitemoe(c: dict[str, Any], draw: Draw, layer: str, n: int, experts: str) -> _Named:
    path, count = f"{layer}.block_sparse_moe", c["num_local_experts"]
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    yield _linear(draw, f"{path}.router.layer", count, hidden, gain=_ROUTER_GAIN)
    yield _linear(draw, f"{path}.input_linear", count, 2 * inner, hidden)
    yield _linear(draw, f"{path}.output_linear", count, hidden, inner)


def _deepseek(c: dict[str, Any], draw: Draw, layer: str, n: int, experts: str) -> _Named:
    if n < c["first_k_dense_replace"]:
        yield from _dense(c, draw, layer, n, experts)
        return
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    path = f"{layer}.mlp"
    is_v3 = c["model_type"] == "deepseek_v3"
    # its scores are sigmoids, which a large gain would press together
    gain = 1.0 if is_v3 else _ROUTER_GAIN
    yield _linear(draw, f"{path}.gate", c["n_routed_experts"], hidden, gain=gain)
    if is_v3:
        name = f"{path}.gate.e_score_correction_bias"
        yield name, draw(name, c["n_routed_experts"])
    for e in range(c["n_routed_experts"]):
        yield from _gated(draw, f"{path}.experts.{e}", _GATE_UP_DOWN, hidden, inner)
    shared = inner * c["n_shared_experts"]
    yield from _gated(draw, f"{path}.shared_experts", _GATE_UP_DOWN, hidden, shared)


def _gpt_oss(c: dict[str, Any], draw: Draw, layer: str, n: int, experts: str) -> _Named:
    hidden, inner, count = c["hidden_size"], c["intermediate_size"], c["num_local_experts"]
    router = f"{layer}.mlp.router"
    yield _linear(draw, router, count, hidden, gain=_ROUTER_GAIN)
    yield f"{router}.bias", draw(f"{router}.bias", count)
    path = f"{layer}.mlp.experts"
    # Rows of gate_up alternate: gate 0, up 0, gate 1, up 1, ...
    gate_up = draw(f"{path}.gate_up_proj", count, 2 * inner, hidden)
    down = draw(f"{path}.down_proj", count, hidden, inner)
    gate_up_bias = 0.1 * draw(f"{path}.gate_up_proj_bias", count, 2 * inner)
    down_bias = 0.1 * draw(f"{path}.down_proj_bias", count, hidden)
    if experts == "split":
        yield f"{path}.gate_proj.weight", gate_up[:, ::2]
        yield f"{path}.up_proj.weight", gate_up[:, 1::2]
        yield f"{path}.down_proj.weight", down
        yield f"{path}.gate_proj.bias", gate_up_bias[:, ::2]
        yield f"{path}.up_proj.bias", gate_up_bias[:, 1::2]
        yield f"{path}.down_proj.bias", down_bias
        return
    if experts == "fused":
        yield f"{path}.gate_up_proj", gate_up.swapaxes(1, 2)
        yield f"{path}.down_proj", down.swapaxes(1, 2)
    elif experts == "mxfp4":
        for name, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
            blocks, scales = _mxfp4(weight)
            yield f"{path}.{name}_blocks", blocks
            yield f"{path}.{name}_scales", scales
    else:
        raise ValueError(f"unknown layout of experts: {experts}")
    yield f"{path}.gate_up_proj_bias", gate_up_bias
    yield f"{path}.down_proj_bias", down_bias


_FEED_FORWARD: dict[str, Callable[..., _Named]] = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "granitemoe": _granitemoe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}


def vision_tensors(draw: Draw, text_width: int) -> _Named:
    width, patch = VISION_CONFIG["hidden_size"], VISION_CONFIG["patch_size"]
    tower = "vision_tower.vision_model"
    name = f"{tower}.embeddings.patch_embedding"
    yield f"{name}.weight", draw(f"{name}.weight", width, 3, patch, patch)
    yield f"{name}.bias", draw(f"{name}.bias", width)
    for proj in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield _linear(draw, f"{tower}.encoder.layers.0.self_attn.{proj}", width, width)
    yield _norm(draw, f"{tower}.post_layernorm", width)
    name = "multi_modal_projector.mm_input_projection_weight"
    yield name, draw(name, width, text_width)


def _mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[..., n] -> uint8 blocks [..., n/32, 16] of two 4-bit floats each, uint8 scales [..., n/32].

    A scale byte s stands for 2**(s - 127); the four bits are sign and one of eight magnitudes;
    the even element lies in the low half of its byte.
    """
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    blocks = weight.reshape(*weight.shape[:-1], -1, 32)
    largest = np.maximum(np.abs(blocks).max(-1, keepdims=True), 2.0**-100)
    exponent = np.floor(np.log2(largest)) - 2
    scaled = blocks / np.exp2(exponent)
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, np.abs(scaled)).astype(np.uint8)
    codes |= (scaled < 0).astype(np.uint8) << 3
    packed = codes[..., ::2] | (codes[..., 1::2] << 4)
    return packed, (exponent[..., 0] + 127).astype(np.uint8)
