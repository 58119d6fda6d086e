"""Tiny random checkpoints in the Hugging Face layout, written without MLX.

``build_source(folder, "qwen3_moe")`` writes everything that a published model folder holds:
config.json, safetensors (one file, or shards with an index), tokenizer, chat template and
generation_config.json. Tensors carry the names of the *published* checkpoints, so that the
loaders' own renaming, stacking and splitting are exercised.

Weights are heavy-tailed: a few input columns are much larger than the rest, as in real models,
so that a rotation has something to do. Every tensor is drawn from its own generator, keyed by
seed and name; adding a tensor never changes another one, and a recorded result can be
reproduced from the seed alone.
"""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

MODEL_TYPES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gemma3_text",
    "gpt_oss",
    "granitemoe",
    "deepseek_v2",
    "deepseek_v3",
)
MOE_TYPES = ("qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "deepseek_v2", "deepseek_v3")

VOCAB_SIZE = 288
PAD_ID, START_ID, END_ID, THINK_ID, END_THINK_ID = range(5)
SPECIAL_TOKENS = ("<|pad|>", "<|start|>", "<|end|>", "<think>", "</think>")

CORPUS = """
the small red boat waits by the old stone bridge. a short question gets a short answer.
why does ice float? because it is lighter than the water around it.
numbers: 0 1 2 3 4 5 6 7 8 9 10 20 30 and more. rows and columns, keys and values, groups of rows.
def double(x):
    return x + x
{"name": "read_file", "arguments": {"path": "notes"}}
"""

# Follows the convention of Qwen3: thinking switched off means an empty thought in the prompt.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)

_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
}

_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
}

# What each type adds to or changes in _COMMON, as transformers 4 spelled it.
_TYPES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": 64,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 64,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 2,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 64,
        "attention_bias": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "use_sliding_window": False,
        "sliding_window": None,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": True,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "swiglu_limit": 7.0,
    },
    "granitemoe": {
        "architectures": ["GraniteMoeForCausalLM"],
        "intermediate_size": 64,
        "attention_bias": False,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "deepseek_v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 2,
        "attention_bias": False,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 2,
        "attention_bias": False,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}

_VISION_CONFIG = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}


def build_source(
    dst: Path | str,
    model_type: str,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    tokenizer: bool = True,
    shards: int = 1,
    transformers5: bool = True,
    experts: str = "split",
    extra: dict[str, np.ndarray] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Write one complete source folder and return its config as written.

    Args:
        dst: folder to create (parents too); its files are overwritten.
        model_type: one of MODEL_TYPES, or "gemma3" (gemma3_text inside a vision wrapper, with a
            few tensors of a vision tower and of the projector).
        seed: the weights are a function of this and of the tensors' names and shapes.
        dtype: "float32", "float16" or "bfloat16" of all tensors.
        tokenizer: False leaves out every tokenizer file.
        shards: number of safetensors files; an index is written when there are several.
        transformers5: write config.json as transformers 5 does (``rope_parameters``, ``dtype``,
            renamed keys), else as transformers 4 did (``rope_theta``, ``torch_dtype``).
        experts: only for gpt_oss. "split": separate gate and up, as the bf16 checkpoints for MLX
            have them; "fused": one [E, in, 2 * out] tensor, as transformers writes bf16;
            "mxfp4": packed 4-bit blocks, as OpenAI published them.
        extra: further tensors to store as they are (written as float32).
        **overrides: config keys in the spelling of transformers 4, which also decide the shapes.

    Raises:
        KeyError: unknown model type.
    """
    dst = Path(dst)
    dst.mkdir(parents=True, exist_ok=True)
    config = text_config(model_type, dtype=dtype, **overrides)
    if model_type == "gpt_oss" and experts == "mxfp4":
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
    tensors = dict(_tensors(config, _Draw(seed), experts))
    stored = {
        name: value if value.dtype == np.uint8 else _encode(value, _stored_dtype(name, dtype))
        for name, value in tensors.items()
    }
    if model_type == "gemma3":
        stored = {f"language_model.{name}": value for name, value in stored.items()}
        for name, value in _vision_tensors(_Draw(seed), config["hidden_size"]):
            stored[name] = _encode(value, dtype)
    for name, value in (extra or {}).items():
        stored[name] = np.ascontiguousarray(value, dtype=np.float32)
    _write_shards(dst, stored, shards)

    if transformers5:
        config = _as_transformers5(config)
    if model_type == "gemma3":
        config = _wrap_gemma3(config)
    (dst / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (dst / "generation_config.json").write_text(
        json.dumps(
            {
                "do_sample": True,
                "eos_token_id": [END_ID, PAD_ID],
                "pad_token_id": PAD_ID,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.95,
            },
            indent=2,
        )
        + "\n",
        encoding="utf-8",
    )
    if tokenizer:
        write_tokenizer(dst, config.get("vocab_size", VOCAB_SIZE), transformers5=transformers5)
    return config


def text_config(model_type: str, *, dtype: str = "bfloat16", **overrides: Any) -> dict[str, Any]:
    """The config of a text model in the spelling of transformers 4."""
    name = "gemma3_text" if model_type == "gemma3" else model_type
    config = {"model_type": name, **_COMMON, **_TYPES[name], "torch_dtype": dtype, **overrides}
    n_layers = config["num_hidden_layers"]
    if name == "gpt_oss" and len(config["layer_types"]) != n_layers:
        config["layer_types"] = [("sliding", "full")[i % 2] + "_attention" for i in range(n_layers)]
    config["transformers_version"] = "4.57.1"
    return config


def token_ids(n: int = 12, seed: int = 0) -> list[int]:
    """A fixed sequence of ordinary tokens, none of them special."""
    rng = np.random.default_rng([seed, n])
    return [int(i) for i in rng.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, n)]


# --- config spelling -------------------------------------------------------------------------


def _as_transformers5(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 5 saves it (checked against version 5.24)."""
    config = dict(config)
    config["dtype"] = config.pop("torch_dtype")
    rope: dict[str, Any] = {"rope_theta": config.pop("rope_theta")}
    scaling = config.pop("rope_scaling") or {}
    rope.update(scaling)
    rope.setdefault("rope_type", scaling.get("type", "default"))
    if config["model_type"] == "gemma3_text":
        local = config.pop("rope_local_base_freq")
        pattern = config.pop("sliding_window_pattern")
        config["_sliding_window_pattern"] = pattern
        config["layer_types"] = [
            "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
            for i in range(config["num_hidden_layers"])
        ]
        config["rope_parameters"] = {
            "full_attention": rope,
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        }
    else:
        config["rope_parameters"] = rope
    if config["model_type"] == "qwen3_moe":
        config["num_local_experts"] = config.pop("num_experts")
    if config["model_type"] in ("qwen2", "qwen3"):
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    if config["model_type"].startswith("deepseek"):
        config["head_dim"] = config["qk_rope_head_dim"]
        config["qk_head_dim"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        for key in ("scoring_func", "moe_layer_freq"):
            config.pop(key)
        if config["model_type"] == "deepseek_v3":
            config.pop("topk_method")
            config["rope_interleave"] = True
    config["transformers_version"] = "5.24.0"
    return config


def _wrap_gemma3(text: dict[str, Any]) -> dict[str, Any]:
    text = dict(text)
    outer = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": dict(_VISION_CONFIG),
        "vocab_size": text["vocab_size"],
        "mm_tokens_per_image": 4,
        "image_token_index": VOCAB_SIZE - 1,
        "eos_token_id": text["eos_token_id"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "transformers_version": text.pop("transformers_version"),
    }
    for key in ("dtype", "torch_dtype"):
        if key in text:
            outer[key] = text[key]
    text.pop("architectures")
    return outer


# --- weights ---------------------------------------------------------------------------------


class _Draw:
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


def _tensors(c: dict[str, Any], draw: _Draw, experts: str) -> _Named:
    kind, hidden = c["model_type"], c["hidden_size"]
    yield _linear(draw, "model.embed_tokens", c["vocab_size"], hidden, gain=4.0)
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


def _linear(draw: _Draw, path: str, *shape: int, gain: float = 1.0) -> tuple[str, np.ndarray]:
    return f"{path}.weight", gain * draw(f"{path}.weight", *shape)


def _norm(draw: _Draw, path: str, width: int, centred: bool = False) -> tuple[str, np.ndarray]:
    """``centred``: the model itself adds one to the weight, as Gemma does."""
    return f"{path}.weight", draw(f"{path}.weight", width) + (0.0 if centred else 1.0)


def _attention(c: dict[str, Any], draw: _Draw, path: str) -> _Named:
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


def _latent_attention(c: dict[str, Any], draw: _Draw, path: str) -> _Named:
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


def _gated(draw: _Draw, path: str, names: tuple[str, str, str], hidden: int, inner: int) -> _Named:
    gate, up, down = names
    yield _linear(draw, f"{path}.{gate}", inner, hidden)
    yield _linear(draw, f"{path}.{up}", inner, hidden)
    yield _linear(draw, f"{path}.{down}", hidden, inner)


_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
# Routers are given a gain so that their choices are clear-cut and survive rounding.
_ROUTER_GAIN = 3.0


def _dense(c: dict[str, Any], draw: _Draw, layer: str, n: int, experts: str) -> _Named:
    yield from _gated(draw, f"{layer}.mlp", _GATE_UP_DOWN, c["hidden_size"], c["intermediate_size"])


def _qwen3_moe(c: dict[str, Any], draw: _Draw, layer: str, n: int, experts: str) -> _Named:
    if n in c["mlp_only_layers"]:
        yield from _dense(c, draw, layer, n, experts)
        return
    yield _linear(draw, f"{layer}.mlp.gate", c["num_experts"], c["hidden_size"], gain=_ROUTER_GAIN)
    for e in range(c["num_experts"]):
        path = f"{layer}.mlp.experts.{e}"
        yield from _gated(draw, path, _GATE_UP_DOWN, c["hidden_size"], c["moe_intermediate_size"])


def _mixtral(c: dict[str, Any], draw: _Draw, layer: str, n: int, experts: str) -> _Named:
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


def _granitemoe(c: dict[str, Any], draw: _Draw, layer: str, n: int, experts: str) -> _Named:
    path, count = f"{layer}.block_sparse_moe", c["num_local_experts"]
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    yield _linear(draw, f"{path}.router.layer", count, hidden, gain=_ROUTER_GAIN)
    yield _linear(draw, f"{path}.input_linear", count, 2 * inner, hidden)
    yield _linear(draw, f"{path}.output_linear", count, hidden, inner)


def _deepseek(c: dict[str, Any], draw: _Draw, layer: str, n: int, experts: str) -> _Named:
    if n < c["first_k_dense_replace"]:
        yield from _dense(c, draw, layer, n, experts)
        return
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    path = f"{layer}.mlp"
    yield _linear(draw, f"{path}.gate", c["n_routed_experts"], hidden, gain=_ROUTER_GAIN)
    if c["model_type"] == "deepseek_v3":
        name = f"{path}.gate.e_score_correction_bias"
        yield name, draw(name, c["n_routed_experts"])
    for e in range(c["n_routed_experts"]):
        yield from _gated(draw, f"{path}.experts.{e}", _GATE_UP_DOWN, hidden, inner)
    shared = inner * c["n_shared_experts"]
    yield from _gated(draw, f"{path}.shared_experts", _GATE_UP_DOWN, hidden, shared)


def _gpt_oss(c: dict[str, Any], draw: _Draw, layer: str, n: int, experts: str) -> _Named:
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


def _vision_tensors(draw: _Draw, text_width: int) -> _Named:
    width, patch = _VISION_CONFIG["hidden_size"], _VISION_CONFIG["patch_size"]
    tower = "vision_tower.vision_model"
    name = f"{tower}.embeddings.patch_embedding"
    yield f"{name}.weight", draw(f"{name}.weight", width, 3, patch, patch)
    yield f"{name}.bias", draw(f"{name}.bias", width)
    for proj in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield _linear(draw, f"{tower}.encoder.layers.0.self_attn.{proj}", width, width)
    yield _norm(draw, f"{tower}.post_layernorm", width)
    name = "multi_modal_projector.mm_input_projection_weight"
    yield name, draw(name, width, text_width)


# --- numbers and files -----------------------------------------------------------------------


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


def _stored_dtype(name: str, dtype: str) -> str:
    """DeepSeek publishes the routers' correction in float32 whatever the rest is."""
    return "float32" if name.endswith("e_score_correction_bias") else dtype


def _encode(value: np.ndarray, dtype: str) -> np.ndarray:
    """float32 to the stored dtype; bfloat16 (rounded to nearest even) is held in a uint16."""
    value = np.ascontiguousarray(value, dtype=np.float32)
    if dtype == "bfloat16":
        bits = value.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return value.astype({"float32": np.float32, "float16": np.float16}[dtype])


_SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "uint8": "U8"}


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write one safetensors file; a uint16 array is taken for bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + value.nbytes],
        }
        offset += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).tobytes())


def _write_shards(dst: Path, tensors: dict[str, np.ndarray], shards: int) -> None:
    if shards == 1:
        write_safetensors(dst / "model.safetensors", tensors)
        return
    names = sorted(tensors)
    per_shard = math.ceil(len(names) / shards)
    weight_map = {}
    for n in range(shards):
        file = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        part = names[n * per_shard : (n + 1) * per_shard]
        write_safetensors(dst / file, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    index = {
        "metadata": {"total_size": sum(value.nbytes for value in tensors.values())},
        "weight_map": weight_map,
    }
    (dst / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


@functools.lru_cache
def _tokenizer_json(vocab_size: int) -> str:
    """A byte-level BPE tokenizer with exactly ``vocab_size`` entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        # Thoughts are text: their marks must survive decoding that skips special tokens.
        token["special"] = "think" not in token["content"]
    return json.dumps(content, ensure_ascii=False)


def write_tokenizer(dst: Path, vocab_size: int = VOCAB_SIZE, *, transformers5: bool = True) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template.

    The template lies in chat_template.jinja, where transformers 5 puts it, or else inside
    tokenizer_config.json. A vocabulary beyond what the corpus yields leaves the rest of the
    model's rows without a token, as padded vocabularies do.
    """
    (dst / "tokenizer.json").write_text(
        _tokenizer_json(min(vocab_size, VOCAB_SIZE)), encoding="utf-8"
    )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    if transformers5:
        (dst / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    else:
        config["chat_template"] = CHAT_TEMPLATE
    (dst / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
