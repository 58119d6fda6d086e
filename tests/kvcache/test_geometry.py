"""What a model's caches cost is predicted from its config.json, and compared with the real caches.

``tiny_configs.json`` holds a small config of every model type that mlx-lm can build and run here.
Each is instantiated in bfloat16 and fed; then the bytes of its caches are the reference.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from cache_kinds import model_types
from turboquant_mlx.kvcache.architectures.defaults import DEFAULTS
from turboquant_mlx.kvcache.architectures.table import ALIASES, RULES
from turboquant_mlx.kvcache.geometry import Attention, State, describe, text_config, why_unknown
from turboquant_mlx.kvcache.install import install
from turboquant_mlx.kvcache.spec import KVSpec

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "tiny_configs.json").read_text()
)
# Two more that stay out of that file, because other tests run all of it: one brings a cache that
# only its own model reads, the module of the other ends the program where a package is missing, and
# takes one token at a time.
DEEPSEEK_V41 = {
    "model_type": "deepseek_v41",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "compress_ratios": [0, 7, 4, 1],
    "kv_source_layer_ids": [1, 2, 3],
    "index_source_layer_ids": [1, 3],
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
}
OLMO = {
    "model_type": "olmo",
    "d_model": 64,
    "n_layers": 3,
    "mlp_hidden_size": 128,
    "n_heads": 4,
    "vocab_size": 256,
    "embedding_size": 256,
    "weight_tying": False,
}
SPECS = (KVSpec(8, 3), KVSpec(3, 4, min_tokens=20))
CONTEXTS = (40, 300)  # below and above all windows of the tiny configs, and a step of 256


pytestmark = pytest.mark.usefixtures("experts_in_bfloat16")


def build(config: dict[str, Any]) -> Any:
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.set_dtype(mx.bfloat16)
    return model


def filled_bytes(model: Any, context: int) -> int:
    """Bytes of the caches after a prompt and one generated token."""
    caches = make_prompt_cache(model)
    prompt = mx.arange(context - 1)[None] % 200
    mx.eval(model(prompt, cache=caches), [cache.state for cache in caches])
    mx.eval(model(mx.array([[5]]), cache=caches))
    return sum(cache.nbytes for cache in caches)


def real_bytes(config: dict[str, Any]) -> list[int]:
    """The same per context length."""
    model = build(config)
    return [filled_bytes(model, context) for context in CONTEXTS]


class TestAgainstTheRealCaches:
    @pytest.mark.parametrize("model_type", CONFIGS)
    def test_predicted_bytes_are_those_of_the_caches(self, model_type):
        config = CONFIGS[model_type]
        geometry = describe(config)
        assert geometry is not None, why_unknown(config)
        predicted = [geometry.nbytes(context) for context in CONTEXTS]
        assert predicted == real_bytes(config)

    @pytest.mark.parametrize("model_type", model_types(CONFIGS))
    def test_packed_bytes_are_those_of_the_packed_caches(self, model_type):
        config = CONFIGS[model_type]
        spec = SPECS[len(model_type) % len(SPECS)]
        model = build(config)
        install(model, spec)
        predicted = describe(config).nbytes(CONTEXTS[-1], spec)
        assert predicted == pytest.approx(filled_bytes(model, CONTEXTS[-1]), rel=0.01)

    def test_deepseek_v41_keeps_one_vector_for_several_tokens(self):
        # 40 and 300 tokens leave groups of 7 open, whose tokens wait in float32
        predicted = [describe(DEEPSEEK_V41).nbytes(context) for context in CONTEXTS]
        assert predicted == real_bytes(DEEPSEEK_V41)

    def test_olmo(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "hf_olmo", types.ModuleType("hf_olmo"))
        model = build(OLMO)
        caches = make_prompt_cache(model)
        for _ in range(2):
            mx.eval(model(mx.array([[5]]), cache=caches))
        assert sum(cache.nbytes for cache in caches) == describe(OLMO).nbytes(2)

    def test_covers_nearly_all_that_mlx_lm_has(self):
        assert len(CONFIGS) >= 110

    @pytest.mark.parametrize("model_type", DEFAULTS)
    def test_what_stands_in_for_absent_values_is_what_the_class_has(self, model_type):
        if model_type == "gemma3":
            return  # set by code of the wrapper, see below
        for key, value in DEFAULTS[model_type].items():
            assert class_defaults(model_type)[key] == value, key

    def test_the_wrapper_of_gemma_3_has_defaults_of_its_own(self):
        text = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "rope_scaling": None}
        config = {"model_type": "gemma3", "text_config": text}
        _model_class, args_class = _get_classes(config)
        args = args_class.from_dict(json.loads(json.dumps(config)))
        for key in ("num_attention_heads", "num_key_value_heads"):
            assert args.text_config[key] == DEFAULTS["gemma3"][key]


def class_defaults(model_type: str) -> dict[str, Any]:
    """Defaults of the record that mlx-lm's module for the type reads the language model from."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    names = ("TextArgs", "TextModelArgs", "TextConfig", "ModelArgs")
    records = [getattr(module, name) for name in names if hasattr(module, name)]
    if model_type in ("kimi_k25", "qwen3_5_moe"):
        other = {"kimi_k25": ("deepseek_v3", "ModelArgs"), "qwen3_5_moe": ("qwen3_5", names[1])}
        inner, name = other[model_type]
        records = [getattr(importlib.import_module(f"mlx_lm.models.{inner}"), name)]
    return {field.name: field.default for field in dataclasses.fields(records[0])}


LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}


class TestArithmetic:
    def test_a_full_cache_grows_in_steps_of_256_tokens(self):
        geometry = describe(LLAMA)
        per_token = 16 * 8 * (64 + 64) * 2
        assert geometry.nbytes(1) == 256 * per_token
        assert geometry.nbytes(256) == 256 * per_token
        assert geometry.nbytes(257) == 512 * per_token
        assert geometry.bytes_per_token() == per_token

    def test_float32_activations_cost_twice_as_much(self):
        geometry = describe(LLAMA)
        assert geometry.nbytes(1000, element_bytes=4) == 2 * geometry.nbytes(1000)

    def test_no_tokens_cost_nothing(self):
        assert describe(LLAMA).nbytes(0) == 0

    def test_bytes_are_told_apart_by_kind(self):
        kinds = describe(CONFIGS["qwen3_next"]).bytes_by_kind(300)
        assert set(kinds) == {"state", "full"}
        assert sum(kinds.values()) == describe(CONFIGS["qwen3_next"]).nbytes(300)


class TestTurboQuant:
    # 1023 tokens of a prompt and a sixteenth to spare
    COLUMNS = 1023 + 1023 // 16

    def test_each_vector_is_codes_and_a_scale_and_each_head_has_a_mean_key(self):
        # 64 values at 8 bits are 16 words and a byte of scale, at 3 bits 6 words and a byte
        spec = KVSpec(8, 3, min_tokens=0)
        packed = self.COLUMNS * ((64 + 1) + (24 + 1))
        assert describe(LLAMA).nbytes(1024, spec) == 16 * 8 * (packed + 64 * 2)

    def test_first_tokens_are_kept_in_16_bits_beside_them(self):
        without, kept = KVSpec(4, 4, min_tokens=0), KVSpec(4, 4, min_tokens=128)
        more = describe(LLAMA).nbytes(1024, kept) - describe(LLAMA).nbytes(1024, without)
        assert more == 16 * 8 * 128 * (64 + 64) * 2

    def test_a_short_sequence_is_not_packed_yet(self):
        spec = KVSpec(4, 4)
        tokens = spec.warm_tokens - 1
        assert describe(LLAMA).nbytes(tokens, spec) == (tokens - 1 + 16) * 16 * 8 * 128 * 2

    def test_protected_layers_stay_in_16_bits(self):
        geometry = describe(LLAMA)
        spec = KVSpec(4, 4, protect_first=1, protect_last=2)
        assert geometry.packed(spec) == 13
        free = KVSpec(4, 4)
        plain, packed = geometry.nbytes(2048), geometry.nbytes(2048, free)
        assert geometry.nbytes(2048, spec) == (3 * plain + 13 * packed) // 16

    @pytest.mark.parametrize("model_type", ["qwen3_next", "llama4", "minimax_m3_vl"])
    def test_chunks_states_and_index_keys_are_left_alone(self, model_type):
        geometry, spec = describe(CONFIGS[model_type]), KVSpec(3, 4)
        before, after = geometry.bytes_by_kind(2048), geometry.bytes_by_kind(2048, spec)
        assert {k: v for k, v in before.items() if k != "full"} == {
            k: v for k, v in after.items() if k != "full"
        }
        assert geometry.packed(spec) == geometry.count("full")

    def test_a_window_is_packed_with_a_sixteenth_to_spare(self):
        """Once it has turned around none of the first tokens are left in 16 bits."""
        config = CONFIGS["gemma3_text"] | {"sliding_window": 512, "num_hidden_layers": 4}
        geometry, spec = describe(config), KVSpec(3, 4, min_tokens=20)
        window = next(p for p in geometry.pieces() if p.kind == "window")
        assert geometry.packed(spec) == len(geometry.pieces())
        each = window.heads * (
            (512 + 32) * spec.token_bytes(window.key_dim, window.value_dim) + 2 * window.key_dim
        )
        found = geometry.bytes_by_kind(2048, spec)["window"]
        assert found == geometry.count("window") * each

    def test_a_short_or_protected_window_is_left_alone(self):
        short = describe(CONFIGS["gemma3_text"] | {"sliding_window": 32})
        assert short.packed(KVSpec(3, 4)) == short.count("full")
        geometry = describe(CONFIGS["gemma3_text"])
        spec = KVSpec(3, 4, protect_first=1)
        assert geometry.layers[0][0].kind == "window"
        assert geometry.packed(spec) == geometry.count("full")


class TestUnknown:
    def test_an_unknown_type_is_unknown_and_not_free(self):
        config = LLAMA | {"model_type": "something_new"}
        assert describe(config) is None
        assert why_unknown(config) == "no rule for the caches of model type 'something_new'"

    def test_a_value_that_the_rule_needs_is_named(self):
        config = {k: v for k, v in LLAMA.items() if k != "num_hidden_layers"}
        assert why_unknown(config) == "config.json has no num_hidden_layers"

    @pytest.mark.parametrize("value", ["32", -1, 2**70, 1.5, [4], True])
    def test_a_value_that_is_no_size_is_named(self, value):
        config = LLAMA | {"num_key_value_heads": value}
        assert why_unknown(config) == f"config.json: num_key_value_heads {value!r} is not a size"

    def test_what_mlx_lm_assumes_is_reported(self):
        config = {"model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 256}
        assert describe(config).assumed["sliding_window"] == 512

    def test_every_alias_leads_to_a_rule(self):
        assert set(ALIASES.values()) <= set(RULES)


class TestNestedConfigs:
    @pytest.mark.parametrize("key", ["text_config", "llm_config", "language_config"])
    def test_the_language_model_is_found_inside(self, key):
        config = {"model_type": "some_vlm", key: LLAMA, "vision_config": {"hidden_size": 3}}
        assert text_config(config) == LLAMA
        assert describe(config).nbytes(512) == describe(LLAMA).nbytes(512)

    def test_thinker_of_an_omni_model(self):
        config = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": LLAMA}}
        assert text_config(config) == LLAMA

    def test_text_types_of_wrappers_mean_the_type_itself(self):
        text = CONFIGS["qwen3"] | {"model_type": "qwen3_vl_text"}
        assert describe({"model_type": "qwen3_vl", "text_config": text}).model_type == "qwen3"


# Facts of published configs, and bytes at 32768 tokens worked out by hand:
# layers x key/value heads x (key + value size) x 2 bytes x tokens, windows and states apart.
K32 = 32768
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.2-1B": (LLAMA, 16 * 8 * 128 * 2 * K32),
    "Llama-3.1-8B": (
        dict(LLAMA, hidden_size=4096, num_hidden_layers=32, head_dim=None),
        32 * 8 * 256 * 2 * K32,
    ),
    "Llama-3.1-70B": (
        dict(LLAMA, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, head_dim=None),
        80 * 8 * 256 * 2 * K32,
    ),
    "SmolLM2-135M": (
        {
            "model_type": "llama",
            "hidden_size": 576,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
        },
        30 * 3 * 128 * 2 * K32,
    ),
    "Mistral-7B-v0.3": (
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": None,
        },
        32 * 8 * 256 * 2 * K32,
    ),
    "Mixtral-8x7B": (
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
        32 * 8 * 256 * 2 * K32,
    ),
    "Qwen2.5-7B": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "sliding_window": 131072,
            "use_sliding_window": False,
        },
        28 * 4 * 256 * 2 * K32,
    ),
    "Qwen3-0.6B": (
        {
            "model_type": "qwen3",
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        28 * 8 * 256 * 2 * K32,
    ),
    "Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
        48 * 4 * 256 * 2 * K32,
    ),
    # every fourth layer keeps keys and values; the others a state of 32 x 128 x 128 in float32 and
    # three rows of 2 x 16 x 128 + 32 x 128 convolution inputs
    "Qwen3-Next-80B-A3B": (
        {
            "model_type": "qwen3_next",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
        },
        12 * 2 * 512 * 2 * K32 + 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2),
    ),
    # five of six layers see 512 tokens
    "gemma-3-1b": (
        {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
        },
        (4 * K32 + 22 * 512) * 512 * 2,
    ),
    # its config leaves heads, head size and pattern to the class
    "gemma-3-4b": (
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 34,
                "intermediate_size": 10240,
                "sliding_window": 1024,
            },
        },
        (5 * K32 + 29 * 1024) * 4 * 512 * 2,
    ),
    "gemma-2-9b": (
        {
            "model_type": "gemma2",
            "hidden_size": 3584,
            "num_hidden_layers": 42,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "sliding_window": 4096,
        },
        42 * 8 * 512 * 2 * K32,  # mlx-lm gives its sliding layers full caches
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
        },
        (12 * K32 + 12 * 128) * 8 * 128 * 2,
    ),
    "DeepSeek-V3": (
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        61 * (512 + 64) * 2 * K32,
    ),
    "Kimi-K2": (
        {
            "model_type": "kimi_k2",
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
        },
        61 * (512 + 64) * 2 * K32,
    ),
    # this class of mlx-lm expands the latent: 16 heads of 192 for keys and 128 for values
    "DeepSeek-V2-Lite": (
        {
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        27 * 16 * (192 + 128) * 2 * K32,
    ),
    "Llama-4-Scout": (
        {
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text",
                "hidden_size": 5120,
                "num_hidden_layers": 48,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "attention_chunk_size": 8192,
            },
        },
        (12 * K32 + 36 * (8192 + 256)) * 8 * 256 * 2,
    ),
    "falcon-mamba-7b": (
        {
            "model_type": "falcon_mamba",
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "intermediate_size": 8192,
            "state_size": 16,
            "conv_kernel": 4,
        },
        64 * (3 * 8192 + 8192 * 16) * 2,
    ),
    "granite-4.0-h-tiny": (
        {
            "model_type": "granitemoehybrid",
            "hidden_size": 1536,
            "num_hidden_layers": 40,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
        },
        4 * 4 * 256 * 2 * K32 + 36 * (3 * (3072 + 256) * 2 + 48 * 64 * 128 * 4),
    ),
    "phi-4": (
        {
            "model_type": "phi3",
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
        },
        40 * 10 * 256 * 2 * K32,
    ),
    "GLM-4.5-Air": (
        {
            "model_type": "glm4_moe",
            "hidden_size": 4096,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        46 * 8 * 256 * 2 * K32,
    ),
    "LFM2-1.2B": (
        {
            "model_type": "lfm2",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
        6 * 8 * 128 * 2 * K32 + 10 * 2 * 2048 * 2,
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024},
        12 * 12 * 128 * 2 * K32,
    ),
}


class TestPublishedConfigs:
    @pytest.mark.parametrize("name", PUBLISHED)
    def test_bytes_worked_out_by_hand(self, name):
        config, expected = PUBLISHED[name]
        assert describe(config).nbytes(K32) == expected

    def test_pieces_say_what_they_are(self):
        geometry = describe(PUBLISHED["Qwen3-Next-80B-A3B"][0])
        assert geometry.count("full") == 12
        assert geometry.count("state") == 36
        assert isinstance(geometry.layers[0][0], State)
        assert isinstance(geometry.layers[3][0], Attention)


class TestHostileConfigs:
    JUNK = (
        *(None, 0, 1, -1, 3, 2**39, 10**30, True, False, 1.5, float("nan"), "x", "", [], {}),
        *([1], ["full_attention"] * 4, [None] * 40, [[]] * 40, ["a", {}], {"a": []}),
        *([{"attention": {"n_heads_in_group": value}}] * 40 for value in (0, "a")),
    )
    FIELDS = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "layer_types", "sliding_window", "sliding_window_pattern", "kv_lora_rank"),
        *("qk_rope_head_dim", "n_layer", "n_layers", "num_layers", "hybrid_override_pattern"),
        *("block_configs", "compress_ratios", "kv_source_layer_ids", "linear_attn_config"),
        *("layers_block_type", "block_types", "text_config", "architectures", "model_type"),
    )

    @pytest.mark.parametrize("model_type", sorted(RULES))
    def test_give_a_cost_above_zero_or_none_and_no_other_error(self, model_type):
        chance = random.Random(model_type)
        for _ in range(60):
            config = {"model_type": model_type}
            if chance.random() < 0.7:
                config = dict(CONFIGS.get(model_type, config))
            fields = [*self.FIELDS, *config]
            for _ in range(chance.randint(1, 4)):
                config[chance.choice(fields)] = chance.choice(self.JUNK)
            geometry = describe(config)
            if geometry is None:
                assert why_unknown(config)
            else:
                assert geometry.layers
                assert geometry.nbytes(300) >= 0
                assert all(p.heads for p in geometry.pieces() if isinstance(p, Attention))
