"""The options of a conversion: what is permitted, what excludes or needs what."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turboquant_mlx.convert.options import (
    ConvertOptions,
    check_needs,
    load_tiers,
    parse_layer_ranges,
)
from turboquant_mlx.errors import OptionError


def test_defaults() -> None:
    options = ConvertOptions()
    assert (options.bits, options.group_size, options.rotation) == (3, None, "hadamard")
    assert options.codec == "trellis"
    assert (options.rotation_seed, options.protect_bits) == (42, 3)
    assert (options.extras_bits, options.extras_group_size) == (4, 64)
    assert options.dtype is None
    assert not options.use_qjl


def test_options_are_frozen_and_survive_json() -> None:
    options = ConvertOptions(
        protect_expert_layers=[3, 1],  # type: ignore[arg-type]  # any sequence will do
        bits=4,
    )
    assert options.protect_expert_layers == (3, 1)
    with pytest.raises(AttributeError):
        options.bits = 2  # type: ignore[misc]
    tiers = ConvertOptions(expert_layer_tiers={0: "4", 5: "ternary"})
    assert json.loads(json.dumps(tiers.to_dict()))["expert_layer_tiers"] == {
        "0": "4",
        "5": "ternary",
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bits": 5}, "--bits 5 is not one of 2, 3, 4"),
        ({"bits": "3"}, "--bits 3 is not one of 2, 3, 4"),
        ({"bits": True}, "--bits True is not one of 2, 3, 4"),
        ({"bits": 3.0}, "--bits 3.0 is not one of 2, 3, 4"),
        ({"group_size": 32.0}, "--group-size 32.0 is not one of 32, 64, 128"),
        (
            {"rotation": "none", "rotation_seed": 5},
            "--rotation-seed has no effect with --rotation none",
        ),
        ({"group_size": 16}, "--group-size 16 is not one of 32, 64, 128"),
        ({"codec": "vector"}, "--codec vector is not one of scalar, trellis"),
        ({"mlp_group_size": 8}, "--mlp-group-size 8 is not one of 16, 32, 64, 128"),
        ({"attn_bits": 1}, "--attn-bits 1 is not one of 2, 3, 4"),
        ({"mlp_bits": 8}, "--mlp-bits 8 is not one of 2, 3, 4"),
        ({"expert_down_bits": 5}, "--expert-down-bits 5 is not one of 2, 3, 4"),
        ({"rotation": "qr"}, "--rotation qr is not one of hadamard, blockwise_hadamard, none"),
        ({"rotation_seed": 1.5}, "--rotation-seed 1.5 is not a whole number"),
        ({"dtype": "int8"}, "--dtype int8 is not one of float16, bfloat16, float32"),
        ({"quantize_extras": True, "extras_bits": 5}, "--extras-bits 5 is not one of 2, 3, 4, 8"),
        (
            {"quantize_extras": True, "extras_group_size": 16},
            "--extras-group-size 16 is not one of 32, 64, 128",
        ),
        ({"protect_expert_layers": (-1,)}, "--protect-expert-layers: -1 is not a layer number"),
        (
            {"expert_layer_tiers": {0: "5"}},
            "--expert-layer-tiers: '5' for layer 0 is not one of ternary, 2, 3, 4",
        ),
        (
            {"expert_layer_tiers": {"0": "4"}},
            "--expert-layer-tiers: '0' is not a layer number",
        ),
    ],
)
def test_a_bad_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        ConvertOptions(**values)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"expert_layer_tiers": {0: "4"}, "protect_expert_layers": (1,)},
            "--expert-layer-tiers and --protect-expert-layers exclude each other",
        ),
        (
            {"expert_layer_tiers": {0: "4"}, "expert_down_bits": 4},
            "--expert-layer-tiers and --expert-down-bits exclude each other",
        ),
        (
            {"streaming": True, "dtype": "float16"},
            "--dtype is not supported together with --streaming",
        ),
        ({"protect_bits": 4}, "--protect-bits has no effect without --protect-expert-layers"),
        ({"extras_bits": 8}, "--extras-bits has no effect without --quantize-extras"),
        ({"extras_group_size": 32}, "--extras-group-size has no effect without --quantize-extras"),
    ],
)
def test_a_bad_combination_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        ConvertOptions(**values)
    assert caught.value.message == message


def test_a_tuning_option_that_repeats_the_default_is_idle_too() -> None:
    with pytest.raises(OptionError, match="--protect-bits has no effect without"):
        check_needs({"protect_bits"})
    check_needs({"protect_bits", "protect_expert_layers"})


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("3", (3,)),
        ("0-2", (0, 1, 2)),
        ("0-2,7", (0, 1, 2, 7)),
        ("42-43, 0 - 1", (0, 1, 42, 43)),
        ("5,5,4-6", (4, 5, 6)),
    ],
)
def test_layer_ranges(text: str, layers: tuple[int, ...]) -> None:
    assert parse_layer_ranges(text) == layers


@pytest.mark.parametrize("text", ["", "a", "1,", "1-", "-1", "1-2-3", "1.5", "²", "0x1"])
def test_what_is_no_layer_range(text: str) -> None:
    with pytest.raises(OptionError, match="neither a layer number nor a range"):
        parse_layer_ranges(text)


def test_backward_and_absurd_layer_ranges() -> None:
    with pytest.raises(OptionError, match="'5-2' runs backwards"):
        parse_layer_ranges("0,5-2")
    with pytest.raises(OptionError, match="layer 999999999 is beyond"):
        parse_layer_ranges("0-999999999")


@pytest.mark.parametrize(
    "content",
    [
        '{"0": "4", "3": "ternary"}',
        '{"tiers": {"0": "4", "3": "ternary"}}',
        '{"0": 4, "3": "ternary"}',
    ],
)
def test_tiers_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tiers.json"
    path.write_text(content)
    assert load_tiers(path) == {0: "4", 3: "ternary"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[1, 2]", "does not map layers to tiers"),
        ("{}", "does not map layers to tiers"),
        ('{"tiers": []}', "does not map layers to tiers"),
        ('{"tiers": {"0": "4"}, "more": 1}', "'tiers' is not a layer number"),
        ('{"one": "4"}', "'one' is not a layer number"),
        ('{"-1": "4"}', "'-1' is not a layer number"),
        ('{"0": "5"}', "'5' for layer 0 is not one of ternary, 2, 3, 4"),
        ('{"0": true}', "True for layer 0 is not one of"),
        ('{"0": ["4"]}', "for layer 0 is not one of"),
        ('{"0": "4", "0": "2"}', "the key '0' appears twice"),
        ('{"0": "4", "00": "2"}', "names layer 0 twice"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_bad_tiers_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "tiers.json"
    path.write_text(content)
    with pytest.raises(OptionError) as caught:
        load_tiers(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message


def test_a_missing_or_unreadable_tiers_file(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no such tiers file"):
        load_tiers(tmp_path / "absent.json")
    with pytest.raises(OptionError, match="cannot read the tiers file"):
        load_tiers(tmp_path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="is not valid JSON"):
        load_tiers(binary)


@pytest.mark.parametrize("module", ["options", "recipe", "roles", "report", "command"])
def test_planning_needs_no_mlx(module: str) -> None:
    code = (
        f"import sys, turboquant_mlx.convert.{module}; "
        "sys.exit(any(name.split('.')[0] in ('mlx', 'mlx_lm') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
