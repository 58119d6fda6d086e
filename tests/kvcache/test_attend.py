"""Attention over a packed store equals attention over what the store decodes to."""

from __future__ import annotations

import copy
import itertools

import mlx.core as mx
import numpy as np
import pytest

from turboquant_mlx.kernels import attention_hook
from turboquant_mlx.kernels.dispatch import force_backend
from turboquant_mlx.kvcache.attend import attend
from turboquant_mlx.kvcache.cache import BatchTurboQuantKVCache, TurboQuantKVCache
from turboquant_mlx.kvcache.spec import KVSpec
from turboquant_mlx.kvcache.store import PackedStore

TOLERANCE = 2e-5


def random(*shape: int, seed: int = 0, dtype=mx.float32) -> mx.array:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return mx.array(values).astype(dtype)


def filled(spec: KVSpec, padding: list[int], columns: int, heads: int, width: int, value_width=0):
    """A store of rows that begin in different columns; keys share a large mean."""
    store = PackedStore(spec, list(padding))
    mean = 2 * random(1, heads, 1, width, seed=7)
    keys = random(len(padding), heads, columns, width, seed=1) + mean
    values = random(len(padding), heads, columns, value_width or width, seed=2)
    for start in range(0, columns, 24):
        store.append(keys[:, :, start : start + 24], values[:, :, start : start + 24])
    return store


def reference(q, store: PackedStore, scale, mask=None, sinks=None) -> mx.array:
    keys, values = (x.astype(mx.float32) for x in store.decoded(store.columns))
    return mx.fast.scaled_dot_product_attention(
        q.astype(mx.float32), keys, values, scale=scale, mask=mask, sinks=sinks
    )


def padding_mask(store: PackedStore, length: int, window: int | None = None) -> mx.array:
    cache = BatchTurboQuantKVCache(store.padding, spec=store.spec)
    cache.store.columns = store.columns - length
    return cache.make_mask(length, window_size=window)


def distance(a: mx.array, b: mx.array) -> float:
    return mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()


@pytest.fixture(params=["cpu", "portable"])
def backend(request):
    with force_backend(request.param):
        yield request.param


@pytest.mark.parametrize("width", [32, 48, 64, 80, 96, 112, 128, 192, 256, 576])
def test_every_head_size(backend, width):
    store = filled(KVSpec(3, 4), [0], 70, 2, width)
    q = random(1, 4, 1, width, seed=3)
    scale = width**-0.5
    out = attend(q, store, scale=scale)
    assert distance(out, reference(q, store, scale)) < TOLERANCE


@pytest.mark.parametrize(
    ("bits", "repeats", "length"),
    [(pair, (1, 2, 4, 8)[i % 4], (1, 2, 5, 8)[i // 2 % 4]) for i, pair in enumerate(
        [(1, 2), (2, 2), (3, 3), (3, 4), (4, 3), (4, 4), (5, 6), (6, 5), (7, 8), (8, 3)])],
)  # fmt: skip
def test_every_width_and_grouping(backend, bits, repeats, length):
    store = filled(KVSpec(*bits), [0], 70, 2, 64)
    q = random(1, 2 * repeats, length, 64, seed=3)
    out = attend(q, store, scale=0.125, mask="causal")
    assert distance(out, reference(q, store, 0.125, "causal")) < TOLERANCE


@pytest.mark.parametrize("min_tokens", [0, 1, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kind", ["bool", "additive", "per head", "window"])
def test_ragged_batches_masks_and_sinks(backend, min_tokens, sinks, kind):
    """Rows of 70, 49, 3 and 33 tokens: packed, just packed, and not packed yet."""
    store = filled(KVSpec(4, 4, min_tokens=min_tokens), [0, 21, 67, 37], 70, 2, 64)
    q = random(4, 8, 2, 64, seed=3)
    mask = padding_mask(store, 2, 20 if kind == "window" else None)
    if kind != "bool" and kind != "window":
        mask = mx.where(mask, 0.0, -1e9)
        if kind == "per head":
            mask = mask + random(1, 8, 1, 70, seed=5)
    sink = random(8, seed=4) if sinks else None
    out = attend(q, store, scale=0.125, mask=mask, sinks=sink)
    assert distance(out, reference(q, store, 0.125, mask, sink)) < TOLERANCE


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_queries_of_16_bits_give_answers_of_16_bits(backend, dtype):
    store = filled(KVSpec(3, 4), [0], 70, 2, 64)
    q = random(1, 4, 1, 64, seed=3, dtype=dtype)
    out = attend(q, store, scale=0.125)
    assert out.dtype == dtype
    assert distance(out, reference(q, store, 0.125)) < 0.01


def test_keys_and_values_of_different_widths_and_groups(backend):
    store = filled(KVSpec(3, 4, group_size=16), [0], 70, 1, 96, value_width=48)
    q = random(1, 4, 1, 96, seed=3)
    assert distance(attend(q, store, scale=0.1), reference(q, store, 0.1)) < TOLERANCE


@pytest.mark.parametrize("schemes", list(itertools.product(["uniform", "turboquant"], repeat=2)))
def test_every_pair_of_schemes(backend, schemes):
    store = filled(KVSpec(4, 4, *schemes, group_size=32), [0, 9], 70, 2, 64)
    q = random(2, 4, 1, 64, seed=3)
    mask = padding_mask(store, 1)
    assert distance(attend(q, store, scale=0.1, mask=mask), reference(q, store, 0.1, mask)) < 1e-4


def test_pieces_make_no_difference(backend, monkeypatch):
    store = filled(KVSpec(3, 4, min_tokens=9), [0, 4], 90, 2, 64)
    q, mask = random(2, 4, 3, 64, seed=3), padding_mask(store, 3)
    whole = attend(q, store, scale=0.1, mask=mask)
    monkeypatch.setattr("turboquant_mlx.kvcache.attend.PIECE", 2 * 2 * 64 * 7)
    assert distance(attend(q, store, scale=0.1, mask=mask), whole) < TOLERANCE


def test_attention_through_the_hook_runs_on_the_packed_store(backend, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "turboquant_mlx.kvcache.views.attend", lambda *a, **k: calls.append(k) or attend(*a, **k)
    )
    cache = TurboQuantKVCache(3.5)
    cache.update_and_fetch(random(1, 2, 60, 64), random(1, 2, 60, 64, seed=1))
    q = random(1, 4, 1, 64, seed=3)
    keys, values = cache.update_and_fetch(random(1, 2, 1, 64), random(1, 2, 1, 64, seed=1))
    plain = [mx.array(np.array(x)) for x in (keys, values)]
    out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.1)
    assert len(calls) == 1
    expected = mx.fast.scaled_dot_product_attention(q, *plain, scale=0.1)
    assert len(calls) == 1
    assert distance(out, expected) < TOLERANCE
    # a view of what was there before is answered from what it holds
    cache.update_and_fetch(random(1, 2, 1, 64), random(1, 2, 1, 64, seed=1))
    stale = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.1)
    assert len(calls) == 1
    assert distance(stale, expected) < TOLERANCE


@pytest.mark.parametrize("change", ["*=", "+=", "[]"])
def test_views_that_a_model_changes_are_no_longer_answered_from_the_store(change):
    cache = TurboQuantKVCache(8)
    keys, values = cache.update_and_fetch(random(1, 2, 50, 64), random(1, 2, 50, 64, seed=1))
    plain = [mx.array(keys), mx.array(values)]
    for k in (keys, plain[0]):
        if change == "*=":
            k *= 3
        elif change == "+=":
            k += 1
        else:
            k[:, :, 10] = 5
    q = random(1, 2, 1, 64, seed=2)
    got = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.1)
    want = mx.fast.scaled_dot_product_attention(q, *plain, scale=0.1)
    assert distance(got, want) < 1e-6


@pytest.mark.parametrize("additive", [False, True])
def test_padding_is_hidden_whatever_a_mask_says_before_anything_is_packed(additive):
    store = filled(KVSpec(8, 8), [0, 7], 20, 2, 64)
    assert not any(store.frozen)
    q = random(2, 4, 1, 64, seed=3)
    mask = mx.zeros((2, 1, 1, 20)) if additive else mx.ones((2, 1, 1, 20), mx.bool_)
    with force_backend("metal"):  # its kernels take none of this
        got = attend(q, store, scale=0.1, mask=mask)
    with force_backend("portable"):
        want = attend(q, store, scale=0.1, mask=mask)
    assert distance(got, want) < 1e-5


def test_the_latest_handler_of_the_hook_is_asked_first():
    """The CPU's own attention, registered when a model was loaded, would decode the whole cache."""
    asked = []
    handlers = [lambda *a, **k: asked.append(0), lambda *a, **k: asked.append(1)]
    for handler in handlers:
        attention_hook.register(handler)
    q = random(1, 1, 1, 64)
    mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0)
    for handler in handlers:
        attention_hook.unregister(handler)
    assert asked == [1, 0]


def test_the_hook_is_in_place_only_while_a_packed_cache_lives(monkeypatch):
    monkeypatch.setattr(attention_hook, "_handlers", {})
    monkeypatch.setattr(attention_hook, "_original", None)
    original = mx.fast.scaled_dot_product_attention
    caches = [TurboQuantKVCache(4), BatchTurboQuantKVCache([0], 4)]
    caches += copy.deepcopy(caches)
    assert mx.fast.scaled_dot_product_attention is not original
    caches.clear()
    assert mx.fast.scaled_dot_product_attention is original
