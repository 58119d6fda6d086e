"""Folders of the predecessor package: what they are recognised by, and what they decode to.

The folders in tests/fixtures/predecessor were written by that package; their README says how,
and what it recorded (``expected.npz``). Other layouts that its reader accepts are made here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from turboquant_mlx.checkpoint.loader import load_model
from turboquant_mlx.checkpoint.predecessor import (
    is_predecessor,
    manifest_from_headers,
    plain_config,
    rotation_block,
)
from turboquant_mlx.checkpoint.repack import dense_codes, repack
from turboquant_mlx.checkpoint.schema import Manifest, ModuleEntry
from turboquant_mlx.checkpoint.source import inspect_folder
from turboquant_mlx.errors import CheckpointError, TurboQuantError, UnsupportedModelError
from turboquant_mlx.kernels.dispatch import Backend, force_backend
from turboquant_mlx.layers.install import set_qjl
from turboquant_mlx.quant.weight import PackedWeight, dequantize_weight

FIXTURES = Path(__file__).parents[1] / "fixtures" / "predecessor"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/expected.npz"))
CONFIG = {"quantization": {"mode": "turboquant", "rotation": "hadamard"}}

# w{i} was computed in float64 and rounded; we transform back in float32.
ORIGINAL_DOMAIN_TOLERANCE = 2e-6

AFFINE = ("weight", "scales", "biases")
# The predecessor computed in float16; what is left when we compute in float32 is its rounding.
MIN_COSINE = 0.9999
LAYER_TOLERANCE = 3e-3

DTYPES = {
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
    mx.uint32: "U32",
}


# ---- helpers ----------------------------------------------------------------------------------


def headers_of(weights: dict[str, mx.array]) -> dict[str, Any]:
    """What the safetensors headers of these arrays would say."""
    return {
        name: SimpleNamespace(dtype=DTYPES[array.dtype], shape=array.shape)
        for name, array in weights.items()
    }


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, mx.array]]:
    folder = inspect_folder(path)
    weights: dict[str, mx.array] = {}
    for file in folder.weight_files:
        weights.update(mx.load(str(file)))
    return folder.config, weights


def derive(config: dict[str, Any], weights: dict[str, mx.array]) -> Manifest:
    return manifest_from_headers(
        config, headers_of(weights), read_tensor=lambda name: np.array(weights[name])
    )


def packed_weight(manifest: Manifest, ours: dict[str, mx.array], path: str) -> PackedWeight:
    entry = manifest.modules[path]
    names = ("codes", "scales", "table", "multiplier", "qjl_codes", "qjl_norms", "qjl_multiplier")
    arrays = {name: ours.get(f"{path}.{name}") for name in names}
    return PackedWeight(spec=entry.spec, shape=entry.shape, **arrays)


def whole_words(indices: np.ndarray, bits: int) -> np.ndarray:
    """The predecessor's packing: 32 // bits codes in a word, the first one lowest."""
    *rows, width = indices.shape
    per_word = 32 // bits
    padded = np.zeros((*rows, -(-width // per_word) * per_word), np.uint64)
    padded[..., :width] = indices
    lanes = padded.reshape(*rows, -1, per_word) << np.arange(per_word, dtype=np.uint64) * bits
    return np.bitwise_or.reduce(lanes, axis=-1).astype(np.uint32)


def trit_words(indices: np.ndarray) -> np.ndarray:
    *rows, width = indices.shape
    padded = np.zeros((*rows, -(-width // 20) * 20), np.uint64)
    padded[..., :width] = indices
    digits = padded.reshape(*rows, -1, 20) * 3 ** np.arange(20, dtype=np.uint64)
    return digits.sum(axis=-1).astype(np.uint32)


@dataclass
class Module:
    """One module in the predecessor's layout, and the weight in the stored domain it stands for."""

    tensors: dict[str, mx.array]
    stored: np.ndarray


def make_module(
    path: str,
    shape: tuple[int, ...] = (6, 128),
    *,
    levels: int = 8,
    group_size: int = 32,
    scale_dtype: mx.Dtype = mx.float16,
    codebook_dtype: mx.Dtype = mx.float16,
    negative_signs: bool = True,
    seed: int = 0,
) -> Module:
    rng = np.random.default_rng(seed)
    *rows, width = shape
    indices = rng.integers(0, levels, shape)
    scales = mx.array(rng.uniform(0.1, 2, (*rows, width // group_size)).astype(np.float16))
    scales = scales.astype(scale_dtype)
    codebook = mx.array(np.sort(rng.standard_normal(levels))).astype(codebook_dtype)
    signs = rng.choice([-1.0, 1.0], width) if negative_signs else np.ones(width)
    words = trit_words(indices) if levels == 3 else whole_words(indices, levels.bit_length() - 1)
    stored = np.array(codebook.astype(mx.float32))[indices]
    stored *= np.repeat(np.array(scales.astype(mx.float32)), group_size, axis=-1)
    tensors = {
        f"{path}.weight": mx.array(words),
        f"{path}.scales": scales,
        f"{path}.codebook": codebook,
        f"{path}.signs": mx.array(signs).astype(mx.float16),
    }
    return Module(tensors, stored)


def decode(module: Module, config: dict[str, Any] = CONFIG, *, rotated: bool) -> np.ndarray:
    path = next(iter(module.tensors)).rpartition(".")[0]
    manifest = derive(config, module.tensors)
    ours = repack(dict(module.tensors), manifest)
    return np.array(dequantize_weight(packed_weight(manifest, ours, path), rotated=rotated))


# ---- recognition ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_fixture_is_recognised(name: str) -> None:
    config = json.loads((FIXTURES / name / "config.json").read_text())
    assert is_predecessor(config)
    plain = plain_config(config)
    assert not is_predecessor(plain)
    assert set(config) - set(plain) == {"quantization", "quantization_config"}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"quantization": {"group_size": 64, "bits": 4}},
        {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
        {"quantization": None},
        {"quantization_config": {"quant_method": "turboquant"}, "turboquant": {}},
    ],
)
def test_other_configs_are_not(config: dict[str, Any]) -> None:
    assert not is_predecessor(config)


def test_one_copy_of_the_block_is_enough() -> None:
    assert is_predecessor({"quantization_config": {"mode": "turboquant"}})


# ---- the manifest -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "block"),
    [
        (128, 128),
        (160, 160),
        (192, 192),
        (224, 224),
        (352, 32),
        (5120, 5120),
        (6656, 512),
        (11008, 256),
        (13824, 1536),
        (14336, 14336),
        (35, 1),
    ],
)
def test_rotation_block_of_a_width(width: int, block: int) -> None:
    assert rotation_block(width) == block


@pytest.mark.parametrize(
    ("name", "path", "wanted"),
    [
        (
            "dense-3bit-g64",
            "lm_head",
            {"kind": "linear", "shape": (288, 128), "bits": 3, "group_size": 64, "bias": False},
        ),
        (
            "dense-2bit-g32",
            "model.layers.0.mlp.down_proj",
            {"bits": 2, "group_size": 32, "rotation_block": 192},
        ),
        ("dense-2bit-g32", "model.layers.0.self_attn.q_proj", {"bias": True, "qjl": False}),
        (
            "dense-4bit-g128-qjl",
            "model.layers.1.self_attn.v_proj",
            {"bits": 4, "group_size": 128, "qjl": True},
        ),
        (
            "moe-ternary-down4",
            "model.layers.0.mlp.switch_mlp.up_proj",
            {"kind": "switch", "shape": (4, 64, 128), "code": "ternary", "group_size": 64},
        ),
        (
            "moe-ternary-down4",
            "model.layers.0.mlp.switch_mlp.down_proj",
            {"kind": "switch", "shape": (4, 128, 64), "code": "scalar", "bits": 4},
        ),
        ("rotation-none", "lm_head", {"rotation_block": 1}),
        (
            "quantize-extras",
            "model.embed_tokens",
            {"kind": "affine_embedding", "shape": (288, 128), "bits": 4, "group_size": 32},
        ),
        (
            "quantize-extras",
            "model.layers.0.mlp.down_proj",
            {"kind": "affine_linear", "shape": (128, 160), "bits": 4, "group_size": 32},
        ),
        ("odd-dims", "model.layers.0.mlp.down_proj", {"rotation_block": 32, "group_size": 32}),
        (
            "hybrid-mtp",
            "language_model.model.layers.0.linear_attn.in_proj_z",
            {"kind": "linear", "bits": 4, "group_size": 32, "rotation_block": 64},
        ),
    ],
)
def test_modules_are_told_from_headers(name: str, path: str, wanted: dict[str, Any]) -> None:
    entry = derive(*read_folder(FIXTURES / name)).modules[path]
    assert {key: getattr(entry, key) for key in wanted} == wanted


@pytest.mark.parametrize("name", NAMES)
def test_each_module_leads_its_own_rotation_group(name: str) -> None:
    manifest = derive(*read_folder(FIXTURES / name))
    assert all(entry.is_leader for entry in manifest.modules.values() if not entry.is_affine)


def test_signs_are_read_only_where_the_config_denies_a_rotation() -> None:
    asked: list[str] = []
    for name in ("dense-3bit-g64", "rotation-none"):
        config, weights = read_folder(FIXTURES / name)

        def read(tensor: str, weights: dict[str, mx.array] = weights) -> np.ndarray:
            asked.append(tensor)
            return np.array(weights[tensor])

        manifest = manifest_from_headers(config, headers_of(weights), read_tensor=read)
        assert len(asked) == (0 if name == "dense-3bit-g64" else len(manifest.modules))
    assert all(tensor.endswith(".signs") for tensor in asked)


def test_old_folders_rotated_although_the_config_denies_it() -> None:
    module = make_module("a.b", negative_signs=True)
    config = {"quantization": {"mode": "turboquant", "rotation": "none"}}
    assert derive(config, module.tensors).modules["a.b"].rotation_block == 128
    np.testing.assert_array_equal(
        decode(module, config, rotated=False), decode(module, CONFIG, rotated=False)
    )


# ---- decoded weights --------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_repacked_tensors_are_what_our_format_asks_for(name: str) -> None:
    config, weights = read_folder(FIXTURES / name)
    names = set(weights)
    manifest = derive(config, weights)
    quantized = {n for n in names if n.rpartition(".")[0] in manifest.modules}
    ours = repack(weights, manifest)
    manifest.check_tensors(headers_of(ours))
    kept = {n for n in names - quantized if not n.startswith("tq_speculator.")}
    assert {n for n in ours if n.rpartition(".")[0] not in manifest.modules} == kept
    assert weights == {}, "packed tensors must not be held twice"


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_decoded_weights_are_the_recorded_ones(name: str, i: int) -> None:
    expected = np.load(FIXTURES / name / "expected.npz")
    path = str(expected["layer_names"][i])
    config, weights = read_folder(FIXTURES / name)
    manifest = derive(config, weights)
    packed = packed_weight(manifest, repack(weights, manifest), path)

    def decoded(rotated: bool) -> np.ndarray:
        weight = np.array(dequantize_weight(packed, rotated=rotated, use_qjl=False))
        if weight.ndim == 3:
            weight = weight[int(expected[f"w{i}_expert"])]
        return weight[:32]

    np.testing.assert_array_equal(decoded(rotated=True), expected[f"w{i}_rot"])
    wanted = expected[f"w{i}"]
    error = np.abs(decoded(rotated=False) - wanted).max() / np.abs(wanted).max()
    assert error < ORIGINAL_DOMAIN_TOLERANCE


@pytest.mark.parametrize("shape", [(6, 160), (3, 5, 96)])
@pytest.mark.parametrize("levels", [2, 3, 4, 8, 16, 32, 64, 128, 256])
def test_every_width_from_one_to_eight_bits(levels: int, shape: tuple[int, ...]) -> None:
    module = make_module("a.b", shape, levels=levels, group_size=32)
    np.testing.assert_array_equal(decode(module, rotated=True), module.stored)


@pytest.mark.parametrize("width", [224, 320, 384, 5120, 14336])
def test_rotations_of_any_length_are_undone(width: int) -> None:
    module = make_module("a.b", (4, width))
    original = decode(module, rotated=False)
    signs = np.array(module.tensors["a.b.signs"].astype(mx.float32))
    block = rotation_block(width)
    again = mx.hadamard_transform(mx.array(original * signs).reshape(4, -1, block))
    error = np.abs(np.array(again).reshape(4, width) - module.stored).max()
    assert error < ORIGINAL_DOMAIN_TOLERANCE * np.abs(module.stored).max()


@pytest.mark.parametrize("group_size", [8, 20, 80, 160])
def test_any_group_size_that_divides_the_width(group_size: int) -> None:
    module = make_module("a.b", (4, 160), group_size=group_size)
    np.testing.assert_array_equal(decode(module, rotated=True), module.stored)


@pytest.mark.parametrize("codebook_dtype", [mx.float16, mx.float32])
@pytest.mark.parametrize("scale_dtype", [mx.bfloat16, mx.float32])
def test_bfloat16_scales_and_float32_codebooks(
    scale_dtype: mx.Dtype, codebook_dtype: mx.Dtype
) -> None:
    module = make_module("a.b", scale_dtype=scale_dtype, codebook_dtype=codebook_dtype)
    np.testing.assert_array_equal(decode(module, rotated=True), module.stored)


@pytest.mark.parametrize("power", [-100, -30, 30, 100])
def test_bfloat16_scales_beyond_the_range_of_float16(power: int) -> None:
    module = make_module("a.b", scale_dtype=mx.bfloat16)
    factor = 2.0**power
    module.tensors["a.b.scales"] = module.tensors["a.b.scales"] * mx.array(factor, mx.bfloat16)
    np.testing.assert_array_equal(decode(module, rotated=True), module.stored * np.float32(factor))


def test_scales_that_float16_cannot_hold_are_an_error() -> None:
    module = make_module("a.b", scale_dtype=mx.float32)
    module.tensors["a.b.scales"][0, 0] = 1 + 2**-20
    manifest = derive(CONFIG, module.tensors)
    with pytest.raises(CheckpointError, match=r"tensor a\.b\.scales cannot be stored as float16"):
        repack(dict(module.tensors), manifest)
    module.tensors["a.b.scales"][0, 0] = float("inf")
    with pytest.raises(CheckpointError, match=r"tensor a\.b\.scales holds values that are not"):
        repack(dict(module.tensors), manifest)


@pytest.mark.parametrize("width", [1, 9, 10, 31, 64, 160, 353])
@pytest.mark.parametrize("bits", range(1, 9))
def test_dense_codes(monkeypatch: pytest.MonkeyPatch, bits: int, width: int) -> None:
    indices = np.random.default_rng(bits).integers(0, 1 << bits, (2, 5, width))
    words = whole_words(indices, bits)
    if 32 % bits:
        words |= np.uint32(0xC0000000)  # unused bits are not codes
    monkeypatch.setattr("turboquant_mlx.checkpoint.repack.BLOCK_BYTES", 4 * 3 * words.shape[-1])
    dense = np.array(dense_codes(mx.array(words), bits, width))
    assert dense.shape == (2, 5, -(-width * bits // 32))
    stream = (dense[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    stream = stream.reshape(2, 5, -1)[..., : width * bits].reshape(2, 5, width, bits)
    np.testing.assert_array_equal((stream << np.arange(bits)).sum(axis=-1), indices)


def test_a_kept_prediction_head_is_counted_and_left_out() -> None:
    config, weights = read_folder(FIXTURES / "hybrid-mtp")
    head = [name for name in weights if name.startswith("tq_speculator.")]
    manifest = derive(config, weights)
    assert manifest.mtp is not None and manifest.mtp.tensors == len(head) == 15
    assert not any("speculator" in name for name in repack(weights, manifest))
    assert derive(*read_folder(FIXTURES / "dense-3bit-g64")).mtp is None


def test_biases_keep_their_type() -> None:
    config, weights = read_folder(FIXTURES / "dense-2bit-g32")
    name = "model.layers.0.self_attn.q_proj.bias"
    bias = weights[name]
    ours = repack(weights, derive(config, weights))
    assert ours[name].dtype == mx.float16
    np.testing.assert_array_equal(np.array(ours[name]), np.array(bias))


# ---- affine modules ---------------------------------------------------------------------------


def affine_module(path: str, width: int, bits: int, group_size: int) -> dict[str, mx.array]:
    weight = mx.random.normal((8, width), key=mx.random.key(1))
    parts = mx.quantize(weight, group_size=group_size, bits=bits)
    return {f"{path}.{name}": part for name, part in zip(AFFINE, parts, strict=True)}


def affine_entry(
    config: dict[str, Any], width_of: Callable[[str], int | None] | None = None
) -> ModuleEntry:
    tensors = headers_of(affine_module("a.b", 256, 4, 64))
    return manifest_from_headers(config, tensors, width_of=width_of).modules["a.b"]


def test_affine_shapes_alone_may_fit_several_layouts() -> None:
    with pytest.raises(CheckpointError, match="2 bits of group size 128 or 4 bits of group size"):
        affine_entry(CONFIG)


def test_the_config_says_which_affine_layout() -> None:
    block = CONFIG["quantization"] | {"affine_extras": {"bits": 4, "group_size": 64}}
    entry = affine_entry({"quantization": block})
    assert (entry.shape, entry.bits, entry.group_size) == ((8, 256), 4, 64)


def test_the_model_says_so_with_more_authority() -> None:
    block = CONFIG["quantization"] | {"affine_extras": {"bits": 2, "group_size": 128}}
    entry = affine_entry({"quantization": block}, lambda path: 256)
    assert (entry.shape, entry.bits, entry.group_size) == ((8, 256), 4, 64)
    with pytest.raises(CheckpointError, match="fit no affine quantization"):
        affine_entry({"quantization": block}, lambda path: 192)


@pytest.mark.parametrize(("bits", "group_size"), [(5, 32), (8, 128)])
def test_affine_shapes_that_leave_no_doubt(bits: int, group_size: int) -> None:
    tensors = headers_of(affine_module("wte", 128, bits, group_size))
    entry = manifest_from_headers(CONFIG, tensors).modules["wte"]
    assert (entry.kind, entry.shape) == ("affine_embedding", (8, 128))
    assert (entry.bits, entry.group_size) == (bits, group_size)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("model.embed_tokens", "affine_embedding"),
        ("model.embed_tokens_per_layer", "affine_embedding"),
        ("transformer.wte", "affine_embedding"),
        ("backbone.embeddings", "affine_embedding"),
        ("embed_out", "affine_linear"),
        ("model.layers.0.self_attn.q_proj", "affine_linear"),
    ],
)
def test_embeddings_are_told_by_name(path: str, kind: str) -> None:
    tensors = headers_of(affine_module(path, 128, 8, 128))
    assert manifest_from_headers(CONFIG, tensors).modules[path].kind == kind


# ---- damage -----------------------------------------------------------------------------------

PATH = "model.layers.1.self_attn.k_proj"


def damaged(name: str, change: Callable[[dict[str, Any]], Any]) -> str:
    """The error's message after a change of the headers of a fixture."""
    config, weights = read_folder(FIXTURES / name)
    headers = headers_of(weights)
    change(headers)
    with pytest.raises(CheckpointError) as caught:
        manifest_from_headers(config, headers)
    message = caught.value.message
    assert "\n" not in message and not message.endswith(".")
    return message


@pytest.mark.parametrize(
    ("name", "path", "suffix"),
    [
        ("dense-3bit-g64", PATH, "signs"),
        ("dense-3bit-g64", PATH, "codebook"),
        ("dense-3bit-g64", PATH, "scales"),
        ("dense-3bit-g64", PATH, "weight"),
        ("dense-4bit-g128-qjl", PATH, "qjl_packed"),
        ("dense-4bit-g128-qjl", PATH, "qjl_norms"),
        ("dense-4bit-g128-qjl", PATH, "qjl_signs"),
        ("moe-ternary-down4", "model.layers.0.mlp.switch_mlp.up_proj", "codebook"),
        ("quantize-extras", "model.embed_tokens", "biases"),
        ("quantize-extras", "model.embed_tokens", "scales"),
        ("quantize-extras", "model.embed_tokens", "weight"),
    ],
)
def test_a_missing_tensor_is_named(name: str, path: str, suffix: str) -> None:
    message = damaged(name, lambda headers: headers.pop(f"{path}.{suffix}"))
    assert message == f"tensor {path}.{suffix} is missing"


def test_all_missing_tensors_of_a_module_are_named() -> None:
    def change(headers: dict[str, Any]) -> None:
        del headers[f"{PATH}.signs"], headers[f"{PATH}.scales"]

    assert damaged("dense-3bit-g64", change) == (f"tensors {PATH}.scales, {PATH}.signs are missing")


def test_a_packed_weight_on_its_own_is_an_error() -> None:
    def change(headers: dict[str, Any]) -> None:
        for suffix in ("signs", "scales", "codebook"):
            del headers[f"{PATH}.{suffix}"]

    assert damaged("dense-3bit-g64", change) == (
        f"tensor {PATH}.weight is packed, but its scales and codebook are missing"
    )


@pytest.mark.parametrize(
    ("suffix", "dtype", "shape", "problem"),
    [
        (
            "weight",
            "U32",
            (64, 12),
            "is [64, 12], the other tensors of its module ask for [64, 13]",
        ),
        ("weight", "F16", (64, 13), "is F16, not U32"),
        ("weight", "U32", (832,), "has 1 dimensions, neither a matrix nor a stack"),
        ("scales", "F16", (64, 3), "has 3 groups, which do not divide the width 128"),
        ("scales", "F16", (63, 2), "is [63, 2], the other tensors of its module ask for [64, 2]"),
        ("scales", "U8", (64, 2), "is U8, not F16 or BF16 or F32"),
        ("codebook", "F16", (7,), "has 7 entries: no such code"),
        ("codebook", "F16", (1,), "has 1 entries: no such code"),
        ("codebook", "F16", (512,), "has 512 entries: no such code"),
        ("codebook", "F16", (2, 4), "is [2, 4], not a vector"),
        ("signs", "F16", (1, 128), "is [1, 128], not a vector"),
        ("signs", "I8", (128,), "is I8, not F16 or BF16 or F32"),
        ("bias", "F16", (63,), "is [63], the other tensors of its module ask for [64]"),
        ("biases", "F16", (64, 2), "belongs to nothing"),
        ("zeros", "F16", (64, 2), "belongs to nothing"),
    ],
)
def test_a_wrong_tensor_is_named(
    suffix: str, dtype: str, shape: tuple[int, ...], problem: str
) -> None:
    name = f"{PATH}.{suffix}"
    info = SimpleNamespace(dtype=dtype, shape=shape)
    message = damaged("dense-3bit-g64", lambda headers: headers.__setitem__(name, info))
    if suffix in ("signs", "codebook", "weight", "scales"):
        assert message.startswith(f"tensor {PATH}.")
    assert message == f"tensor {name} {problem}"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"rotation": "fourier"}, "config.json: unknown rotation 'fourier'"),
        ({"affine_extras": {"bits": 4}}, "affine_extras does not say bits and group_size"),
    ],
)
def test_bad_config_values(change: dict[str, Any], problem: str) -> None:
    block = {"mode": "turboquant"} | change
    tensors = headers_of(affine_module("a.b", 256, 4, 64))
    with pytest.raises(CheckpointError, match=problem):
        manifest_from_headers({"quantization": block}, tensors)


def test_the_two_copies_of_the_config_must_agree() -> None:
    config = CONFIG | {"quantization_config": {"mode": "turboquant", "rotation": "none"}}
    with pytest.raises(CheckpointError, match="disagree on 'rotation'"):
        manifest_from_headers(config, {})


def test_qjl_without_rotation_is_refused() -> None:
    config, weights = read_folder(FIXTURES / "dense-4bit-g128-qjl")
    for key in ("quantization", "quantization_config"):
        config[key]["rotation"] = "none"
    with pytest.raises(UnsupportedModelError, match="QJL sketch of a weight that is not rotated"):
        manifest_from_headers(config, headers_of(weights))


def test_repack_names_what_is_missing_or_surplus() -> None:
    config, weights = read_folder(FIXTURES / "dense-3bit-g64")
    manifest = derive(config, weights)

    def message(change: Callable[[dict[str, mx.array]], Any]) -> str:
        changed = dict(weights)
        change(changed)
        with pytest.raises(CheckpointError) as caught:
            repack(changed, manifest)
        return caught.value.message

    assert message(lambda w: w.pop(f"{PATH}.signs")) == f"tensor {PATH}.signs is missing"
    assert message(lambda w: w.update({f"{PATH}.bias": mx.zeros(64)})) == (
        f"tensor {PATH}.bias belongs to nothing"
    )
    assert message(lambda w: w.update({f"{PATH}.qjl_norms": mx.zeros(64)})) == (
        f"tensor {PATH}.qjl_norms belongs to nothing"
    )
    assert message(lambda w: w.update({f"{PATH}.weight": mx.zeros((64, 12), mx.uint32)})) == (
        f"tensor {PATH}.weight has 12 words in a row, not 13"
    )
    assert message(lambda w: w.update({f"{PATH}.scales": mx.zeros((64, 4), mx.float16)})) == (
        f"tensor {PATH}.scales is [64, 4] after repacking, not [64, 2]"
    )


# ---- whole models -----------------------------------------------------------------------------


@pytest.fixture(params=["cpu", "portable"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with force_backend(request.param):
        yield request.param


def load_float32(path: Path) -> nn.Module:
    model, _ = load_model(path)
    model.set_dtype(mx.float32)
    return model


def assert_same_logits(model: nn.Module, expected: Any, key: str) -> None:
    logits = np.array(model(mx.array(expected["input_ids"])))[0]
    wanted = expected[key]
    cosine = (logits * wanted).sum() / np.linalg.norm(logits) / np.linalg.norm(wanted)
    assert cosine > MIN_COSINE
    np.testing.assert_array_equal(logits.argmax(axis=-1), wanted.argmax(axis=-1))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_recorded_ones(name: str, backend: Backend) -> None:
    expected = np.load(FIXTURES / name / "expected.npz")
    assert_same_logits(load_float32(FIXTURES / name), expected, "logits")


def test_logits_without_the_qjl_sketch(backend: Backend) -> None:
    name = "dense-4bit-g128-qjl"
    expected = np.load(FIXTURES / name / "expected.npz")
    model = load_float32(FIXTURES / name)
    set_qjl(model, False)
    assert_same_logits(model, expected, "logits_fast")
    set_qjl(model, True)
    assert_same_logits(model, expected, "logits")


@pytest.mark.parametrize("name", NAMES)
def test_layer_outputs_are_the_recorded_ones(name: str, backend: Backend) -> None:
    expected = np.load(FIXTURES / name / "expected.npz")
    modules = dict(load_float32(FIXTURES / name).named_modules())
    for i, path in enumerate(expected["layer_names"]):
        layer, x = modules[str(path)], mx.array(expected[f"x{i}"])
        if f"e{i}" in expected:
            y = layer(x[:, None, :], mx.array(expected[f"e{i}"]))
        else:
            y = layer(x)
        wanted = expected[f"y{i}"]
        error = np.abs(np.array(y).reshape(wanted.shape) - wanted).max() / np.abs(wanted).max()
        assert error < LAYER_TOLERANCE


@pytest.mark.parametrize("name", ["dense-2bit-g32", "hybrid-mtp", "moe-ternary-down4"])
def test_activations_keep_the_type_of_the_model(name: str, backend: Backend) -> None:
    expected = np.load(FIXTURES / name / "expected.npz")
    model, _ = load_model(FIXTURES / name)
    assert model(mx.array(expected["input_ids"])).dtype == mx.bfloat16


# ---- whole folders ----------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "sharded", tmp_path / "sharded"))


def load_error(path: Path) -> TurboQuantError:
    with pytest.raises(TurboQuantError) as caught:
        load_model(path)
    message = caught.value.message
    assert "\n" not in message and not message.endswith(".")
    return caught.value


def rewrite(path: Path, change: Callable[[dict[str, mx.array]], Any]) -> None:
    """Change the tensors of a folder, index included, so that the files agree again."""
    _, weights = read_folder(path)
    mx.eval(weights)
    for file in path.glob("model*.safetensors*"):
        file.unlink()
    change(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})


def test_a_deleted_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00004.safetensors").unlink()
    assert "model-00002-of-00004.safetensors is missing" in load_error(sharded).message


def test_a_deleted_shard_is_noticed_without_an_index(sharded: Path) -> None:
    (sharded / "model-00002-of-00004.safetensors").unlink()
    (sharded / "model.safetensors.index.json").unlink()
    assert "model-00002-of-00004.safetensors is missing" in load_error(sharded).message


def test_a_stray_shard_is_named(sharded: Path) -> None:
    shutil.copy(sharded / "model-00001-of-00004.safetensors", sharded / "model-extra.safetensors")
    assert "model-extra.safetensors" in load_error(sharded).message


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sharded / "model-00001-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert "model-00001-of-00004.safetensors: truncated" in load_error(sharded).message


@pytest.mark.parametrize(
    "tensor",
    [
        f"{PATH}.signs",
        f"{PATH}.codebook",
        f"{PATH}.scales",
        f"{PATH}.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    ],
)
def test_a_tensor_missing_from_a_folder_is_named(sharded: Path, tensor: str) -> None:
    rewrite(sharded, lambda weights: weights.pop(tensor))
    error = load_error(sharded)
    assert isinstance(error, CheckpointError) and tensor in error.message


def test_a_missing_module_is_named(sharded: Path) -> None:
    def change(weights: dict[str, mx.array]) -> None:
        for suffix in ("weight", "scales", "codebook", "signs"):
            del weights[f"{PATH}.{suffix}"]

    rewrite(sharded, change)
    assert PATH in load_error(sharded).message


def test_a_wrong_packed_width_is_named(sharded: Path) -> None:
    name = f"{PATH}.weight"
    rewrite(sharded, lambda weights: weights.update({name: weights[name][:, :-1]}))
    assert name in load_error(sharded).message


def test_a_module_of_another_width_than_the_model_has_is_named(sharded: Path) -> None:
    module = make_module(PATH, (64, 192), group_size=64)
    rewrite(sharded, lambda weights: weights.update(module.tensors))
    assert PATH in load_error(sharded).message


def test_modules_that_the_model_does_not_have_are_named(sharded: Path) -> None:
    """Some models of the predecessor had module names of their own."""

    def change(weights: dict[str, mx.array]) -> None:
        for name in [name for name in weights if ".mlp." in name]:
            weights[name.replace(".mlp.", ".feed_forward.")] = weights.pop(name)

    rewrite(sharded, change)
    error = load_error(sharded)
    assert isinstance(error, CheckpointError) and ".feed_forward." in error.message


def test_a_model_type_that_mlx_lm_lacks_is_named(sharded: Path) -> None:
    config = json.loads((sharded / "config.json").read_text())
    config["model_type"] = "sarvam_moe"
    (sharded / "config.json").write_text(json.dumps(config))
    error = load_error(sharded)
    assert isinstance(error, UnsupportedModelError) and "'sarvam_moe'" in error.message
