"""The vocabulary of module names, held against the model classes of the installed mlx-lm.

Models are built with 40 experts and no other size of 40, so that a weight with 40 outputs is a
router whatever it is called. Nothing is computed: MLX builds lazily.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from typing import Any

import pytest

from turboquant_mlx.convert.options import ConvertOptions
from turboquant_mlx.convert.recipe import ModuleInfo, plan_modules
from turboquant_mlx.convert.roles import is_router, layer_of, reads_block_input, role_of

EXPERTS = 40
LAYERS = 4
FULL = ["full_attention"] * LAYERS

# One configuration in the words of every architecture; each takes what it knows.
COMMON: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), EXPERTS),
    **dict.fromkeys(("moe_num_experts", "routed_experts"), EXPERTS),
    **dict.fromkeys(("hidden_size", "dim", "d_model", "model_dim", "hidden_dim", "n_embd"), 96),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), 1e-5),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "intermediate_size_mlp"), 160),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"), False),
    **dict.fromkeys(("conv_bias", "router_bias", "use_cla"), False),
    **dict.fromkeys(("use_qk_norm", "use_conv_bias", "mamba_conv_bias"), True),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("logits_scaling", "attention_multiplier", "embedding_multiplier"), 1.0),
    **dict.fromkeys(("residual_multiplier", "partial_rotary_factor"), 1.0),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim"), 4),
    **dict.fromkeys(("ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head", "head_dim", "v_head_dim"), 32),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "qk_nope_head_dim"), 32),
    **dict.fromkeys(("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"), 32),
    "decay_low_rank_dim": 32,
    "conv_L_cache": 3,
    "decoder_sparse_step": 1,
    "group_norm_size": 1,
    "kv_lora_rank": 48,
    "layer_group_size": 2,
    "linear_num_key_heads": 2,
    "mamba_expand": 2,
    "max_position_embeddings": 128,
    "mlp_only_layers": [],
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "vocab_size": 160,
}

# What single architectures need besides.
SPECIAL: dict[str, dict[str, Any]] = {
    "Klear": {},
    "afmoe": {"layer_types": FULL},
    "bailing_hybrid": {},
    "bailing_moe": {},
    "bailing_moe_linear": {},
    "bailing_moe_v3": {},
    "dbrx": {
        "ffn_config": {"moe_num_experts": EXPERTS, "moe_top_k": 2, "ffn_hidden_size": 64},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
    },
    "deepseek": {},
    "deepseek_v2": {
        "topk_method": "greedy",
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1,
            "mscale_all_dim": 1,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "deepseek_v3": {},
    "deepseek_v32": {},
    "dots1": {},
    "ernie4_5_moe": {},
    "exaone_moe": {"sliding_window": None, "layer_types": FULL, "is_moe_layer": [True] * LAYERS},
    "gemma4_text": {
        "enable_moe_block": True,
        "layer_types": FULL,
        "num_kv_shared_layers": 0,
        "top_k_experts": 2,
    },
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "position_embedding_type": "rope",
    },
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_linear": {
        "model_max_length": 128,
        "linear_attn_config": {
            "kda_layers": [1, 2],
            "full_attn_layers": [3, 4],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "laguna": {},
    "lfm2_moe": {"use_expert_bias": True, "layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 0,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "minimax": {"rotary_dim": 16},
    "mistral4": {
        "rope_parameters": {
            "rope_theta": 1e4,
            "type": "yarn",
            "factor": 4.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 64,
        },
    },
    "mixtral": {},
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "E", "-"],
        "mlp_hidden_act": "relu2",
        "moe_shared_expert_intermediate_size": 64,
    },
    "olmoe": {},
    "phimoe": {},
    "phixtral": {"rotary_dim": 16},
    "qwen2_moe": {},
    "qwen3_5_moe": {},
    "qwen3_moe": {},
    "qwen3_next": {"partial_rotary_factor": 0.5},
    "solar_open": {},
    "step3p5": {"num_attention_groups": 2},
    # without experts, but with activations that are read by unusual sets of layers
    "gemma3n": {},
    "llama": {},
    "muse_glimmer": {},
    "nanochat": {},
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_allow_neg_eigval": False,
    },
    "qwen": {"kv_channels": 24},
    "rwkv7": {},
    "talkie": {},
}
WITHOUT_EXPERTS = set(list(SPECIAL)[list(SPECIAL).index("gemma3n") :])


def build(model_type: str) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    config = {**COMMON, **SPECIAL[model_type], "model_type": model_type}
    if model_type == "gemma3n":
        config = {"model_type": model_type, "text_config": {**config, **GEMMA3N}}
    return module.Model(module.ModelArgs.from_dict(config))


GEMMA3N: dict[str, Any] = {
    "activation_sparsity_pattern": [0.0] * LAYERS,
    "hidden_size_per_layer_input": 32,
    "intermediate_size": [160] * LAYERS,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": 160,
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "final_logit_softcapping": 30.0,
    "laurel_rank": 32,
    "query_pre_attn_scalar": 32,
    "rope_local_base_freq": 1e4,
    "rope_scaling": None,
    "sliding_window": 32,
}


def modules_of(model: Any) -> list[ModuleInfo]:
    from turboquant_mlx.convert.source_model import list_modules

    return list_modules(model)


@pytest.mark.parametrize("model_type", sorted(set(SPECIAL) - WITHOUT_EXPERTS))
def test_routers_of_real_models_stay_and_experts_do_not(model_type: str) -> None:
    infos = modules_of(build(model_type))
    decisions = plan_modules(infos, ConvertOptions(bits=4)).by_path()
    for info in infos:
        decision = decisions[info.path]
        if info.kind == "linear" and info.shape[0] == EXPERTS:
            assert (decision.role, decision.action) == ("router", "keep"), info.path
        elif info.kind in ("linear", "switch"):
            assert decision.role != "router" or is_block_indexer(info.path), info.path
        if info.kind == "switch":
            assert (decision.role, decision.action) == ("expert", "quantize"), info.path
    assert any(d.role == "expert" for d in decisions.values())
    assert any(d.role == "router" for d in decisions.values())


def is_block_indexer(path: str) -> bool:
    return ".indexer." in path or path.endswith(".shared_expert_gate")


@pytest.mark.parametrize("model_type", sorted(SPECIAL))
def test_every_linear_of_a_decoder_layer_has_a_role(model_type: str) -> None:
    """--attn-bits and --mlp-bits together reach all of it, but for gemma's side paths."""
    for info in modules_of(build(model_type)):
        if info.kind in ("linear", "switch") and layer_of(info.path) is not None:
            side_path = any(
                mark in info.path for mark in ("per_layer_", ".altup", ".laurel.", "_res_proj")
            )
            assert side_path or role_of(info.path, info.kind) in {
                "attention",
                "mlp",
                "expert",
                "router",
            }, info.path


@pytest.mark.parametrize("model_type", sorted(SPECIAL))
def test_a_rotation_group_is_what_reads_one_array(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watched from inside: the layers of one parent that are called with the same array."""
    model = build(model_type)
    plan = plan_modules(modules_of(model), ConvertOptions(bits=4, group_size=32))
    leader = {d.path: d.rotation_group for d in plan.decisions if d.action == "quantize"}
    readers = watch_a_forward(model, monkeypatch)
    assert readers, "the model called no layer"
    for together in readers:
        known = [path for path in together if path in leader]
        by_parent = defaultdict(set)
        for path in known:
            by_parent[path.rpartition(".")[0]].add(leader[path])
        if "altup_projections" not in str(known):  # siblings in a list: too rare to be worth it
            assert all(len(leaders) == 1 for leaders in by_parent.values()), known
    called = {path for together in readers for path in together}
    groups = defaultdict(set)
    for path, group in leader.items():
        groups[group].add(path)
    for members in groups.values():
        members &= called
        # Experts that are plain linears see different tokens each time they are called.
        assert any(members <= set(together) for together in readers) or not members, members


def watch_a_forward(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Paths of linear and expert layers, grouped by the very array that they were called with."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.models.switch_layers import SwitchLinear

    paths = {
        id(m): path for path, m in model.named_modules() if isinstance(m, (nn.Linear, SwitchLinear))
    }
    seen: dict[int, tuple[Any, list[str]]] = {}

    def watched(original: Any) -> Any:
        def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            if id(self) in paths:
                # The array is held, or its id could be given to a later one.
                seen.setdefault(id(x), (x, []))[1].append(paths[id(self)])
            return original(self, x, *args, **kwargs)

        return call

    for kind in (nn.Linear, SwitchLinear):
        monkeypatch.setattr(kind, "__call__", watched(kind.__call__))
    model(mx.array([[0, 1, 2, 3]]), cache=make_prompt_cache(model))
    return [together for _, together in seen.values()]


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.gate.gate_proj",
        "model.layers.0.mlp.gate.gate",
        "model.layers.0.mlp.gate.proj",
        "model.layers.0.mlp.gate.wg",
        "model.layers.0.mlp.router",
        "model.layers.0.mlp.router.gate",
        "model.layers.0.mlp.router.classifier",
        "model.layers.0.router.proj",
        "model.layers.0.block_sparse_moe.gate",
        "model.layers.0.block_sparse_moe.router.layer",
        "model.layers.0.feed_forward.router",
        "model.layers.0.mlp.shared_expert_gate",
        "model.layers.0.mlp.gate_1",
        "model.layers.0.altup.modality_router",
        "model.layers.0.self_attn.indexer.wq_b",
        "model.layers.0.self_attn.indexer.weights_proj",
        "model.layers.0.self_attn.index_qk_proj",
        "model.layers.0.self_attn.index_q_proj",
    ],
)
def test_routers_and_block_indexers_are_known_by_name(path: str) -> None:
    assert is_router(path)
    assert role_of(path, "linear") == "router"


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.switch_mlp.gate_proj",
        "model.layers.0.mlp.shared_experts.gate_proj",
        "model.layers.0.self_attn.gate_proj",
        "model.layers.0.self_attn.g_proj",
        "model.layers.0.mlp.mlp_gate",
        "model.layers.0.per_layer_input_gate",
    ],
)
def test_gates_of_an_activation_are_no_routers(path: str) -> None:
    assert not is_router(path)


@pytest.mark.parametrize(
    ("path", "kind", "role"),
    [
        ("model.layers.0.self_attn.q_proj", "linear", "attention"),
        ("model.layers.0.linear_attn.in_proj_qkvz", "linear", "attention"),
        ("transformer.h.0.attn.attention.out_proj", "linear", "attention"),
        ("transformer.blocks.0.norm_attn_norm.attn.Wqkv", "linear", "attention"),
        ("model.layers.0.conv.in_proj", "linear", "attention"),
        ("backbone.layers.0.mixer.in_proj", "linear", "attention"),
        ("backbone.layers.0.mixer.up_proj", "linear", "mlp"),
        ("backbone.layers.0.mixer.shared_experts.up_proj", "linear", "mlp"),
        ("backbone.layers.0.mixer.switch_mlp.fc1", "switch", "expert"),
        ("model.layers.0.mlp.gate_up_proj", "linear", "mlp"),
        ("model.layers.0.feed_forward.w2", "linear", "mlp"),
        ("transformer.layers.0.ffn.proj_1", "linear", "mlp"),
        ("model.layers.0.mlp.shared_experts.down_proj", "linear", "mlp"),
        ("model.layers.0.mlp.routed_expert_up_proj", "linear", "mlp"),
        ("model.layers.0.block_sparse_moe.switch_mlp.down_proj", "switch", "expert"),
        ("model.layers.0.feed_forward.experts.down_proj", "switch", "expert"),
        ("model.layers.0.mlp.experts.gate_up_proj", "switch", "expert"),
        ("transformer.blocks.0.ffn.experts.3.w2", "linear", "expert"),
        ("model.layers.0.self_attn.o_a_proj", "switch", "attention"),
        ("lm_head", "linear", "lm_head"),
        ("language_model.lm_head", "linear", "lm_head"),
        ("lm_head.linear", "linear", "lm_head"),
        ("output", "linear", "lm_head"),
        ("model.embed_out", "linear", "lm_head"),
        ("model.embed_tokens", "embedding", "embedding"),
        ("model.layers.0.input_layernorm", "other", "norm"),
        ("model.layers.0.input_layernorm.1", "other", "norm"),
        ("transformer.h.0.ln_1", "other", "norm"),
        ("model.layers.0.mlp.gate", "other", "router"),
        ("model.per_layer_model_projection", "linear", "other"),
    ],
)
def test_role_of_a_path(path: str, kind: str, role: str) -> None:
    assert role_of(path, kind) == role


def test_the_layer_is_the_first_number_of_a_path() -> None:
    assert layer_of("language_model.model.layers.12.mlp.experts.3.w1") == 12
    assert layer_of("lm_head") is None


def test_reading_the_block_input_depends_on_the_siblings() -> None:
    swiglu = frozenset({"w1", "w2", "w3"})
    first_qwen = frozenset({"w1", "w2", "c_proj"})
    assert not reads_block_input("model.layers.0.feed_forward.w2", swiglu)
    assert reads_block_input("transformer.h.0.mlp.w2", first_qwen)
    token_shifted = frozenset({"r_proj", "k_proj", "v_proj"})
    assert not reads_block_input("model.layers.0.attn.k_proj", token_shifted)
