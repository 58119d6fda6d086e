"""Packed experts: a kernel reads only those that are named."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kernel_cases import (
    ON_GPU,
    activation,
    as_double,
    assert_close,
    dense,
    dialects,
    packed,
    running,
)
from turboquant_mlx.kernels.gather import gather_matmul, portable_gather
from turboquant_mlx.kernels.matvec import gather_matvec
from turboquant_mlx.kernels.selection import GATHER_ENTRIES
from turboquant_mlx.quant.spec import QuantSpec

SPEC = QuantSpec(bits=3, window_bits=8, group_size=64, scale_layout="log8")
EXPERTS, OUTPUTS, WIDTH = 6, 13, 192


def expected(x: mx.array, weight, indices: mx.array, use_qjl: bool = True) -> np.ndarray:
    matrices = dense(weight, use_qjl)[np.array(indices)]
    return as_double(x) @ matrices.swapaxes(-1, -2)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_the_experts_of_a_token_share_its_activation(dialect, dtype):
    """The gate and up projections of a decode step, as mlx-lm calls them."""
    weight, x = packed(SPEC, EXPERTS, OUTPUTS, WIDTH), activation(1, 1, 1, 1, WIDTH, dtype=dtype)
    indices = mx.array([[[4, 0, 5]]], mx.uint32)
    with running(dialect):
        y = gather_matmul(x, weight, indices)
        mx.eval(y)
    assert_close(y, expected(x, weight, indices), dtype)


@pytest.mark.parametrize("dialect", dialects())
def test_each_expert_has_an_activation_of_its_own(dialect):
    """The down projection of a decode step."""
    weight, x = packed(SPEC, EXPERTS, OUTPUTS, WIDTH), activation(2, 3, 1, WIDTH)
    indices = mx.array([[4, 0, 5], [4, 4, 1]], mx.int32)
    with running(dialect):
        y = gather_matmul(x, weight, indices)
        mx.eval(y)
    assert_close(y, expected(x, weight, indices), mx.float32)


@pytest.mark.parametrize("dialect", dialects())
def test_a_small_batch_of_tokens(dialect):
    weight, x = packed(SPEC, EXPERTS, OUTPUTS, WIDTH), activation(3, 1, 1, 1, WIDTH)
    indices = mx.array([[[4, 0]], [[5, 5]], [[1, 2]]], mx.uint32)
    with running(dialect):
        y = gather_matmul(x, weight, indices)
        mx.eval(y)
    assert_close(y, expected(x, weight, indices), mx.float32)


@pytest.mark.parametrize("dialect", dialects())
def test_axes_that_broadcast_otherwise(dialect):
    weight, x = packed(SPEC, EXPERTS, OUTPUTS, WIDTH), activation(1, 3, 1, WIDTH)
    indices = mx.array([[4], [2]], mx.uint32)
    with running(dialect):
        y = gather_matmul(x, weight, indices)
        mx.eval(y)
    assert_close(y, expected(x, weight, mx.broadcast_to(indices, (2, 3))), mx.float32)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("bits, group, width", [(2, 32, 96), (3, 64, 576), (4, 16, 2048)])
def test_scalar_codes(dialect, bits, group, width):
    weight = packed(QuantSpec(bits=bits, group_size=group), 3, 37, width)
    x, indices = activation(2, width), mx.array([2, 0, 1, 1], mx.uint32)
    with running(dialect):
        y = gather_matvec(x, weight, indices, dialect)
        mx.eval(y)
    rows = mx.repeat(x, 2, axis=0)[:, None]
    assert_close(y, expected(rows, weight, indices)[:, 0], mx.float32)


@pytest.mark.parametrize("dialect", dialects())
def test_experts_with_many_outputs(dialect):
    """Enough of them for a warp to compute several together."""
    weight, x = packed(SPEC, 3, 150, WIDTH), activation(1, WIDTH, dtype=mx.float16)
    with running(dialect):
        y = gather_matvec(x, weight, mx.array([2, 0], mx.uint32), dialect)
        mx.eval(y)
    assert_close(y, expected(x, weight, mx.array([2, 0]))[:, 0], mx.float16)


def test_no_other_expert_is_read():
    """The scales of the others are not numbers, so whatever touches them shows."""
    weight = packed(QuantSpec(bits=3, group_size=64), EXPERTS, OUTPUTS, WIDTH)
    named = np.array(weight.scales.astype(mx.float32))
    named[[0, 2, 3]] = np.nan
    weight.scales = mx.array(named.astype(np.float16))
    x = activation(1, WIDTH)
    with running(dialects()[0]):
        y = gather_matvec(x, weight, mx.array([1, 5, 4], mx.uint32), dialects()[0])
        mx.eval(y)
    assert mx.isfinite(y).all()


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("shape", [(GATHER_ENTRIES + 1, 1), (5, 3)])
def test_many_rows_go_through_decoded_experts(dialect, shape):
    weight = packed(SPEC, EXPERTS, OUTPUTS, WIDTH)
    x = activation(*shape, WIDTH)
    indices = mx.sort(mx.array(np.random.default_rng(0).integers(0, EXPERTS, shape[0])))
    with running(dialect):
        y = gather_matmul(x, weight, indices, sorted_indices=True)
        mx.eval(y)
    want = expected(x, weight, indices)
    # a GPU may multiply float32 in TF32
    bound = 2.0**-10 if ON_GPU else 2e-6
    assert np.linalg.norm(as_double(y) - want) <= bound * np.linalg.norm(want)


@pytest.mark.parametrize("dialect", dialects())
def test_the_sketch_of_the_residual_counts(dialect):
    spec = QuantSpec(bits=3, group_size=64, rotation_block=64, qjl=True)
    weight, x = packed(spec, EXPERTS, OUTPUTS, WIDTH), activation(1, 1, 1, WIDTH)
    indices = mx.array([[4, 0, 5]], mx.uint32)
    with running(dialect):
        y = gather_matmul(x, weight, indices)
        fast = gather_matmul(x, weight, indices, use_qjl=False)
        mx.eval(y, fast)
    assert_close(y, expected(x, weight, indices), mx.float32)
    assert_close(fast, expected(x, weight, indices, use_qjl=False), mx.float32)


def test_the_reference_agrees():
    weight, x = packed(SPEC, EXPERTS, OUTPUTS, WIDTH), activation(2, 3, 1, WIDTH)
    indices = mx.array([[4, 0, 5], [4, 4, 1]], mx.int32)
    want = expected(x, weight, indices)
    error = np.linalg.norm(as_double(portable_gather(x, weight, indices)) - want)
    assert error <= (2.0**-10 if ON_GPU else 2e-6) * np.linalg.norm(want)
