"""config.json: transformers 5 said in mlx-lm's words, and never a wrong rotary base."""

from __future__ import annotations

import copy
import importlib
import json
import math

import mlx.core as mx
import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from turboquant_mlx.checkpoint.config import (
    dump_json,
    model_dtype,
    normalize_config,
    read_json_object,
    set_model_dtype,
)
from turboquant_mlx.errors import CheckpointError, UnsupportedModelError

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def saved_by_transformers(tmp_path, model_type: str, **values) -> dict:
    """What the installed transformers writes for a config."""
    folder = tmp_path / "saved"
    CONFIG_MAPPING[model_type](**values).save_pretrained(folder)
    return read_json_object(folder / "config.json")


def mlx_lm_args(config: dict, module: str | None = None, name: str = "ModelArgs"):
    """The settings that mlx-lm's model of this type takes from a config."""
    module = module or config["model_type"]
    args_class = getattr(importlib.import_module(f"mlx_lm.models.{module}"), name)
    return args_class.from_dict(copy.deepcopy(config))


def default(theta: float, **more) -> dict:
    return {"rope_type": "default", "rope_theta": theta, **more}


# --- the model types that must work -------------------------------------------------------------

# model type, its rope_parameters, what mlx-lm must be told
TABLE = [
    ("llama", default(500001.0), {"rope_theta": 500001.0, "rope_scaling": None}),
    ("llama", {**LLAMA3, "rope_theta": 500002.0}, {"rope_theta": 500002.0, "rope_scaling": LLAMA3}),
    ("qwen2", default(1000003.0), {"rope_theta": 1000003.0, "rope_scaling": None}),
    ("qwen3", default(1000004.0), {"rope_theta": 1000004.0}),
    ("qwen3", {**YARN, "rope_theta": 1000005.0}, {"rope_theta": 1000005.0, "rope_scaling": YARN}),
    ("qwen3_moe", default(1000006.0), {"rope_theta": 1000006.0, "num_experts": 24}),
    ("mixtral", default(1000007.0), {"rope_theta": 1000007.0, "rope_scaling": None}),
    ("gpt_oss", {**YARN, "rope_theta": 150008.0}, {"rope_theta": 150008.0, "rope_scaling": YARN}),
    ("granitemoe", default(10009.0), {"rope_theta": 10009.0, "rope_scaling": None}),
    ("deepseek_v2", default(10010.0), {"rope_theta": 10010.0}),
    ("deepseek_v2", {**YARN, "rope_theta": 10011.0}, {"rope_theta": 10011.0, "rope_scaling": YARN}),
    ("deepseek_v3", default(10012.0), {"rope_theta": 10012.0, "rope_scaling": None}),
    ("deepseek_v3", {**YARN, "rope_theta": 10013.0}, {"rope_theta": 10013.0, "rope_scaling": YARN}),
    (
        "gemma3_text",
        {"full_attention": default(1000014.0), "sliding_attention": default(10014.0)},
        {"rope_theta": 1000014.0, "rope_local_base_freq": 10014.0, "rope_scaling": None},
    ),
    (
        "gemma3_text",
        {
            "full_attention": {**LINEAR, "rope_theta": 1000015.0},
            "sliding_attention": default(10015.0),
        },
        {"rope_theta": 1000015.0, "rope_local_base_freq": 10015.0, "rope_scaling": LINEAR},
    ),
]


@pytest.mark.parametrize(("model_type", "parameters", "expected"), TABLE)
def test_mlx_lm_gets_what_transformers_wrote(tmp_path, model_type, parameters, expected):
    extra = {"num_local_experts": 24} if model_type == "qwen3_moe" else {}
    config = saved_by_transformers(tmp_path, model_type, rope_parameters=parameters, **extra)
    assert "rope_theta" not in config  # the new style, in which mlx-lm would take its default
    before = copy.deepcopy(config)
    normal, notes = normalize_config(config)
    assert config == before
    assert any("rope_theta" in note for note in notes)
    args = mlx_lm_args(normal)
    for key, value in expected.items():
        found = getattr(args, key)
        if isinstance(value, dict):
            assert {name: found[name] for name in value} == value
            assert found["type"] == value["rope_type"]
        else:
            assert found == value, key


def test_gemma3_keeps_its_text_model_in_a_section(tmp_path):
    text = {
        "rope_parameters": {
            "full_attention": {**LINEAR, "rope_theta": 1000016.0},
            "sliding_attention": default(10016.0),
        }
    }
    config = saved_by_transformers(tmp_path, "gemma3", text_config=text)
    normal, notes = normalize_config(config)
    assert all(note.startswith("text_config.") for note in notes)
    args = mlx_lm_args(normal["text_config"], "gemma3_text")
    assert (args.rope_theta, args.rope_local_base_freq) == (1000016.0, 10016.0)
    assert args.rope_scaling["factor"] == 8.0
    assert "rope_theta" not in normal


def test_qwen3_5_reads_its_nested_parameters_itself_and_still_does(tmp_path):
    text = {"rope_parameters": default(1000017.0, partial_rotary_factor=0.5)}
    config = saved_by_transformers(tmp_path, "qwen3_5", text_config=text)
    normal, _ = normalize_config(config)
    args = mlx_lm_args(normal["text_config"], "qwen3_5", "TextModelArgs")
    assert (args.rope_theta, args.partial_rotary_factor) == (1000017.0, 0.5)
    assert normal["text_config"]["rope_parameters"] == config["text_config"]["rope_parameters"]


def test_deepseek_v2_without_scaling_gets_the_plain_rotation(tmp_path):
    """mlx-lm's deepseek_v2 cannot be built without a YaRN scaling; with factor 1 it is none."""
    rope_class = importlib.import_module("mlx_lm.models.deepseek_v2").DeepseekV2YarnRotaryEmbedding
    config = saved_by_transformers(tmp_path, "deepseek_v2", rope_parameters=default(10018.0))
    scaling = mlx_lm_args(normalize_config(config)[0]).rope_scaling
    rope = rope_class(
        dim=64,
        base=10018.0,
        scaling_factor=scaling["factor"],
        original_max_position_embeddings=scaling["original_max_position_embeddings"],
        mscale=scaling["mscale"],
        mscale_all_dim=scaling["mscale_all_dim"],
    )
    x = mx.random.normal((1, 2, 30, 64))
    plain = mx.fast.rope(x, 64, traditional=True, base=10018.0, scale=1.0, offset=5)
    assert mx.abs(rope(x, offset=5) - plain).max().item() < 1e-4


# --- every other type that both libraries know --------------------------------------------------

# (transformers' type, mlx-lm's module and class, key that holds the base)
OTHERS = [
    ("afmoe", "afmoe", "rope_theta"),
    ("apertus", "apertus", "rope_theta"),
    ("cohere", "cohere", "rope_theta"),
    ("cohere2", "cohere2", "rope_theta"),
    ("dots1", "dots1", "rope_theta"),
    ("ernie4_5", "ernie4_5", "rope_theta"),
    ("exaone4", "exaone4", "rope_theta"),
    ("falcon_h1", "falcon_h1", "rope_theta"),
    ("gemma", "gemma", "rope_theta"),
    ("gemma2", "gemma2", "rope_theta"),
    ("glm", "glm", "rope_theta"),
    ("glm4", "glm4", "rope_theta"),
    ("glm4_moe", "glm4_moe", "rope_theta"),
    ("glm4_moe_lite", "glm4_moe_lite", "rope_theta"),
    ("gpt_neox", "gpt_neox", "rotary_emb_base"),
    ("granite", "granite", "rope_theta"),
    ("granitemoehybrid", "granitemoehybrid", "rope_theta"),
    ("helium", "helium", "rope_theta"),
    ("hunyuan_v1_dense", "hunyuan_v1_dense", "rope_theta"),
    ("lfm2_moe", "lfm2_moe", "rope_theta"),
    ("llama4_text", "llama4_text", "rope_theta"),
    ("mistral", "llama", "rope_theta"),
    ("nanochat", "nanochat", "rope_theta"),
    ("nemotron", "nemotron", "rope_theta"),
    ("olmo2", "olmo2", "rope_theta"),
    ("olmoe", "olmoe", "rope_theta"),
    ("phi", "phi", "rope_theta"),
    ("phi3", "phi3", "rope_theta"),
    ("phimoe", "phimoe", "rope_theta"),
    ("qwen2_moe", "qwen2_moe", "rope_theta"),
    ("qwen3_next", "qwen3_next", "rope_theta"),
    ("seed_oss", "seed_oss", "rope_theta"),
    ("smollm3", "smollm3", "rope_theta"),
    ("stablelm", "stablelm", "rope_theta"),
    ("starcoder2", "starcoder2", "rope_theta"),
]


# what these mlx-lm classes need and transformers does not write; nothing rotary
MISSING = {
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "lfm2_moe": {"layer_types": []},
}


@pytest.mark.parametrize(("model_type", "module", "key"), OTHERS)
def test_the_base_arrives_in_every_model(tmp_path, model_type, module, key):
    config = saved_by_transformers(tmp_path, model_type)
    config["rope_parameters"]["rope_theta"] = 77777.0
    partial = config["rope_parameters"].get("partial_rotary_factor")
    args = mlx_lm_args({**normalize_config(config)[0], **MISSING.get(model_type, {})}, module)
    assert getattr(args, key) == 77777.0
    for name in ("partial_rotary_factor", "rotary_pct"):
        if partial is not None and hasattr(args, name):
            assert getattr(args, name) == partial


@pytest.mark.parametrize(
    ("model_type", "module"),
    [("laguna", "laguna"), ("gemma4_text", "gemma4_text"), ("mellum", "mellum")],
)
def test_models_that_read_settings_per_layer_are_left_to_it(tmp_path, model_type, module):
    config = saved_by_transformers(tmp_path, model_type)
    normal, _ = normalize_config(config)
    assert mlx_lm_args(normal, module).rope_parameters == config["rope_parameters"]
    assert "rope_theta" not in normal


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("gemma3n_text", "rope_local_base_freq"),
        ("gear", "rope_local_base_freq"),
        ("mimo_v2_flash", "swa_rope_theta"),
    ],
)
def test_other_models_with_a_second_base(model_type, key):
    parameters = {"full_attention": default(1e6), "sliding_attention": default(2e4)}
    normal, _ = normalize_config({"model_type": model_type, "rope_parameters": parameters})
    assert (normal["rope_theta"], normal[key]) == (1e6, 2e4)


def test_olmo3_scales_only_its_full_layers():
    parameters = {
        "full_attention": {**YARN, "rope_theta": 5e5},
        "sliding_attention": default(5e5),
    }
    normal, _ = normalize_config({"model_type": "olmo3", "rope_parameters": parameters})
    assert normal["rope_theta"] == 5e5 and normal["rope_scaling"]["factor"] == 4.0


def test_layer_types_that_agree_are_one_setting():
    parameters = {"full_attention": default(5e5), "sliding_attention": default(5e5)}
    normal, _ = normalize_config({"model_type": "other", "rope_parameters": parameters})
    assert normal["rope_theta"] == 5e5


def test_layers_without_rotation_do_not_count():
    parameters = {"full_attention": None, "sliding_attention": default(5e5)}
    normal, _ = normalize_config({"model_type": "other", "rope_parameters": parameters})
    assert normal["rope_theta"] == 5e5


def test_longrope_keeps_its_original_length_where_phi3_looks_for_it(tmp_path):
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = {
        "model_type": "phi3",
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10019.0,
            "original_max_position_embeddings": 2048,
            **factors,
        },
    }
    normal, _ = normalize_config(config)
    assert normal["original_max_position_embeddings"] == 2048
    assert normal["rope_scaling"]["type"] == "longrope"
    assert normal["rope_scaling"]["long_factor"] == factors["long_factor"]


def test_sections_of_a_multimodal_rotation_are_kept():
    parameters = default(1e6, mrope_section=[16, 24, 24])
    normal, _ = normalize_config({"model_type": "qwen2", "rope_parameters": parameters})
    assert normal["rope_scaling"] == {
        "type": "default",
        "rope_type": "default",
        "mrope_section": [16, 24, 24],
    }


# --- older configs ------------------------------------------------------------------------------

OLDER = [
    {"model_type": "llama", "rope_theta": 100000, "torch_dtype": "bfloat16", "rope_scaling": None},
    {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"model_type": "mistral"},
    {"model_type": "qwen2", "rope_theta": 1000000.0, "sliding_window": 131072},
    {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    {"model_type": "qwen3_moe", "rope_theta": 1000000.0, "num_experts": 128, "head_dim": 128},
    {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "sliding_window": 1024}},
    {
        "model_type": "gemma3_text",
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    },
    {"model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25},
    {"model_type": "phi3", "rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
    {"model_type": "deepseek_v2", "rope_scaling": {"type": "yarn", "factor": 40}},
    {"model_type": "step3p5", "rope_theta": [1e4, 5e6]},
    {"model_type": "mamba2"},
]


@pytest.mark.parametrize("config", OLDER, ids=lambda config: config["model_type"])
def test_an_older_config_comes_through_unchanged(config):
    assert normalize_config(config) == (config, [])


def test_scaling_whose_type_has_the_name_that_mlx_lm_does_not_look_for():
    config = {"model_type": "phi3", "rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}}
    normal, notes = normalize_config(config)
    assert normal["rope_scaling"]["type"] == "longrope" and len(notes) == 1
    config = {"model_type": "internlm3", "rope_scaling": {"type": "dynamic", "factor": 6.0}}
    assert normalize_config(config)[0]["rope_scaling"]["rope_type"] == "dynamic"


def test_a_base_inside_of_the_older_scaling_is_found():
    config = {"model_type": "llama", "rope_scaling": {**LLAMA3, "rope_theta": 500020.0}}
    assert normalize_config(config)[0]["rope_theta"] == 500020.0


# --- the result is stable and transformers still reads it ---------------------------------------


@pytest.mark.parametrize(("model_type", "parameters", "expected"), TABLE)
def test_a_normal_config_is_normal_and_transformers_reads_the_same(
    tmp_path, model_type, parameters, expected
):
    config = saved_by_transformers(tmp_path, model_type, rope_parameters=parameters)
    normal, _ = normalize_config(config)
    assert normalize_config(normal) == (normal, [])
    assert {key: normal[key] for key in config} == config
    folder = tmp_path / "normal"
    folder.mkdir()
    (folder / "config.json").write_text(dump_json(normal))
    read = AutoConfig.from_pretrained(folder).to_dict()["rope_parameters"]
    for part in (read, read.get("full_attention", {})):
        part.pop("type", None)
    if model_type == "deepseek_v2" and parameters["rope_type"] == "default":
        assert read["factor"] == 1.0 and read["rope_theta"] == parameters["rope_theta"]
    else:
        assert read == config["rope_parameters"]


# --- intervals between full attention layers ----------------------------------------------------


def layers(pattern: str) -> dict:
    names = {"f": "full_attention", "s": "sliding_attention", "l": "linear_attention"}
    return {"num_hidden_layers": len(pattern), "layer_types": [names[c] for c in pattern]}


@pytest.mark.parametrize(
    ("model_type", "pattern", "key", "interval"),
    [
        ("gemma3_text", "sssssfsssssfss", "sliding_window_pattern", 6),
        ("gemma3_text", "sf", "sliding_window_pattern", 2),
        ("gemma3_text", "ff", "sliding_window_pattern", 1),
        ("cohere2", "sssfsssf", "sliding_window_pattern", 4),
        ("qwen3_5_text", "lfl", "full_attention_interval", 2),
        ("qwen3_next", "llf", "full_attention_interval", 3),
    ],
)
def test_a_list_of_layer_types_becomes_an_interval(model_type, pattern, key, interval):
    normal, _ = normalize_config({"model_type": model_type, **layers(pattern)})
    assert normal[key] == interval


@pytest.mark.parametrize("pattern", ["sfssf", "sff", "fs", "ss"])
def test_layer_types_that_are_no_interval_are_refused(pattern):
    with pytest.raises(UnsupportedModelError, match="gemma3_text"):
        normalize_config({"model_type": "gemma3_text", **layers(pattern)})


def test_interval_that_contradicts_the_layer_types():
    config = {"model_type": "gemma3_text", "sliding_window_pattern": 6, **layers("sf")}
    with pytest.raises(CheckpointError, match="sliding_window_pattern 6 contradicts layer_types"):
        normalize_config(config)


# --- contradictions and nonsense ----------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1e4, "rope_parameters": default(1e6)},
        {"rope_theta": 1e4, "rope_parameters": {"full_attention": default(1e6)}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "default", "rope_theta": 1e6}},
        {"rope_parameters": default(1e6), "rope_scaling": {"type": "linear", "factor": 2.0}},
        {
            "rope_parameters": {**LINEAR, "rope_theta": 1e6},
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
        {"partial_rotary_factor": 1.0, "rope_parameters": default(1e6, partial_rotary_factor=0.5)},
        {"model_type": "gpt_neox", "rotary_emb_base": 1e4, "rope_parameters": default(1e6)},
        {
            "model_type": "gemma3_text",
            "rope_local_base_freq": 1e3,
            "rope_parameters": {
                "full_attention": default(1e6),
                "sliding_attention": default(1e4),
            },
        },
        {"model_type": "qwen3_moe", "num_experts": 8, "num_local_experts": 16},
    ],
)
def test_contradictions_are_errors(config):
    with pytest.raises(CheckpointError) as caught:
        normalize_config({"model_type": "llama", **config})
    assert caught.value.message.startswith("config.json: ")
    assert ", but " in caught.value.message and not caught.value.message.endswith(".")


def test_contradiction_in_a_section_names_the_section():
    text = {"rope_theta": 1e4, "rope_parameters": default(1e6)}
    with pytest.raises(CheckpointError, match=r"config.json: text_config.rope_theta is 10000.0"):
        normalize_config({"model_type": "qwen3_5", "text_config": text})


def test_the_same_number_written_differently_is_no_contradiction():
    config = {"model_type": "llama", "rope_theta": 500000, "rope_parameters": default(500000.0)}
    assert normalize_config(config)[0]["rope_theta"] == 500000


@pytest.mark.parametrize(
    "theta", [None, "1e6", True, [1e4], 0, -1.0, math.inf, math.nan, 10**400, {}]
)
def test_a_base_that_is_none(theta):
    with pytest.raises(CheckpointError, match="not a rotary base"):
        normalize_config({"model_type": "llama", "rope_parameters": default(theta)})


def test_parameters_without_a_base():
    with pytest.raises(CheckpointError, match="no rope_theta"):
        normalize_config({"model_type": "llama", "rope_parameters": {"rope_type": "default"}})
    config = {"model_type": "llama", "rope_theta": 1e6, "rope_parameters": LINEAR}
    assert normalize_config(config)[0]["rope_scaling"]["factor"] == 8.0


@pytest.mark.parametrize("value", [[], "default", 3, True])
def test_parameters_that_are_no_object(value):
    with pytest.raises(CheckpointError, match="rope_parameters is not an object"):
        normalize_config({"model_type": "llama", "rope_parameters": value})


@pytest.mark.parametrize(
    ("model_type", "full", "sliding"),
    [
        ("llama", default(1e6), default(1e4)),
        ("olmo3", default(1e6), default(1e4)),
        ("olmo3", default(1e6), {**LINEAR, "rope_theta": 1e6}),
        ("gemma3_text", default(1e6), {**LINEAR, "rope_theta": 1e4}),
        ("gemma3_text", default(1e6, partial_rotary_factor=0.5), default(1e4)),
        ("gemma3_text", default(1e6), None),
    ],
)
def test_what_mlx_lm_cannot_do_is_refused(model_type, full, sliding):
    parameters = {"full_attention": full, "sliding_attention": sliding}
    with pytest.raises(UnsupportedModelError, match=f"mlx-lm's {model_type} cannot do"):
        normalize_config({"model_type": model_type, "rope_parameters": parameters})


# --- number types and files ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": None, "text_config": None}, None),
        ({}, None),
    ],
)
def test_number_type_under_both_names(config, dtype):
    assert model_dtype(config) == dtype


def test_the_newer_name_of_the_number_type_gets_its_older_one():
    normal, notes = normalize_config({"model_type": "llama", "dtype": "bfloat16"})
    assert normal["torch_dtype"] == normal["dtype"] == "bfloat16" and notes == []


def test_another_number_type_is_named_everywhere():
    config = {"torch_dtype": "float32", "text_config": {"dtype": "float32", "x": 1}}
    set_model_dtype(config, "bfloat16")
    assert config == {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "x": 1}}
    config = {"model_type": "llama"}
    set_model_dtype(config, "float16")
    assert model_dtype(config) == "float16"


def test_numbers_that_are_not_finite_survive_as_valid_json(tmp_path):
    values = {"a": math.inf, "b": [-math.inf, {"c": math.nan}], "d": "ü", "e": {"__float__": "x"}}
    text = dump_json(values)
    assert json.loads(text, parse_constant=pytest.fail)["a"] == {"__float__": "Infinity"}
    (tmp_path / "config.json").write_text(text)
    read = read_json_object(tmp_path / "config.json")
    assert math.isnan(read["b"][1].pop("c"))
    assert read == {"a": math.inf, "b": [-math.inf, {}], "d": "ü", "e": {"__float__": "x"}}


def test_files_that_cannot_be_read(tmp_path):
    for content in (b"{", b"\xff", b"[1]", b'{"a": ' + b"9" * 5000 + b"}"):
        (tmp_path / "x.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"x\.json"):
            read_json_object(tmp_path / "x.json")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_json_object(tmp_path / "absent.json")
    (tmp_path / "bom.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json_object(tmp_path / "bom.json") == {"a": 1}
