"""Candidates are what they say: the right layers, the right arrays, every stored byte counted."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tiny import build_source
from turboquant_mlx import convert
from turboquant_mlx.evaluate.candidates import Candidate, load_folder, load_source, prepare
from turboquant_mlx.evaluate.running import (
    forward_of,
    use_16bit_activations,
    use_float32_activations,
)

PREDECESSOR = Path(__file__).parents[1] / "fixtures" / "predecessor"
IDS = np.arange(10, 30, dtype=np.int32)


@pytest.fixture(scope="module")
def moe(models) -> Path:
    folder = models / "moe"
    build_source(folder, "qwen3_moe")
    return folder


def linears(model) -> dict:
    """Path -> module of everything that multiplies by a stored matrix, embeddings aside."""
    return {
        path: module
        for path, module in model.named_modules()
        if path.endswith(("_proj", "lm_head")) and "weight" in module
    }


@pytest.mark.parametrize(
    ("method", "bits", "group_size", "bits_per_weight"),
    [("affine", 2, 64, 2.5), ("affine", 3, 32, 4.0), ("mxfp4", 4, 32, 4.25), ("nvfp4", 4, 16, 4.5)],
)
def test_mlx_formats_quantize_the_layers_that_we_do(
    source, method, bits, group_size, bits_per_weight
):
    prepared = prepare(Candidate("row", method, bits, group_size), source)
    plain = dict(mlx_lm.load(str(source))[0].named_modules())
    layers = linears(prepared.model)
    assert len(layers) == 2 * 7 + 1
    for path, layer in layers.items():
        weight = plain[path].weight
        expected = mx.quantize(weight, group_size=group_size, bits=bits, mode=method)
        assert mx.array_equal(layer.weight, expected[0]).item()
        assert mx.array_equal(layer.scales, expected[1]).item()
    embedding = prepared.model.model.embed_tokens.weight
    assert embedding.dtype == mx.bfloat16
    size = prepared.size
    assert size.weights == sum(plain[path].weight.size for path in layers)
    assert size.bits_per_weight == pytest.approx(bits_per_weight)
    parameters = dict(tree_flatten(prepared.model.parameters()))
    assert size.model_bytes == sum(array.nbytes for array in parameters.values())


def test_a_width_that_a_format_does_not_divide_stays_and_counts(tmp_path):
    source = tmp_path / "narrow"
    build_source(source, "llama", intermediate_size=96)
    said = []
    prepared = prepare(
        Candidate("affine 3-bit g64", "affine", 3, 64), source, say=lambda *a: said.append(a)
    )
    (note,) = [text for kind, text in said if kind == "note"]
    assert note.startswith("affine 3-bit g64: 2 of 15 layers stay in 16 bits")
    down = prepared.model.model.layers[0].mlp.down_proj
    assert down.weight.dtype == mx.bfloat16
    kept = 2 * down.weight.size
    rest = prepared.size.weights - kept
    assert prepared.size.weight_bytes == rest * 3.5 / 8 + kept * 2


def test_expert_stacks_are_quantized_too(moe):
    prepared = prepare(Candidate("row", "affine", 4, 64), moe)
    experts = prepared.model.model.layers[0].mlp.switch_mlp.gate_proj
    assert experts.bits == 4
    assert prepared.size.bits_per_weight == pytest.approx(4.5)
    assert prepared.model.model.layers[0].mlp.gate.weight.dtype == mx.bfloat16
    assert np.isfinite(forward_of(prepared.model)(IDS)).all()


@pytest.mark.parametrize("options", [{"bits": 3}, {"bits": 2, "use_qjl": True}])
def test_our_own_row_is_what_the_converter_makes(source, tmp_path, options):
    report = convert(source, tmp_path / "model", **options)
    prepared = prepare(Candidate("row", "turboquant", options=options), source)
    assert prepared.size.weights == report.quantized_weights
    assert prepared.size.weight_bytes == report.quantized_bytes
    assert prepared.size.model_bytes == report.stored_bytes
    assert prepared.options["bits"] == options["bits"]
    stored = load_folder(tmp_path / "model")
    assert stored.size == prepared.size
    np.testing.assert_array_equal(forward_of(stored.model)(IDS), forward_of(prepared.model)(IDS))


def test_nothing_of_a_conversion_stays_on_the_disk(source, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prepared = prepare(Candidate("row", "turboquant", options={"bits": 4}), source)
    assert list(tmp_path.iterdir()) == []
    assert np.isfinite(forward_of(prepared.model)(IDS)).all()


def test_a_folder_of_the_predecessor_counts_as_it_is_stored():
    """Its 3-bit codes take 3.2 bits; in memory they are packed densely."""
    path = PREDECESSOR / "dense-3bit-g64"
    size = load_folder(path).size
    stored = mx.load(str(path / "model.safetensors"))
    modules = {name.rpartition(".")[0] for name in stored if name.endswith(".codebook")}
    own = [array for name, array in stored.items() if name.rpartition(".")[0] in modules]
    assert size.weight_bytes == sum(array.nbytes for array in own)
    assert size.model_bytes == sum(array.nbytes for array in stored.values())
    assert size.bits_per_weight > 3.2 + 16 / 64


def test_a_folder_of_mlx_lm_counts_its_embedding_too(source, tmp_path):
    folder = tmp_path / "affine"
    mlx_lm.convert(str(source), str(folder), quantize=True, q_bits=4, q_group_size=64)
    size = load_folder(folder).size
    assert size.bits_per_weight == pytest.approx(4.5)
    plain = prepare(Candidate("row", "affine", 4, 64), source).size
    assert size.weights > plain.weights


def test_a_folder_that_is_not_quantized_has_no_bits_per_weight(source):
    size = load_folder(source).size
    assert (size.weights, size.bits_per_weight) == (0, None)
    assert size.model_bytes > 0


# --- activations --------------------------------------------------------------------------------


def output_dtype(model) -> mx.Dtype:
    return model(mx.array(IDS)[None]).dtype


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "granitemoe", "gpt_oss"])
def test_activations_are_float32_and_weights_stay(models, kind):
    folder = models / f"wide-{kind}"
    build_source(folder, kind)
    model = load_source(folder).model
    before = {name: value.dtype for name, value in tree_flatten(model.parameters())}
    assert output_dtype(model) == mx.bfloat16
    use_float32_activations(model)
    assert output_dtype(model) == mx.float32
    assert before == {name: value.dtype for name, value in tree_flatten(model.parameters())}


def test_float32_activations_are_those_of_a_float32_model(source):
    wide, whole = load_source(source).model, load_source(source).model
    use_float32_activations(wide)
    whole.set_dtype(mx.float32)
    np.testing.assert_allclose(forward_of(wide)(IDS), forward_of(whole)(IDS), atol=2e-4)


def test_16_bit_activations(source, tmp_path):
    model = load_source(source).model
    use_16bit_activations(model)
    assert output_dtype(model) == mx.bfloat16
    build_source(tmp_path / "float32", "llama", dtype="float32")
    model = load_source(tmp_path / "float32").model
    assert output_dtype(model) == mx.float32
    use_16bit_activations(model)
    assert output_dtype(model) == mx.bfloat16
