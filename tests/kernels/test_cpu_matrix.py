"""Products on the CPU through numpy: values, dtypes, bounded memory, gradients."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.kernels import cpu_matrix
from turboquant_mlx.kernels.cpu_matrix import CpuMatrix, as_numpy, expert_product


def matrix(weight: np.ndarray, **options) -> CpuMatrix:
    return CpuMatrix(weight.shape, lambda a, b: weight[a:b], **options)


@pytest.fixture
def weight() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((37, 48)).astype(np.float32)


@pytest.fixture
def x() -> mx.array:
    return mx.array(np.random.default_rng(1).standard_normal((2, 5, 48)).astype(np.float32))


@pytest.mark.parametrize("keep", [True, False])
def test_multiplies_by_the_transpose(weight, x, keep):
    y = matrix(weight, keep=keep)(x)
    np.testing.assert_allclose(np.array(y), np.array(x) @ weight.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_the_dtype_of_the_activation_is_kept(weight, x, dtype):
    y = matrix(weight)(x.astype(dtype))
    assert y.dtype == dtype
    assert y.shape == (2, 5, 37)


def test_a_matrix_that_is_not_kept_is_expanded_in_bounded_blocks(weight, x, monkeypatch):
    monkeypatch.setattr(cpu_matrix, "BLOCK_BYTES", 4 * 48 * 10)
    asked = []

    def expand(start, stop):
        asked.append((start, stop))
        return weight[start:stop]

    blocked = CpuMatrix(weight.shape, expand, keep=False)
    y = blocked(x)
    assert sorted(asked) == [(0, 10), (10, 20), (20, 30), (30, 37)]
    assert blocked.resident_bytes == 0
    np.testing.assert_allclose(np.array(y), np.array(x) @ weight.T, rtol=1e-4, atol=1e-5)


def test_a_matrix_that_is_kept_is_expanded_once(weight, x):
    asked = []

    def expand(start, stop):
        asked.append((start, stop))
        return weight[start:stop]

    kept = CpuMatrix(weight.shape, expand, keep=True)
    kept(x)
    kept(x)
    assert asked == [(0, 37)]
    assert kept.resident_bytes == weight.nbytes


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("shape", [(0, 48), (48,), (3, 1, 48)])
def test_any_shape_is_read_and_made(weight, dtype, shape):
    x = mx.random.normal(shape).astype(dtype)
    mx.eval(x)
    y = matrix(weight)(x)
    assert y.dtype == dtype
    assert y.shape == (*shape[:-1], 37)
    expected = np.array(x.astype(mx.float32)) @ weight.T
    np.testing.assert_allclose(np.array(y.astype(mx.float32)), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_arrays_that_are_not_contiguous_are_read(dtype):
    x = mx.arange(24).reshape(2, 3, 4).astype(dtype).transpose(1, 2, 0)
    mx.eval(x)
    np.testing.assert_array_equal(as_numpy(x), np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0))


def test_the_result_may_have_another_dtype(weight, x):
    assert matrix(weight)(x, mx.bfloat16).dtype == mx.bfloat16


def test_a_product_comes_in_parts(weight, x):
    whole, parts = matrix(weight)(x), matrix(weight).parts(x, [0, 5, 30, 37])
    assert [part.shape for part in parts] == [(2, 5, 5), (2, 5, 25), (2, 5, 7)]
    assert mx.array_equal(mx.concatenate(parts, axis=-1), whole)


@pytest.mark.parametrize("high", [True, False])
def test_a_row_is_multiplied_the_same_way_at_each_call(high):
    rng = np.random.default_rng(0)
    values = rng.standard_normal((700, 300) if high else (300, 700)).astype(np.float32)
    product, x = matrix(values), rng.standard_normal((1, values.shape[1])).astype(np.float32)
    first = product.multiply(x)
    np.testing.assert_allclose(first, x @ values.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(product.multiply(x), first)


def test_gradients_of_parts_pass_through(weight, x):
    product, reference = matrix(weight), mx.array(weight)

    def loss(a):
        first, second = product.parts(a, [0, 10, 37])
        return (first**2).sum() + (2 * second).sum()

    def expected(a):
        y = a @ reference.T
        return (y[..., :10] ** 2).sum() + (2 * y[..., 10:]).sum()

    got = mx.grad(loss)(x)
    np.testing.assert_allclose(np.array(got), np.array(mx.grad(expected)(x)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("keep", [True, False])
def test_gradients_pass_through(weight, x, keep):
    product = matrix(weight, keep=keep)
    reference = mx.array(weight)
    got = mx.grad(lambda a: (product(a) ** 2).sum())(x)
    expected = mx.grad(lambda a: ((a @ reference.T) ** 2).sum())(x)
    np.testing.assert_allclose(np.array(got), np.array(expected), rtol=1e-3, atol=1e-3)


def test_experts_multiply_their_own_rows_and_only_those_that_are_named():
    rng = np.random.default_rng(2)
    stack = rng.standard_normal((6, 7, 16)).astype(np.float32)
    x = rng.standard_normal((2, 3, 1, 1, 16)).astype(np.float32)
    indices = np.array([[[0, 4], [4, 4], [1, 0]], [[1, 1], [0, 0], [4, 1]]])
    used = set()

    def matrix_of(expert: int) -> CpuMatrix:
        used.add(expert)
        return matrix(stack[expert])

    y = expert_product(mx.array(x), mx.array(indices), matrix_of, 7)
    expected = np.einsum("blxni,blkoi->blkno", x, stack[indices])
    assert used == {0, 1, 4}
    np.testing.assert_allclose(np.array(y), expected, rtol=1e-4, atol=1e-5)


def test_experts_keep_bfloat16():
    stack = np.ones((2, 4, 8), np.float32)
    x = mx.ones((3, 1, 8), mx.bfloat16)
    y = expert_product(x, mx.array([0, 1, 1]), lambda e: matrix(stack[e]), 4)
    assert y.dtype == mx.bfloat16
    assert y.shape == (3, 1, 4)
