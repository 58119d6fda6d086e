"""What all packed caches have in common, by mlx-lm's cache contract and mlx-vlm's."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..errors import OptionError
from ..kernels.in_flight import note_decoded
from .attend import MAX_QUERIES
from .spec import KVSpec, split_bits
from .state import state_of, store_of
from .store import PackedStore
from .views import HookHold, view_pair

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
        TypeError: nothing given (mlx-vlm's prefix cache makes caches in that way, and expects it).
        OptionError: too little or too much given, or unsupported bits.
    """
    if spec is bits is key_bits is value_bits is None:
        raise TypeError("a packed cache needs bits, key_bits and value_bits, or a spec")
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
    """What caches of one sequence and of a batch have in common, windows or not."""

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
        if keys.shape[2] > MAX_QUERIES:
            return self._append_prompt(self.store.columns, keys, values)
        self.store.append(keys, values)
        return self.keys_and_values()

    def _append_prompt(
        self, before: int, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Append many columns; views of the last ``before`` ones as they are stored and of the new
        ones in full precision."""
        store = self.store
        if not before:
            store.append(keys, values)
            return view_pair(store, keys, values)
        old_keys, old_values = (x[:, :, -before:] for x in store.decoded(store.columns))
        # once these keys are there, what earlier layers decoded has been used
        note_decoded(keys, old_keys.nbytes + old_values.nbytes)
        store.append(keys, values)
        return view_pair(
            store,
            mx.concatenate([old_keys, keys.astype(old_keys.dtype)], axis=2),
            mx.concatenate([old_values, values.astype(old_values.dtype)], axis=2),
        )

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Views of all keys [B, Hkv, columns, D] and values that are held."""
        store = self.store
        return view_pair(store, *store.decoded(store.columns))

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

    # mlx-vlm's prefix cache asks for these, and for ``prefix_cache_merge`` of single caches

    def prefix_cache_snapshot(self) -> dict[str, Any]:
        """What ``prefix_cache_restore`` takes."""
        return {"state": self.state, "meta_state": None}

    def prefix_cache_restore(self, snapshot: dict[str, Any]) -> None:
        """Become what the snapshot was taken of."""
        self.state = snapshot["state"]

    def prefix_cache_reserve(self, min_capacity_tokens: int) -> tuple:
        """Nothing is reserved ahead: capacity grows by a sixteenth."""
        return ()

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
        return state_of(self.store)

    @state.setter
    def state(self, state: tuple) -> None:
        self._restore(state)

    def _restore(self, state: tuple) -> None:
        self._start(store_of(state))

    @classmethod
    def from_state(cls, state: tuple):
        """A cache from what ``state`` gave, as mlx-lm reloads them."""
        made = cls.__new__(cls)
        made.state = state
        return made


class PackedSingle(PackedCache):
    """What caches of one sequence have in common, for mlx-vlm's server and its prefix cache."""

    @classmethod
    def from_cache(cls, cache: Any, bits: Any = None, *, spec: KVSpec | None = None) -> Any:
        """Pack a plain cache; one that is packed already in this way is returned."""
        raise NotImplementedError

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        """One batch of several caches; plain ones among them are packed."""
        raise NotImplementedError

    def _empty_batch(self, padding: list[int]) -> Any:
        raise NotImplementedError

    def _is_alike(self, row: Any) -> bool:
        """Whether a row, packed or plain and empty, can stand beside this one."""
        raise NotImplementedError

    def to_batch(self, left_padding: list[int]) -> Any:
        """A batch cache, as mlx-vlm's server asks for: empty, or of this sequence repeated.

        Raises:
            ValueError: it holds tokens and padding is asked for.
        """
        padding = [int(p) for p in left_padding]
        if self.empty():
            return self._empty_batch(padding)
        if any(padding):
            raise ValueError("a cache with tokens in it cannot be padded")
        return self.merge([self] * len(padding))

    def prefix_cache_merge(self, rows: list[Any], prefix_lens: list[int]) -> Any:
        """One batch of restored rows, empty plain ones among them; None if they do not fit."""
        for row, length in zip(rows, prefix_lens, strict=True):
            if not self._is_alike(row) or int(row.offset) != int(length):
                return None
        singles = [self.from_cache(row, spec=self.spec) for row in rows]
        return self.merge(singles) if singles else None


class PackedBatch(PackedCache):
    """What caches of several sequences have in common, padded on the left."""

    _behind: tuple[int, ...] = ()
    """Right padding that ``prepare`` was told of without lengths."""

    @property
    def offset(self) -> mx.array:
        """int32 [B]: the position of each row's next token; negative inside its padding."""
        return mx.array(self.store.offsets(), dtype=mx.int32)

    @property
    def left_padding(self) -> mx.array:
        """int32 [B]: columns before each row's first token."""
        return mx.array(self.store.padding, dtype=mx.int32)

    @property
    def batch_size(self) -> int:
        return self.store.batch

    def is_single_row(self) -> bool:
        """Whether mlx-vlm's prefix cache can take this batch for a single sequence."""
        return self.store.batch == 1

    def prepare(
        self,
        *,
        left_padding: list[int] | None = None,
        lengths: list[int] | None = None,
        right_padding: list[int] | None = None,
    ) -> None:
        """Announce padding of the prompt that comes next.

        Right padding without ``lengths`` may also be that of the latest tokens, which are to be
        taken back (as mlx-vlm does with what a draft had wrong in some rows).

        Raises:
            ValueError: left padding of a cache that holds tokens.
        """
        store = self.store
        if left_padding is not None:
            if not store.is_empty:
                raise ValueError("left padding can only be added to an empty cache")
            store.padding = [p + int(n) for p, n in zip(store.padding, left_padding, strict=True)]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                self._behind = tuple(int(n) for n in right_padding)
                return
            before = store.lengths()
            store.limits = [b + int(n) for b, n in zip(before, lengths, strict=True)]

    def finalize(self) -> None:
        """Move the padding behind the prompts, if there was any, to before them."""
        if self.store.limits is not None:
            self.store.roll(self.store.beyond_limits())
        if any(self._behind):
            self.store.roll(self._behind)
            self._behind = ()

    def filter(self, batch_indices: Any) -> None:
        """Keep just these rows, in this order."""
        values = batch_indices.tolist() if hasattr(batch_indices, "tolist") else batch_indices
        self.store = self.store.rows([int(i) for i in values])
