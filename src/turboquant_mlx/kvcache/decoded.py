"""The keys and values of a packed store as a model would have them: for prompts, whose attention is
MLX's own, and for whoever computes with a packed cache's keys directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx

from ..kernels import dispatch, kv_expand
from ..kernels.kv_sides import KVRows
from .codec import Parts, SideCodec, kernel_facts, kernel_sides

if TYPE_CHECKING:
    from .store import PackedStore

PIECE = 2**20
"""Values that are decoded at a time; what lies between codes and 16 bits takes 20 bytes each."""

STEP = 16
"""Columns that are decoded at a time at least."""


def decoded(store: PackedStore, columns: int) -> tuple[mx.array, mx.array]:
    """Keys and values [B, Hkv, columns, D] of the first columns in the model's dtype, lazy.

    Columns before a row's first token hold anything finite.
    """
    assert store.raw_keys is not None and store.raw_values is not None
    rows = store.token_rows()._replace(columns=columns)
    if any(store.frozen) and columns and (made := _by_kernel(store, rows)):
        return made
    raw_lengths = [min(n, columns) for n in rows.raw]
    out = []
    for codec, parts, shift, raw in (
        (store.key_codec, store.keys, store.shift, store.raw_keys),
        (store.value_codec, store.values, None, store.raw_values),
    ):
        out.append(_side(store, codec, parts, shift, raw, raw_lengths, columns))
    return out[0], out[1]


def _by_kernel(store: PackedStore, rows: KVRows) -> tuple[mx.array, mx.array] | None:
    """``decoded`` in one launch, or None where no kernel does it."""
    assert store.raw_keys is not None and store.raw_values is not None
    dialect = dispatch.kernels_of_backend(store.dtype)
    if dialect is None:
        return None
    codecs = store.codecs()
    sides = kernel_sides(*codecs)
    if kv_expand.why_no_kernel(sides, (store.keys[0], store.values[0])):
        return None
    return kv_expand.kv_expand(
        store.keys,
        store.values,
        dialect,
        sides=sides,
        facts=kernel_facts(*codecs),
        rows=rows,
        raw=(store.raw_keys, store.raw_values),
        shift=store.shift,
        dtype=store.dtype,
    )


def _side(
    store: PackedStore,
    codec: SideCodec,
    parts: Parts,
    shift: mx.array | None,
    raw: mx.array,
    raw_lengths: list[int],
    columns: int,
) -> mx.array:
    # one sequence: its raw tokens come first
    first = raw_lengths[0] if store.batch == 1 and store.padding[0] == 0 else 0
    pieces = [raw[:, :, :first]] if first else []
    if any(store.frozen):
        step = max(STEP, PIECE // (raw.shape[0] * raw.shape[1] * codec.width))
        for start in range(first, columns, step):
            stop = min(start + step, columns)
            part = tuple(p[:, :, start:stop] for p in parts)
            pieces.append(codec.decode(part, shift, store.dtype))
    elif columns > first:
        pieces.append(mx.zeros((*raw.shape[:2], columns - first, codec.width), store.dtype))
    if not pieces:
        return raw[:, :, :0]
    whole = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)
    if not first:
        for r, n in enumerate(raw_lengths):
            n = min(n, columns - store.padding[r])
            if n > 0:
                column = store.padding[r]
                whole[r, :, column : column + n] = raw[r, :, :n]
    return whole
