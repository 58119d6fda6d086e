"""Stores of different sequences in one, for batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..errors import OptionError
from .store import PackedStore, grown


def stack(stores: Sequence[PackedStore]) -> PackedStore:
    """All rows in one store, right-justified.

    Raises:
        OptionError: they are packed in different ways.
    """
    spec, keep = stores[0].spec, stores[0].keep
    if any(s.spec != spec or s.keep != keep for s in stores):
        raise OptionError("caches that are packed in different ways cannot be joined")
    columns = max(s.columns for s in stores)
    padding = [p + columns - s.columns for s in stores for p in s.padding]
    frozen = [f for s in stores for f in s.frozen]
    models = [s for s in stores if not s.is_empty]
    dropped = [n for s in stores for n in s.dropped]
    out = PackedStore(spec, padding, columns, frozen, keep=keep, dropped=dropped)
    if not models:
        return out
    model = models[0]
    if any(s.widths != model.widths or s.dtype_name != model.dtype_name for s in models):
        raise OptionError("caches of different models cannot be joined")
    assert model.raw_keys is not None and model.raw_values is not None
    out.widths, out.dtype_name = model.widths, model.dtype_name
    heads = model.raw_keys.shape[1]
    packed = columns if any(frozen) else 0
    capacity = grown(packed)
    raw = max(max(s.raw_lengths(), default=0) for s in stores)

    def joined(pick: Any, empty: mx.array, left: bool, size: int) -> mx.array:
        pieces = []
        for s in stores:
            a = pick(s) if not s.is_empty else None
            if a is None:
                pieces.append(mx.zeros((s.batch, heads, size, empty.shape[3]), empty.dtype))
                continue
            used = min(s.columns if left else size, a.shape[2])
            before = packed - s.columns if left and used else 0
            widths = [(0, 0), (0, 0), (before, size - before - used), (0, 0)]
            pieces.append(mx.pad(a[:, :, :used], widths))
        return mx.concatenate(pieces, axis=0)

    out.keys = tuple(
        joined(lambda s, i=i: s.keys[i], model.keys[i], True, capacity)
        for i in range(len(model.keys))
    )
    out.values = tuple(
        joined(lambda s, i=i: s.values[i], model.values[i], True, capacity)
        for i in range(len(model.values))
    )
    if model.shift is not None:
        out.shift = joined(lambda s: s.shift, model.shift, False, 1)
    out.raw_keys = joined(lambda s: s.raw_keys, model.raw_keys, False, raw)
    out.raw_values = joined(lambda s: s.raw_values, model.raw_values, False, raw)
    return out
