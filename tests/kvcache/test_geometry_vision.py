"""Caches of the model types that only mlx-vlm loads: predictions against its language models.

Each is built from a small config, its class's own where possible, and fed text.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import mlx.core as mx
import pytest

from turboquant_mlx.kvcache.architectures.table import VISION_RULES
from turboquant_mlx.kvcache.architectures.vision_defaults import VISION_DEFAULTS
from turboquant_mlx.kvcache.geometry import describe, why_unknown

pytest.importorskip("mlx_vlm")
pytestmark = pytest.mark.usefixtures("experts_in_bfloat16")

CONTEXTS = (40, 300)

# Taken by every class that has such a field.
TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "sliding_window": 32,
    "sliding_window_size": 32,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "attention_head_dim": 24,
}
MIXED = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}

# What single types need besides, or have under other names.
SINGLE: dict[str, dict[str, Any]] = {
    "aya_vision": {"head_dim": 16},
    "cohere2_moe": {"sliding_window_pattern": 2},
    "cohere_compass": MIXED,
    "deepseek_v4": {
        "head_dim": 32,
        "compress_ratios": [0, 4, 128, 0],
        "index_head_dim": 16,
        "index_n_heads": 2,
        "index_topk": 8,
        "o_groups": 2,
        "o_lora_rank": 16,
        "num_hash_layers": 0,
    },
    "deepseekocr": {"qk_nope_head_dim": 0, "num_key_value_heads": 4},
    "diffusion_gemma": {
        **MIXED,
        "num_global_key_value_heads": 1,
        "global_head_dim": 32,
        "top_k_experts": 2,
    },
    "flint": MIXED,
    "hrm_text": {"num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 1},
    "inkling": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "sliding_window_size": 32,
        "layer_types": ["hybrid_sliding"] * 3 + ["hybrid"],
        "dense_intermediate_size": 96,
        "unpadded_vocab_size": 256,
        "d_rel": 8,
        "rel_extent": 64,
    },
    "kolibri1": {**MIXED, "max_position_embeddings": 2048},
    "llava_next": {"model_type": "llama"},
    "limite": {"head_dim": 16, "rope_n_pairs": 8, "ve_dim": 16, "attn_gate_channels": 16},
    "minicpmo": {
        "max_position_embeddings": 2048,
        "rope_scaling": {"type": "default", "mrope_section": [4, 4, 4]},
    },
    "mimo_v2": {
        "hybrid_layer_pattern": [1, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "partial_rotary_factor": 0.5,
    },
    "molmo": {
        "d_model": 64,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 3,
        "mlp_hidden_size": 64,
        "embedding_size": 256,
    },
    "moondream3": {"num_key_value_heads": 4, "rope_dim": 8, "moe_start_layer": 1},
    "multi_modality": {"model_type": "llama"},
    "plamo2vl": {
        "model_type": "plamo2",
        "hidden_size_per_head": 16,
        "mamba_d_state": 8,
        "mamba_num_heads": 4,
    },
    "step3p7": {
        "num_attention_groups": 2,
        "layer_types": MIXED["layer_types"],
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "moe_layers_enum": "2,3",
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 4},
    },
    "unlimited_ocr": {"qk_nope_head_dim": 0, "num_key_value_heads": 4},
}
"""Type -> fields of its language model's config."""

# Types whose wrapper holds another type's language model.
ELSEWHERE = {"got": "qwen2", "minicpmo": "qwen3_vl", "mistral_large3": "deepseek_v3"}
# These have no language model that runs without the rest.
WHOLE = {"hunyuan_vl", "phi3_v"}


def classes(model_type: str) -> tuple[type, type]:
    """The language model's class of mlx-vlm and the record that it is configured by."""
    package = f"mlx_vlm.models.{model_type}"
    modules = [importlib.import_module(package)]
    for name in ("language", "config"):
        try:
            modules.append(importlib.import_module(f"{package}.{name}"))
        except ImportError:
            continue

    def find(*names: str) -> type:
        for name in names:
            for module in modules:
                if hasattr(module, name):
                    return getattr(module, name)
        raise AssertionError(f"{package} has none of {names}")

    # these put the language model's sizes beside the others
    flat = model_type in ("phi3_v", "phi4mm")
    if model_type in ELSEWHERE:
        language = importlib.import_module(f"mlx_vlm.models.{ELSEWHERE[model_type]}.language")
        modules.append(language)
    model = type(None) if model_type in WHOLE else find("LanguageModel")
    return model, find(*(["ModelConfig"] if flat else ["TextConfig", "ModelConfig"]))


def text_config(model_type: str) -> dict[str, Any]:
    _model, record = classes(model_type)
    known = {field.name for field in dataclasses.fields(record)}
    config = {"model_type": model_type, **TINY, **SINGLE.get(model_type, {})}
    return {key: value for key, value in config.items() if key in known or key in ("model_type",)}


def real_bytes(model_type: str, context: int) -> int:
    from mlx_vlm.models.cache import make_prompt_cache

    model_class, record = classes(model_type)
    config = record.from_dict(text_config(model_type))
    parameters = list(inspect.signature(model_class.__init__).parameters)[1:]
    # the whole model's config, of which language models take token ids and the like
    whole = MagicMock(text_config=config, vision_config=SimpleNamespace(spatial_merge_size=2))
    if model_type == "diffusion_gemma":
        whole.vision_config = None
    model = model_class(config, whole) if "config" in parameters[1:] else model_class(config)
    if model_type == "jina_vlm":
        model.lm_head = lambda hidden: hidden  # it is the whole model's
    model.set_dtype(mx.bfloat16)
    caches = make_prompt_cache(model)
    for tokens in (mx.arange(context - 1)[None] % 200, mx.array([[5]])):
        result = model(tokens, cache=caches)
        mx.eval(getattr(result, "logits", result))
    return sum(cache.nbytes for cache in caches)


@pytest.mark.parametrize("model_type", sorted(set(VISION_RULES) - WHOLE))
def test_predicted_bytes_are_those_of_the_caches(model_type):
    geometry = describe({"model_type": model_type, "text_config": text_config(model_type)})
    predicted = [geometry.nbytes(context) for context in CONTEXTS]
    assert predicted == [real_bytes(model_type, context) for context in CONTEXTS]


@pytest.mark.parametrize("model_type", VISION_DEFAULTS)
def test_what_stands_in_for_absent_values_is_what_the_class_has(model_type):
    _model, record = classes(model_type)
    fields = {field.name: field.default for field in dataclasses.fields(record)}
    for key, value in VISION_DEFAULTS[model_type].items():
        assert fields[key] == value, key


def test_phi_3_vision_worked_out_by_hand():
    config = {
        "model_type": "phi3_v",
        "hidden_size": 3072,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }
    assert describe(config).nbytes(32768) == 32 * 32 * 2 * 96 * 2 * 32768


def test_hunyuan_ocr_worked_out_by_hand():
    # its config says all of it at the top; what it leaves out, the class has as 24, 8 and 128
    config = {"model_type": "hunyuan_vl", "hidden_size": 1024, "num_attention_heads": 16}
    assert describe(config).nbytes(32768) == 24 * 8 * 256 * 2 * 32768


def test_the_wrapper_decides_and_not_the_type_of_the_text_inside():
    # mlx-vlm's class takes the head size from the hidden size, mlx-lm's qwen3 would not
    text = {"model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128}
    config = {"model_type": "llava_onevision", "text_config": text}
    assert describe(config).layers[0][0].key_dim == 64


@pytest.mark.parametrize("name", ["LLaVA_Qwen2", "Unlimited-OCR", "jvlm", "Bunny-Llama"])
def test_types_are_known_under_every_spelling_that_mlx_vlm_takes(name):
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": name, "text_config": text}
    assert describe(config) is not None, why_unknown(config)


@pytest.mark.parametrize("name", ["mllama", "florence2", "sam3", "flux2", "qwen4_exp"])
def test_what_has_no_rule_is_unknown(name):
    assert describe({"model_type": name, "hidden_size": 64}) is None
