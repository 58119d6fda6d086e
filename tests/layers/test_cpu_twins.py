"""Stock layers that a conversion leaves alone: on a CPU they give what the stock ones give."""

from __future__ import annotations

import itertools

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchLinear

from turboquant_mlx.kernels.dispatch import force_backend
from turboquant_mlx.layers import cpu
from turboquant_mlx.layers.linear import TurboQuantLinear
from turboquant_mlx.layers.rotation_group import RotationGroup
from turboquant_mlx.quant.spec import QuantSpec
from turboquant_mlx.quant.weight import quantize_weight

pytestmark = pytest.mark.skipif(
    mx.default_device().type == mx.DeviceType.gpu, reason="for machines without a GPU"
)
WIDTH = 64


class Holder(nn.Module):
    """A model of one layer."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer


def twin(layer: nn.Module) -> nn.Module:
    model = Holder(layer)
    cpu.prepare(model, "always")
    return model.layer


def values(*shape, seed=0) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


DTYPES = [mx.float32, mx.bfloat16, mx.float16]


@pytest.mark.parametrize("dtype, weight_dtype", list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("bias", [False, True])
def test_a_result_is_as_wide_as_the_stock_one(dtype, weight_dtype, bias):
    """A gate in float32 gives scores in float32, whatever the activations are."""
    stock = nn.Linear(WIDTH, 24, bias=bias)
    stock.set_dtype(weight_dtype)
    x = values(2, WIDTH).astype(dtype)
    want = stock(x)
    got = twin(stock)(x)
    assert got.dtype == want.dtype
    assert mx.allclose(got.astype(mx.float32), want.astype(mx.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype, weight_dtype", list(itertools.product(DTYPES, DTYPES)))
def test_so_are_tied_heads_and_quantized_layers(dtype, weight_dtype):
    x = values(2, WIDTH).astype(dtype)
    embedding = nn.Embedding(32, WIDTH)
    embedding.set_dtype(weight_dtype)
    want = embedding.as_linear(x).dtype
    assert twin(embedding).as_linear(x).dtype == want
    plain = nn.Linear(WIDTH, 32, bias=False)
    plain.set_dtype(weight_dtype)
    quantized = nn.QuantizedLinear.from_linear(plain, group_size=32, bits=4)
    want = quantized(x).dtype
    assert twin(quantized)(x).dtype == want


@pytest.mark.parametrize("dtype", DTYPES)
def test_so_are_experts(dtype):
    stock = SwitchLinear(WIDTH, 24, 3, bias=False)
    x, chosen = values(2, 1, WIDTH).astype(dtype), mx.array([[0], [2]])
    assert twin(stock)(x, chosen).dtype == mx.result_type(dtype, mx.float32)


def test_a_matrix_that_costs_nothing_is_made_once():
    layer = twin(nn.Linear(WIDTH, 24, bias=False))
    assert layer.expanded.matrix() is layer.expanded.matrix()


def packed_layer() -> nn.Module:
    spec = QuantSpec(bits=4, group_size=32, rotation_block=64)
    packed = quantize_weight(values(24, WIDTH), spec)
    layer = TurboQuantLinear(spec, (24, WIDTH), group=RotationGroup(WIDTH, 64))
    layer.load_weights(list(packed.arrays().items()), strict=True)
    return layer


@pytest.mark.parametrize("make", [packed_layer, lambda: twin(nn.Linear(WIDTH, 24, bias=False))])
def test_forward_and_second_derivatives(make):
    """NumPy's products are constants to MLX unless each derivative has a rule."""
    layer, x, direction = make(), values(2, WIDTH, seed=3), values(2, WIDTH, seed=4)
    _, (tangent,) = mx.jvp(layer, [x], [direction])
    assert mx.allclose(tangent, layer(direction), rtol=1e-4, atol=1e-4)

    def slope(v):
        gradient = mx.grad(lambda u: (layer(u) ** 3).sum())(v)
        return (gradient * direction).sum()

    got = mx.grad(slope)(x)
    with force_backend("portable"):
        want = mx.grad(slope)(x)
    assert mx.allclose(got, want, rtol=1e-3, atol=1e-3)
    assert mx.abs(want).max() > 1
