"""Every supported architecture runs as it should: unconverted, converted, and in bfloat16.

The models are tiny and random (tests/tiny.py) in the tensor naming of published checkpoints. The
references come from outside: the stock mlx-lm, and logits recorded from transformers. All have
unusual rotary bases, so a loader that overlooks the base in the config cannot pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_stock

import tiny
from distances import as_float32, cosines, divergences
from turboquant_mlx.checkpoint.loader import load_model
from turboquant_mlx.errors import CheckpointError
from turboquant_mlx.layers.install import packed_layers
from turboquant_mlx.quant.weight import dequantize_weight

TYPES = (*tiny.MODEL_TYPES, "gemma3")
BASES = [(name, "rope_theta") for name in TYPES] + [
    (name, "rope_local_base_freq") for name in ("gemma3_text", "gemma3")
]

# Bounds of the mean over the positions: measured on these models, with the distance from 1 doubled
# and the divergence (in nats) tripled, as another choice of signs moves both that much.
COSINE_4_BITS = {
    "llama": 0.980,
    "qwen2": 0.985,
    "qwen3": 0.985,
    "qwen3_moe": 0.970,
    "mixtral": 0.975,
    "gemma3_text": 0.975,
    "gpt_oss": 0.940,
    "granitemoe": 0.993,
    "deepseek_v2": 0.950,
    "deepseek_v3": 0.940,
    "gemma3": 0.975,
}
DIVERGENCE_4_BITS = {
    "llama": 0.24,
    "qwen2": 0.13,
    "qwen3": 0.12,
    "qwen3_moe": 0.7,
    "mixtral": 0.65,
    "gemma3_text": 0.07,
    "gpt_oss": 1.2,
    "granitemoe": 0.02,
    "deepseek_v2": 0.9,
    "deepseek_v3": 0.7,
    "gemma3": 0.07,
}


def run(folder: Path, ids: mx.array) -> mx.array:
    """Logits [L, vocab] of the model in a folder, through our own loader."""
    model, _ = load_model(folder)
    return model(ids)[0]


@pytest.fixture(params=TYPES)
def model_type(request: pytest.FixtureRequest) -> str:
    return request.param


class TestUnconverted:
    def test_equals_the_stock_loader(self, folders, model_type):
        # mlx-lm cannot read every config of transformers 5, so both read the older spelling.
        folder = folders.source(model_type, transformers5=False)
        ids = folders.recording(model_type).ids
        stock, _ = load_stock(folder)
        expected = as_float32(stock(ids))
        np.testing.assert_allclose(as_float32(run(folder, ids)), expected, rtol=0, atol=2e-4)

    def test_spelling_of_the_config_makes_no_difference(self, folders, model_type):
        ids = folders.recording(model_type).ids
        new = run(folders.source(model_type, transformers5=True), ids)
        old = run(folders.source(model_type, transformers5=False), ids)
        assert mx.array_equal(new, old)

    def test_equals_transformers(self, folders, model_type):
        recording = folders.recording(model_type)
        logits = as_float32(run(folders.source(model_type), recording.ids))
        assert cosines(recording.logits, logits).min() > 0.9999
        assert (logits.argmax(-1) == recording.logits.argmax(-1)).all()

    @pytest.mark.parametrize(("model_type", "key"), BASES)
    def test_a_wrong_rotary_base_would_be_seen(self, folders, model_type, key):
        recording = folders.recording(model_type)
        assert recording.recipe[key] != 10000.0
        wrong = folders.source(model_type, **{key: 10000.0})
        assert cosines(recording.logits, run(wrong, recording.ids)).min() < 0.999

    def test_bfloat16_stays_bfloat16_and_close(self, folders, model_type):
        recording = folders.recording(model_type)
        model, _ = load_model(folders.source(model_type, dtype="bfloat16"))
        with watch_dtypes(model) as seen:
            logits = model(recording.ids)
        assert_all_bfloat16(seen, logits)
        assert cosines(recording.logits, logits).mean() > 0.995


class TestConvertedTo4Bits:
    def test_is_close_to_transformers(self, folders, model_type):
        recording = folders.recording(model_type)
        logits = run(folders.converted(model_type), recording.ids)
        assert cosines(recording.logits, logits).mean() > COSINE_4_BITS[model_type]
        assert divergences(recording.logits, logits).mean() < DIVERGENCE_4_BITS[model_type]

    def test_equals_the_stock_model_with_the_decoded_weights(self, folders, model_type):
        """All distance from the source is in the stored weights, none in how they are used."""
        ids = folders.recording(model_type).ids
        converted, _ = load_model(folders.converted(model_type, dtype="float32"))
        stock, _ = load_stock(folders.source(model_type, transformers5=False))
        modules = dict(stock.named_modules())
        for path, layer in packed_layers(converted):
            modules[path].weight = dequantize_weight(layer.packed())
        expected = as_float32(stock(ids))
        np.testing.assert_allclose(as_float32(converted(ids)), expected, rtol=0, atol=2e-3)

    def test_something_was_converted_in_every_layer(self, folders, model_type):
        model, _ = load_model(folders.converted(model_type))
        paths = [path for path, _ in packed_layers(model)]
        for n in range(len(model.layers)):
            inside = [path for path in paths if f"layers.{n}." in path]
            assert any("self_attn" in path for path in inside)
            assert any("mlp" in path or "moe" in path for path in inside)

    def test_bfloat16_stays_bfloat16(self, folders, model_type):
        model, _ = load_model(folders.converted(model_type))
        with watch_dtypes(model) as seen:
            logits = model(folders.recording(model_type).ids)
        assert_all_bfloat16(seen, logits)

    def test_spelling_of_the_source_makes_no_difference(self, folders, model_type):
        ids = folders.recording(model_type).ids
        new = run(folders.converted(model_type, transformers5=True), ids)
        old = run(folders.converted(model_type, transformers5=False), ids)
        assert mx.array_equal(new, old)

    def test_decoding_step_by_step_equals_one_pass(self, folders, model_type):
        """A prompt of 7 tokens, then one by one over the edge of the sliding windows (8)."""
        ids = folders.recording(model_type).ids
        model, _ = load_model(folders.converted(model_type))
        whole = as_float32(model(ids))
        cache = make_prompt_cache(model)
        parts = [as_float32(model(ids[:, :7], cache=cache))]
        parts += [as_float32(model(ids[:, n : n + 1], cache=cache)) for n in range(7, ids.size)]
        # Attention over one query and over many differ in their bfloat16 roundings only.
        assert cosines(whole, np.concatenate(parts)).min() > 0.99


class TestExpertsOfGptOss:
    """Its experts are published in three layouts; all of them hold the same model."""

    def test_mxfp4_equals_the_stock_loader(self, folders):
        folder = folders.source("gpt_oss", experts="mxfp4", transformers5=False)
        ids = folders.recording("gpt_oss").ids
        stock, _ = load_stock(folder)
        expected = as_float32(stock(ids))
        np.testing.assert_allclose(as_float32(run(folder, ids)), expected, rtol=0, atol=2e-4)

    def test_mxfp4_converts(self, folders):
        ids = folders.recording("gpt_oss").ids
        model, _ = load_model(folders.converted("gpt_oss", experts="mxfp4"))
        assert any("experts" in path for path, _ in packed_layers(model))
        source = run(folders.source("gpt_oss", experts="mxfp4"), ids)
        assert cosines(source, model(ids)).mean() > COSINE_4_BITS["gpt_oss"]

    def test_fused_layout_is_refused_by_name(self, folders):
        # mlx-lm has no reading of what transformers writes for a bf16 gpt-oss.
        with pytest.raises(CheckpointError, match=r"mlp\.experts\.down_proj"):
            load_model(folders.source("gpt_oss", experts="fused"))


# --- dtypes of activations -------------------------------------------------------------------

# Routers whose scores mlx-lm computes in float32 on purpose; their model casts the result back.
FLOAT32_ROUTERS = ("MoEGate", "GraniteMoeTopKGating")


class watch_dtypes:
    """Collects (path, dtype) of everything that any module of a model returns."""

    def __init__(self, model: nn.Module):
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.kinds = {type(module) for _, module in model.named_modules()}
        self.seen: list[tuple[str, mx.Dtype]] = []

    def __enter__(self) -> list[tuple[str, mx.Dtype]]:
        self.patch = pytest.MonkeyPatch()
        for kind in self.kinds:
            is_called = any("__call__" in vars(base) for base in kind.__mro__)
            if is_called and kind.__name__ not in FLOAT32_ROUTERS:
                self.patch.setattr(kind, "__call__", self._watched(kind.__call__))
        return self.seen

    def __exit__(self, *_) -> None:
        self.patch.undo()

    def _watched(self, call):
        def watched(module, *args, **kwargs):
            result = call(module, *args, **kwargs)
            path = f"{self.paths.get(id(module))} ({type(module).__name__})"
            self.seen += [(path, array.dtype) for array in arrays_in(result)]
            return result

        return watched


def arrays_in(value: object) -> Iterator[mx.array]:
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from arrays_in(item)


def assert_all_bfloat16(seen: list[tuple[str, mx.Dtype]], logits: mx.array) -> None:
    assert len(seen) > 20
    floats = [(path, dtype) for path, dtype in seen if mx.issubdtype(dtype, mx.floating)]
    assert [item for item in floats if item[1] != mx.bfloat16] == []
    assert logits.dtype == mx.bfloat16
