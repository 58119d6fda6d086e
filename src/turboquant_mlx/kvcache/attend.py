"""Attention of a few queries over a packed store, nothing unpacked beyond a bounded piece.

On a GPU kernels answer (``kernels.kv_attend``). On a CPU, and for what the kernels do not take
(``why_reference`` says what and why), it is the reference here: queries are rotated once instead of
every key, the sum over values is rotated back once instead of every value, and columns are gone
through in pieces with a running maximum (online softmax), so the memory it needs does not grow
with the context.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ..kernels import dispatch
from ..kernels.dialect import Dialect
from ..kernels.kv_attend import Prepared, prepare, why_no_kernel
from ..kernels.kv_selection import LONG
from ..kernels.kv_sides import KVRows
from ..quant.bfloat16 import widen
from .codec import Array, Parts, SideCodec, bits_of, kernel_facts, kernel_sides
from .store import PackedStore

MAX_QUERIES = 8
"""Queries of one call (a decode step, or the verification of a draft) that are answered here;
more are answered by MLX's own attention on decoded keys and values."""

PIECE = 2**20
"""Keys' values that are decoded at a time."""

_HIDDEN = np.float32(-1e30)


def attend(
    queries: mx.array,
    store: PackedStore,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention as ``mx.fast.scaled_dot_product_attention`` defines it, keys and values packed.

    Args:
        queries: [B, H, L, D]; H is a multiple of the store's heads.
        store: keys and values of every column in use; the queries are those of the last L.
        scale: multiplies the scores.
        mask: None, "causal", a boolean array or an additive one that broadcasts to
            [B, H, L, columns]. Padding before a row's first token is hidden whatever it says.
        sinks: None or one extra logit per head [H].

    Returns:
        [B, H, L, Dv] in the queries' dtype.
    """
    dialect = dispatch.kernels_of_backend(queries.dtype)
    if dialect is None:
        return reference(queries, store, scale=scale, mask=mask, sinks=sinks)
    given = mask if isinstance(mask, mx.array) else None
    if not any(store.frozen) and (given is not None or not any(store.padding)):
        # all in 16 bits
        if given is not None and any(store.padding):
            mask = _without_padding(given, store)
        plain = [x.astype(queries.dtype) for x in store.decoded(store.columns)]
        return mx.fast.scaled_dot_product_attention(
            queries, *plain, scale=scale, mask=mask, sinks=sinks
        )
    rows = store.token_rows()
    causal = mask is not None and given is None
    if given is not None or sinks is not None:
        if given is not None:
            given = given.reshape((1,) * (4 - given.ndim) + given.shape)
        call = _prepared(queries, store, rows, dialect, scale, causal, given, sinks)
    else:
        # from token to token nothing of this changes, and asking for all of it takes long
        assert store.raw_keys is not None
        key = (
            *(queries.shape, queries.dtype, store.keys[0].shape, store.raw_keys.shape, rows.raw),
            *(rows.columns >= LONG, dialect, scale, causal),
        )
        held = store.held("attention")
        if held is None or held[0] != key:
            held = key, _prepared(queries, store, rows, dialect, scale, causal, None, None)
            store.hold("attention", held)
        call = held[1]
    if call is None:
        return reference(queries, store, scale=scale, mask=mask, sinks=sinks)
    raw = store.raw_keys, store.raw_values
    return call(queries, store.keys, store.values, rows, *raw, store.shift, sinks, given)


def _without_padding(mask: mx.array, store: PackedStore) -> mx.array:
    """A mask that also hides the columns before each row's first token."""
    there = mx.arange(store.columns) >= mx.array(store.padding)[:, None, None, None]
    if mask.dtype == mx.bool_:
        return mask & there
    # finite, or a query that sees nothing, padding itself, would become NaN
    return mx.where(there, mask, mx.array(mx.finfo(mask.dtype).min, mask.dtype))


def _prepared(
    queries: mx.array,
    store: PackedStore,
    rows: KVRows,
    dialect: Dialect,
    scale: float,
    causal: bool,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> Prepared | None:
    """The kernels' call, or None if they do not take it."""
    if _why_no_kernel(queries, store, rows, mask):
        return None
    assert store.raw_keys is not None
    codecs = store.key_codec, store.value_codec
    return prepare(
        queries.shape,
        queries.dtype,
        store.keys[0].shape,
        dialect,
        sides=kernel_sides(*codecs),
        facts=kernel_facts(*codecs),
        rows=rows,
        scale=scale,
        raw_capacity=store.raw_keys.shape[2],
        shift=store.shift is not None,
        mask=mask,
        causal=causal,
        sinks=sinks is not None,
    )


def why_reference(queries: mx.array, store: PackedStore, mask: mx.array | str | None) -> str:
    """Why the reference answers this call and no kernel; "" if a kernel does."""
    if dispatch.kernels_of_backend(queries.dtype) is None:
        return f"the back-end {dispatch.backend()} has no kernels for {queries.dtype}"
    given = mask if isinstance(mask, mx.array) else None
    return _why_no_kernel(queries, store, store.token_rows(), given)


def _why_no_kernel(
    queries: mx.array, store: PackedStore, rows: KVRows, mask: mx.array | None
) -> str:
    if not any(store.frozen):
        return "nothing is packed yet"
    sides = kernel_sides(store.key_codec, store.value_codec)
    codes = (store.keys[0], store.values[0])
    return why_no_kernel(sides, rows, queries, codes, mask)


def reference(
    queries: mx.array,
    store: PackedStore,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """``attend`` in NumPy on a CPU, and in plain MLX operations elsewhere."""
    on_numpy = False
    if dispatch.backend() == "cpu":
        extra = [a for a in (mask, sinks) if isinstance(a, mx.array)]
        on_numpy = not dispatch.is_traced(bits_of(queries), *store.arrays(), *extra)
    if not on_numpy:
        return _attend(mx, queries, store, scale, mask, sinks).astype(queries.dtype)
    from ..kernels.blas import one_thread  # a GPU machine needs none of what it needs

    with one_thread():
        return mx.array(_attend(np, queries, store, scale, mask, sinks)).astype(queries.dtype)


def _float(xp: Any, x: mx.array) -> Array:
    """float32 of an MLX array, as NumPy where that works."""
    if xp is np:
        return widen(np.array(bits_of(x), copy=False))
    return x.astype(mx.float32)


class _Softmax:
    """Running maximum, total and two weighted sums: of stored (rotated) and of plain values."""

    def __init__(self, xp: Any, lead: tuple[int, ...], codec: SideCodec):
        self.xp, self.codec = xp, codec
        self.top = xp.full((*lead, 1), -np.inf, dtype=xp.float32)
        self.total = xp.zeros((*lead, 1), dtype=xp.float32)
        self.sums: list[Array] = [xp.zeros((*lead, codec.width), dtype=xp.float32)] * 2

    def add(self, scores: Array, values: Array | None, stored: bool) -> None:
        """scores [..., rows, n], values [..., n, width] (None: a logit without a value)."""
        xp = self.xp
        top = xp.maximum(self.top, scores.max(axis=-1, keepdims=True))
        finite = xp.maximum(top, _HIDDEN)  # nothing visible yet
        keep = xp.exp(self.top - finite)
        weights = xp.exp(scores - finite)
        self.total = self.total * keep + weights.sum(axis=-1, keepdims=True)
        self.sums = [s * keep for s in self.sums]
        if values is not None:
            which = 0 if stored else 1
            self.sums[which] = self.sums[which] + weights @ values
        self.top = top

    def result(self) -> Array:
        out = self.codec.unrotate(self.sums[0]) + self.sums[1]
        return out / self.xp.maximum(self.total, 1e-30)


def _attend(xp: Any, queries, store: PackedStore, scale, mask, sinks) -> Array:
    assert store.raw_keys is not None and store.raw_values is not None
    batch, heads, length, width = queries.shape
    kv_heads = store.raw_keys.shape[1]
    repeats = heads // kv_heads
    lead = (batch, kv_heads, repeats * length)
    q = _float(xp, queries).reshape(*lead, width) * xp.array(scale, dtype=xp.float32)
    see = _Visible(xp, mask, store, (batch, kv_heads, repeats, length))
    softmax = _Softmax(xp, lead, store.value_codec)
    raw_lengths = store.raw_lengths()
    if any(raw_lengths):
        _add_raw(xp, q, store, raw_lengths, see, softmax)
    if any(store.frozen):
        _add_packed(xp, q, store, raw_lengths, see, softmax)
    if sinks is not None:
        sink = _float(xp, sinks).reshape(1, kv_heads, repeats, 1, 1)
        sink = xp.broadcast_to(sink, (batch, kv_heads, repeats, length, 1)).reshape(*lead, 1)
        softmax.add(sink, None, stored=True)
    return softmax.result().reshape(batch, heads, length, -1)


def _add_raw(xp, q, store: PackedStore, raw_lengths, see: _Visible, softmax: _Softmax) -> None:
    """The tokens that are held in 16 bits, in rows' own positions."""
    assert store.raw_keys is not None and store.raw_values is not None
    count = max(raw_lengths)
    step = max(1, PIECE // (q.shape[0] * q.shape[1] * max(store.widths)))
    for start in range(0, count, step):
        stop = min(start + step, count)
        own = np.arange(start, stop)[None]
        columns = own + np.array(store.padding)[:, None]
        there = own < np.array(raw_lengths)[:, None]
        keys = _float(xp, store.raw_keys[:, :, start:stop])
        values = _float(xp, store.raw_values[:, :, start:stop])
        scores = see.hide_at(q @ keys.swapaxes(-1, -2), columns, there)
        softmax.add(scores, values, stored=False)


def _add_packed(xp, q, store: PackedStore, raw_lengths, see: _Visible, softmax: _Softmax) -> None:
    """The packed columns; padding and what is held in 16 bits is hidden here."""
    key_codec, value_codec = store.key_codec, store.value_codec
    rotated = key_codec.rotate(q)
    # the same for all packed keys of a row; it matters beside keys that are not packed, and sinks
    common = None
    if store.shift is not None:
        common = (q * _float(xp, store.shift)).sum(axis=-1, keepdims=True)
    step = max(1, PIECE // (q.shape[0] * q.shape[1] * max(store.widths)))
    first = np.array(store.padding)[:, None] + np.array(raw_lengths)[:, None]
    for start in range(int(first.min()), store.columns, step):
        stop = min(start + step, store.columns)
        keys = _stored(xp, key_codec, store.keys, start, stop)
        scores = rotated @ keys.swapaxes(-1, -2)
        if common is not None:
            scores = scores + common
        columns = np.arange(start, stop)[None]
        there = None if int(first.max()) <= start else columns >= first
        scores = see.hide(scores, start, stop, there)
        softmax.add(scores, _stored(xp, value_codec, store.values, start, stop), stored=True)


def _stored(xp: Any, codec: SideCodec, parts: Parts, start: int, stop: int) -> Array:
    """float32 [B, Hkv, stop - start, D] in the stored domain."""
    if xp is np and codec.rotated:
        views = tuple(np.array(p, copy=False)[:, :, start:stop] for p in parts)
        return codec.decode_stored_numpy(views)
    values = codec.decode_stored(tuple(p[:, :, start:stop] for p in parts))
    return _float(xp, values)


class _Visible:
    """Which query sees which column, from MLX's forms of a mask."""

    def __init__(self, xp: Any, mask, store: PackedStore, shape: tuple[int, int, int, int]):
        self.xp, self.shape, self.columns = xp, shape, store.columns
        self.causal = isinstance(mask, str) and shape[3] > 1
        self.mask: Array | None = None
        if isinstance(mask, mx.array):
            self.bool = mask.dtype == mx.bool_
            if not self.bool:
                self.mask = _float(xp, mask)
            else:
                self.mask = np.array(mask, copy=False) if xp is np else mask
            while self.mask.ndim < 4:
                self.mask = self.mask[None]
            if self.mask.shape[-1] != store.columns:
                shape = (*self.mask.shape[:-1], store.columns)
                self.mask = xp.broadcast_to(self.mask, shape)

    def hide(self, scores: Array, start: int, stop: int, there: np.ndarray | None) -> Array:
        """Hide columns [start, stop) of scores [B, Hkv, rows, n]; there: [B, n] or None."""
        part = None if self.mask is None else self.mask[..., start:stop]
        return self._apply(scores, np.arange(start, stop)[None], there, part)

    def hide_at(self, scores: Array, columns: np.ndarray, there: np.ndarray) -> Array:
        """The same for columns [B, n] of each row's own."""
        part = None
        if self.mask is not None:
            xp, batch = self.xp, self.shape[0]
            mask = xp.broadcast_to(self.mask, (batch, *self.mask.shape[1:]))
            index = xp.array(np.clip(columns, 0, self.columns - 1))[:, None, None, :]
            index = xp.broadcast_to(index, (*mask.shape[:3], columns.shape[-1]))
            part = xp.take_along_axis(mask, index, axis=-1)
        return self._apply(scores, columns, there, part)

    def _apply(self, scores, columns: np.ndarray, there, part) -> Array:
        if part is None and there is None and not self.causal:
            return scores
        xp = self.xp
        batch, kv_heads, repeats, length = self.shape
        n = scores.shape[-1]
        scores = scores.reshape(batch, kv_heads, repeats, length, n)
        if there is not None and not there.all():
            scores = xp.where(xp.array(there)[:, None, None, None], scores, -np.inf)
        if self.causal:
            last = self.columns - length + np.arange(length)
            seen = columns[:, None, :] <= last[:, None]
            scores = xp.where(xp.array(seen)[:, None, None], scores, -np.inf)
        if part is not None:
            b, h = part.shape[:2]
            part = (
                part.reshape(b, kv_heads, repeats, *part.shape[2:]) if h > 1 else part[:, :, None]
            )  # [B or 1, Hkv or 1, repeats or 1, L or 1, n]
            scores = xp.where(part, scores, -np.inf) if self.bool else scores + part
        return scores.reshape(batch, kv_heads, repeats * length, n)
