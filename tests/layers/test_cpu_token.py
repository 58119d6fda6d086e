"""CPU twins of normalizations and rotary embeddings against the stock layers."""

from __future__ import annotations

import copy

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from turboquant_mlx.kernels.dispatch import force_backend
from turboquant_mlx.layers.cpu import prepare

DTYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.fixture(autouse=True)
def _on_the_cpu():
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        with force_backend("cpu"):
            yield
    finally:
        mx.set_default_device(before)


def twin(stock: nn.Module) -> nn.Module:
    """A prepared copy of a stock layer."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = copy.deepcopy(stock)

    model = Model()
    prepare(model)
    assert type(model.layer) is not type(stock)
    assert isinstance(model.layer, type(stock))
    return model.layer


def values(*shape, seed=0) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def close(got: mx.array, expected: mx.array) -> bool:
    """To the precision of the dtype."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    bound = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[got.dtype]
    return bool(mx.allclose(got, expected, rtol=bound, atol=bound))


def norm(width=48, seed=1) -> nn.RMSNorm:
    layer = nn.RMSNorm(width, eps=1e-3)
    layer.weight = values(width, seed=seed)
    return layer


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 48), (48,), (1, 3, 48), (0, 48)])
def test_a_norm_equals_the_stock_one(shape, dtype, weight_dtype):
    stock = norm()
    stock.set_dtype(weight_dtype)
    x = values(*shape).astype(dtype) * 2
    assert close(twin(stock)(x), stock(x))


def test_the_gradients_of_a_norm_are_the_stock_ones():
    stock, x = norm(), values(1, 1, 48)
    layer = twin(stock)

    def loss(one):
        return lambda a: (one(a) ** 3).sum()

    assert close(mx.grad(loss(layer))(x), mx.grad(loss(stock))(x))
    _, by_weight = nn.value_and_grad(layer, lambda a: (layer(a) ** 3).sum())(x)
    _, expected = nn.value_and_grad(stock, lambda a: (stock(a) ** 3).sum())(x)
    assert mx.abs(expected["weight"]).max() > 0.01
    assert close(by_weight["weight"], expected["weight"])


def test_a_norm_follows_its_weight():
    layer = twin(norm())
    x = values(1, 1, 48)
    layer(x)
    layer.weight = 2 * layer.weight
    stock = norm()
    assert close(layer(x), 2 * stock(x))


def test_a_norm_compiles():
    stock, x = norm(), values(1, 1, 48)
    assert close(mx.compile(twin(stock))(x), stock(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 41, 5000])
@pytest.mark.parametrize("dims", [16, 12])
@pytest.mark.parametrize("traditional", [False, True])
def test_a_rotary_embedding_equals_the_stock_one(traditional, dims, offset, dtype):
    stock = nn.RoPE(dims, traditional=traditional, base=5e3, scale=0.5)
    x = values(2, 1, 3, 16).astype(dtype).transpose(0, 2, 1, 3)
    bound = 1e-3 if dtype == mx.float32 and offset == 5000 else 0  # of its angles in float32
    got, expected = twin(stock)(x, offset=offset), stock(x, offset=offset)
    assert close(got, expected) or mx.abs(got - expected).max() < bound


@pytest.mark.parametrize("length, offset", [(4, 7), (1, mx.array(7)), (1, mx.array([7, 9]))])
def test_other_rotary_embeddings_are_left_to_mlx(length, offset):
    stock, x = nn.RoPE(16), values(2, 3, length, 16)
    assert mx.array_equal(twin(stock)(x, offset=offset), stock(x, offset=offset))


def test_a_rotary_embedding_has_gradients_and_compiles():
    stock, x = nn.RoPE(16), values(1, 3, 1, 16)
    layer = twin(stock)

    def loss(one):
        return lambda a: (one(a, offset=5) ** 3).sum()

    assert close(mx.grad(loss(layer))(x), mx.grad(loss(stock))(x))
    assert close(mx.compile(lambda a: layer(a, offset=5))(x), stock(x, offset=5))
