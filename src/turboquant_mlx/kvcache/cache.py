"""The packed cache of one sequence (or of several of equal length), by mlx-lm's cache contract.

Importing this module puts both cache classes into ``mlx_lm.models.cache``, where
``load_prompt_cache`` looks names up, so that a saved prompt cache can be read in a new process.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.base import create_causal_mask

from ..errors import CheckpointError, OptionError
from .attend import MAX_QUERIES
from .spec import KVSpec, split_bits
from .store import PackedStore
from .views import HookHold, view_pair

STATE_VERSION = 1
_LIBRARIES = ("mlx_lm.models.cache", "mlx_vlm.models.cache")


def kind_of(cache: Any) -> str:
    """Name of the class of a cache that mlx-lm or mlx-vlm brings along, exactly; else ""."""
    return type(cache).__name__ if type(cache).__module__ in _LIBRARIES else ""


def make_spec(
    bits: Any = None,
    key_bits: int | None = None,
    value_bits: int | None = None,
    spec: KVSpec | None = None,
) -> KVSpec:
    """The spec that a constructor's arguments stand for.

    Raises:
        OptionError: nothing given, too much given, or unsupported bits.
    """
    if spec is not None:
        if bits is not None or key_bits is not None or value_bits is not None:
            raise OptionError("a packed cache takes either a spec or bits, not both")
        return spec
    if bits is None and (key_bits is None or value_bits is None):
        raise OptionError("a packed cache needs bits, or key_bits and value_bits")
    both = (key_bits, value_bits) if bits is None else split_bits(bits)
    key = both[0] if key_bits is None else key_bits
    value = both[1] if value_bits is None else value_bits
    assert key is not None and value is not None
    return KVSpec(key, value)


class PackedCache:
    """What the single and the batch cache have in common."""

    store: PackedStore

    def _start(self, store: PackedStore) -> None:
        self.store = store
        self._hold = HookHold()

    @property
    def spec(self) -> KVSpec:
        """How the cache is packed."""
        return self.store.spec

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys [B, Hkv, n, D] and values; views of everything held, see ``views``.

        A long append (a prompt) sees itself in full precision and what came before as it is
        stored; up to ``MAX_QUERIES`` tokens see themselves as stored, too, so that a verified
        draft and the same tokens decoded singly agree.
        """
        store, before, n = self.store, self.store.columns, keys.shape[2]
        if n <= MAX_QUERIES or not before:
            store.append(keys, values)
            if n <= MAX_QUERIES:
                return self.keys_and_values()
            return view_pair(store, keys, values)
        old_keys, old_values = store.decoded(before)
        store.append(keys, values)
        return view_pair(
            store,
            mx.concatenate([old_keys, keys.astype(old_keys.dtype)], axis=2),
            mx.concatenate([old_values, values.astype(old_values.dtype)], axis=2),
        )

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Views of all keys [B, Hkv, columns, D] and values that are held."""
        return view_pair(self.store, *self.store.decoded(self.store.columns))

    @property
    def keys(self) -> mx.array | None:
        """An array that all later keys hang on, for models that tie their graph to
        ``cache.keys = mx.depends(cache.keys, ...)``. These are no keys: see ``keys_and_values``."""
        return self.store.anchor

    @keys.setter
    def keys(self, tied: mx.array) -> None:
        self.store.anchor = tied

    def size(self) -> int:
        return self.store.columns

    def empty(self) -> bool:
        return self.store.is_empty

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the last n tokens; returns how many there were."""
        return self.store.trim(n)

    @property
    def nbytes(self) -> int:
        """Bytes that are held, spare capacity included."""
        return self.store.nbytes

    # mlx-vlm's prefix cache asks for these four

    def prefix_cache_snapshot(self) -> dict[str, Any]:
        """What ``prefix_cache_restore`` takes."""
        return {"state": self.state, "meta_state": None}

    def prefix_cache_restore(self, snapshot: dict[str, Any]) -> None:
        """Become what the snapshot was taken of."""
        self.state = snapshot["state"]

    def prefix_cache_reserve(self, min_capacity_tokens: int) -> tuple:
        """Nothing is reserved ahead: capacity grows by a sixteenth."""
        return ()

    def prefix_cache_merge(self, rows: list[Any], prefix_lens: list[int]) -> Any:
        """One batch of restored rows, empty plain ones among them; None if they do not fit."""
        for row, length in zip(rows, prefix_lens, strict=True):
            ours = isinstance(row, TurboQuantKVCache) and row.spec == self.spec
            cold = kind_of(row) == "KVCache" and row.keys is None
            if not (ours or cold) or int(row.offset) != int(length):
                return None
        singles = [TurboQuantKVCache.from_cache(row, spec=self.spec) for row in rows]
        return BatchTurboQuantKVCache.merge(singles) if singles else None

    @property
    def spare_nbytes(self) -> int:
        """Bytes of ``nbytes`` that hold no token yet."""
        return self.store.spare_nbytes

    @property
    def plain_nbytes(self) -> int:
        """Bytes that the same tokens take in a cache that is not packed."""
        return self.store.plain_nbytes()

    @property
    def state(self) -> tuple:
        s = self.store
        spec = ",".join(f"{k}={v}" for k, v in asdict(s.spec).items())
        facts = (STATE_VERSION, spec, s.dtype_name, s.columns, s.widths[0], s.widths[1])
        rows = [(p, bool(f)) for p, f in zip(s.padding, s.frozen, strict=True)]
        return facts, rows, (s.shift, s.raw_keys, s.raw_values), list(s.keys), list(s.values)

    @state.setter
    def state(self, state: tuple) -> None:
        self._start(_store_of(state))

    @classmethod
    def from_state(cls, state: tuple):
        """A cache from what ``state`` gave, as mlx-lm reloads them."""
        made = cls.__new__(cls)
        made.state = state
        return made


def _store_of(state: tuple) -> PackedStore:
    try:
        # an empty cache has no arrays, and mlx-lm's files leave empty lists out
        facts, rows, (shift, raw_keys, raw_values), *sides = state
        version, text, dtype_name, columns, key_width, value_width = facts
        if version != STATE_VERSION:
            raise CheckpointError(
                f"a packed cache of state version {version} is not known to this version",
                hint="make the prompt cache anew",
            )
        fields: dict[str, Any] = dict(pair.split("=") for pair in text.split(","))
        known: dict[str, Any] = {
            k: v if k.endswith("scheme") else int(v) for k, v in fields.items()
        }
        store = PackedStore(KVSpec(**known), [int(p) for p, _ in rows], int(columns))
        store.frozen = [bool(f) for _, f in rows]
        store.dtype_name, store.widths = dtype_name, (int(key_width), int(value_width))
        store.shift, store.raw_keys, store.raw_values = shift, raw_keys, raw_values
        if raw_keys is not None:
            keys, values = sides
            store.keys, store.values = tuple(keys), tuple(values)
        return store
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"this is no state of a packed cache: {error}") from error


class TurboQuantKVCache(PackedCache, mlx_lm_cache._BaseCache):
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

    def to_batch(self, left_padding: list[int]) -> BatchTurboQuantKVCache:
        """A batch cache, as mlx-vlm's server asks for: empty, or of this sequence repeated.

        Raises:
            ValueError: it holds tokens and padding is asked for.
        """
        padding = [int(p) for p in left_padding]
        if self.empty():
            return BatchTurboQuantKVCache(padding, spec=self.spec)
        if any(padding):
            raise ValueError("a cache with tokens in it cannot be padded")
        return BatchTurboQuantKVCache.merge([self] * len(padding))


class BatchTurboQuantKVCache(PackedCache, mlx_lm_cache._BaseCache):
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

    @property
    def offset(self) -> mx.array:
        """int32 [B]: the position of each row's next token; negative inside its padding."""
        return mx.array([self.store.columns - p for p in self.store.padding], dtype=mx.int32)

    @property
    def left_padding(self) -> mx.array:
        """int32 [B]: columns before each row's first token."""
        return mx.array(self.store.padding, dtype=mx.int32)

    @property
    def batch_size(self) -> int:
        return self.store.batch

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        return create_causal_mask(
            N, offset=self.store.columns, left_padding=self.left_padding, **kwargs
        )

    def prepare(
        self,
        *,
        left_padding: list[int] | None = None,
        lengths: list[int] | None = None,
        right_padding: list[int] | None = None,
    ) -> None:
        """Announce padding of the prompt that comes next.

        Raises:
            ValueError: left padding of a cache that holds tokens, right padding without lengths.
        """
        store = self.store
        if left_padding is not None:
            if not store.is_empty:
                raise ValueError("left padding can only be added to an empty cache")
            store.padding = [p + int(n) for p, n in zip(store.padding, left_padding, strict=True)]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("right padding needs the lengths of the prompts")
            before = store.lengths()
            store.limits = [b + int(n) for b, n in zip(before, lengths, strict=True)]
            self._right_padding = [int(p) for p in right_padding]

    def finalize(self) -> None:
        """Move the padding behind the prompts, if there was any, to before them."""
        if self.store.limits is not None:
            self.store.roll(self._right_padding)

    def filter(self, batch_indices: Any) -> None:
        """Keep just these rows, in this order."""
        self.store = self.store.rows(_as_list(batch_indices))

    def extend(self, other: Any) -> None:
        """Add the rows of another batch; a plain one is packed.

        Raises:
            OptionError: it is packed in another way, or of another kind.
        """
        self.store = PackedStore.stack([self.store, batch_store(other, self.spec)])

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
        made.store = PackedStore.stack([c.store for c in singles])
        return made


def batch_store(other: Any, spec: KVSpec) -> PackedStore:
    if isinstance(other, PackedCache):
        return other.store
    if kind_of(other) != "BatchKVCache":
        raise OptionError(f"a {type(other).__name__} cannot be joined to a packed cache")
    padding = [int(p) for p in other.left_padding.tolist()]
    store = PackedStore(spec, padding)
    if other.keys is not None:
        end = other._idx
        store.append(other.keys[..., :end, :], other.values[..., :end, :])
    return store


def _as_list(indices: Any) -> list[int]:
    values = indices.tolist() if hasattr(indices, "tolist") else indices
    return [int(i) for i in values]


for _class in (TurboQuantKVCache, BatchTurboQuantKVCache):
    setattr(mlx_lm_cache, _class.__name__, _class)
