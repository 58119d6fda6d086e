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

import json
from pathlib import Path
from typing import Any

import numpy as np

from tiny_files import (
    END_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    encode,
    write_shards,
    write_tokenizer,
)
from tiny_weights import VISION_CONFIG, Draw, text_tensors, vision_tensors

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
        "embedding_multiplier": 1.5,
        "attention_multiplier": 0.125,
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
    tensors = dict(text_tensors(config, Draw(seed), experts))
    stored = {
        name: value if value.dtype == np.uint8 else encode(value, _stored_dtype(name, dtype))
        for name, value in tensors.items()
    }
    if model_type == "gemma3":
        stored = {f"language_model.{name}": value for name, value in stored.items()}
        for name, value in vision_tensors(Draw(seed), config["hidden_size"]):
            stored[name] = encode(value, dtype)
    for name, value in (extra or {}).items():
        stored[name] = np.ascontiguousarray(value, dtype=np.float32)
    write_shards(dst, stored, shards)

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
        "vision_config": dict(VISION_CONFIG),
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


def _stored_dtype(name: str, dtype: str) -> str:
    """DeepSeek publishes the routers' correction in float32 whatever the rest is."""
    return "float32" if name.endswith("e_score_correction_bias") else dtype
