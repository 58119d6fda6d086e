"""Packed caches of all tokens: one sequence (or several of equal length), and a batch.

Importing this module puts all packed cache classes into ``mlx_lm.models.cache``, where
``load_prompt_cache`` looks names up, so that a saved prompt cache can be read in a new process.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.base import create_causal_mask

from ..errors import OptionError
from .packed import PackedBatch, PackedCache, PackedSingle, kind_of, make_spec
from .rotating import BatchTurboQuantRotatingKVCache, TurboQuantRotatingKVCache
from .spec import KVSpec
from .stack import stack
from .store import PackedStore


class TurboQuantKVCache(PackedSingle, mlx_lm_cache._BaseCache):
    """Packed keys and values of one sequence.

    Args:
        bits: 1 to 8, whole or half (3.5: 3 for keys, 4 for values), or the name of a preset.
        key_bits, value_bits: of one side, in place of what ``bits`` gives.
        spec: everything at once instead.

    Raises:
        OptionError: unsupported bits.
    """

    def __init__(
        self,
        bits: Any = None,
        *,
        key_bits: int | None = None,
        value_bits: int | None = None,
        spec: KVSpec | None = None,
    ):
        self._start(PackedStore(make_spec(bits, key_bits, value_bits, spec), [0]))

    @classmethod
    def from_cache(
        cls,
        cache: Any,
        bits: Any = None,
        *,
        key_bits: int | None = None,
        value_bits: int | None = None,
        spec: KVSpec | None = None,
    ) -> TurboQuantKVCache:
        """Pack what a ``KVCache`` of mlx-lm or mlx-vlm holds.

        Raises:
            OptionError: unsupported bits, or a cache of another kind.
        """
        made = cls(bits, key_bits=key_bits, value_bits=value_bits, spec=spec)
        if isinstance(cache, TurboQuantKVCache):
            if cache.spec != made.spec:
                raise OptionError("a cache that is packed in another way cannot be packed again")
            return cache
        if kind_of(cache) != "KVCache":
            raise OptionError(f"a {type(cache).__name__} cannot be packed")
        if cache.keys is not None and cache.offset:
            keys, values = (x[..., : cache.offset, :] for x in (cache.keys, cache.values))
            if keys.shape[0] > 1:
                made._start(PackedStore(made.spec, [0] * keys.shape[0]))
            made.store.append(keys, values)
        return made

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.store.is_empty and keys.shape[0] != self.store.batch:
            self.store = PackedStore(self.spec, [0] * keys.shape[0])
        return super().update_and_fetch(keys, values)

    update_and_fetch.__doc__ = PackedCache.update_and_fetch.__doc__

    @property
    def offset(self) -> int:
        """Tokens that are held: the position of the next one."""
        return self.store.columns

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return mlx_lm_cache.create_attention_mask(*args, offset=self.offset, **kwargs)

    @classmethod
    def merge(cls, caches: list[Any]) -> BatchTurboQuantKVCache:
        """One batch of several caches; plain ones among them are packed."""
        return BatchTurboQuantKVCache.merge(caches)

    def _empty_batch(self, padding: list[int]) -> BatchTurboQuantKVCache:
        return BatchTurboQuantKVCache(padding, spec=self.spec)

    def _is_alike(self, row: Any) -> bool:
        ours = isinstance(row, TurboQuantKVCache) and row.spec == self.spec
        return ours or (kind_of(row) == "KVCache" and row.keys is None)


class BatchTurboQuantKVCache(PackedBatch, mlx_lm_cache._BaseCache):
    """Packed keys and values of several sequences, padded on the left.

    Args:
        left_padding: of each row, as in mlx-lm's ``BatchKVCache``.
        bits, key_bits, value_bits, spec: as for ``TurboQuantKVCache``.
    """

    def __init__(
        self,
        left_padding: list[int],
        bits: Any = None,
        *,
        key_bits: int | None = None,
        value_bits: int | None = None,
        spec: KVSpec | None = None,
    ):
        made = make_spec(bits, key_bits, value_bits, spec)
        self._start(PackedStore(made, [int(p) for p in left_padding]))

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        return create_causal_mask(
            N, offset=self.store.columns, left_padding=self.left_padding, **kwargs
        )

    def extend(self, other: Any) -> None:
        """Add the rows of another batch; a plain one is packed.

        Raises:
            OptionError: it is packed in another way, or of another kind.
        """
        self.store = stack([self.store, batch_store(other, self.spec)])

    def extract(self, idx: int) -> TurboQuantKVCache:
        """A cache of row ``idx`` alone."""
        single = TurboQuantKVCache(spec=self.spec)
        if not self.store.is_empty:
            single.store = self.store.rows([int(idx)]).tight()
        return single

    @classmethod
    def merge(cls, caches: list[Any]) -> BatchTurboQuantKVCache:
        """One batch of several single caches; plain ones among them are packed.

        Raises:
            OptionError: they are packed in different ways, or of other kinds.
        """
        spec = next(c.spec for c in caches if isinstance(c, PackedCache))
        singles = [TurboQuantKVCache.from_cache(c, spec=spec) for c in caches]
        made = cls([0] * len(caches), spec=spec)
        made.store = stack([c.store for c in singles])
        return made


def batch_store(other: Any, spec: KVSpec) -> PackedStore:
    """The rows of a packed cache as they are, or those of a plain batch, packed.

    Raises:
        OptionError: it is of another kind.
    """
    if isinstance(other, (TurboQuantKVCache, BatchTurboQuantKVCache)):
        return other.store
    if kind_of(other) != "BatchKVCache":
        raise OptionError(f"a {type(other).__name__} cannot be joined to a packed cache")
    padding = [int(p) for p in other.left_padding.tolist()]
    store = PackedStore(spec, padding)
    if other.keys is not None:
        end = other._idx
        store.append(other.keys[..., :end, :], other.values[..., :end, :])
    return store


for _class in (
    TurboQuantKVCache,
    BatchTurboQuantKVCache,
    TurboQuantRotatingKVCache,
    BatchTurboQuantRotatingKVCache,
):
    setattr(mlx_lm_cache, _class.__name__, _class)
