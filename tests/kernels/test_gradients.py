"""Gradients pass through the kernels, which have none of their own: LoRA training works."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

from kernel_cases import ON_GPU, activation, dense, dialects, packed, running
from turboquant_mlx.kernels import matmul
from turboquant_mlx.kernels.gather import gather_matmul
from turboquant_mlx.kernels.matmul import packed_matmul
from turboquant_mlx.layers.rotation_group import RotationGroup
from turboquant_mlx.quant.spec import QuantSpec

# a GPU may multiply float32 in TF32
BOUND = 2.0**-9 if ON_GPU else 1e-5
SPEC = QuantSpec(bits=3, window_bits=8, group_size=64, scale_layout="log8")


def close(got: mx.array, want: np.ndarray) -> bool:
    return np.linalg.norm(np.array(got) - want) <= BOUND * np.linalg.norm(want)


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("rows", [2, 12])
@pytest.mark.parametrize("qjl", [False, True])
def test_the_gradient_is_that_of_the_decoded_weight(dialect, rows, qjl, monkeypatch):
    monkeypatch.setitem(matmul.DECODED_BYTES, dialect, 192 * 4 * 16)  # several blocks
    spec = SPEC.with_(window_bits=8, rotation_block=64, qjl=qjl)
    weight, x = packed(spec, 37, 192), activation(rows, 192)
    direction = activation(rows, 37, seed=5)

    def loss(v):
        return (packed_matmul(v, weight, gradients=True) * direction).sum()

    with running(dialect):
        gradient = mx.grad(loss)(x)
        mx.eval(gradient)
    assert close(gradient, np.array(direction).astype(np.float64) @ dense(weight))


@pytest.mark.parametrize("dialect", dialects())
def test_the_gradient_of_experts(dialect):
    weight, x = packed(SPEC, 4, 13, 192), activation(1, 2, 1, 192)
    indices = mx.array([[3, 1]], mx.uint32)
    direction = activation(1, 2, 1, 13, seed=5)

    def loss(v):
        return (gather_matmul(v, weight, indices, gradients=True) * direction).sum()

    with running(dialect):
        gradient = mx.grad(loss)(x)
        mx.eval(gradient)
    matrices = dense(weight)[np.array(indices)]
    assert close(gradient, np.array(direction).astype(np.float64) @ matrices)


@pytest.mark.parametrize("dialect", dialects())
def test_lora_training_on_top_of_our_layers(dialect):
    """Two layers, so that the gradient of the lower adapter goes through the upper weight."""
    LoRALinear = pytest.importorskip("mlx_lm.tuner.lora", exc_type=ImportError).LoRALinear
    pytest.importorskip("threadpoolctl")  # of the layers' CPU back-end
    from turboquant_mlx.layers.linear import TurboQuantLinear

    mx.random.seed(0)

    def layer():
        spec = SPEC.with_(window_bits=8, rotation_block=64)
        made = TurboQuantLinear(spec, (64, 64), group=RotationGroup(64, 64))
        weight = packed(spec, 64, 64)
        made.codes, made.scales, made.table = weight.codes, weight.scales, weight.table * 0.2
        # LoRALinear.from_base knows stock layers only: an adapter of the same shape takes it
        adapter = LoRALinear(64, 64, r=4, scale=2.0)
        adapter.linear = made
        return adapter

    model = nn.Sequential(layer(), nn.ReLU(), layer())
    x, target = activation(6, 64), activation(6, 64, seed=3)
    model.freeze()
    model.apply_to_modules(
        lambda _, m: m.unfreeze(keys=["lora_a", "lora_b"]) if isinstance(m, LoRALinear) else None
    )
    model.train()
    optimizer = optim.Adam(learning_rate=1e-3)
    step = nn.value_and_grad(model, lambda m: ((m(x) - target) ** 2).mean())
    losses = []
    with running(dialect):
        for _ in range(15):
            loss, gradients = step(model)
            optimizer.update(model, gradients)
            mx.eval(model.parameters(), optimizer.state, loss)
            losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0]
    lower = gradients["layers"][0]
    assert "codes" not in lower.get("linear", {})
    assert mx.abs(lower["lora_b"]).max() > 0
