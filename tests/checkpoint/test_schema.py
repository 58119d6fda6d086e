"""The manifest: strict reading, the tensors that follow from it, and its JSON Schema."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import mlx.core as mx
import pytest

import tiny
from turboquant_mlx.checkpoint.schema import (
    AFFINE_BITS,
    AFFINE_GROUP_SIZES,
    FORMAT_VERSION,
    Manifest,
    ModuleEntry,
    MtpInfo,
    TensorSpec,
    config_entries,
    expected_tensors,
    has_manifest,
    is_hadamard_size,
)
from turboquant_mlx.checkpoint.source import inspect_folder
from turboquant_mlx.convert.pipeline import convert
from turboquant_mlx.errors import CheckpointError
from turboquant_mlx.quant.spec import QuantSpec

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "reference" / "format.schema.json").read_text()
)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

Q, K, UP, EMBED = "layers.0.q_proj", "layers.0.k_proj", "layers.0.experts.up_proj", "embed_tokens"


def manifest() -> Manifest:
    """One module of each sort."""
    spec = QuantSpec(bits=3, group_size=32, rotation_block=64)
    trellis = QuantSpec(
        bits=3, window_bits=8, tile=64, group_size=32, scale_layout="log8", qjl=True
    )
    entries = [
        ModuleEntry.from_spec(Q, "linear", (96, 128), spec, bias=True),
        ModuleEntry.from_spec(K, "linear", (32, 128), spec, rotation_group=Q),
        ModuleEntry.from_spec("o_proj", "linear", (16, 128), trellis),
        ModuleEntry.from_spec(UP, "switch", (4, 48, 96), QuantSpec(code="ternary", group_size=32)),
        ModuleEntry(EMBED, "affine_embedding", (288, 128), bits=4, group_size=64),
        ModuleEntry("fc", "affine_linear", (8, 64), bits=3, group_size=32, bias=True),
        ModuleEntry("experts.fc", "affine_switch", (2, 8, 64), bits=8, group_size=64),
    ]
    return Manifest(
        modules={entry.path: entry for entry in entries},
        options={"bits": 3, "dtype": None},
        created_by="turboquant-mlx-kit 0.1.0",
        mtp=MtpInfo("mtp.safetensors", 15),
    )


def block() -> dict[str, Any]:
    return manifest().to_dict()


def read(value: Any) -> Manifest:
    return Manifest.from_config({"model_type": "llama", "turboquant": value})


def refused(value: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(value)
    assert "\n" not in caught.value.message and not caught.value.message.endswith(".")
    return caught.value.message


def changed(path: str, **values: Any) -> dict[str, Any]:
    """The manifest with some values of one module changed; ``...`` takes a key out."""
    result = block()
    entry = result["modules"][path]
    for key, value in values.items():
        if value is ...:
            del entry[key]
        else:
            entry[key] = value
    return result


# --- writing and reading ------------------------------------------------------------------------


def test_what_is_written_is_read_back():
    through_json = json.loads(json.dumps(block()))
    assert read(through_json) == manifest()
    assert list(through_json["modules"]) == list(manifest().modules)


def test_config_entries_label_the_folder_without_inviting_stock_loaders():
    entries = config_entries(manifest(), bits=3, group_size=32)
    assert entries["quantization_config"] == {
        "quant_method": "turboquant",
        "bits": 3,
        "group_size": 32,
    }
    assert entries["model_file"] == "turboquant_model.py"
    assert "quantization" not in entries
    assert has_manifest(entries) and not has_manifest({"model_type": "llama"})
    assert Manifest.from_config(entries) == manifest()


def test_a_manifest_without_a_head_has_no_key_for_it():
    assert "mtp" not in Manifest(modules={}).to_dict()
    assert read(Manifest(modules={}).to_dict()).mtp is None


def test_specs_come_back():
    assert manifest().spec(K) == QuantSpec(bits=3, group_size=32, rotation_block=64)
    assert manifest().spec(UP).code == "ternary"
    with pytest.raises(KeyError):
        manifest().spec("absent")
    with pytest.raises(ValueError, match="affine"):
        manifest().spec(EMBED)


def test_groups_and_their_leaders():
    assert manifest().groups() == {Q: [Q, K], "o_proj": ["o_proj"], UP: [UP]}
    assert manifest().modules[Q].is_leader and not manifest().modules[K].is_leader
    assert not manifest().modules[EMBED].is_leader


# --- tensors ------------------------------------------------------------------------------------


def test_tensors_of_each_kind():
    modules = manifest().modules
    assert expected_tensors(modules[Q]) == {
        "codes": TensorSpec("U32", (96, 12)),
        "scales": TensorSpec("F16", (96, 4)),
        "table": TensorSpec("F32", (8,)),
        "multiplier": TensorSpec("F16", (128,)),
        "bias": TensorSpec(None, (96,)),
    }
    assert set(expected_tensors(modules[K])) == {"codes", "scales", "table"}
    assert expected_tensors(modules["o_proj"]) == {
        "codes": TensorSpec("U32", (16, 12)),
        "scales": TensorSpec("U8", (16, 4)),
        "table": TensorSpec("F32", (256,)),
        "multiplier": TensorSpec("F16", (128,)),
        "qjl_codes": TensorSpec("U32", (16, 4)),
        "qjl_norms": TensorSpec("F16", (16,)),
        "qjl_multiplier": TensorSpec("F16", (128,)),
    }
    assert expected_tensors(modules[UP]) == {
        "codes": TensorSpec("U32", (4, 48, 5)),  # 96 trits, 20 in a word
        "scales": TensorSpec("F16", (4, 48, 3)),
        "table": TensorSpec("F32", (3,)),
        "multiplier": TensorSpec("F16", (96,)),
    }
    assert expected_tensors(modules["fc"]) == {
        "weight": TensorSpec("U32", (8, 6)),
        "scales": TensorSpec(None, (8, 2)),
        "biases": TensorSpec(None, (8, 2)),
        "bias": TensorSpec(None, (8,)),
    }


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("group_size", AFFINE_GROUP_SIZES)
def test_affine_tensors_are_those_that_mlx_makes(bits, group_size):
    entry = ModuleEntry("x", "affine_linear", (5, 384), bits=bits, group_size=group_size)
    made = mx.quantize(mx.ones((5, 384)), group_size=group_size, bits=bits)
    shapes = [tensor.shape for tensor in expected_tensors(entry).values()]
    assert shapes == [array.shape for array in made]


def test_sizes_agree_with_those_of_the_spec():
    """The planner counts with QuantSpec.packed_bytes, the writer with these shapes."""
    sizes = {"U32": 4, "F32": 4, "F16": 2, "U8": 1}
    for entry in manifest().modules.values():
        if entry.is_affine:
            continue
        tensors = expected_tensors(entry)
        counted = sum(
            sizes[tensor.dtype] * math.prod(tensor.shape)
            for suffix, tensor in tensors.items()
            if suffix not in ("bias", "multiplier", "qjl_multiplier")
        )
        assert counted == entry.spec.packed_bytes(entry.shape)


def found() -> dict[str, Any]:
    """The tensors of a folder that agrees with the manifest, and one that belongs to no module."""
    tensors = {
        name: SimpleNamespace(dtype=tensor.dtype or "BF16", shape=tensor.shape)
        for name, tensor in manifest().tensors().items()
    }
    tensors["norm.weight"] = SimpleNamespace(dtype="BF16", shape=(128,))
    return tensors


def test_tensors_that_agree():
    manifest().check_tensors(found())


@pytest.mark.parametrize("name", sorted(manifest().tensors()))
def test_every_tensor_must_be_there(name):
    tensors = found()
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"tensor {name} is missing"):
        manifest().check_tensors(tensors)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        (f"{Q}.codes", "I32", (96, 12)),
        (f"{Q}.codes", "U32", (96, 13)),
        (f"{Q}.codes", "U32", (96 * 12,)),
        (f"{Q}.table", "F16", (8,)),
        (f"{Q}.bias", "U32", (96,)),
        (f"{EMBED}.scales", "F16", (288, 4)),
    ],
)
def test_a_tensor_of_the_wrong_type_or_shape(name, dtype, shape):
    tensors = found() | {name: SimpleNamespace(dtype=dtype, shape=shape)}
    with pytest.raises(CheckpointError, match=f"tensor {name} is {dtype}") as caught:
        manifest().check_tensors(tensors)
    assert "the manifest asks for" in caught.value.message


@pytest.mark.parametrize("suffix", ["multiplier", "qjl_codes", "weight", "codebook"])
def test_a_surplus_tensor_below_a_quantized_module(suffix):
    tensors = found() | {f"{K}.{suffix}": SimpleNamespace(dtype="F16", shape=(128,))}
    with pytest.raises(CheckpointError, match=rf"tensor {K}.{suffix} belongs to nothing"):
        manifest().check_tensors(tensors)


# --- strict reading -----------------------------------------------------------------------------


def test_no_manifest():
    with pytest.raises(CheckpointError, match="no 'turboquant' block"):
        Manifest.from_config({"model_type": "llama"})


@pytest.mark.parametrize("value", [[], "x", 3, True])
def test_a_manifest_that_is_no_object(value):
    assert "not an object" in refused(value)


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, None, True])
def test_versions_that_are_none(version):
    assert "format_version" in refused({**block(), "format_version": version})


def test_a_newer_version_asks_for_an_upgrade():
    with pytest.raises(CheckpointError) as caught:
        read({"format_version": FORMAT_VERSION + 1, "something": "else"})
    assert f"format version {FORMAT_VERSION + 1}" in caught.value.message
    assert "upgrade" in caught.value.hint


@pytest.mark.parametrize("key", ["created_by", "options", "modules"])
def test_missing_keys(key):
    value = block()
    del value[key]
    assert f"key {key!r} is missing" in refused(value)


def test_unknown_keys_name_the_nearest():
    with pytest.raises(CheckpointError) as caught:
        read({**block(), "option": {}})
    assert "unknown key 'option'" in caught.value.message and "'options'" in caught.value.hint
    with pytest.raises(CheckpointError) as caught:
        read(changed(Q, windowbits=3))
    assert Q in caught.value.message and "'window_bits'" in caught.value.hint


@pytest.mark.parametrize("key", sorted(block()["modules"][Q]))
def test_missing_keys_of_a_module(key):
    message = refused(changed(Q, **{key: ...}))
    assert Q in message and key in message


# each changes a valid entry into one that nobody can decode
WRONG = [
    (Q, {"kind": "conv"}),
    (Q, {"kind": None}),
    (Q, {"kind": ["linear"]}),
    (Q, {"kind": "switch"}),
    (Q, {"kind": "affine_linear"}),
    (Q, {"shape": [96]}),
    (Q, {"shape": [96, 0]}),
    (Q, {"shape": [96, -128]}),
    (Q, {"shape": [96.0, 128]}),
    (Q, {"shape": "96x128"}),
    (Q, {"shape": None}),
    (Q, {"bits": 0}),
    (Q, {"bits": 9}),
    (Q, {"bits": "3"}),
    (Q, {"bits": True}),
    (Q, {"bits": None}),
    (Q, {"bits": 3.0}),
    (Q, {"window_bits": 2}),
    (Q, {"window_bits": 17}),
    (Q, {"window_bits": 0}),
    (Q, {"tile": -32}),
    (Q, {"tile": 3}),
    (Q, {"tile": 96}),
    (Q, {"group_size": 0}),
    (Q, {"group_size": 48}),
    (Q, {"group_size": None}),
    (Q, {"code": "vector"}),
    (Q, {"code": "ternary"}),
    (Q, {"code": ["scalar"]}),
    (Q, {"code": ""}),
    (Q, {"scale_layout": "float32"}),
    (Q, {"scale_layout": {}}),
    (Q, {"rotation_block": 0}),
    (Q, {"rotation_block": 36}),
    (Q, {"rotation_block": 256}),
    (Q, {"rotation_block": None}),
    (Q, {"rotation_group": ""}),
    (Q, {"rotation_group": None}),
    (Q, {"qjl": 1}),
    (Q, {"bias": "yes"}),
    (UP, {"bits": 3}),
    (UP, {"shape": [48, 96]}),
    (EMBED, {"bits": 7}),
    (EMBED, {"group_size": 16}),
    (EMBED, {"bias": True}),
    (EMBED, {"shape": [288, 100]}),
    (EMBED, {"qjl": False}),
]


@pytest.mark.parametrize(("path", "values"), WRONG)
def test_impossible_values_name_the_module(path, values):
    assert path in refused(changed(path, **values))


@pytest.mark.parametrize("path", ["", ".", "a..b", "../a", "a/b", "a b", "a\n", "a\\b"])
def test_paths_that_are_none(path):
    value = block()
    value["modules"][path] = {**value["modules"][EMBED]}
    assert "is not a module path" in refused(value)


@pytest.mark.parametrize("entry", [None, [], "linear", 3])
def test_an_entry_that_is_no_object(entry):
    value = block()
    value["modules"][Q] = entry
    assert Q in refused(value)


def test_rotation_groups_hang_together():
    assert "absent" in refused(changed(K, rotation_group="layers.1.q_proj"))
    assert "does not lead a group" in refused(changed(UP, rotation_group=K))
    assert "does not lead a group" in refused(changed(UP, rotation_group=EMBED))
    assert "width 96 differs from 128" in refused(changed(UP, rotation_group=Q))
    assert "rotation_block 32 differs from 64" in refused(changed(K, rotation_block=32))
    assert "qjl True differs from False" in refused(changed(K, qjl=True))
    leaderless = changed(Q, rotation_group=K)
    leaderless["modules"][K]["rotation_group"] = Q
    assert "does not lead a group" in refused(leaderless)


@pytest.mark.parametrize(
    "mtp",
    [
        None,
        {},
        {"file": "mtp.safetensors"},
        {"file": "../mtp.safetensors", "tensors": 1},
        {"file": "mtp.bin", "tensors": 1},
        {"file": 3, "tensors": 1},
        {"file": "mtp.safetensors", "tensors": 0},
        {"file": "mtp.safetensors", "tensors": "1"},
        {"file": "mtp.safetensors", "tensors": 1, "more": 2},
    ],
)
def test_a_head_that_is_none(mtp):
    assert "mtp" in refused({**block(), "mtp": mtp})


def test_sizes_of_rotations():
    sizes = [n for n in range(1, 200) if is_hadamard_size(n)]
    assert sizes == sorted({m * 2**k for m in (1, 12, 20, 28) for k in range(8) if m * 2**k < 200})
    assert not is_hadamard_size(0)


# --- the JSON Schema ----------------------------------------------------------------------------


def test_the_schema_is_a_schema_and_takes_our_manifests():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    VALIDATOR.validate(block())
    VALIDATOR.validate(Manifest(modules={}).to_dict())


# values whose fault lies in how they fit together, which a schema cannot say
RELATIONS = [
    (Q, {"window_bits": 2}),
    (Q, {"tile": 3}),
    (Q, {"tile": 96}),
    (Q, {"group_size": 48}),
    (Q, {"rotation_block": 36}),
    (Q, {"rotation_block": 256}),
    (EMBED, {"bias": True}),
    (EMBED, {"shape": [288, 100]}),
    (Q, {"shape": [96.0, 128]}),  # JSON has one sort of number
    (Q, {"bits": 3.0}),
]


@pytest.mark.parametrize(("path", "values"), WRONG)
def test_the_schema_refuses_what_the_reader_refuses(path, values):
    value = json.loads(json.dumps(changed(path, **values)))
    assert VALIDATOR.is_valid(value) == ((path, values) in RELATIONS)


@pytest.mark.parametrize("key", ["format_version", "created_by", "options", "modules"])
def test_the_schema_asks_for_the_same_keys(key):
    value = block()
    del value[key]
    assert not VALIDATOR.is_valid(value)
    assert not VALIDATOR.is_valid({**block(), "more": 1})
    assert not VALIDATOR.is_valid(changed(Q, more=1)) and not VALIDATOR.is_valid(
        changed(EMBED, more=1)
    )


# --- real folders -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"bits": 4, "group_size": 32, "use_qjl": True}),
        (
            "qwen3_moe",
            {
                "group_size": 32,
                "ternary_experts": True,
                "quantize_extras": True,
                "extras_group_size": 32,
            },
        ),
    ],
)
def test_real_folders_fit_the_schema_and_their_own_manifest(tmp_path, model_type, options):
    tiny.build_source(tmp_path / "source", model_type)
    convert(tmp_path / "source", tmp_path / "out", **options)
    folder = inspect_folder(tmp_path / "out")
    VALIDATOR.validate(copy.deepcopy(folder.config["turboquant"]))
    read_back = Manifest.from_config(folder.config)
    read_back.check_tensors(folder.tensors)
    assert read_back.to_dict() == folder.config["turboquant"]
