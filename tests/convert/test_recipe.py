"""What is quantized how: the rules one by one, on small invented models."""

from __future__ import annotations

from typing import Any

import pytest

from turboquant_mlx.convert.options import ConvertOptions
from turboquant_mlx.convert.recipe import (
    Decision,
    ModuleInfo,
    Plan,
    fit_affine_group_size,
    fit_group_size,
    plan_modules,
)
from turboquant_mlx.errors import OptionError
from turboquant_mlx.quant.rotation import block_size
from turboquant_mlx.quant.spec import QuantSpec


def linear(path: str, outputs: int = 128, inputs: int = 128, **more: Any) -> ModuleInfo:
    return ModuleInfo(path, "linear", (outputs, inputs), num_parameters=outputs * inputs, **more)


def experts(path: str, outputs: int = 64, inputs: int = 128, **more: Any) -> ModuleInfo:
    shape = (8, outputs, inputs)
    return ModuleInfo(path, "switch", shape, num_parameters=8 * outputs * inputs, **more)


def norm(path: str) -> ModuleInfo:
    return ModuleInfo(path, "other", (128,), num_parameters=128)


EMBEDDING = ModuleInfo("model.embed_tokens", "embedding", (320, 128), num_parameters=40960)


def dense_layer(number: int, width: int = 128) -> list[ModuleInfo]:
    at = f"model.layers.{number}"
    return [
        *(linear(f"{at}.self_attn.{name}", 128, width) for name in ("q_proj", "k_proj", "v_proj")),
        linear(f"{at}.self_attn.o_proj", width, 128),
        linear(f"{at}.mlp.gate_proj", 192, width),
        linear(f"{at}.mlp.up_proj", 192, width),
        linear(f"{at}.mlp.down_proj", width, 192),
        norm(f"{at}.input_layernorm"),
    ]


def moe_layer(number: int, block: str = "mlp", down: str = "down_proj") -> list[ModuleInfo]:
    at = f"model.layers.{number}"
    return [
        linear(f"{at}.self_attn.q_proj"),
        linear(f"{at}.{block}.gate", 32, 128),
        experts(f"{at}.{block}.switch_mlp.gate_proj"),
        experts(f"{at}.{block}.switch_mlp.up_proj"),
        experts(f"{at}.{block}.switch_mlp.{down}", 128, 64),
        linear(f"{at}.{block}.shared_experts.up_proj"),
        linear(f"{at}.{block}.shared_experts.down_proj"),
    ]


DENSE = [EMBEDDING, *dense_layer(0), *dense_layer(1), norm("model.norm"), linear("lm_head", 320)]
MOE = [EMBEDDING, *moe_layer(0), *moe_layer(1), *moe_layer(2), linear("lm_head", 320)]


def plan(modules: list[ModuleInfo], **options: Any) -> Plan:
    """With scalar codes, whose group size depends on nothing but the options."""
    return plan_modules(modules, ConvertOptions(**{"codec": "scalar", **options}))


def decision(modules: list[ModuleInfo], path: str, **options: Any) -> Decision:
    return plan(modules, **options).by_path()[path]


def methods(result: Plan, ending: str) -> list[str]:
    """How the modules whose path ends so are stored, in module order."""
    return [d.method for d in result.decisions if d.path.endswith(ending)]


# --- what is quantized at all ---


def test_a_plan_decides_every_module_in_order() -> None:
    result = plan(DENSE)
    assert [d.path for d in result.decisions] == [m.path for m in DENSE]
    assert not result.notices
    assert not result.warnings


def test_linears_are_quantized_and_the_rest_stays_with_a_reason() -> None:
    result = plan(DENSE)
    assert {d.method for d in result.decisions if d.action == "quantize"} == {"3-bit g32"}
    assert result.why_kept() == {"norm": 3, "embedding": 1}
    assert not result.quantizes_nothing


def test_an_untied_head_is_quantized_like_any_linear() -> None:
    head = decision(DENSE, "lm_head", bits=4, attn_bits=2, mlp_bits=2)
    assert (head.role, head.method) == ("lm_head", "4-bit g32")


def test_expert_stacks_are_quantized_and_their_router_is_not() -> None:
    result = plan(MOE)
    assert decision(MOE, "model.layers.0.mlp.gate").reason == "router"
    assert methods(result, "switch_mlp.gate_proj") == ["3-bit g32"] * 3


@pytest.mark.parametrize("kind", ["multi_linear", "conv", "other"])
def test_other_classes_stay(kind: Any) -> None:
    odd = ModuleInfo("model.layers.0.self_attn.embed_q", kind, (4, 64, 64))
    assert decision([odd], odd.path, quantize_extras=True).action == "keep"


def test_a_scalar_parameter_is_no_obstacle() -> None:
    gain = ModuleInfo("model.layers.0.attn_gain", "other", ())
    assert decision([gain], gain.path).reason == "other parameters"


@pytest.mark.parametrize(("outputs", "inputs"), [(31, 128), (128, 16), (1, 128)])
def test_small_layers_stay(outputs: int, inputs: int) -> None:
    small = linear("model.layers.0.mlp.up_proj", outputs, inputs)
    assert decision([small], small.path).reason == "fewer than 32 inputs or outputs"
    assert decision([small], small.path, quantize_extras=True).action == "keep"


def test_a_model_without_anything_to_quantize_says_so() -> None:
    result = plan([EMBEDDING, norm("model.norm")], quantize_extras=True)
    assert result.quantizes_nothing
    assert result.why_kept() == {"norm": 1}


# --- the model's own rule ---


def test_what_the_model_refuses_stays() -> None:
    refused = linear("model.layers.0.self_attn.g_proj", predicate=False)
    for extras in (False, True):
        found = decision([refused], refused.path, quantize_extras=extras)
        assert (found.action, found.reason) == ("keep", "kept by the model's own rule")


def test_what_the_model_wants_treated_specially_stays() -> None:
    """Also where no name says that it is a router."""
    special = linear("model.layers.0.mlp.chooser", predicate={"group_size": 64, "bits": 8})
    assert decision([special], special.path).reason == "kept by the model's own rule"


@pytest.mark.parametrize("last", ["self_attn.o_proj", "mlp.down_proj"])
def test_a_guard_against_floating_point_formats_is_not_meant_for_us(last: str) -> None:
    """granite wants 8 bits in these layers because scales of nvfp4 underflow there."""
    guarded = linear(f"model.layers.0.{last}", predicate={"group_size": 64, "bits": 8})
    result = plan([guarded])
    assert result.decisions[0].method == "3-bit g32"
    assert "1 module quantized as asked" in result.notices[0]


def test_a_router_stays_whatever_the_predicate_says() -> None:
    for predicate in (None, True, False, {"bits": 8}):
        router = linear("model.layers.0.block_sparse_moe.router.layer", predicate=predicate)
        found = decision([router], router.path, quantize_extras=True)
        assert (found.action, found.reason) == ("keep", "router")


# --- bits ---


def test_attention_and_mlp_bits() -> None:
    result = plan(DENSE, attn_bits=4, mlp_bits=2)
    assert set(methods(result, "_proj")) == {"4-bit g32", "2-bit g32"}
    by_role = {d.role: d.method for d in result.decisions if d.action == "quantize"}
    assert by_role == {"attention": "4-bit g32", "mlp": "2-bit g32", "lm_head": "3-bit g32"}


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe", "feed_forward", "ffn", "moe"])
def test_mlp_bits_and_group_size_reach_every_expert_naming(block: str) -> None:
    result = plan(moe_layer(0, block), mlp_bits=2, mlp_group_size=64)
    for ending in ("switch_mlp.gate_proj", "switch_mlp.down_proj", "shared_experts.up_proj"):
        assert methods(result, ending) == ["2-bit g64"], ending
    assert methods(result, "q_proj") == ["3-bit g32"]


@pytest.mark.parametrize(
    "module",
    [
        experts("model.layers.0.mlp.experts.gate_up_proj"),
        experts("model.layers.0.feed_forward.experts.gate_up_proj"),
        experts("backbone.layers.0.mixer.switch_mlp.fc1"),
        linear("transformer.blocks.0.ffn.experts.0.w1"),
        linear("model.layers.0.mlp.gate_up_proj"),
    ],
)
def test_mlp_bits_reach_fused_and_listed_experts(module: ModuleInfo) -> None:
    assert decision([module], module.path, mlp_bits=2).method == "2-bit g32"


def test_qjl_reaches_linears_experts_and_ternary() -> None:
    result = plan(MOE, use_qjl=True, ternary_experts=True)
    assert set(methods(result, "q_proj")) == {"3-bit g32 + QJL"}
    assert set(methods(result, "switch_mlp.up_proj")) == {"ternary g32 + QJL"}


# --- experts ---


def test_ternary_experts_leave_shared_experts_alone() -> None:
    result = plan(MOE, ternary_experts=True)
    assert set(methods(result, "switch_mlp.down_proj")) == {"ternary g32"}
    assert set(methods(result, "shared_experts.up_proj")) == {"3-bit g32"}


@pytest.mark.parametrize("down", ["down_proj", "fc2", "w2", "output_linear"])
def test_expert_down_bits(down: str) -> None:
    result = plan(moe_layer(0, down=down), ternary_experts=True, expert_down_bits=4)
    assert methods(result, f"switch_mlp.{down}") == ["4-bit g32"]
    assert methods(result, "switch_mlp.up_proj") == ["ternary g32"]
    assert methods(result, "shared_experts.down_proj") == ["3-bit g32"]


def test_protected_layers_get_their_own_bits() -> None:
    result = plan(MOE, bits=2, ternary_experts=True, protect_expert_layers=(1,), protect_bits=4)
    assert methods(result, "switch_mlp.up_proj") == ["ternary g32", "4-bit g32", "ternary g32"]
    assert set(methods(result, "shared_experts.up_proj")) == {"2-bit g32"}


def test_protection_never_lowers_the_down_projections() -> None:
    result = plan(
        MOE, ternary_experts=True, expert_down_bits=4, protect_expert_layers=(0,), protect_bits=3
    )
    assert methods(result, "switch_mlp.down_proj") == ["4-bit g32"] * 3
    assert methods(result, "switch_mlp.up_proj") == ["3-bit g32", "ternary g32", "ternary g32"]


def test_protection_changes_no_group_size() -> None:
    result = plan(MOE, mlp_group_size=32, ternary_experts=True, protect_expert_layers=(0,))
    assert methods(result, "switch_mlp.up_proj") == ["3-bit g32", "ternary g32", "ternary g32"]


def test_protecting_a_layer_without_experts_warns() -> None:
    result = plan(MOE, ternary_experts=True, protect_expert_layers=(0, 7, 8))
    assert result.warnings == [
        "--protect-expert-layers: nothing to protect in layers 7-8, the experts of this model are "
        "in layers 0-2"
    ]


def test_protection_that_takes_bits_away_warns() -> None:
    result = plan(MOE, bits=4, protect_expert_layers=(0,))
    assert methods(result, "switch_mlp.up_proj") == ["3-bit g32", "4-bit g32", "4-bit g32"]
    assert result.warnings == [
        "--protect-bits 3 gives the protected layers fewer bits than the other experts have (4)"
    ]


def test_tiers_per_layer() -> None:
    tiers = {0: "4", 2: "ternary"}
    result = plan(MOE, expert_layer_tiers=tiers)
    assert methods(result, "switch_mlp.up_proj") == ["4-bit g32", "3-bit g32", "ternary g32"]
    assert methods(result, "switch_mlp.down_proj") == ["4-bit g32", "3-bit g32", "ternary g32"]
    rest_ternary = plan(MOE, expert_layer_tiers={0: "4"}, ternary_experts=True)
    assert methods(rest_ternary, "switch_mlp.up_proj") == ["4-bit g32", *["ternary g32"] * 2]


def test_a_tier_for_a_layer_without_experts_is_an_error() -> None:
    with pytest.raises(OptionError) as caught:
        plan(MOE, expert_layer_tiers={1: "4", 9: "2"})
    assert caught.value.message == "--expert-layer-tiers names layer 9, which has no experts"
    assert caught.value.hint == "the experts of this model are in layers 0-2"


# --- options without effect ---


@pytest.mark.parametrize(
    "options",
    [
        {"ternary_experts": True},
        {"expert_down_bits": 4},
        {"protect_expert_layers": (0,)},
        {"expert_layer_tiers": {0: "4"}},
    ],
)
def test_expert_options_on_a_dense_model_are_noticed(options: dict[str, Any]) -> None:
    result = plan(DENSE, **options)
    flag = "--" + next(iter(options)).replace("_", "-")
    assert result.notices == [f"{flag} has no effect on this model: it has no experts to quantize"]
    assert result.decisions == plan(DENSE).decisions


def test_other_idle_options_are_noticed() -> None:
    head_only = [linear("lm_head", 320)]
    result = plan(head_only, attn_bits=4, mlp_bits=4, mlp_group_size=32, quantize_extras=True)
    assert [notice.split(":")[0] for notice in result.notices] == [
        "--attn-bits has no effect on this model",
        "--mlp-bits has no effect on this model",
        "--mlp-group-size has no effect on this model",
        "--quantize-extras has no effect on this model",
    ]


# --- group sizes ---


@pytest.mark.parametrize(
    ("width", "requested", "used"),
    [(128, 64, 64), (144, 64, 16), (576, 128, 64), (96, 128, 32), (100, 64, None), (48, 16, 16)],
)
def test_the_largest_smaller_group_size_that_divides_is_used(
    width: int, requested: int, used: int | None
) -> None:
    assert fit_group_size(width, requested) == used


def test_an_adapted_group_size_is_recorded_and_counted() -> None:
    result = plan(dense_layer(0, width=144))
    assert methods(result, "q_proj") == ["3-bit g16"]
    assert methods(result, "o_proj") == ["3-bit g32"]
    assert result.notices == ["5 modules use group size 16: 32 does not divide the width 144"]


def test_a_width_that_nothing_divides_stays_and_is_counted() -> None:
    modules = [*dense_layer(0), linear("model.layers.0.self_attn.x_proj", 64, 100)]
    result = plan(modules)
    assert result.by_path()["model.layers.0.self_attn.x_proj"].action == "keep"
    assert result.notices == [
        "1 module left at source precision: no group size divides the width 100"
    ]


# --- rotations ---


@pytest.mark.parametrize(
    ("rotation", "group_size", "block"),
    [("hadamard", 64, 192), ("blockwise_hadamard", 64, 64), ("none", 64, 1)],
)
def test_rotation_block(rotation: str, group_size: int, block: int) -> None:
    down = decision(DENSE, "model.layers.0.mlp.down_proj", rotation=rotation, group_size=group_size)
    assert down.spec is not None
    assert down.spec.rotation_block == block


def groups(result: Plan) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for d in result.decisions:
        if d.rotation_group is not None:
            found.setdefault(d.rotation_group, []).append(d.path.rpartition(".")[2])
    return found


def test_layers_that_read_one_activation_share_its_rotation() -> None:
    at = "model.layers.0"
    assert groups(plan(dense_layer(0))) == {
        f"{at}.self_attn.q_proj": ["q_proj", "k_proj", "v_proj"],
        f"{at}.self_attn.o_proj": ["o_proj"],
        f"{at}.mlp.gate_proj": ["gate_proj", "up_proj"],
        f"{at}.mlp.down_proj": ["down_proj"],
    }


def test_experts_share_and_so_do_the_projections_of_latent_attention() -> None:
    at = "model.layers.0.self_attn"
    latent = [linear(f"{at}.{name}") for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")]
    assert groups(plan(latent)) == {
        f"{at}.q_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
        f"{at}.q_b_proj": ["q_b_proj"],
    }
    stacks = groups(plan(moe_layer(0)))
    assert stacks["model.layers.0.mlp.switch_mlp.gate_proj"] == ["gate_proj", "up_proj"]


def test_different_bits_do_not_separate_a_group_but_different_blocks_do() -> None:
    at = "model.layers.0.mlp"
    pair = [linear(f"{at}.gate_proj", 64, 144), linear(f"{at}.up_proj", 64, 128)]
    assert len(groups(plan(pair))) == 2
    listed = [linear(f"{at}.experts.0.{name}") for name in ("w1", "v1", "w2")]
    assert groups(plan(listed)) == {
        f"{at}.experts.0.w1": ["w1", "v1"],
        f"{at}.experts.0.w2": ["w2"],
    }


def test_a_kept_layer_leads_no_group() -> None:
    at = "model.layers.0.self_attn"
    modules = [linear(f"{at}.q_proj", predicate=False), linear(f"{at}.k_proj")]
    assert groups(plan(modules)) == {f"{at}.k_proj": ["k_proj"]}


# --- extras ---


def test_extras_turn_embeddings_into_affine() -> None:
    embedding = decision(DENSE, "model.embed_tokens", quantize_extras=True)
    assert (embedding.action, embedding.affine) == ("affine", (4, 64))
    assert embedding.method == "affine 4-bit g64"
    assert decision(DENSE, "lm_head", quantize_extras=True).action == "quantize"


@pytest.mark.parametrize(
    ("width", "requested", "used"), [(128, 64, 64), (96, 64, 32), (192, 128, 64), (144, 64, None)]
)
def test_affine_group_size(width: int, requested: int, used: int | None) -> None:
    assert fit_affine_group_size(width, requested) == used


def test_an_embedding_that_affine_cannot_group_stays() -> None:
    odd = ModuleInfo("model.embed_tokens", "embedding", (320, 144))
    result = plan([odd, *dense_layer(0)], quantize_extras=True)
    assert result.decisions[0].action == "keep"
    assert "no group size of MLX's affine mode" in result.decisions[0].reason


def test_extras_reach_what_the_model_wants_treated_specially_at_the_bits_it_wants() -> None:
    special = linear("model.layers.0.attn.w_lora.lora.2", predicate={"bits": 8})
    embedding = ModuleInfo("model.embeddings", "embedding", (320, 128), predicate={"bits": 8})
    result = plan([embedding, special, *dense_layer(0)], quantize_extras=True, extras_bits=3)
    assert [d.affine for d in result.decisions[:2]] == [(8, 64), (8, 64)]


def test_extras_respect_an_embedding_that_the_model_refuses() -> None:
    refused = ModuleInfo("model.word_embeddings", "embedding", (320, 128), predicate=False)
    assert decision([refused], refused.path, quantize_extras=True).action == "keep"


# --- codecs ---


def test_trellis_codes_have_one_scale_for_each_rotation_block() -> None:
    for width, size in ((128, 128), (576, 192), (1536, 768), (4096, 1024), (2080, 32), (320, 64)):
        module = linear("model.layers.0.mlp.down_proj", inputs=width)
        found = decision([module], module.path, codec="trellis", bits=4)
        block = block_size(width)
        assert found.spec == QuantSpec(
            bits=4, window_bits=8, group_size=size, scale_layout="log8", rotation_block=block
        )
        assert size == max(block, 16)
        assert found.reason == ""
        assert found.method == f"4-bit trellis g{size}"


def test_a_given_group_size_holds_for_trellis_codes_too() -> None:
    result = plan(DENSE, codec="trellis", group_size=64, mlp_group_size=128)
    specs = {path: d.spec for path, d in result.by_path().items() if d.spec}
    assert specs["model.layers.0.self_attn.q_proj"] == QuantSpec(
        bits=3, window_bits=8, group_size=64, scale_layout="log8", rotation_block=128
    )
    assert specs["model.layers.0.mlp.up_proj"].group_size == 128
    assert specs["model.layers.0.mlp.down_proj"].group_size == 64
    assert any("128 does not divide the width 192" in note for note in result.notices)


def test_ternary_codes_are_never_trellis_codes() -> None:
    ternary = decision(
        MOE, "model.layers.0.mlp.switch_mlp.up_proj", ternary_experts=True, codec="trellis"
    )
    assert ternary.spec == QuantSpec(
        code="ternary", group_size=32, scale_layout="log8", rotation_block=128
    )
    other = decision(MOE, "model.layers.0.self_attn.q_proj", ternary_experts=True, codec="trellis")
    assert other.spec is not None
    assert other.spec.is_trellis


# --- specs ---


def test_specs_carry_what_the_decoder_needs() -> None:
    down = decision(DENSE, "model.layers.0.mlp.down_proj", bits=4, group_size=64, use_qjl=True)
    assert down.spec == QuantSpec(
        bits=4, group_size=64, scale_layout="log8", rotation_block=192, qjl=True
    )
    stack = decision(MOE, "model.layers.0.mlp.switch_mlp.up_proj", ternary_experts=True)
    assert stack.spec == QuantSpec(
        code="ternary", group_size=32, scale_layout="log8", rotation_block=128
    )
