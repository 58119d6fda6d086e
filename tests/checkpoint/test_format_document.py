"""docs/reference/format.md: its program decodes what the package encodes, its example is valid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.checkpoint.schema import FORMAT_VERSION, Manifest, ModuleEntry
from turboquant_mlx.quant.spec import QuantSpec
from turboquant_mlx.quant.weight import PackedWeight, dequantize_weight, quantize_weight

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
TEXT = (REFERENCE / "format.md").read_text()


def block(language: str) -> str:
    [found] = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return found


@pytest.fixture(scope="module")
def program() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(block("python"), names)
    return names


def decoded(program, packed: PackedWeight) -> np.ndarray:
    kind = "linear" if len(packed.shape) == 2 else "switch"
    entry = ModuleEntry.from_spec("x", kind, packed.shape, packed.spec)
    arrays = {name: np.array(value) for name, value in packed.arrays().items()}
    return program["decode"](entry.to_dict(), arrays, arrays)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((5, 128), QuantSpec(bits=3, group_size=64, rotation_block=128)),
        ((5, 96), QuantSpec(bits=2, group_size=32, rotation_block=96)),
        ((5, 160), QuantSpec(bits=5, group_size=32, rotation_block=1)),
        ((2, 3, 192), QuantSpec(bits=4, group_size=64, rotation_block=48)),
        ((2, 3, 96), QuantSpec(code="ternary", group_size=32, rotation_block=32)),
        ((5, 128), QuantSpec(bits=4, group_size=32, scale_layout="log8", rotation_block=64)),
        ((5, 192), QuantSpec(bits=3, group_size=64, rotation_block=192, qjl=True)),
    ],
)
def test_the_program_decodes_what_the_package_encodes(program, shape, spec):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(shape).astype(np.float32)
    packed = quantize_weight(mx.array(weight), spec)
    ours = np.array(dequantize_weight(packed))
    theirs = decoded(program, packed)
    assert np.abs(ours - theirs).max() < 1e-5
    assert np.square(theirs - weight).mean() < 0.25 * np.square(weight).mean()


def test_the_program_reads_windows_that_wrap_in_their_tile(program):
    """Nothing writes trellis codes yet; both readers already agree on them."""
    spec = QuantSpec(bits=3, window_bits=8, tile=64, group_size=64)
    rng = np.random.default_rng(1)
    packed = PackedWeight(
        spec=spec,
        shape=(3, 128),
        codes=mx.array(rng.integers(0, 2**32, (3, 12), dtype=np.uint32)),
        scales=mx.array(rng.random((3, 2)).astype(np.float16)),
        table=mx.array(rng.standard_normal(256).astype(np.float32)),
        multiplier=mx.ones(128, dtype=mx.float16),
    )
    assert np.abs(np.array(dequantize_weight(packed)) - decoded(program, packed)).max() < 1e-6


def test_the_hadamard_matrices_of_the_program_are_those_of_mlx(program):
    for n in (2, 64, 12, 24, 192):
        theirs = np.array(mx.hadamard_transform(mx.eye(n)))
        assert np.abs(program["hadamard"](n) - theirs).max() < 1e-6


def test_the_example_is_a_manifest_but_for_the_leader_that_it_leaves_out():
    example = json.loads(block("json"))
    schema = json.loads((REFERENCE / "format.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(example)
    [module] = [entry for entry in example["modules"].values() if entry["kind"] == "linear"]
    leader = {**module, "shape": [576, 576]}
    example["modules"][module["rotation_group"]] = leader
    assert Manifest.from_config({"turboquant": example}).mtp is not None


def test_document_schema_and_code_name_the_same_version():
    schema = json.loads((REFERENCE / "format.schema.json").read_text())
    assert schema["properties"]["format_version"]["const"] == FORMAT_VERSION
    assert f"Format version {FORMAT_VERSION}." in TEXT
