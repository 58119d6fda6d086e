"""Packed stores, what they hold, and attention over it, for tests of the kernels."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kernel_cases import as_double
from turboquant_mlx.kernels.dispatch import force_backend
from turboquant_mlx.kvcache.spec import KVSpec
from turboquant_mlx.kvcache.store import PackedStore

WIDTHS = [32, 48, 64, 80, 96, 112, 128, 160, 192, 256, 512, 576]
COLUMNS = 90


def random(*shape: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    values = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return mx.array(values.astype(np.float32)).astype(dtype)


def filled(
    spec: KVSpec,
    padding: tuple[int, ...] = (0,),
    columns: int = COLUMNS,
    heads: int = 2,
    width: int = 64,
    value_width: int = 0,
    dtype: mx.Dtype = mx.float16,
) -> PackedStore:
    """A store of rows that begin in different columns, made on the CPU; keys have a large mean."""
    store = PackedStore(spec, list(padding))
    lead = (len(padding), heads, columns)
    keys = random(*lead, width, seed=1) + 2 * random(1, heads, 1, width, seed=7)
    values = random(*lead, value_width or width, seed=2)
    with force_backend("portable"):
        store.append(keys.astype(dtype), values.astype(dtype))
        mx.eval(store.arrays())
    return store


def decoded(store: PackedStore) -> tuple[np.ndarray, np.ndarray]:
    """float64 keys and values in full precision: not rounded to the model's dtype."""
    with force_backend("portable"):
        out = []
        raw_lengths = store.raw_lengths()
        sides = [
            (store.key_codec, store.keys, store.shift, store.raw_keys),
            (store.value_codec, store.values, None, store.raw_values),
        ]
        for codec, parts, shift, raw in sides:
            whole = codec.decode(tuple(p[:, :, : store.columns] for p in parts), shift, mx.float32)
            whole = as_double(whole)
            for r, n in enumerate(raw_lengths):
                at = store.padding[r]
                whole[r, :, at : at + n] = as_double(raw[r, :, :n])
            out.append(whole)
    return out[0], out[1]


def expected(q: mx.array, store: PackedStore, scale: float, mask, sinks) -> np.ndarray:
    """float64 [B, H, L, Dv]; rows that see nothing are 0."""
    keys, values = decoded(store)
    repeats = q.shape[1] // keys.shape[1]
    keys, values = (np.repeat(x, repeats, axis=1) for x in (keys, values))
    scores = as_double(q) @ keys.swapaxes(-1, -2) * scale
    length, columns = scores.shape[-2:]
    column = np.arange(columns)
    for r, padding in enumerate(store.padding):
        scores[r, :, :, column < padding] = -np.inf
    if isinstance(mask, str):
        seen = column[None] <= columns - length + np.arange(length)[:, None]
        scores = np.where(seen, scores, -np.inf)
    elif mask is not None and mask.dtype == mx.bool_:
        scores = np.where(np.array(mask), scores, -np.inf)
    elif mask is not None:
        scores = scores + as_double(mask)
    if sinks is not None:
        sink = np.broadcast_to(as_double(sinks)[None, :, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, sink], axis=-1)
    top = np.maximum(scores.max(axis=-1, keepdims=True), -1e300)
    weights = np.exp(scores - top)
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    return weights[..., :columns] @ values
