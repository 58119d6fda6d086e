"""Error feedback: what it minimises, what it leaves alone, and that it is repeatable."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.errors import QuantizationError
from turboquant_mlx.quant.codebook import lloyd_max
from turboquant_mlx.quant.feedback import (
    damping_of,
    feed_forward,
    inverse_factor,
    quantize_weight_with_feedback,
)
from turboquant_mlx.quant.spec import QuantSpec
from turboquant_mlx.quant.weight import dequantize_weight, quantize_weight

WIDTH = 128
SPECS = [
    QuantSpec(bits=2, group_size=32, scale_layout="log8", rotation_block=128),
    QuantSpec(bits=3, group_size=64, rotation_block=64),
    QuantSpec(bits=4, group_size=16, rotation_block=1),
    QuantSpec(code="ternary", group_size=64, rotation_block=128),
    QuantSpec(bits=2, window_bits=8, group_size=128, scale_layout="log8", rotation_block=128),
    QuantSpec(bits=3, window_bits=8, group_size=64, rotation_block=64),
    QuantSpec(bits=4, window_bits=8, group_size=16, scale_layout="log8", rotation_block=128),
]
IDS = ["2-bit log8", "3-bit", "4-bit unrotated", "ternary", "trellis 2", "trellis 3", "trellis 4"]
PLAIN = [spec for spec in SPECS if not spec.is_trellis]


def inputs(seed: int = 0, n: int = 2000) -> np.ndarray:
    """float32 [n, WIDTH]: correlated inputs, as those of a layer are."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((WIDTH // 4, WIDTH))
    z = rng.standard_normal((n, WIDTH // 4)) @ mix + 0.3 * rng.standard_normal((n, WIDTH))
    return z.astype(np.float32)


def weights(rows: int = 96, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, WIDTH)).astype(np.float32)


def moments(z: np.ndarray) -> np.ndarray:
    return z.T.astype(np.float64) @ z


def output_error(packed, weight: np.ndarray, z: np.ndarray) -> float:
    """Relative mean square error of the outputs for rotated inputs z."""
    wanted = np.array(dequantize_weight(exact(weight, packed), rotated=True))
    error = np.array(dequantize_weight(packed, rotated=True)) - wanted
    return float(np.square(z @ error.T).sum() / np.square(z @ wanted.T).sum())


def exact(weight: np.ndarray, packed):
    """The weight in nearly exact form, with the same rotation."""
    spec = packed.spec.with_(code="scalar", bits=8, group_size=16, scale_layout="float16")
    return quantize_weight(mx.array(weight), spec, multiplier=packed.multiplier)


@pytest.mark.parametrize("spec", SPECS, ids=IDS)
def test_outputs_are_much_closer_than_with_plain_rounding(spec: QuantSpec) -> None:
    z, w = inputs(), weights()
    factor = inverse_factor(moments(z))
    plain = quantize_weight(mx.array(w), spec)
    fed = quantize_weight_with_feedback(mx.array(w), spec, lambda _: factor)
    assert output_error(fed, w, z) < 0.55 * output_error(plain, w, z)
    # inputs that it was not made for, of the same kind
    fresh = inputs(seed=0, n=4000)[2000:]
    assert output_error(fed, w, fresh) < 0.55 * output_error(plain, w, fresh)
    assert {n: (a.dtype, a.shape) for n, a in fed.arrays().items()} == {
        n: (a.dtype, a.shape) for n, a in plain.arrays().items()
    }


@pytest.mark.parametrize("spec", PLAIN, ids=IDS[: len(PLAIN)])
def test_white_inputs_leave_nothing_to_feed(spec: QuantSpec) -> None:
    w = mx.array(weights())
    factor = inverse_factor(np.eye(WIDTH))
    plain = quantize_weight(w, spec)
    fed = quantize_weight_with_feedback(w, spec, lambda _: factor)
    for name, array in plain.arrays().items():
        assert mx.array_equal(array, fed.arrays()[name]), name


def weak_inputs(n: int) -> np.ndarray:
    """float32 [n, WIDTH]: inputs with many weak correlations."""
    mix = np.eye(WIDTH) + np.random.default_rng(0).standard_normal((WIDTH, WIDTH)) / 15
    return (np.random.default_rng(n).standard_normal((n, WIDTH)) @ mix).astype(np.float32)


def test_a_trellis_loses_little_by_going_block_by_block() -> None:
    # with nothing to feed, against the search over whole rows
    w = mx.array(np.random.default_rng(0).standard_normal((48, 768)).astype(np.float32))
    factor = inverse_factor(np.eye(768))
    for spec in SPECS[len(PLAIN) :]:
        plain = quantize_weight(w, spec)
        fed = quantize_weight_with_feedback(w, spec, lambda _: factor)
        errors = [mx.square(dequantize_weight(p) - w).mean().item() for p in (plain, fed)]
        assert errors[1] < 1.06 * errors[0], spec


def test_a_trellis_is_better_than_plain_codes_with_feedback_too() -> None:
    z, w = weak_inputs(3000), weights(rows=200)
    factor = inverse_factor(moments(z))
    plain = QuantSpec(bits=3, group_size=64, scale_layout="log8", rotation_block=128)
    a, b = (
        quantize_weight_with_feedback(mx.array(w), spec, lambda _: factor)
        for spec in (plain, plain.with_(window_bits=8, group_size=128))
    )
    assert output_error(b, w, z) < 0.9 * output_error(a, w, z)


def test_few_inputs_are_not_followed_closely() -> None:
    w, few, fresh = weights(), weak_inputs(200), weak_inputs(2000)
    errors = []
    for damping in (damping_of(WIDTH, 1e9), damping_of(WIDTH, len(few))):
        factor = inverse_factor(moments(few), damping)
        fed = quantize_weight_with_feedback(mx.array(w), SPECS[1], lambda _, f=factor: f)
        errors.append(output_error(fed, w, fresh))
    assert damping_of(WIDTH, 1e9) == 0.01
    assert damping_of(WIDTH, 1280) == pytest.approx(0.32)
    assert errors[1] < 0.95 * errors[0]


def test_the_factor_is_that_of_the_damped_inverse() -> None:
    hessian = moments(inputs())
    u = inverse_factor(hessian, damping=0.05).astype(np.float64)
    damped = hessian + 0.05 * np.trace(hessian) / WIDTH * np.eye(WIDTH)
    product = u.T @ u @ damped
    assert np.allclose(product / product[0, 0], np.eye(WIDTH), atol=1e-3)
    assert (np.tril(u, -1) == 0).all()
    assert np.diag(u).mean() == pytest.approx(1)
    assert np.allclose(inverse_factor(7 * hessian, damping=0.05), u, rtol=1e-4, atol=1e-5)


def test_columns_take_up_the_errors_one_by_one() -> None:
    # the blocks must compute what the plain loop of the definition does
    w = weights(rows=5)
    factor = inverse_factor(moments(inputs())).astype(np.float32)
    levels = lloyd_max(3)
    spec = QuantSpec(bits=3, group_size=64)
    scales, idx = feed_forward(w.T.copy(), factor, levels, spec)
    x = w.T.astype(np.float64)
    for j in range(WIDTH):
        q = levels[idx[j]] * scales[j // 64]
        other = np.abs(x[j][:, None] - levels * scales[j // 64][:, None]).min(axis=1)
        assert np.abs(x[j] - q) == pytest.approx(other, abs=1e-4)  # the nearest one was taken
        x[j + 1 :] -= factor[j, j + 1 :, None] * ((x[j] - q) / factor[j, j])


def test_each_matrix_of_a_stack_has_its_own_inputs() -> None:
    stack = np.stack([weights(seed=s) for s in range(3)])
    factors = [inverse_factor(moments(inputs(seed=s))) for s in range(3)]
    spec = SPECS[1]
    whole = quantize_weight_with_feedback(mx.array(stack), spec, factors.__getitem__, label="a")
    for i in range(3):
        own = quantize_weight_with_feedback(
            mx.array(stack[i]), spec, lambda _, i=i: factors[i], label="a"
        )
        assert mx.array_equal(whole.codes[i], own.codes)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_sixteen_bit_weights(dtype: mx.Dtype) -> None:
    w = mx.array(weights()).astype(dtype)
    factor = inverse_factor(moments(inputs()))
    a = quantize_weight_with_feedback(w, SPECS[0], lambda _: factor)
    b = quantize_weight_with_feedback(w.astype(mx.float32), SPECS[0], lambda _: factor)
    assert mx.array_equal(a.codes, b.codes)


def test_zeros_stay_zeros() -> None:
    w = weights()
    w[3] = 0
    factor = inverse_factor(moments(inputs()))
    packed = quantize_weight_with_feedback(mx.array(w), SPECS[0], lambda _: factor)
    assert (dequantize_weight(packed)[3] == 0).all().item()


def test_few_inputs_are_enough_to_run() -> None:
    factor = inverse_factor(moments(inputs(n=3)))
    packed = quantize_weight_with_feedback(mx.array(weights()), SPECS[1], lambda _: factor)
    assert mx.isfinite(dequantize_weight(packed)).all().item()


def test_useless_inputs_are_refused() -> None:
    for hessian in (np.zeros((4, 4)), np.full((4, 4), np.nan), np.diag([1, 1, np.inf, 1.0])):
        with pytest.raises(QuantizationError, match="no usable second moments"):
            inverse_factor(hessian)


def test_values_that_are_not_finite_are_refused() -> None:
    w = weights()
    w[2, 5] = np.nan
    factor = inverse_factor(moments(inputs()))
    with pytest.raises(QuantizationError, match="layer has values that are not finite"):
        quantize_weight_with_feedback(mx.array(w), SPECS[1], lambda _: factor, label="layer")


def test_a_sketch_is_refused() -> None:
    with pytest.raises(QuantizationError, match="exclude each other"):
        quantize_weight_with_feedback(
            mx.array(weights()), SPECS[1].with_(qjl=True), lambda _: np.eye(WIDTH)
        )


def test_threads_do_not_change_a_byte() -> None:
    w = mx.array(weights(rows=900))
    factor = inverse_factor(moments(inputs()))
    one, many = (
        quantize_weight_with_feedback(w, SPECS[0], lambda _: factor, threads=n) for n in (1, 4)
    )
    assert mx.array_equal(one.codes, many.codes)
    assert mx.array_equal(one.scales, many.scales)


def digest() -> str:
    factor = inverse_factor(moments(inputs()))
    packed = quantize_weight_with_feedback(mx.array(weights()), SPECS[0], lambda _: factor)
    arrays = packed.arrays()
    data = b"".join(np.array(arrays[name]).tobytes() for name in sorted(arrays))
    return hashlib.sha256(data).hexdigest()


def test_two_processes_give_the_same_bytes() -> None:
    code = "from test_feedback import digest; print(digest())"
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=__file__.rpartition("/")[0],
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == digest()
