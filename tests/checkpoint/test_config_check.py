"""Values of config.json that no model can have."""

from __future__ import annotations

import math

import pytest

from turboquant_mlx.checkpoint.config_check import check_config, impossible_size
from turboquant_mlx.errors import CheckpointError

TENSORS = 20


@pytest.mark.parametrize(
    "config",
    [
        {"rms_norm_eps": 1e-6, "rope_theta": 10000, "num_hidden_layers": 2},
        {"layer_norm_eps": 0, "rope_theta": None},
        {"rope_theta": [1e4, 5e6]},
        {"num_hidden_layers": TENSORS, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"quantization": None, "quantization_config": {"quant_method": "awq"}},
        {"time_step_limit": [0.0, math.inf]},
        {"num_experts": 8, "num_experts_per_tok": 8, "n_group": 4, "topk_group": 4},
        {"n_routed_experts": 8, "num_local_experts": None, "moe_topk": [2, 2]},
        {"num_experts": 0, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 0},
        {"layer_types": ["sliding_attention"], "sliding_window": 1},
        {"layer_types": ["full_attention"], "sliding_window": 0},
        {"sliding_window": -1, "sliding_window_pattern": None},
    ],
    ids=repr,
)
def test_what_models_have(config):
    check_config(config, TENSORS)
    check_config({"text_config": config}, TENSORS)


@pytest.mark.parametrize(
    "key", ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"]
)
@pytest.mark.parametrize("value", [math.inf, math.nan, -1e-6, "1e-6", True, {}, 10**400])
def test_an_epsilon_that_is_none(key, value):
    with pytest.raises(CheckpointError, match=f"config.json: {key} is .*, not a finite number, 0"):
        check_config({key: value}, TENSORS)


@pytest.mark.parametrize("key", ["rope_theta", "rope_local_base_freq", "rotary_emb_base"])
@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0, 0, "10000", False, [1e4, -1]])
def test_a_rotary_base_that_is_none(key, value):
    with pytest.raises(CheckpointError, match=f"config.json: {key} is .*, not a finite number abo"):
        check_config({key: value}, TENSORS)


def test_the_part_of_the_config_is_named():
    with pytest.raises(CheckpointError, match=r"config\.json: text_config\.rope_theta is nan"):
        check_config({"text_config": {"rope_theta": math.nan}}, TENSORS)


def test_scaling_by_what_is_not_finite():
    with pytest.raises(CheckpointError, match=r"rope_scaling\.factor is inf, not a finite number"):
        check_config({"rope_scaling": {"type": "yarn", "factor": math.inf}}, TENSORS)


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer"])
def test_more_layers_than_tensors(key):
    with pytest.raises(CheckpointError, match=f"{key} is 21, but the weight files hold only 20"):
        check_config({key: TENSORS + 1}, TENSORS)


def test_no_layers():
    with pytest.raises(CheckpointError, match="num_hidden_layers 0 is not a positive whole number"):
        check_config({"num_hidden_layers": 0}, TENSORS)


@pytest.mark.parametrize("count", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("key", ["num_experts_per_tok", "top_k_experts", "moe_topk"])
@pytest.mark.parametrize("value", [-1, 0, 9])
def test_a_number_of_experts_that_there_is_not(count, key, value):
    with pytest.raises(CheckpointError, match=f"{key} {value} is not between 1 and 8"):
        check_config({count: 8, key: value}, TENSORS)


@pytest.mark.parametrize("value", [-1, 0, 5])
def test_a_number_of_groups_of_experts_that_there_is_not(value):
    with pytest.raises(CheckpointError, match=f"text_config.topk_group {value} is not between 1"):
        check_config({"text_config": {"n_group": 4, "topk_group": value}}, TENSORS)


@pytest.mark.parametrize("value", [0, -1, "128", 0.5, True])
@pytest.mark.parametrize(
    "used",
    [{"layer_types": ["sliding_attention", "full_attention"]}, {"sliding_window_pattern": 6}],
)
def test_a_window_that_holds_nothing(used, value):
    wrong = f"config.json: sliding_window {value!r} is not a positive whole number"
    with pytest.raises(CheckpointError, match=wrong):
        check_config({**used, "sliding_window": value}, TENSORS)


@pytest.mark.parametrize("key", ["quantization", "quantization_config"])
def test_a_quantization_that_is_no_object(key):
    with pytest.raises(CheckpointError, match=f"config.json: {key} is not an object"):
        check_config({key: "awq"}, TENSORS)


@pytest.mark.parametrize("value", [0, -128, "128", 1.5, True])
def test_a_size_that_no_model_has(value):
    assert impossible_size({"hidden_size": 64, "head_dim": None}) is None
    assert impossible_size({"num_key_value_heads": [4, 8]}) is None
    wrong = f"config.json: hidden_size {value!r} is not a positive whole number"
    assert impossible_size({"hidden_size": value}) == wrong


def test_an_absurd_number_is_not_printed_whole():
    said = impossible_size({"hidden_size": -(10**5000)})
    assert said is not None
    assert len(said) < 120
