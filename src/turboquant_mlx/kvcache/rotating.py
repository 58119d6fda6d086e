"""Packed caches of a sliding window: the last ``max_size`` tokens, packed.

They answer as mlx-lm's ``RotatingKVCache`` and ``BatchRotatingKVCache`` do: the same tokens are
seen at every step, in the order in which they came (those turn around in a ring, which a sum does
not notice). Before n tokens are appended all but the last ``max_size - 1`` are forgotten. So the
cache shows up to ``max_size - 1 + n`` columns, and ``make_mask`` lets each query see its own window
of them.

Forgotten columns are hidden at once and given back when the store is full or much too large: one
that has turned around holds a window and, as spare, a sixteenth of it.

Where the plain classes lose the first ``keep`` tokens when caches join a batch, these keep them:
a row of a batch equals itself alone.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.base import create_causal_mask

from ..errors import CheckpointError, OptionError
from .attend import MAX_QUERIES
from .packed import PackedBatch, PackedCache, PackedSingle, kind_of, make_spec
from .spec import KVSpec
from .stack import stack
from .state import store_of
from .store import PackedStore, grown
from .views import view_pair


def window_spec(spec: KVSpec, max_size: int, keep: int) -> KVSpec:
    """How a window is packed.

    Raises:
        OptionError: it is too short to be packed.
    """
    made = spec.for_window(max_size, keep)
    if made is None:
        raise OptionError(
            f"a sliding window of {max_size} tokens is too short to be packed",
            hint="leave its cache in 16 bits",
        )
    return made


class RotatingPackedCache(PackedCache):
    """What the single and the batch cache of a window have in common."""

    max_size: int
    keep: int

    def _start_window(self, spec: KVSpec, max_size: int, keep: int, padding: list[int]) -> None:
        self.max_size, self.keep = int(max_size), int(keep)
        made = window_spec(spec, self.max_size, self.keep)
        self._start(PackedStore(made, padding, keep=self.keep))

    def _seen_before(self) -> int:
        """Columns that the next append still sees."""
        columns = self.store.columns
        return min(columns - min(min(self._padding(), default=0), columns), self.max_size - 1)

    def _padding(self) -> list[int]:
        """Columns before each row's first token once padding behind a complete row is before it,
        where the next append puts it."""
        return [p + n for p, n in zip(self.store.padding, self.store.beyond_limits(), strict=True)]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys [B, Hkv, n, D] and values; views of what their queries may see: up to
        ``max_size - 1 + n`` columns in the order in which they came.

        As for ``PackedCache``, more than ``MAX_QUERIES`` tokens see themselves in full precision.
        """
        store, n = self.store, keys.shape[2]
        if store.limits is not None and any(store.beyond_limits()):
            # a row that is complete must not lose tokens to the padding behind them
            limits = store.limits
            store.roll(store.beyond_limits())
            store.limits = limits
        before = self._seen_before()
        store.drop(store.columns - before)
        after = before + n
        capacity = store.keys[0].shape[2] if store.keys else 0
        too_large = capacity - after > 2 * (grown(after) - after)
        if n > MAX_QUERIES or too_large or store.columns + n > capacity:
            store.cut(after)
        if n > MAX_QUERIES:
            return self._append_prompt(before, keys, values)
        store.append(keys, values)
        return self._views(after)

    def _views(self, columns: int) -> tuple[mx.array, mx.array]:
        first = self.store.columns - columns
        keys, values = self.store.decoded(self.store.columns)
        return view_pair(self.store, keys[:, :, first:], values[:, :, first:])

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Views of all keys [B, Hkv, columns, D] and values that the last queries might see."""
        return self._views(self.store.live)

    def is_trimmable(self) -> bool:
        """As long as nothing was forgotten."""
        return max(self.store.offsets()) < self.max_size

    def trim(self, n: int) -> int:
        """Forget the last n tokens; returns how many there were to forget.

        Once something was forgotten that is all or nothing: the tokens of the latest append, for
        which nothing has been forgotten yet, can be taken back (those of a draft, say).
        """
        if not any(self.store.dropped) or n <= self.store.live - (self.max_size - 1):
            return super().trim(n)
        return 0

    def size(self) -> int:
        return min(self.store.live, self.max_size)

    @property
    def state(self) -> tuple:
        facts = (self.max_size, self.keep)
        return facts, list(self.store.dropped), *super().state

    @state.setter
    def state(self, state: tuple) -> None:
        self._restore(state)

    def _restore(self, state: tuple) -> None:
        try:
            (max_size, keep), dropped, *rest = state
            self.max_size, self.keep = int(max_size), int(keep)
            gone = [int(n) for n in dropped]
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"this is no state of a packed window: {error}") from error
        self._start(store_of(tuple(rest), keep=self.keep, dropped=gone))

    def _joinable(self, other: Any) -> PackedStore:
        """The store of another cache of the same window, packed if it is plain.

        Raises:
            OptionError: it is of another kind, another size or packed in another way.
        """
        theirs = (getattr(other, "max_size", 0), getattr(other, "keep", self.keep))
        if theirs != (self.max_size, self.keep):
            raise OptionError(
                f"a {type(other).__name__} cannot be joined to a packed window of {self.max_size} "
                "tokens"
            )
        if isinstance(other, RotatingPackedCache):
            store = other.store
        elif kind_of(other) == "RotatingKVCache":
            store = store_of_single(other, self.spec)
        else:
            store = store_of_batch(other, self.spec)
        # what comes next sees no more
        store.drop(max(0, store.columns - self.max_size))
        return store.rows(range(store.batch))


class TurboQuantRotatingKVCache(RotatingPackedCache, PackedSingle, mlx_lm_cache._BaseCache):
    """Packed keys and values of the last tokens of one sequence.

    Args:
        max_size: tokens of the window.
        keep: first tokens that are never forgotten; they stay in 16 bits.
        bits, key_bits, value_bits, spec: as for ``TurboQuantKVCache``.

    Raises:
        OptionError: unsupported bits, or a window too short to be packed.
    """

    def __init__(
        self,
        max_size: int,
        keep: int = 0,
        bits: Any = None,
        *,
        key_bits: int | None = None,
        value_bits: int | None = None,
        spec: KVSpec | None = None,
    ):
        self._start_window(make_spec(bits, key_bits, value_bits, spec), max_size, keep, [0])

    @classmethod
    def from_cache(
        cls,
        cache: Any,
        bits: Any = None,
        *,
        key_bits: int | None = None,
        value_bits: int | None = None,
        spec: KVSpec | None = None,
    ) -> TurboQuantRotatingKVCache:
        """Pack what a ``RotatingKVCache`` of mlx-lm or mlx-vlm holds.

        Raises:
            OptionError: unsupported bits, a window too short, or a cache of another kind.
        """
        made_spec = make_spec(bits, key_bits, value_bits, spec)
        if isinstance(cache, cls):
            if cache.spec != window_spec(made_spec, cache.max_size, cache.keep):
                raise OptionError("a cache that is packed in another way cannot be packed again")
            return cache
        if kind_of(cache) != "RotatingKVCache":
            raise OptionError(f"a {type(cache).__name__} cannot be packed")
        made = cls(cache.max_size, cache.keep, spec=made_spec)
        if cache.keys is not None and cache.offset:
            made.store = store_of_single(cache, made.spec)
        return made

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.store.is_empty and keys.shape[0] != self.store.batch:
            self._start_window(self.spec, self.max_size, self.keep, [0] * keys.shape[0])
        return super().update_and_fetch(keys, values)

    update_and_fetch.__doc__ = RotatingPackedCache.update_and_fetch.__doc__

    @property
    def offset(self) -> int:
        """Tokens that came in: the position of the next one."""
        return self.store.offsets()[0]

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """What N queries may see of the columns that the next append shows."""
        before = self._seen_before()
        window = window_size or self.max_size
        if N > 1:
            if before + N > window or return_array:
                return create_causal_mask(N, before, window_size=window)
            return "causal"
        if before + 1 <= window:
            return None
        return mx.arange(before + 1) > before - window

    @classmethod
    def merge(cls, caches: list[Any]) -> BatchTurboQuantRotatingKVCache:
        """One batch of several caches; plain ones among them are packed."""
        return BatchTurboQuantRotatingKVCache.merge(caches)

    def _empty_batch(self, padding: list[int]) -> BatchTurboQuantRotatingKVCache:
        return BatchTurboQuantRotatingKVCache(
            self.max_size, padding, keep=self.keep, spec=self.spec
        )

    def _is_alike(self, row: Any) -> bool:
        ours = isinstance(row, TurboQuantRotatingKVCache) and row.spec == self.spec
        cold = kind_of(row) == "RotatingKVCache" and row.keys is None
        return (ours or cold) and (row.max_size, row.keep) == (self.max_size, self.keep)


class BatchTurboQuantRotatingKVCache(RotatingPackedCache, PackedBatch, mlx_lm_cache._BaseCache):
    """Packed keys and values of the last tokens of several sequences, padded on the left.

    Args:
        max_size: tokens of the window.
        left_padding: of each row, as in mlx-lm's ``BatchRotatingKVCache``.
        keep: first tokens of each row that are never forgotten.
        bits, key_bits, value_bits, spec: as for ``TurboQuantKVCache``.

    Raises:
        OptionError: unsupported bits, or a window too short to be packed.
    """

    def __init__(
        self,
        max_size: int,
        left_padding: list[int],
        bits: Any = None,
        *,
        keep: int = 0,
        key_bits: int | None = None,
        value_bits: int | None = None,
        spec: KVSpec | None = None,
    ):
        made = make_spec(bits, key_bits, value_bits, spec)
        self._start_window(made, max_size, keep, [int(p) for p in left_padding])

    def is_trimmable(self) -> bool:
        """As long as nothing was forgotten."""
        return self.store.columns < self.max_size and not any(self.store.dropped)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """bool [B, 1, N, columns]: what N queries of each row may see of the columns that the next
        append shows."""
        before = self._seen_before()
        hidden = [p - (self.store.columns - before) for p in self._padding()]
        return create_causal_mask(
            N, before, window_size=window_size or self.max_size, left_padding=mx.array(hidden)
        )

    def extend(self, other: Any) -> None:
        """Add the rows of another batch; a plain one is packed.

        Raises:
            OptionError: it is packed in another way, or of another kind.
        """
        self.store = stack([self._joinable(self), self._joinable(other)])

    def extract(self, idx: int) -> TurboQuantRotatingKVCache:
        """A cache of row ``idx`` alone."""
        single = TurboQuantRotatingKVCache(self.max_size, self.keep, spec=self.spec)
        if not self.store.is_empty:
            single.store = self.store.rows([int(idx)]).tight()
        return single

    @classmethod
    def merge(cls, caches: list[Any]) -> BatchTurboQuantRotatingKVCache:
        """One batch of several single caches; plain ones among them are packed.

        Raises:
            OptionError: they are packed in different ways, or of other kinds or sizes.
        """
        model = next(c for c in caches if isinstance(c, RotatingPackedCache))
        made = cls(model.max_size, [0] * len(caches), keep=model.keep, spec=model.spec)
        made.store = stack([made._joinable(c) for c in caches])
        return made


def store_of_single(cache: Any, spec: KVSpec) -> PackedStore:
    """A plain ``RotatingKVCache`` packed; ``spec`` is that of the window."""
    keys, values = (cache._temporal_order(x) for x in (cache.keys, cache.values))
    if cache.offset < keys.shape[2]:
        keys, values = keys[..., : cache.offset, :], values[..., : cache.offset, :]
    dropped = cache.offset - keys.shape[2]
    batch = keys.shape[0]
    store = PackedStore(spec, [0] * batch, keep=cache.keep, dropped=[dropped] * batch)
    store.append(keys, values)
    return store


def store_of_batch(cache: Any, spec: KVSpec) -> PackedStore:
    """A plain ``BatchRotatingKVCache`` packed.

    Raises:
        OptionError: it is something else.
    """
    if kind_of(cache) != "BatchRotatingKVCache":
        raise OptionError(f"a {type(cache).__name__} cannot be joined to a packed cache")
    left = [int(p) for p in cache.left_padding.tolist()]
    store = PackedStore(spec, [max(0, p) for p in left])
    if cache.keys is None:
        return store
    end = cache._idx
    keys, values = cache.keys, cache.values
    if cache.rotated:
        keys, values = (mx.roll(x, -end, 2) for x in (keys, values))
        end = keys.shape[2]
    offsets = [int(n) for n in cache.offset.tolist()]
    store.dropped = [n - (end - p) for n, p in zip(offsets, store.padding, strict=True)]
    store.append(keys[..., :end, :], values[..., :end, :])
    return store
