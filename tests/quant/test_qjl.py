"""The 1-bit sketch of the residual."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.quant.packing import pack_codes, unpack_codes
from turboquant_mlx.quant.qjl import decode_sketch, sketch_factor
from turboquant_mlx.quant.rotation import hadamard_matrix, random_signs, rotate
from turboquant_mlx.quant.spec import QuantSpec
from turboquant_mlx.quant.weight import dequantize_weight, quantize_weight

WIDTH = 576


def sketch_of(r: np.ndarray, sigma: np.ndarray, block: int) -> tuple[mx.array, mx.array]:
    projected = np.array(rotate(mx.array(r), block, sigma))
    norms = np.linalg.norm(r, axis=-1).astype(np.float16)
    return mx.array(pack_codes(projected >= 0, 1)), mx.array(norms)


@pytest.mark.parametrize("block", [1, 64, 192, 80])
def test_the_dense_residual_is_the_formula(block):
    width = 240 if block == 80 else WIDTH
    r = np.random.default_rng(0).standard_normal((5, width)).astype(np.float32)
    sigma = random_signs(width, 1, "s")
    codes, norms = sketch_of(r, sigma, block)
    dense = np.array(decode_sketch(codes, norms, mx.array(sigma), width, block))
    h = np.kron(np.eye(width // block, dtype=np.float32), hadamard_matrix(block))
    b = np.where((r * sigma) @ h.T >= 0, 1.0, -1.0)
    norm = np.array(norms).astype(np.float64)[:, None]
    expected = math.sqrt(math.pi / 2) / math.sqrt(width) * norm * sigma * (b @ h)
    np.testing.assert_allclose(dense, expected, rtol=1e-4, atol=1e-5)


def test_the_dense_residual_and_the_estimator_agree():
    rng = np.random.default_rng(1)
    r, x = rng.standard_normal((5, WIDTH)), rng.standard_normal(WIDTH)
    sigma = random_signs(WIDTH, 1, "s")
    codes, norms = sketch_of(r.astype(np.float32), sigma, 192)
    dense = np.array(decode_sketch(codes, norms, mx.array(sigma), WIDTH, 192))
    b = 2.0 * unpack_codes(np.array(codes), 1, WIDTH) - 1
    z = np.array(rotate(mx.array(x.astype(np.float32)), 192, sigma))
    estimate = sketch_factor(WIDTH) * np.array(norms).astype(np.float64) * (b @ z)
    np.testing.assert_allclose(dense @ x, estimate, rtol=1e-4, atol=1e-4)


def test_the_estimate_is_unbiased_over_the_signs():
    rng = np.random.default_rng(2)
    r = rng.standard_normal((1, WIDTH)).astype(np.float32)
    x = (r[0] + rng.standard_normal(WIDTH)).astype(np.float32)
    estimates = []
    for seed in range(400):
        sigma = random_signs(WIDTH, seed, "s")
        codes, norms = sketch_of(r, sigma, 192)
        dense = decode_sketch(codes, norms, mx.array(sigma), WIDTH, 192)
        estimates.append((dense @ mx.array(x)).item())
    spread = np.std(estimates) / math.sqrt(len(estimates))
    assert np.mean(estimates) == pytest.approx(float(r[0] @ x), abs=4 * spread)


@pytest.mark.parametrize("backend", ["numpy", "mlx"])
def test_a_packed_weight_stores_the_sketch_of_its_own_residual(backend):
    w = mx.array(np.random.default_rng(3).standard_normal((33, WIDTH)).astype(np.float32))
    spec = QuantSpec(bits=3, rotation_block=192, qjl=True)
    packed = quantize_weight(w, spec, backend=backend)
    sigma = np.array(packed.qjl_multiplier)
    np.testing.assert_array_equal(sigma, random_signs(WIDTH, 42, "weight.qjl"))
    target = np.array(rotate(w, 192, packed.multiplier))
    coded = np.array(dequantize_weight(packed, rotated=True, use_qjl=False))
    codes, _ = sketch_of(target - coded, sigma, 192)
    # no other norm brings the decoded sketch nearer to the residual
    direction = np.array(decode_sketch(codes, mx.ones(33), mx.array(sigma), WIDTH, 192))
    best = ((target - coded) * direction).sum(axis=1) / (direction**2).sum(axis=1)
    np.testing.assert_allclose(np.array(packed.qjl_norms), best, rtol=2e-3)
    same = unpack_codes(np.array(packed.qjl_codes), 1, WIDTH) == unpack_codes(
        np.array(codes), 1, WIDTH
    )
    assert same.mean() > 0.999  # all but projections next to zero


@pytest.mark.parametrize("rotation_block", [1, 64, 192])
def test_the_sketch_lowers_the_error(rotation_block):
    w = mx.array(np.random.default_rng(4).standard_normal((64, WIDTH)).astype(np.float32))
    packed = quantize_weight(w, QuantSpec(bits=2, rotation_block=rotation_block, qjl=True))
    with_sketch = ((dequantize_weight(packed) - w) ** 2).sum().item()
    without = ((dequantize_weight(packed, use_qjl=False) - w) ** 2).sum().item()
    # an unbiased 1-bit estimate would leave pi / 2 - 1 = 57 % of the residual's energy
    assert with_sketch / without == pytest.approx(1 - 2 / math.pi, rel=0.06)
