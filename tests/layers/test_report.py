"""What a model says of the way in which it runs here."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from turboquant_mlx.kernels.dispatch import force_backend
from turboquant_mlx.layers.linear import TurboQuantLinear
from turboquant_mlx.layers.report import describe_backend
from turboquant_mlx.layers.rotation_group import RotationGroup
from turboquant_mlx.quant.spec import QuantSpec

THREE_BITS = QuantSpec(bits=3, group_size=64, rotation_block=64)
WITH_SKETCH = QuantSpec(bits=3, group_size=64, rotation_block=64, qjl=True)
WIDE_WINDOW = QuantSpec(bits=2, window_bits=14, group_size=64, rotation_block=64)


def model_of(*specs: QuantSpec) -> nn.Module:
    layers = [TurboQuantLinear(s, (128, 64), group=RotationGroup(64, 64)) for s in specs]
    return nn.Sequential(*layers)


@pytest.fixture
def said():
    def said(model: nn.Module, backend: str, dtype: mx.Dtype = mx.bfloat16) -> list[str]:
        with force_backend(backend):
            return describe_backend(model, dtype)[1:]

    return said


def test_the_first_line_is_the_backend():
    assert describe_backend(nn.Linear(4, 4), mx.float32)[0].startswith("back-end: ")


def test_a_model_without_packed_weights_says_so(said):
    assert said(nn.Linear(4, 4), "cpu") == [
        "weights: none are packed, MLX's own operations multiply"
    ]


def test_a_plain_model_with_copies_of_its_weights_says_so(said):
    from turboquant_mlx.layers.cpu import prepare

    model = nn.Sequential(nn.Linear(64, 64))
    model.set_dtype(mx.bfloat16)
    prepare(model)
    (line,) = said(model, "cpu")
    assert line.startswith("weights: none are packed, NumPy multiplies by float32 copies")


def test_on_a_cpu_it_is_said_what_is_kept_and_what_that_takes(said):
    model = model_of(THREE_BITS, THREE_BITS)
    (line,) = said(model, "cpu")
    assert line.startswith("weights: 2 packed layers, expanded to float32")
    assert "(0.00 GB)" in line
    model.layers[0].expanded.keep = False
    assert [line.split(",")[0] for line in said(model, "cpu")] == [
        "weights: 1 packed layers",
        "weights: 1 packed layers",
    ]


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_on_a_gpu_it_is_said_which_weights_kernels_read_and_why_others_are_not(said, backend):
    kernels, reason = said(model_of(THREE_BITS, THREE_BITS, WIDE_WINDOW), backend)
    assert kernels.startswith(f"weights: 2 packed layers, read as stored by {backend} kernels")
    assert reason == "weights: 1 packed layers by plain MLX operations: a window of 14 bits"


def test_a_dtype_without_kernels_is_the_reason_for_all(said):
    (line,) = said(model_of(THREE_BITS), "cuda", mx.float64)
    assert line.startswith("weights: 1 packed layers by plain MLX operations: no kernels for")


def test_the_correction_is_mentioned_while_it_is_used(said):
    model = model_of(THREE_BITS, WITH_SKETCH)
    assert said(model, "cuda")[-1] == "QJL correction: 1 layers, a product of its own in each"
    model.layers[1].use_qjl = False
    assert not any(line.startswith("QJL") for line in said(model, "cuda"))
