"""Attention on the CPU against MLX's own, and the hook that puts it in place."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.kernels import attention_hook, cpu_attention
from turboquant_mlx.kernels.dispatch import force_backend

TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def _on_the_cpu():
    """Also where a GPU is the default device."""
    with force_backend("cpu"):
        yield


@pytest.fixture(autouse=True)
def _nobody_else_is_hooked(monkeypatch):
    """Models that other tests left alive in this process would answer in MLX's place."""
    original = attention_hook._original or mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", original)
    monkeypatch.setattr(attention_hook, "_handlers", {})
    monkeypatch.setattr(attention_hook, "_original", None)


def arrays(batch=2, heads=6, kv_heads=2, length=5, context=11, width=16, seed=0):
    rng = np.random.default_rng(seed)

    def make(*shape):
        return mx.array(rng.standard_normal(shape).astype(np.float32))

    q = make(batch, heads, length, width)
    return q, make(batch, kv_heads, context, width), make(batch, kv_heads, context, width)


def both(q, k, v, **options):
    scale = q.shape[-1] ** -0.5
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, **options)
    options = {"mask": None, "sinks": None, **options}
    return cpu_attention.attend(q, k, v, scale=scale, **options), expected


@pytest.mark.parametrize("length", [1, 2, 5, 11])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_equals_mlx(length, mask, monkeypatch):
    monkeypatch.setattr(cpu_attention, "SMALL_ATTENTION", 0)
    got, expected = both(*arrays(length=length), mask=mask)
    assert mx.abs(got - expected).max() < TOLERANCE


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_reads_part_of_a_cache_in_16_bits(dtype):
    q, k, v = (a.astype(dtype) for a in arrays(length=3, context=200))
    k, v = k[:, :, :150], v[:, :, :150]
    got, expected = both(q, k, v, mask="causal")
    assert got.dtype == dtype
    assert mx.abs(got - expected).max() < 0.03


def test_gradients_are_those_of_mlx():
    q, k, v = arrays(length=4, context=9)

    def loss(attention):
        return lambda *qkv: (attention(*qkv, scale=0.25, mask="causal") ** 2).sum()

    original = mx.fast.scaled_dot_product_attention
    expected = mx.grad(loss(original), argnums=(0, 1, 2))(q, k, v)
    cpu_attention.install()
    try:
        hooked = mx.fast.scaled_dot_product_attention
        assert hooked is not original
        got = mx.grad(loss(hooked), argnums=(0, 1, 2))(q, k, v)
    finally:
        cpu_attention.uninstall()
    for one, other in zip(got, expected, strict=True):
        assert mx.abs(other).max() > 0.01
        assert mx.abs(one - other).max() < TOLERANCE


def test_leaves_a_single_token_with_a_short_context_to_mlx():
    assert both(*arrays(length=1))[0] is None
    assert both(*arrays(length=1, context=2**14, batch=1))[0] is not None


@pytest.mark.parametrize("shape", [(5, 11), (2, 1, 5, 11), (2, 6, 5, 11), (1, 1, 1, 11)])
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_takes_array_masks(shape, kind):
    rng = np.random.default_rng(3)
    mask = mx.array(rng.random(shape) > 0.3)
    mask[..., 0] = True
    if kind == "additive":
        mask = mx.where(mask, mx.array(0.0), mx.array(-1e9))
    got, expected = both(*arrays(), mask=mask)
    assert mx.abs(got - expected).max() < TOLERANCE


def test_takes_sinks():
    sinks = mx.array(np.random.default_rng(4).standard_normal(6).astype(np.float32))
    got, expected = both(*arrays(), mask="causal", sinks=sinks)
    assert mx.abs(got - expected).max() < TOLERANCE


@pytest.mark.parametrize("rows", [1, 3])
def test_long_queries_are_cut_into_blocks(monkeypatch, rows):
    q, k, v = arrays(length=11)
    monkeypatch.setattr(cpu_attention, "SCORE_BYTES", 4 * 2 * 6 * 11 * rows)
    for mask in (None, "causal", mx.tri(11).astype(mx.bool_)):
        got, expected = both(q, k, v, mask=mask)
        assert mx.abs(got - expected).max() < TOLERANCE


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_keeps_the_dtype(dtype):
    q, k, v = (a.astype(dtype) for a in arrays())
    got, expected = both(q, k, v, mask="causal")
    assert got.dtype == dtype
    assert mx.abs(got - expected).max() < 0.05


def test_values_may_be_narrower_than_keys():
    q, k, v = arrays()
    got, expected = both(q, k, v[..., :8])
    assert got.shape == expected.shape
    assert mx.abs(got - expected).max() < TOLERANCE


def test_declines_off_the_cpu_and_while_traced():
    q, k, v = arrays()
    with force_backend("portable"):
        assert cpu_attention.attend(q, k, v, scale=1.0) is None
    declined = []

    def traced(q, k, v):
        declined.append(cpu_attention.attend(q, k, v, scale=1.0) is None)
        return q

    mx.compile(traced)(q, k, v)
    assert declined == [True]


def test_the_hook_is_counted_and_leaves_no_trace():
    before = mx.fast.scaled_dot_product_attention
    cpu_attention.install()
    cpu_attention.install()
    assert mx.fast.scaled_dot_product_attention is not before
    cpu_attention.uninstall()
    assert attention_hook.is_installed()
    cpu_attention.uninstall()
    assert mx.fast.scaled_dot_product_attention is before
    cpu_attention.uninstall()  # one too many does no harm
    assert mx.fast.scaled_dot_product_attention is before


def test_a_handler_that_declines_leaves_the_call_to_mlx():
    q, k, v = arrays()
    expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask="causal")
    calls = []

    def decline(*_, **options):
        calls.append(options)

    attention_hook.register(decline)
    try:
        got = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask="causal")
        mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, stream=mx.cpu)
    finally:
        attention_hook.unregister(decline)
    assert mx.array_equal(got, expected)
    # a call with a stream of its own is none of the handlers' business
    assert calls == [{"scale": 0.25, "mask": "causal", "sinks": None}]
