"""Packed weights times many activations: decoded by a kernel in bounded blocks."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kernel_cases import (
    BOUNDS,
    CODES,
    ON_GPU,
    activation,
    all_pairs,
    as_double,
    assert_close,
    dense,
    dialects,
    each_of_all,
    name_of,
    packed,
    running,
    spec_of,
)
from turboquant_mlx.kernels import matmul
from turboquant_mlx.kernels.expand import expand
from turboquant_mlx.kernels.matmul import packed_matmul
from turboquant_mlx.quant.spec import QuantSpec

AXES = {
    "code": CODES,
    "group": [16, 32, 64, 192],
    "layout": ["float16", "log8"],
    "tile": [0, 96],
    "dtype": [mx.float16, mx.bfloat16, mx.float32],
    "outputs": [1, 7, 70],
}


def check(dialect, code, group, layout, tile, dtype, outputs):
    weight = packed(spec_of(code, group_size=group, scale_layout=layout, tile=tile), outputs, 192)
    with running(dialect):
        values = expand(weight, dtype, dialect)
        mx.eval(values)
    assert_close(values, dense(weight), dtype)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("case", list(all_pairs(**AXES)), ids=name_of)
def test_a_kernel_decodes_every_weight(dialect, case):
    check(dialect, **case)


@pytest.mark.heavy
@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("code", CODES, ids=str)
def test_all_properties_of_a_decoded_weight_together(dialect, code):
    for case in each_of_all(AXES, "group", "layout", "tile", "dtype"):
        check(dialect, **{**case, "code": code})


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize(
    "spec, width",
    [(QuantSpec(bits=3, group_size=8), width) for width in (40, 2880, 4096)]
    + [(QuantSpec(code="ternary", group_size=16), width) for width in (48, 2880, 4096)],
    ids=str,
)
def test_widths_that_are_no_multiple_of_a_step(dialect, spec, width):
    weight = packed(spec, 9, width)
    with running(dialect):
        values = expand(weight, mx.float32, dialect)
        mx.eval(values)
    assert_close(values, dense(weight), mx.float32)


def tolerance(dtype: mx.Dtype, width: int) -> float:
    """Decoded weights are rounded to the dtype, and a GPU may multiply float32 in TF32."""
    return 2 * BOUNDS[dtype] if dtype != mx.float32 else (2.0**-10 if ON_GPU else 2e-6)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("rows", [9, 33])
def test_more_rows_than_the_matvec_takes(dialect, dtype, rows, monkeypatch):
    monkeypatch.setitem(matmul.DECODED_BYTES, dialect, 192 * 4 * 32)  # several blocks
    weight = packed(QuantSpec(bits=3, window_bits=8, group_size=64, scale_layout="log8"), 70, 192)
    x = activation(rows, 192, dtype=dtype)
    with running(dialect):
        y = packed_matmul(x, weight)
        mx.eval(y)
    expected = as_double(x) @ dense(weight).T
    distance = mx.linalg.norm(y.astype(mx.float32) - mx.array(expected.astype("float32")))
    assert y.dtype == dtype
    assert float(distance) <= tolerance(dtype, 192) * float((expected**2).sum() ** 0.5)


@pytest.mark.parametrize("dialect", dialects())
def test_large_activations_do_not_overflow(dialect):
    """bfloat16 reaches further than float16, and so must every step in between."""
    weight = packed(QuantSpec(bits=3, group_size=64), 5, 64)
    x = activation(20, 64, dtype=mx.bfloat16) * 1e6
    with running(dialect):
        y = packed_matmul(x, weight)
        mx.eval(y)
    expected = as_double(x) @ dense(weight).T
    error = abs(as_double(y) - expected).max()
    assert error <= 2.0**-6 * abs(expected).max()


def test_decoded_rows_are_bounded(monkeypatch):
    """Never the whole of a large matrix, at whatever number of rows."""
    monkeypatch.setitem(matmul.DECODED_BYTES, dialects()[0], 64 * 192 * 2)
    weight = packed(QuantSpec(bits=3, group_size=64), 200, 192)
    blocks = []
    with running(dialects()[0]):
        for block, start, stop in matmul.dense_blocks(weight, mx.float16, dialects()[0]):
            assert block.nbytes <= 64 * 192 * 2
            blocks.append((start, stop))
    assert blocks == [(0, 64), (64, 128), (128, 192), (192, 200)]


@pytest.mark.parametrize("dialect", dialects())
def test_the_sketch_of_the_residual_counts(dialect):
    spec = QuantSpec(bits=3, group_size=64, rotation_block=64, qjl=True)
    weight, x = packed(spec, 10, 192), activation(12, 192)
    with running(dialect):
        y = packed_matmul(x, weight)
        mx.eval(y)
    expected = as_double(x) @ dense(weight).T
    error = ((as_double(y) - expected) ** 2).sum() ** 0.5
    assert error <= tolerance(mx.float32, 192) * (expected**2).sum() ** 0.5
